"""A client over s3fs.

s3fs resolves credentials, region, endpoint and options as usual. Requests go through its
client one at a time: no listing cache, no retries by s3fs, no HEAD before a read.
`s3_answers` maps errors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ckptctl.errors import AccessDenied, PathNotFound, StorageError, StorageUnavailable, UsageError
from ckptctl.model import FileInfo, Kept
from ckptctl.storage.contract import Upload
from ckptctl.storage.in_flight import READ_WIDTH
from ckptctl.storage.objects import CannotCreate
from ckptctl.storage.s3 import (
    ARCHIVES,
    NO_CREDENTIALS,
    NoSuchUpload,
    checksums_in,
    error_of,
    needs_no_key,
)
from ckptctl.storage.waiting import Retries, Transient, retried

T = TypeVar("T")

_RANGE = re.compile(r"bytes (\d+)-(\d+)/")


class S3fsClient:
    """See `objects.Client`; `options` are those of `s3fs.S3FileSystem`."""

    def __init__(
        self, bucket: str, prefix: str, options: Mapping[str, object], *, timeout_s: float
    ) -> None:
        import s3fs

        self.prefix = prefix
        self._bucket = bucket
        ours = {
            "config_kwargs": _config(options, timeout_s),
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }
        try:
            self._fs = s3fs.S3FileSystem(**{**options, **ours})
        except (KeyError, TypeError, ValueError) as exc:
            raise UsageError(f"s3://{bucket}: s3fs does not accept these options: {exc}") from exc
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
            answer = self._ask(self._call("list_objects_v2", **arguments), prefix)
        try:
            return _page(answer)
        except KeyError as exc:
            raise Transient(f"the answer is not a listing: {exc} is missing") from exc

    def get(self, key: str, start: int, end: int) -> tuple[bytes, str]:
        return self._ask(self._get(key, start, end), key)

    def put(self, key: str, data: bytes, *, create: bool) -> None:
        with needs_no_key():
            self._ask(self._put(key, data, create=create), key)

    def put_parts(self, key: str, parts: Iterator[bytes], *, retries: Retries, what: str) -> None:
        upload, summed = retried(lambda: self._begin_parts(key), what=what, retries=retries)
        named = {"Key": key, "UploadId": upload}

        def send(number: int, part: bytes) -> dict[str, object]:
            arguments = {**named, "PartNumber": number, "Body": part, **summed}
            sent = self._ask(self._call("upload_part", **arguments), key)
            names = ("ETag", "ChecksumCRC32")
            return {"PartNumber": number, **{name: sent[name] for name in names if name in sent}}

        def complete() -> None:
            arguments = {**named, "MultipartUpload": {"Parts": done}}
            self._ask(self._call("complete_multipart_upload", **arguments), key)

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
            answer = self._ask(
                self._call("list_multipart_uploads", Prefix=prefix, **markers), prefix
            )
        found = [
            Upload(item["Key"], item["UploadId"], item["Initiated"].timestamp())
            for item in answer.get("Uploads", ())
        ]
        if not answer.get("IsTruncated"):
            return found, None
        names = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        following = {name: answer[next_name] for name, next_name in names.items()}
        if following == markers:
            raise StorageUnavailable(
                f"s3://{self._bucket}/{prefix}: the listing repeats a page and does not end"
            )
        return found, following

    def abort_upload(self, key: str, upload_id: str) -> None:
        with suppress(NoSuchUpload):
            self._ask(self._call("abort_multipart_upload", Key=key, UploadId=upload_id), key)

    def _begin_parts(self, key: str) -> tuple[str, dict[str, str]]:
        """The id of a new upload, and the arguments that each of its parts needs."""
        summed, whole = self._ask(self._checksums_sent(), key)
        try:
            begun = self._ask(
                self._call("create_multipart_upload", Key=key, **summed, **whole), key
            )
        except CannotCreate:  # the server reports that it does not support this checksum
            summed = {}
            begun = self._ask(self._call("create_multipart_upload", Key=key), key)
        return begun["UploadId"], summed

    def delete(self, key: str) -> None:
        self._ask(self._call("delete_object", Key=key), key)

    def exists(self, key: str) -> bool:
        """See `Client.exists`; one HEAD."""
        try:
            self._ask(self._call("head_object", Key=key), key)
        except PathNotFound:
            return False
        return True

    def kept(self, key: str) -> Kept:
        """See `Client.kept`; one HEAD."""
        answer = self._ask(self._head(key), key)
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

    async def _head(self, key: str) -> Mapping[str, Any]:
        client = await self._fs.set_session()
        members = client.meta.service_model.operation_model("HeadObject").input_shape.members
        asked = {"ChecksumMode": "ENABLED"} if "ChecksumMode" in members else {}
        answer: Mapping[str, Any] = await self._call("head_object", Key=key, **asked)
        return answer

    async def _checksums_sent(self) -> tuple[dict[str, str], dict[str, str]]:
        """The arguments with which the store keeps one CRC-32 of a whole multipart object.

        Empty if botocore does not support it, or if its settings disable checksums.
        """
        client = await self._fs.set_session()
        operation = client.meta.service_model.operation_model("CreateMultipartUpload")
        when = getattr(client.meta.config, "request_checksum_calculation", None)
        if when != "when_supported" or "ChecksumType" not in operation.input_shape.members:
            return {}, {}
        return {"ChecksumAlgorithm": "CRC32"}, {"ChecksumType": "FULL_OBJECT"}

    async def _put(self, key: str, data: bytes, *, create: bool) -> None:
        condition = {"IfNoneMatch": "*"} if create else {}
        client = await self._fs.set_session()
        members = client.meta.service_model.operation_model("PutObject").input_shape.members
        if create and "IfNoneMatch" not in members:
            raise CannotCreate("this botocore does not support conditional writes")
        await self._call("put_object", Key=key, Body=data, **condition)

    def _ask(self, request: Coroutine[Any, Any, T], key: str) -> T:
        import aiohttp
        from botocore.exceptions import BotoCoreError
        from botocore.parsers import ResponseParserError
        from fsspec.asyn import sync

        async def once() -> T:
            return await request

        try:
            result: T = sync(self._fs.loop, once)
            return result
        except (
            BotoCoreError,
            ResponseParserError,
            aiohttp.ClientError,
            OSError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as exc:
            raise self._error(exc, key) from exc

    def _error(self, exc: Exception, key: str) -> StorageError | UsageError:
        from botocore import exceptions as boto

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
        if isinstance(exc, boto.NoCredentialsError):
            return AccessDenied(f"{where}: {NO_CREDENTIALS}")
        if isinstance(exc, _credential_errors()):
            return AccessDenied(f"{where}: {exc}")
        # Options reach botocore's session and client unchecked, and only here.
        if isinstance(exc, (*_configuration_errors(), TypeError, ValueError)):
            return UsageError(f"{where}: s3fs does not accept these options: {exc}")
        return Transient(type(exc).__name__)


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


def _credential_errors() -> tuple[type[Exception], ...]:
    from botocore import exceptions as boto

    return (
        boto.PartialCredentialsError,
        boto.CredentialRetrievalError,
        boto.ProfileNotFound,
        boto.UnauthorizedSSOTokenError,
        boto.SSOTokenLoadError,
        boto.TokenRetrievalError,
    )


def _configuration_errors() -> tuple[type[Exception], ...]:
    """Errors that no retry resolves: an invalid option, variable or setting in `~/.aws`."""
    from botocore import exceptions as boto

    return (
        boto.ConfigNotFound,
        boto.ConfigParseError,
        boto.EndpointProviderError,
        boto.InvalidConfigError,
        boto.InvalidProxiesConfigError,
        boto.InvalidRegionError,
        boto.InvalidS3AddressingStyleError,
        boto.InvalidS3UsEast1RegionalEndpointConfigError,
        boto.NoRegionError,
        boto.ParamValidationError,
    )


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
