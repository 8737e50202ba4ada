"""Open the store of a path or URL; join and check addresses.

The scheme of a URL, the installed packages and the option `client` decide which client an
object store gets; the docstring of each client states its limits. Addresses stay text:
`pathlib` would collapse the slashes of a URL. Opening makes no request; a missing root is
found by the first listing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Unpack, cast

from ckptctl.errors import MissingExtra, UsageError
from ckptctl.formatting import path_word
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.outside_numbers import finite
from ckptctl.redaction import HIDDEN, clean_addresses, hide_address
from ckptctl.storage.contract import Store, Wrapped
from ckptctl.storage.local import LocalStore
from ckptctl.storage.objects import Client, ObjectStore
from ckptctl.storage.s3 import checked_settings, meanings
from ckptctl.storage.waiting import Retries

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_ONE_SLASH = re.compile(r"(file|s3a?|gc?s|az|abfss?|https?|memory):(?!//)", re.IGNORECASE)
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_FIRST_PRINTABLE = 0x20

_S3 = frozenset({"s3", "s3a"})
_BUCKET = re.compile(r"[A-Za-z0-9._\-]{1,255}")
_S3_CLIENTS = {"s3fs": "s3", "obstore": "obstore"}
"""The clients for S3 in order of preference, each with the extra that brings it."""


def open_store(
    url: str, storage: StorageOptions = StorageOptions(), **keywords: Unpack[StorageKeywords]
) -> Store:
    """The store for a checkpoint root: a path, `file://…`, `s3://…`, or any URL that fsspec opens.

    `retry_for_s` is `SAVE_RETRY_S` for the store of a save, and 0 for interactive commands;
    the storage option of the same name changes the former. A mounted file system has its
    own limits, and `Watchdog`.

    Raises `UsageError` for an invalid address, and `MissingExtra` if the package for it is
    not installed.
    """
    check_address(url)
    (storage,) = options_from(keywords, storage)
    return storage.lend(url) if isinstance(storage, SharedStores) else _opened(url, storage)


def _opened(url: str, storage: StorageOptions) -> Store:
    """The store of an address.

    The option `client` chooses between s3fs and obstore. Without it, s3fs is used if
    installed: the two find credentials in different places, and installing a package must
    not change which credentials are used.
    """
    if is_local(url):
        start, path = _split(url)
        root = os.path.expanduser(path) or "/"
        return LocalStore(root, url=path_word(start + root), follow=tuple(storage.follow_links))
    retries = _retries(storage)
    options = dict(storage.storage_options or {})
    options.pop("retry_for_s", None)
    if storage.endpoint_url:
        options["endpoint_url"] = storage.endpoint_url
    chosen = options.pop("client", None)
    url = _without_slash(url)
    protocol, _, path = url.partition("://")
    protocol = protocol.lower()
    if protocol in _S3:
        client = _s3_client(url, path, chosen, options, storage.timeout_s)
    else:
        client = _fsspec_client(protocol, url, options)
    return ObjectStore(client, url=url, retries=retries)


def _s3_client(
    url: str, path: str, chosen: object, options: Mapping[str, object], timeout_s: float
) -> Client:
    bucket, _, prefix = path.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(
            f"{url}: {bucket!r} is not a valid bucket name; s3://BUCKET/PREFIX is expected"
        )
    if chosen is None:
        chosen = next((name for name in _S3_CLIENTS if find_spec(name)), "s3fs")
    if chosen not in _S3_CLIENTS:
        raise UsageError(f"client={chosen} is not one of {', '.join(_S3_CLIENTS)}")
    if find_spec(str(chosen)) is None:
        raise MissingExtra(
            f"{url}: opening s3:// needs the package {chosen}, which is an extra",
            next_command=f"pip install 'ckptctl[{_S3_CLIENTS[str(chosen)]}]'",
        )
    options = checked_settings(options)
    meanings()  # read now: an error may be that this process can open no more files
    if chosen == "obstore":
        from ckptctl.storage.obstore_client import ObstoreClient

        return ObstoreClient(bucket, prefix, options, timeout_s=timeout_s)
    from ckptctl.storage.fsspec_client import S3fsClient

    return S3fsClient(bucket, prefix, options, timeout_s=timeout_s)


def _fsspec_client(protocol: str, url: str, options: Mapping[str, object]) -> Client:
    if find_spec("fsspec") is None:
        raise MissingExtra(
            f"{url}: opening {protocol}:// needs fsspec", next_command="pip install fsspec"
        )
    from fsspec.registry import known_implementations

    from ckptctl.storage.fsspec_client import FsspecClient

    try:
        return FsspecClient(protocol, url, options)
    except ImportError as exc:
        package = known_implementations.get(protocol, {}).get("class", protocol).split(".")[0]
        raise MissingExtra(
            f"{url}: opening {protocol}:// needs the package {package}",
            next_command=f"pip install {package}",
        ) from exc
    except (ValueError, TypeError) as exc:
        raise UsageError(f"{url}: {exc}") from exc


def _retries(storage: StorageOptions) -> Retries:
    given = (storage.storage_options or {}).get("retry_for_s")
    wanted = storage.retry_for_s if given is None else finite(str(given))
    if wanted is None or wanted < 0:
        raise UsageError(
            f"the storage option retry_for_s is {given!r}; a number of seconds is expected"
        )
    return Retries(storage.retries, wanted if storage.retry_for_s else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStores(StorageOptions):
    """Storage options under which each address is opened once, until `close`.

    For a caller that uses several functions on the same roots: a resume chooses, inspects,
    loads and checks again. Closing a lent store leaves it open. `dataclasses.replace` gives
    other retries over the same connections; another timeout takes connections of its own,
    because a client of an object store has one timeout for all of its requests.
    """

    stores: dict[tuple[str, float], Store] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, storage: StorageOptions) -> SharedStores:
        """Shared stores with the same options; none is open yet."""
        return cls(**{each.name: getattr(storage, each.name) for each in fields(StorageOptions)})

    def lend(self, url: str) -> Store:
        """The store of an address, opened on first use."""
        key = (_without_slash(url), 0.0 if is_local(url) else self.timeout_s)
        if key not in self.stores:
            self.stores[key] = _opened(url, self)
        return cast("Store", Wrapped(self.stores[key].retrying(_retries(self))))

    def close(self) -> None:
        """Close all stores that were opened."""
        while self.stores:
            self.stores.popitem()[1].close()


def check_address(url: str) -> None:
    """Raise `UsageError` for an address that storages or clients interpret differently.

    If an address is taken for another, empty place, a job starts fresh although a
    checkpoint exists. Clients of object stores drop, keep or reject an empty name between
    slashes, which an unset variable leaves (`s3://bucket/$PREFIX/run`).
    """
    if not url or "\0" in url:
        raise UsageError("the checkpoint root is empty or contains a NUL")
    if url.rstrip("\r\n") != url or (url.strip() != url and not is_local(url.strip())):
        raise UsageError(
            f"{url!r} begins or ends with white space, often from a file with Windows line ends "
            "or a quoted variable"
        )
    if "::" in url and "://" in url:
        raise UsageError(
            f"{url}: chained URLs are not supported, because a cache could answer "
            "instead of the storage"
        )
    _check_secrets(url)
    if slip := _ONE_SLASH.match(url):
        raise UsageError(
            f"{url}: {slip[1]}:// is expected, with two slashes; a folder of that name is ./{url}"
        )
    start, path = _split(url)
    if not is_local(url):
        _check_names(url, url[len(start) :])
    elif start and not path.startswith("/"):
        raise UsageError(
            f"{url}: a file:// address is file:///FOLDER, without a host; a local folder needs no "
            "file://"
        )
    elif start and _ESCAPE.search(path):
        raise UsageError(
            f"{url}: programs disagree whether %XX in a file:// address is an escape; use a plain "
            "path"
        )


_NAMES_WITH_QUERY = frozenset({"s3", "s3a", "gs", "gcs", "memory"})
"""Schemes of stores in which `?` and `=` may be part of a name."""


def _check_secrets(url: str) -> None:
    """Refuse an address with a secret: commands print addresses, and job scripts keep them."""
    clean = clean_addresses(url)
    if is_local(url) or clean == url:
        return
    scheme = url.partition(":")[0].lower()
    if scheme in _NAMES_WITH_QUERY and f"//{HIDDEN}" not in clean:
        return
    hide_address(url)
    raise UsageError(
        f"{clean}: an address with a user name, a password or a signature is not supported: "
        "addresses are printed and recorded; set the variables of the storage's client "
        "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AZURE_STORAGE_SAS_TOKEN) or use "
        "--storage-option"
    )


def _check_names(url: str, path: str) -> None:
    first, *names = path.removesuffix("/").split("/")
    if first in (".", "..") or not (first or any(names)):
        raise UsageError(f"{url} names no bucket and no host")
    if "" in names:
        raise UsageError(
            f"{url} has an empty name between two slashes, often from an unset variable; clients "
            "interpret it differently"
        )
    if "." in names or ".." in names:
        raise UsageError(f"{url}: . and .. have no meaning on this storage; use the full address")
    if any(ord(char) < _FIRST_PRINTABLE or char == "\x7f" for char in path):
        raise UsageError(f"{url!r} contains a control character")
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise UsageError(f"{url!r} is not UTF-8, which addresses of this storage must be") from exc


def is_local(url: str) -> bool:
    """Whether `url` is a local folder: a plain path or `file://…`."""
    scheme = _SCHEME.match(url)
    return scheme is None or scheme[1].lower() == "file"


def local_path(url: str) -> str | None:
    """The path that a local address names, as the operating system takes it; else None."""
    if not is_local(url):
        return None
    scheme = _SCHEME.match(url)
    return url[scheme.end() :] if scheme else os.path.expanduser(url)


def absolute_url(url: str) -> str:
    """The address for use from another working folder; `file://` is removed."""
    if not is_local(url):
        return url
    start, path = _split(url)
    return path if start else os.path.abspath(os.path.expanduser(path))


def join_url(base: str, name: str) -> str:
    """The address of `name`, a path with `/`, below the folder or prefix `base`."""
    if not name:
        return base
    if _STEP_OF_ROOT.fullmatch(name):
        return f"{base}{name}"  # a step without a folder, as arguments name it: ROOT@1200
    if base == "." and name[0] not in "-~" and not {"@", ":"} & {*name}:
        return name  # as typed by hand; a path that could be misread keeps its dot
    return f"{base}{name}" if base.endswith("/") else f"{base}/{name}"


_STEP_OF_ROOT = re.compile(r"@[0-9]{1,19}")


def name_below(base: str, url: str) -> str:
    """The name of a step of the root `base`, by the address that `join_url` gave it."""
    name = url.removeprefix(base)
    return name if _STEP_OF_ROOT.fullmatch(name) else base_name(url)


def parent_url(url: str) -> str:
    """The address of the parent of `url`; the root of a storage is its own parent.

    Raises `UsageError` like `check_address`: without its last name, an invalid address may
    become a valid one of another place.
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
    # A local path has no scheme; in other addresses, `scheme://` and the first name
    # after it (bucket, host) belong to the storage.
    scheme = _SCHEME.match(url)
    start = scheme[0] if scheme else ""
    path = url[len(start) :]
    return start, _without_slash(path)


def _without_slash(path: str) -> str:
    return path.rstrip("/") or path[:1]
