"""Clients over fsspec: one for every implementation, and what s3fs alone can do.

`FsspecClient` supports `gs://`, `az://`, `memory://`, `https://` and every other registered
scheme, through the methods that all implementations share. Listing costs one request per folder:
`find` hides errors in some implementations, `ls` does not.

`S3fsClient` calls the operations of S3 instead: pages of listings, ETags, conditional writes,
parts, the checksums that S3 keeps. s3fs resolves credentials, region, endpoint and options as
usual; there is no listing cache, no retry by s3fs, no HEAD before a read.
"""

from __future__ import annotations

import datetime
import re
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
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
from ckptctl.storage.in_flight import READ_WIDTH
from ckptctl.storage.objects import CannotCreate
from ckptctl.storage.s3 import (
    ARCHIVES,
    NO_CREDENTIALS,
    NoSuchUpload,
    checksums_in,
    error_of,
    hex_of,
    needs_no_key,
)
from ckptctl.storage.waiting import Retries, Throttled, Transient, retried

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
            self._head(key)
        except PathNotFound:
            return False
        return True

    def _head(self, key: str) -> Mapping[str, Any]:
        return self._ask(lambda: self._fs.info(key), key)

    def kept(self, key: str) -> Kept:
        """See `Client.kept`; of these storages only Google's reports a checksum."""
        if self._protocol not in _GOOGLE:
            return Kept(key, why_none=f"{self._protocol}:// is not known to keep any")
        # Source: Cloud Storage JSON API, object resource: always a CRC-32C of the whole object.
        item = self._head(key)
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

    def _error(self, exc: Exception, key: str) -> StorageError | UsageError:
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


_RANGE = re.compile(r"bytes (\d+)-(\d+)/")


