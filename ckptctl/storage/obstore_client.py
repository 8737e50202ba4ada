"""A client over obstore.

obstore is written in Rust: it starts in a few milliseconds, lists several times as fast as
s3fs, and has no dependencies that conflict with a training environment. It reads the
`AWS_…` environment, web identity and instance metadata, but neither profiles nor fsspec's
configuration. `docs/decisions/object-store-client.md` compares the clients.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from ckptctl.errors import (
    AccessDenied,
    AlreadyExists,
    PathNotFound,
    StorageError,
    StorageUnavailable,
    UsageError,
)
from ckptctl.model import FileInfo, Kept
from ckptctl.storage import waiting
from ckptctl.storage.contract import Data, NotSupported, Upload
from ckptctl.storage.in_flight import run_aside
from ckptctl.storage.objects import PART_BYTES
from ckptctl.storage.s3 import (
    ChangedOnTheWay,
    NoSuchUpload,
    endpoint_of,
    error_of,
    meanings,
    needs_no_key,
)
from ckptctl.storage.waiting import Retries, Transient

if TYPE_CHECKING:
    from obstore.store import RetryConfig

T = TypeVar("T")

# The names of s3fs and of obstore, so that one command line works with both.
_NAMES = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "anon": "skip_signature",
}
_NO_CREDENTIALS = (
    "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use "
    "--storage-option client=s3fs for a profile, or anon=true for a public bucket"
)

# obstore's default ends a read after 30 s in all, even if data is arriving.
_NO_TOTAL = "1000d"
_NO_TIME = timedelta(days=1000)
_NO_COUNT = 1_000_000

_REPEATED = "Error performing"
"""So begins the error of a request that obstore has repeated as often as it may."""
_STATUS = re.compile(r"status code: (\d{3})")
# Of an answer, or of one key in a bulk deletion, which obstore uses for single keys.
_CODE = re.compile(r"<Code>([\w.]+)</Code>|\(code: ([\w.]+)\)$", re.MULTILINE)
_REDIRECT = "inner: BareRedirect"
"""A 301 of S3 has no `Location` header; obstore reports nothing else about it."""
_KIND = re.compile(r"\bkind: (\w+)")


PAGE_KEYS = 1000
"""The most keys on one page of a listing; a shorter listing had no second page."""

_LAST = "\U0010ffff"


class ObstoreClient:
    """See `objects.Client`; `options` use the names of s3fs or of obstore's `S3Config`.

    obstore rejects keys with empty names between slashes, and a listing that contains one
    fails. It reports a folder marker without its slash: the marker is recognized by the
    keys below it, so the marker of an empty folder is listed as an empty file. A listing of
    more than a page costs one extra request, because obstore takes a page that lost its
    continuation token for the last.
    """

    def __init__(
        self, bucket: str, prefix: str, options: Mapping[str, object], *, timeout_s: float
    ) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        self.prefix = prefix
        self._bucket = bucket
        config = _config(options)
        _, endpoint = endpoint_of(options)
        self._open = partial(
            S3Store,
            bucket,
            config=cast("Any", config),
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": f"{timeout_s:g}s",
                "read_timeout": f"{timeout_s:g}s",
                "timeout": _NO_TOTAL,
            },
        )
        try:
            self._store = self._open(retry_config={"max_retries": 0})
        except (BaseError, ValueError, TypeError) as exc:
            raise UsageError(f"s3://{bucket}: {_first_line(exc)}") from exc

    def list_page(
        self,
        prefix: str,
        *,
        deep: bool,
        token: str | None,  # noqa: ARG002 - there is one page
    ) -> tuple[list[FileInfo], str | None]:
        """See `Client.list_page`; returns all pages at once and never uses the token."""
        with needs_no_key():
            found = self._ask(lambda: self._tree(prefix) if deep else self._level(prefix), prefix)
            if len(found) >= PAGE_KEYS:
                self._check_end(prefix, found)
        if not found and self.exists(f".ckptctl-{os.urandom(8).hex()}"):
            # obstore accepts any document as a listing, even a login page in HTML.
            raise StorageUnavailable(f"s3://{self._bucket}: the server is not an S3 server")
        return found, None

    def get(self, key: str, start: int, end: int) -> tuple[Data, str]:
        import obstore

        def once() -> tuple[Data, str]:
            answer = obstore.get(self._store, key, options={"range": (start, end)})
            # Not copied: a copy takes a quarter of the processor time of a long read.
            data = memoryview(answer.bytes())
            first, last = answer.range
            if len(data) != last - first:
                raise Transient(f"{len(data):,} of {last - first:,} bytes arrived")
            return data, answer.meta["e_tag"] or ""

        return self._ask(once, key)

    def put(self, key: str, data: bytes, *, create: bool) -> None:
        import obstore

        mode: Literal["create", "overwrite"] = "create" if create else "overwrite"
        with needs_no_key():
            self._ask(
                lambda: obstore.put(self._store, key, data, mode=mode, use_multipart=False), key
            )

    def put_parts(self, key: str, parts: Iterator[bytes], *, retries: Retries, what: str) -> None:
        """See `Client.put_parts`; obstore itself retries requests, within `retries`.

        It repeats none whose answer breaks off, and resends no part that arrives corrupted; then
        the whole object is sent again.
        """
        import obstore

        store = self._open(retry_config=_retry_config(retries))
        failed: list[BaseException] = []

        def watched() -> Iterator[bytes]:
            # obstore would wrap an exception that is raised here.
            try:
                yield from parts
            except BaseException as error:
                failed.append(error)
                raise

        try:
            self._ask(
                lambda: obstore.put(
                    store,
                    key,
                    watched(),
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=2,
                ),
                key,
            )
        except Transient as error:
            if failed:
                raise failed[0] from None
            was_repeated = _REPEATED in str(error.__cause__)
            if isinstance(error, ChangedOnTheWay | NoSuchUpload) or not was_repeated:
                raise
            raise StorageUnavailable(f"{what}: no answer to a part ({error.message})") from error
        except BaseException:
            if failed:
                raise failed[0] from None
            raise

    def list_uploads(
        self,
        prefix: str,
        *,
        token: object,  # noqa: ARG002 - see `Client`
    ) -> tuple[Sequence[Upload], object]:
        """See `Client.list_uploads`; obstore does not support it."""
        raise NotSupported(
            f"s3://{self._bucket}/{prefix}: obstore cannot list unfinished uploads, but "
            "--storage-option client=s3fs can; a lifecycle rule of the bucket "
            "(AbortIncompleteMultipartUpload) removes them"
        )

    def abort_upload(self, key: str, upload_id: str) -> None:  # noqa: ARG002 - see `Client`
        """See `Client.abort_upload`; obstore does not support it."""
        raise NotSupported(f"s3://{self._bucket}/{key}: obstore cannot abort an upload by its id")

    def delete(self, key: str) -> None:
        import obstore

        with suppress(PathNotFound):
            self._ask(lambda: obstore.delete(self._store, key), key)

    def exists(self, key: str) -> bool:
        """See `Client.exists`; one HEAD."""
        import obstore

        try:
            self._ask(lambda: obstore.head(self._store, key), key)
        except PathNotFound:
            return False
        return True

    def kept(self, key: str) -> Kept:
        """See `Client.kept`; one HEAD. obstore reports ETag and version, but no checksum."""
        import obstore

        found = self._ask(lambda: obstore.head(self._store, key), key)
        return Kept(
            key,
            etag=(found["e_tag"] or "").strip('"'),
            version=found["version"] or "",
            why_none="obstore reports none; --storage-option client=s3fs does",
        )

    def close(self) -> None:
        """Does nothing: connections close with the object."""

    def _check_end(self, prefix: str, found: list[FileInfo]) -> None:
        """Raise if keys follow the last one: obstore stops at a page that lost its token."""
        import obstore

        last = max(f"{info.path}/{_LAST}" if info.kind == "dir" else info.path for info in found)
        rest = obstore.list(self._store, prefix or None, offset=last, chunk_size=1)
        more = self._ask(lambda: next(iter(rest), ()), prefix)
        if len(more):
            raise Transient("the listing ends before its last key")

    def _tree(self, prefix: str) -> list[FileInfo]:
        import obstore

        pages = obstore.list(self._store, prefix or None)
        found = [_info(item) for page in pages for item in page]
        slashes = ((info.path, at) for info in found for at, c in enumerate(info.path) if c == "/")
        folders = {path[:at] for path, at in slashes}
        return [info for info in found if info.size or info.path not in folders]

    def _level(self, prefix: str) -> list[FileInfo]:
        import obstore

        answer = obstore.list_with_delimiter(self._store, prefix or None)
        folders = [FileInfo(path, 0, kind="dir") for path in answer["common_prefixes"]]
        return [_info(item) for item in answer["objects"]] + folders

    def _ask(self, request: Callable[[], T], key: str) -> T:
        from obstore import exceptions

        try:
            return run_aside(request)
        except exceptions.InvalidPathError as exc:
            raise StorageUnavailable(
                f"s3://{self._bucket}/{key}: obstore cannot list this ({_first_line(exc)}); "
                "--storage-option client=s3fs can"
            ) from exc
        except (exceptions.BaseError, OSError, ValueError) as exc:
            raise self._error(exc, key) from exc
        except BaseException as exc:
            if type(exc).__name__ != "PanicException":  # pyo3's exception has no importable name
                raise
            raise StorageUnavailable(
                f"s3://{self._bucket}/{key}: obstore failed on this request or on its settings "
                f"({_first_line(exc)}); --storage-option client=s3fs may not"
            ) from exc

    def _error(self, exc: Exception, key: str) -> StorageError:
        first, text = _first_line(exc), str(exc)
        where = f"s3://{self._bucket}/{key}"
        # The request for credentials may have failed instead; the URL shows which one it was.
        if _REPEATED in first and self._bucket not in first:
            return AccessDenied(f"{where}: {_NO_CREDENTIALS}")
        found, named = _STATUS.search(text), _CODE.search(text)
        status = int(found[1]) if found else 301 if _REDIRECT in text else 0
        code = (named[1] or named[2]) if named else ""
        if status or code in meanings():
            return error_of(status, code, bucket=self._bucket, key=key, text=text)
        if isinstance(exc, FileExistsError):
            return AlreadyExists(f"{where} already exists; it was not changed")
        if isinstance(exc, FileNotFoundError):
            return PathNotFound(f"{where}: the object does not exist")
        kind = _KIND.search(text)
        what = first.rpartition(" - ")[2]
        return Transient(f"{what} ({kind[1]})" if kind else what)


def _retry_config(retries: Retries) -> RetryConfig:
    """The same limits for obstore, which stops at the first one reached."""
    return {
        "max_retries": _NO_COUNT if retries.for_s else retries.count,
        "retry_timeout": timedelta(seconds=retries.for_s) if retries.for_s else _NO_TIME,
        "backoff": {
            "init_backoff": timedelta(seconds=waiting.FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=waiting.LONGEST_PAUSE_S * waiting.THROTTLED),
            "base": 2,
        },
    }


def _config(options: Mapping[str, object]) -> dict[str, Any]:
    if "profile" in options:
        raise UsageError(
            "obstore reads no profiles; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or use --storage-option client=s3fs"
        )
    flat = {name: value for name, value in options.items() if name != "client_kwargs"}
    nested = options.get("client_kwargs")
    if isinstance(nested, Mapping):
        flat.update({"region" if k == "region_name" else k: v for k, v in nested.items()})
    return {_NAMES.get(name, name): value for name, value in flat.items()}


def _info(item: Any) -> FileInfo:
    return FileInfo(
        item["path"], item["size"], item["last_modified"].timestamp(), item["e_tag"] or ""
    )


def _first_line(exc: BaseException) -> str:
    return str(exc).splitlines()[0] if str(exc) else type(exc).__name__
