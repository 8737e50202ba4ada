"""What does an S3 server mean by an error?

By status and error code only: the texts differ between servers, and some quote
parts of the request. Which client carried the answer does not matter here.
"""

from __future__ import annotations

from ckptctl.errors import (
    AccessDenied,
    AlreadyExists,
    PathNotFound,
    StorageError,
    StorageUnavailable,
)
from ckptctl.storage.contract import ShortRead
from ckptctl.storage.objects import CannotCreate
from ckptctl.storage.retrying import Transient

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
_HEALS = _CHANGED_ON_THE_WAY | {"InternalError", "RequestTimeout", "SlowDown", "ServiceUnavailable"}
_HEALING_STATUS = frozenset({408, 409, 425, 429})


def error_of(status: int, code: str, *, bucket: str, key: str) -> StorageError:
    """The error for an answer with HTTP `status` and S3's error `code` (may be empty).

    409 is a conditional write that met another one: asking again tells who won.
    """
    where = f"s3://{bucket}/{key}" if key else f"s3://{bucket}"
    answer = f"{status} {code}".strip()
    if code == "NoSuchBucket":
        return PathNotFound(f"s3://{bucket}: there is no such bucket")
    if status in (401, 403) or code in _DENIED:
        return AccessDenied(f"{where}: {_denied(answer)}")
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