class S3fsClient(FsspecClient):
    """See `objects.Client`; `options` are those of `s3fs.S3FileSystem`."""

    def __init__(
        self, bucket: str, prefix: str, options: Mapping[str, object], *, timeout_s: float
    ) -> None:
        config = {"config_kwargs": _config(options, timeout_s)}
        try:
            super().__init__("s3", f"s3://{bucket}", {**options, **config})
        except (KeyError, TypeError, ValueError) as exc:
            raise UsageError(f"s3://{bucket}: s3fs does not accept these options: {exc}") from exc
        self.prefix = prefix
        self._bucket = bucket
        # Limit s3fs's own retry loop to one attempt.
        self._fs.retries = 1

    def list_page(
        self, prefix: str, *, deep: bool, token: str | None
    ) -> tuple[list[FileInfo], str | None]:
        """See `Client.list_page`; 1,000 keys a page."""
        arguments = {"Prefix": prefix}
        if not deep:
            arguments["Delimiter"] = "/"
        if token is not None:
            arguments["ContinuationToken"] = token
        with needs_no_key():
            answer = self._call_once(prefix, "list_objects_v2", **arguments)
        try:
            return _page(answer)
        except KeyError as exc:
            raise Transient(f"the answer is not a listing: {exc} is missing") from exc

    def get(self, key: str, start: int, end: int) -> tuple[bytes, str]:
        return self._await(self._get(key, start, end), key)

    def put(self, key: str, data: bytes, *, create: bool) -> None:
        if create and not _takes(self._session(key), "PutObject", "IfNoneMatch"):
            raise CannotCreate("this botocore does not support conditional writes")
        condition = {"IfNoneMatch": "*"} if create else {}
        with needs_no_key():
            self._call_once(key, "put_object", Key=key, Body=data, **condition)

    def put_parts(self, key: str, parts: Iterator[bytes], *, retries: Retries, what: str) -> None:
        upload, summed = retried(lambda: self._begin_parts(key), what=what, retries=retries)
        named = {"Key": key, "UploadId": upload}

        def send(number: int, part: bytes) -> dict[str, object]:
            arguments = {**named, "PartNumber": number, "Body": part, **summed}
            sent = self._call_once(key, "upload_part", **arguments)
            names = ("ETag", "ChecksumCRC32")
            return {"PartNumber": number, **{name: sent[name] for name in names if name in sent}}

        def complete() -> None:
            arguments = {**named, "MultipartUpload": {"Parts": done}}
            self._call_once(key, "complete_multipart_upload", **arguments)

        done: list[dict[str, object]] = []
        try:
            for number, part in enumerate(parts, 1):
                once = partial(send, number, part)
                done.append(retried(once, what=f"{what}, part {number}", retries=retries))
            retried(complete, what=what, retries=retries)
        except BaseException:
            # The parts of an upload that is not completed are kept and billed.
            with suppress(StorageError, UsageError):
                self.abort_upload(key, upload)
            raise

    def list_uploads(self, prefix: str, *, token: object) -> tuple[Sequence[Upload], object]:
        """See `Client.list_uploads`; 1,000 a page."""
        markers = token if isinstance(token, dict) else {}
        with needs_no_key():
            answer = self._call_once(prefix, "list_multipart_uploads", Prefix=prefix, **markers)
        found = [
            Upload(item["Key"], item["UploadId"], item["Initiated"].timestamp())
            for item in answer.get("Uploads", ())
        ]
        if not answer.get("IsTruncated"):
            return found, None
        names = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        return found, {name: answer[next_name] for name, next_name in names.items()}

    def abort_upload(self, key: str, upload_id: str) -> None:
        with suppress(NoSuchUpload):
            self._call_once(key, "abort_multipart_upload", Key=key, UploadId=upload_id)

    def _begin_parts(self, key: str) -> tuple[str, dict[str, str]]:
        """The id of a new upload, and the arguments that each of its parts needs.

        With them the store keeps one CRC-32 of the whole object; there are none if botocore does
        not support that, or if its settings disable checksums.
        """
        session, summed, whole = self._session(key), {}, {}
        when = getattr(session.meta.config, "request_checksum_calculation", None)
        if when == "when_supported" and _takes(session, "CreateMultipartUpload", "ChecksumType"):
            summed, whole = {"ChecksumAlgorithm": "CRC32"}, {"ChecksumType": "FULL_OBJECT"}
        try:
            begun = self._call_once(key, "create_multipart_upload", Key=key, **summed, **whole)
        except CannotCreate:  # the server reports that it does not support this checksum
            summed = {}
            begun = self._call_once(key, "create_multipart_upload", Key=key)
        return begun["UploadId"], summed

    def delete(self, key: str) -> None:
        self._call_once(key, "delete_object", Key=key)

    def _head(self, key: str) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._call_once(key, "head_object", Key=key)
        return answer

    def kept(self, key: str) -> Kept:
        """See `Client.kept`; one HEAD."""
        asked = {}
        if _takes(self._session(key), "HeadObject", "ChecksumMode"):
            asked = {"ChecksumMode": "ENABLED"}
        answer = self._call_once(key, "head_object", Key=key, **asked)
        checksums = checksums_in(answer)
        return Kept(
            key,
            checksums,
            answer.get("ETag", "").strip('"'),
            answer.get("VersionId", ""),
            "" if checksums else "the store keeps no checksums",
        )

    def close(self) -> None:
        """Close the connections."""
        from fsspec.asyn import sync

        if self._fs._s3 is not None:
            sync(self._fs.loop, self._fs._s3.close)

    async def _call(self, method: str, **arguments: object) -> Any:
        return await self._fs._call_s3(method, Bucket=self._bucket, **arguments)

    async def _get(self, key: str, start: int, end: int) -> tuple[bytes, str]:
        answer = await self._call("get_object", Key=key, Range=f"bytes={start}-{end - 1}")
        async with answer["Body"] as body:
            data: bytes = await body.read()
        if len(data) != answer["ContentLength"]:
            raise Transient(f"{len(data):,} of {answer['ContentLength']:,} bytes arrived")
        served = _RANGE.match(answer.get("ContentRange") or "")
        if served is None and start > 0:
            raise Transient("the answer does not state its byte range")
        if served and (int(served[1]), int(served[2])) != (start, start + len(data) - 1):
            raise Transient(f"{len(data):,} bytes arrived as {served[0]}")
        return data, answer.get("ETag", "")

    def _session(self, key: str) -> Any:
        """The client of botocore."""
        return self._await(self._fs.set_session(), key)

    def _call_once(self, key: str, method: str, **arguments: object) -> Any:
        return self._await(self._call(method, **arguments), key)

    def _await(self, request: Coroutine[Any, Any, T], key: str) -> T:
        from fsspec.asyn import sync

        async def once() -> T:
            return await request

        def answer() -> T:
            result: T = sync(self._fs.loop, once)
            return result

        return self._ask(answer, key)

    def _error(self, exc: Exception, key: str) -> StorageError | UsageError:
        # s3fs translates errors into built-in exceptions, with the original as cause.
        answer = getattr(exc if hasattr(exc, "response") else exc.__cause__, "response", None)
        if isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(answer.get("Error", {}).get("Code", ""))
            headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            return error_of(
                status,
                "" if code == str(status) else code,  # a HEAD has no body and no code
                bucket=self._bucket,
                key=key,
                text="{Message} <Region>{Region}</Region> {Endpoint}".format_map(
                    defaultdict(str, answer.get("Error", {}))
                ),
                region=headers.get("x-amz-bucket-region", ""),
            )
        where = f"s3://{self._bucket}/{key}"
        names = {kind.__name__ for kind in type(exc).__mro__}
        if "NoCredentialsError" in names:
            return AccessDenied(f"{where}: {NO_CREDENTIALS}")
        if names & _CREDENTIAL_ERRORS:
            return AccessDenied(f"{where}: {exc}")
        # Options reach botocore's session and client unchecked, and only here.
        if names & _CONFIGURATION_ERRORS or isinstance(exc, (TypeError, ValueError)):
            return UsageError(f"{where}: s3fs does not accept these options: {exc}")
        return Transient(type(exc).__name__)


