"""Open the store of a path or a URL; join and check addresses.

Addresses are text from end to end: `pathlib` would take a URL's slashes apart.
Nothing is asked of a storage here; a root that is not there shows at the first
listing.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast

from ckptctl.errors import UsageError
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.storage.contract import Store
from ckptctl.storage.retrying import Retries

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_ONE_SLASH = re.compile(r"(file|s3a?|gc?s|az|abfss?|https?|memory):(?!//)", re.IGNORECASE)
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_FIRST_PRINTABLE = 0x20


def open_store(
    url: str, storage: StorageOptions = StorageOptions(), **keywords: Unpack[StorageKeywords]
) -> Store:
    """The store for a checkpoint root: a path, `file://…`, `s3://…`, or any URL fsspec opens.

    `retry_for_s` is `SAVE_RETRY_S` for the store of a save, 0 where somebody waits for an
    answer; the storage option of that name changes the first of the two. A mounted file
    system has its own bounds, and `Watchdog`.

    Raises `UsageError` for an address that no store can have, and
    `MissingExtra` where the package for it is not installed.
    """
    check_address(url)
    storage = options_from(keywords, storage)
    return storage.lend(url) if isinstance(storage, SharedStores) else _opened(url, storage)


def _opened(url: str, storage: StorageOptions) -> Store:
    if not is_local(url):
        from ckptctl.storage.remote import open_remote

        options = dict(storage.storage_options or {})
        given = options.pop("retry_for_s", None)
        retry_for_s = storage.retry_for_s
        if given is not None:
            wanted = _seconds(given)
            retry_for_s = wanted if retry_for_s else retry_for_s
        if storage.endpoint_url:
            options["endpoint_url"] = storage.endpoint_url
        return open_remote(
            _without_slash(url),
            options,
            timeout_s=storage.timeout_s,
            retries=Retries(storage.retries, retry_for_s),
        )
    from ckptctl.storage.local import LocalStore

    start, path = _split(url)
    root = os.path.expanduser(path) or "/"
    return LocalStore(root, url=start + root)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStores(StorageOptions):
    """Storage options under which `open_store` opens each address once, until `close`.

    For a caller that uses several functions on the same roots: a resume chooses, proves,
    loads and checks again. Closing a store that was lent leaves it open.
    """

    stores: dict[str, Store] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, storage: StorageOptions) -> SharedStores:
        """Shared stores under the same options; none is open yet."""
        return cls(**{each.name: getattr(storage, each.name) for each in fields(StorageOptions)})

    def lend(self, url: str) -> Store:
        """The store of an address, opened when it is asked for first."""
        key = _without_slash(url)
        if key not in self.stores:
            self.stores[key] = _opened(url, self)
        return cast("Store", _Lent(self.stores[key]))

    def close(self) -> None:
        """Close all stores that were opened."""
        while self.stores:
            self.stores.popitem()[1].close()


class _Lent:
    """A store that somebody else closes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        """Leave the store open."""

    def __enter__(self) -> _Lent:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _seconds(given: object) -> float:
    try:
        seconds = float(str(given))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise UsageError(f"the storage option retry_for_s is {given!r}; it is a number of seconds")
    return seconds


def check_address(url: str) -> None:
    """Raise `UsageError` for an address that storages or their clients read in different ways.

    An address that is read as another, empty place is a fresh run over a whole one: the
    clients of object stores drop, keep or refuse an empty name between slashes, which is
    what an unset variable leaves (`s3://bucket/$PREFIX/run`).
    """
    if not url or "\0" in url:
        raise UsageError("the checkpoint root is empty, or has a NUL in it")
    if url.rstrip("\r\n") != url or (url.strip() != url and not is_local(url.strip())):
        raise UsageError(
            f"{url!r} begins or ends with white space; a file with Windows line ends, or a "
            "quoted variable, leaves it there"
        )
    if "::" in url and "://" in url:
        raise UsageError(f"{url}: chained URLs are not opened; a cache could answer for a storage")
    if slip := _ONE_SLASH.match(url):
        raise UsageError(
            f"{url}: {slip[1]}:// is expected, with two slashes; a folder of that name is ./{url}"
        )
    start, path = _split(url)
    if not is_local(url):
        _check_names(url, url[len(start) :])
    elif start and not path.startswith("/"):
        raise UsageError(
            f"{url}: a file:// address is file:///FOLDER, without a host; "
            f"a folder of this machine needs no file:// at all"
        )
    elif start and _ESCAPE.search(path):
        raise UsageError(
            f"{url}: %XX in a file:// address is an escape to some programs and a name to "
            "others; give the folder as a plain path"
        )


def _check_names(url: str, path: str) -> None:
    first, *names = path.removesuffix("/").split("/")
    if first in (".", "..") or not (first or any(names)):
        raise UsageError(f"{url} names no bucket and no host")
    if "" in names:
        raise UsageError(
            f"{url} has an empty name between two slashes, as a variable that is not set leaves "
            "it; what clients read there differs"
        )
    if "." in names or ".." in names:
        raise UsageError(f"{url}: . and .. mean nothing on this storage; give the whole address")
    if any(ord(char) < _FIRST_PRINTABLE or char == "\x7f" for char in path):
        raise UsageError(f"{url!r} has a control character in it")
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise UsageError(f"{url!r} is not UTF-8, as addresses of this storage are") from exc


def is_local(url: str) -> bool:
    """Whether `url` names a folder of this machine: a plain path, or `file://…`."""
    scheme = _SCHEME.match(url)
    return scheme is None or scheme[1].lower() == "file"


def absolute_url(url: str) -> str:
    """The same address for whoever reads it in another folder; `file://` is left out."""
    if not is_local(url):
        return url
    start, path = _split(url)
    return path if start else os.path.abspath(os.path.expanduser(path))


def join_url(base: str, name: str) -> str:
    """The address of `name`, a path with `/`, below the folder or prefix `base`."""
    if not name:
        return base
    if base == "." and name[0] not in "-~" and not {"@", ":"} & {*name}:
        return name  # as a person writes it; one that could be read otherwise keeps its dot
    return f"{base}{name}" if base.endswith("/") else f"{base}/{name}"


def parent_url(url: str) -> str:
    """The address of the folder that holds `url`; a root of a storage is its own parent.

    Raises `UsageError` where `check_address` does: without its last name such an address may
    be a sound one, of another place.
    """
    check_address(url)
    start, path = _split(url)
    above, slash, _ = path.rpartition("/")
    if is_local(url):
        return start + (_without_slash(above) or slash or ".")
    return start + (above if slash else path)


def base_name(url: str) -> str:
    """The last name of the address; empty for a root of a storage (`/`, `s3://bucket`)."""
    _, slash, name = _split(url)[1].rpartition("/")
    return name if slash or is_local(url) else ""


def _split(url: str) -> tuple[str, str]:
    # A local path has no start; for the rest it is `scheme://`, and the first name
    # behind it (bucket, host) belongs to the storage.
    scheme = _SCHEME.match(url)
    start = scheme[0] if scheme else ""
    path = url[len(start) :]
    return start, _without_slash(path)


def _without_slash(path: str) -> str:
    return path.rstrip("/") or path[:1]
