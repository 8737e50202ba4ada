"""What does an S3 server mean by an error, and which checksums does it show?

Errors are known by status and error code only: the texts differ between servers,
and some quote parts of the request. Which client carried the answer does not
matter here.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ckptctl.errors import (
    AccessDenied,
    AlreadyExists,
    PathNotFound,
    StorageError,
    StorageUnavailable,
)
from ckptctl.storage.contract import Checksum, ShortRead
from ckptctl.storage.objects import CannotCreate
from ckptctl.storage.retrying import Throttled, Transient

NO_CREDENTIALS = (
    "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or --storage-option anon=true for a public bucket"
)

_DENIED = frozenset(
    {
        "AccessDenied",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_NO_SUCH_NAME = frozenset({"InvalidObjectName", "KeyTooLongError"})
_CHANGED_ON_THE_WAY = frozenset(
    {"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
)
_THROTTLED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"})
_HEALS = frozenset({"InternalError", "RequestTimeout", "ServiceUnavailable"})
_HEALING_STATUS = frozenset({408, 409, 425})


class NoSuchBucket(PathNotFound):
    """The one 404 that a listing may get: of a prefix without keys it is an empty one."""


class ChangedOnTheWay(Transient):
    """The bytes that arrived are not those that were sent."""


class NoSuchUpload(Transient):
    """The multipart upload has ended: completed, aborted, or expired by a lifecycle rule.

    Seen by a writer whose answer to completing it was lost, too.
    """


@contextmanager
def needs_no_key() -> Iterator[None]:
    """Around a listing or a write: a 404 for anything but the bucket is no answer to those."""
    try:
        yield
    except NoSuchBucket:
        raise
    except PathNotFound as error:
        raise Transient("404 in answer to a request that needs no object") from error


def error_of(status: int, code: str, *, bucket: str, key: str) -> StorageError:
    """The error for an answer with HTTP `status` and S3's error `code` (may be empty).

    409 is a conditional write that met another one: asking again tells who won.
    """
    where = f"s3://{bucket}/{key}" if key else f"s3://{bucket}"
    answer = f"{status} {code}".strip()
    if code == "NoSuchBucket":
        return NoSuchBucket(f"s3://{bucket}: there is no such bucket")
    if code == "NoSuchUpload":
        return NoSuchUpload(answer)
    if status in (401, 403) or code in _DENIED:
        return AccessDenied(f"{where}: {_denied(answer)}")
    if code in _THROTTLED or status == 429:
        return Throttled(answer)
    if code in _CHANGED_ON_THE_WAY:
        return ChangedOnTheWay(answer)
    if code in _HEALS or status in _HEALING_STATUS:
        return Transient(answer)
    if status == 404 or code in _NO_SUCH_NAME:
        return PathNotFound(f"{where}: there is no such object")
    if status == 412:
        return AlreadyExists(f"{where} is there already; it was kept")
    if status == 416:
        return ShortRead(f"{where} ends before the bytes that were asked for")
    if status == 501:
        return CannotCreate(f"{where}: the storage does not implement this ({answer})")
    if status >= 500:
        return Transient(answer)
    return StorageUnavailable(f"{where}: the storage refused the request ({answer})")


def _denied(answer: str) -> str:
    return (
        f"access denied ({answer}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
        "AWS_PROFILE, the endpoint, this machine's clock, and what the bucket's policy allows"
    )


_IN_PARTS = re.compile(r"-\d+$")


def checksums_in(answer: Mapping[str, object]) -> tuple[Checksum, ...]:
    """The checksums in an answer to HeadObject, by the names that botocore has for its fields.

    A server that does not say the type has one of the whole object where that was not
    written in parts: composite ones, and the ETags of objects in parts, end in `-N`.
    Source: Amazon S3 API reference, HeadObject; user guide, checking object integrity.
    """
    said = answer.get("ChecksumType")
    in_parts = bool(_IN_PARTS.search(str(answer.get("ETag", "")).strip('"')))
    found = []
    for name, value in answer.items():
        if not name.startswith("Checksum") or name == "ChecksumType" or not isinstance(value, str):
            continue
        number, _, parts = value.partition("-")
        whole = not parts and (not in_parts if said is None else said == "FULL_OBJECT")
        digest = hex_of(number)
        if digest:
            algorithm = name.removeprefix("Checksum").lower()
            found.append(Checksum(algorithm, digest, whole))
    return tuple(found)


def hex_of(base64: str) -> str:
    """A checksum as it is written in headers, in hex; empty where it is none."""
    try:
        return b64decode(base64, validate=True).hex()
    except (binascii.Error, ValueError):
        return ""