def _takes(session: Any, operation: str, argument: str) -> bool:
    """Whether this botocore has an argument of an operation."""
    shape = session.meta.service_model.operation_model(operation).input_shape
    return argument in shape.members


def _page(answer: Mapping[str, Any]) -> tuple[list[FileInfo], str | None]:
    found = [
        FileInfo(
            item["Key"],
            item["Size"],
            item["LastModified"].timestamp(),
            item.get("ETag", ""),
            archived=item.get("StorageClass") in ARCHIVES,
        )
        for item in answer.get("Contents", ())
    ]
    found += [
        FileInfo(item["Prefix"].removesuffix("/"), 0, kind="dir")
        for item in answer.get("CommonPrefixes", ())
    ]
    # Every listing states whether it is truncated; an HTML page does not.
    return found, answer["NextContinuationToken"] if answer["IsTruncated"] else None


_CREDENTIAL_ERRORS = frozenset(
    {
        *("PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"),
        *("UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError"),
    }
)
_CONFIGURATION_ERRORS = frozenset(
    {
        *("ConfigNotFound", "ConfigParseError", "EndpointProviderError", "InvalidConfigError"),
        *("InvalidProxiesConfigError", "InvalidRegionError", "InvalidS3AddressingStyleError"),
        *("InvalidS3UsEast1RegionalEndpointConfigError", "NoRegionError", "ParamValidationError"),
    }
)
"""Classes of botocore for an invalid option, variable or setting in `~/.aws`: no retry helps."""


def _config(options: Mapping[str, object], timeout_s: float) -> dict[str, object]:
    """Botocore's settings: ours, then fsspec's configuration, then the caller's."""
    from fsspec.config import conf

    config: dict[str, object] = {
        "connect_timeout": timeout_s,
        "read_timeout": timeout_s,
        "max_pool_connections": READ_WIDTH,
        "retries": {"mode": "standard", "total_max_attempts": 1},
    }
    for source in (conf.get("s3", {}), options):
        given = source.get("config_kwargs")
        if isinstance(given, Mapping):
            config.update(given)
    return config
