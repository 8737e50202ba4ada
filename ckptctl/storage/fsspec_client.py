"""A client for all other fsspec implementations.

Supports `gs://`, `az://`, `memory://`, `https://` and every other registered scheme,
through the methods that all implementations share. Listing costs one request per folder:
`find` hides errors in some implementations, `ls` does not. S3 has its own clients.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ckptctl.errors import (
    AccessDenied,
    AlreadyExists,
    CkptctlError,
    PathNotFound,
    StorageError,
    StorageUnavailable,
    UsageError,
)
from ckptctl.formatting import seconds_of
from ckptctl.model import Checksum, FileInfo, Kept
from ckptctl.storage.contract import NotSupported, ShortRead, Upload
from ckptctl.storage.objects import CannotCreate
from ckptctl.storage.s3 import hex_of
from ckptctl.storage.waiting import Retries, Throttled, Transient

T = TypeVar("T")

# These stores publish whole objects. On others, readers could see a partial write.
_OF_OBJECTS = frozenset(
    {"memory", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "r2", "cos", "obs", "tos"}
)


_GOOGLE = frozenset({"gs", "gcs"})

# Source: Cloud Storage, resumable uploads; Azure, Put Block: both discard uncompleted
# uploads after a week and do not bill them.
_EXPIRE = _GOOGLE | {"memory", "az", "abfs", "abfss"}


class FsspecClient:
    """See `objects.Client`; a key is the path in the implementation's own form."""

    def __init__(self, protocol: str, url: str, options: Mapping[str, object]) -> None:
        import fsspec

        if protocol in _OF_OBJECTS - {"memory"} and url.startswith(f"{protocol}:///"):
            raise UsageError(
                f"{url}: the bucket name is missing; {protocol}://BUCKET/PREFIX is expected"
            )
        fs_class = fsspec.get_filesystem_class(protocol)
        self._fs = fs_class(**{**options, "use_listings_cache": False, "skip_instance_cache": True})
        self._protocol = protocol
        self.prefix: str = self._fs._strip_protocol(url).rstrip("/")

    def list_page(
        self,
        prefix: str,
        *,
        deep: bool,
        token: str | None,  # noqa: ARG002 - there is one page
    ) -> tuple[list[FileInfo], str | None]:
        """See `Client.list_page`; always one page, and with `deep` one request per folder."""
        found: list[FileInfo] = []
        folders = [prefix]
        while folders:
            level = self._level(folders.pop())
            if deep:
                folders += [f"{info.path}/" for info in level if info.kind == "dir"]
                level = [info for info in level if info.kind != "dir"]
            found += level
        return found, None

    def get(self, key: str, start: int, end: int) -> tuple[bytes, str]:
        """See `Client.get`; returns no ETag."""
        data = bytes(self._ask(lambda: self._fs.cat_file(key, start=start, end=end), key))
        if not data:
            raise ShortRead(f"{key} ends before the requested bytes")
        return data, ""

    def put(self, key: str, data: bytes, *, create: bool) -> None:
        """See `Client.put`; supported only for stores that publish whole objects."""
        self._check_writes()
        if not create:
            self._ask(lambda: self._fs.pipe_file(key, data), key)
            return
        try:
            self._ask(lambda: self._fs.pipe_file(key, data, mode="create"), key)
        except _Unsupported as exc:
            raise CannotCreate(f"{key}: {exc.message}") from exc

    def put_parts(
        self,
        key: str,
        parts: Iterator[bytes],
        *,
        retries: Retries,  # noqa: ARG002 - the implementations repeat parts, or cannot
        what: str,  # noqa: ARG002
    ) -> None:
        """See `Client.put_parts`; supported only for stores that publish whole objects."""
        self._check_writes()
        if self._protocol == "memory":  # publishes a file as soon as it is opened
            self.put(key, b"".join(parts), create=False)
            return
        file = self._ask(lambda: self._fs.open(key, "wb", autocommit=False), key)
        try:
            for part in parts:
                self._ask(lambda part=part: file.write(part), key)  # type: ignore[misc]
            self._ask(file.close, key)
            self._ask(file.commit, key)
        except BaseException:
            with suppress(Exception):
                file.discard()
            raise

    def _check_writes(self) -> None:
        if self._protocol not in _OF_OBJECTS:
            raise UsageError(
                f"{self._protocol}:// is read-only here, because its writes are not atomic"
            )

    def delete(self, key: str) -> None:
        """See `Client.delete`; supported only for stores that publish whole objects."""
        self._check_writes()
        with suppress(PathNotFound):
            self._ask(lambda: self._fs.rm_file(key), key)

    def exists(self, key: str) -> bool:
        try:
            self._ask(lambda: self._fs.info(key), key)
        except PathNotFound:
            return False
        return True

    def kept(self, key: str) -> Kept:
        """See `Client.kept`; of these storages only Google's reports a checksum."""
        if self._protocol not in _GOOGLE:
            return Kept(key, why_none=f"{self._protocol}:// is not known to keep any")
        # Source: Cloud Storage JSON API, object resource: always a CRC-32C of the whole object.
        item = self._ask(lambda: self._fs.info(key), key)
        value = hex_of(str(item.get("crc32c", "")))
        return Kept(
            key,
            (Checksum("crc32c", value, whole=True),) if value else (),
            str(item.get("etag", "")),
            str(item.get("generation", "")),
            "" if value else "the store keeps no checksums",
        )

    def list_uploads(
        self,
        prefix: str,
        *,
        token: object,  # noqa: ARG002 - there is one page
    ) -> tuple[Sequence[Upload], object]:
        if self._protocol in _OF_OBJECTS - _EXPIRE:
            raise NotSupported(
                f"{self._address(prefix)}: unfinished uploads cannot be listed through fsspec; "
                "set a lifecycle rule of the bucket that aborts them"
            )
        return (), None

    def abort_upload(self, key: str, upload_id: str) -> None:
        """See `Client.abort_upload`."""

    def close(self) -> None:
        """Does nothing: fsspec implementations close their own connections."""

    def _level(self, prefix: str) -> list[FileInfo]:
        self._fs.invalidate_cache()
        try:
            return self._ask(lambda: self._infos(prefix), prefix)
        except PathNotFound:
            self._check_container(prefix)
            return []

    def _infos(self, prefix: str) -> list[FileInfo]:
        items = self._fs.ls(prefix.rstrip("/"), detail=True)
        # For a file, some implementations list the file itself.
        return [self._info(item) for item in items if item["name"].rstrip("/").startswith(prefix)]

    def _check_container(self, prefix: str) -> None:
        if self._protocol == "memory":
            return
        if self._protocol not in _OF_OBJECTS:
            raise PathNotFound(f"{self._address(prefix)} does not exist")
        container = prefix.split("/", 1)[0]
        try:
            self._ask(lambda: self._fs.info(container), container)
        except PathNotFound:
            raise PathNotFound(
                f"{self._protocol}://{container}: the bucket does not exist"
            ) from None

    def _info(self, item: Mapping[str, Any]) -> FileInfo:
        path = item["name"]
        if item["type"] == "directory":
            return FileInfo(path.rstrip("/"), 0, kind="dir")
        size = item["size"]
        if size is None:
            size = self._fs.info(path)["size"]
        if size is None:
            raise StorageUnavailable(f"{path}: the storage does not report its size")
        return FileInfo(path, size, _seconds(item), _identity(item))

    def _ask(self, request: Callable[[], T], key: str) -> T:
        try:
            return request()
        except CkptctlError:
            raise
        except Exception as exc:
            raise self._error(exc, key) from exc

    def _address(self, key: str) -> str:
        # On some storages (http) the keys are complete URLs.
        return key if "://" in key else f"{self._protocol}://{key.lstrip('/')}"

    def _error(self, exc: Exception, key: str) -> StorageError:
        where = self._address(key)
        status = next(
            (s for name in ("status", "code", "status_code")
             if isinstance(s := getattr(exc, name, None), int)),
            0,
        )  # fmt: skip
        if isinstance(exc, FileNotFoundError) or status == 404:
            return PathNotFound(f"{where} does not exist")
        if isinstance(exc, PermissionError) or status in (401, 403):
            return AccessDenied(f"{where}: access denied ({_described(exc)})")
        if isinstance(exc, FileExistsError) or status == 412:
            return AlreadyExists(f"{where} already exists; it was not changed")
        if isinstance(exc, (NotImplementedError, TypeError)):
            return _Unsupported(f"{where}: {_described(exc)}")
        if status == 429:
            return Throttled(_described(exc))
        if isinstance(exc, OSError) or status >= 500 or status == 408:
            return Transient(_described(exc))
        return StorageUnavailable(f"{where}: {_described(exc)}")


class _Unsupported(StorageUnavailable):
    """The implementation does not support this method, or not with these arguments."""


def _described(exc: Exception) -> str:
    text = str(exc).strip()
    return f"{type(exc).__name__}: {text.splitlines()[0]}" if text else type(exc).__name__


def _seconds(item: Mapping[str, Any]) -> float | None:
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = item.get(name)
        if isinstance(value, str):
            value = seconds_of(value)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _identity(item: Mapping[str, Any]) -> str:
    for name in ("ETag", "etag", "generation", "md5Hash", "mtime", "created"):
        if value := item.get(name):
            return str(value)
    return ""
