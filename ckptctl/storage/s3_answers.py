"""Map what an S3 server answers to errors, and read the checksums that it shows.

Errors are known by status and error code; the texts differ between servers, and some
quote parts of the request. `MEANINGS` holds what each code means, for every client:
the exception with its exit code, the message and the next command.
"""

from __future__ import annotations

import binascii
import re
import shlex
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ckptctl.errors import (
    AccessDenied,
    AlreadyExists,
    ObjectArchived,
    PathNotFound,
    StorageError,
    StorageMisconfigured,
    StorageUnavailable,
)
from ckptctl.model import Checksum
from ckptctl.storage.contract import ShortRead
from ckptctl.storage.objects import CannotCreate
from ckptctl.storage.retrying import Throttled, Transient

NO_CREDENTIALS = (
    "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or --storage-option anon=true for a public bucket"
)


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


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an answer means: `text` and `next_command` are templates for the words of `error_of`."""

    error: type[StorageError]
    text: str
    next_command: str = ""


_CREDENTIALS = Meaning(
    AccessDenied,
    "access denied ({answer}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
    "AWS_PROFILE, the endpoint, this machine's clock, and what the bucket's policy allows",
)
_KEY_DENIED = Meaning(
    AccessDenied,
    "the encryption key {kms_key} may not be used ({answer}); whoever owns it grants "
    "kms:Decrypt and kms:GenerateDataKey",
    "aws kms describe-key --key-id {kms_key}",
)
_KEY_UNUSABLE = Meaning(
    AccessDenied,
    "the encryption key {kms_key} is disabled, deleted or of the wrong kind ({answer}); what it "
    "encrypted cannot be read until its owner restores it",
    "aws kms describe-key --key-id {kms_key}",
)
_EXPIRED = Meaning(
    AccessDenied,
    "the credentials have expired ({answer}); renew them, or let a role or a profile do so",
    "aws sts get-caller-identity",
)
_CLOCK = Meaning(
    AccessDenied,
    "this machine's clock and that of the storage are too far apart ({answer})",
    "timedatectl status",
)
_SUSPENDED = Meaning(
    AccessDenied, "the account or its user is suspended, closed or not signed up ({answer})"
)
_REGION = Meaning(
    StorageMisconfigured,
    "the bucket is in {region}, and the request went elsewhere ({answer})",
    "{set_region}",
)
_NO_SUCH_NAME = Meaning(PathNotFound, "there is no such object")
_FULL = Meaning(
    StorageUnavailable,
    "the storage is full, or a quota is used up ({answer}); nothing was written",
    "aws s3 ls --summarize --human-readable --recursive s3://{bucket}",
)
_CONDITION = Meaning(AlreadyExists, "{where} is there already; it was kept")
_PASSES = Meaning(Transient, "{answer}")


MEANINGS: Mapping[str, Meaning] = {
    **dict.fromkeys(
        (
            *("AccessDenied", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"),
            *("TokenRefreshRequired", "InvalidSecurity", "MissingSecurityHeader"),
        ),
        _CREDENTIALS,
    ),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException"), _EXPIRED),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired"), _CLOCK),
    **dict.fromkeys(
        ("AccountProblem", "AllAccessDisabled", "NotSignedUp", "UserSuspended"), _SUSPENDED
    ),
    **dict.fromkeys(("KMS.AccessDeniedException", "KMS.AccessDenied"), _KEY_DENIED),
    **dict.fromkeys(
        (
            *("KMS.DisabledException", "KMS.NotFoundException", "KMS.InvalidStateException"),
            *("KMS.KMSInvalidStateException", "KMS.InvalidKeyUsageException"),
        ),
        _KEY_UNUSABLE,
    ),
    **dict.fromkeys(
        (
            *("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint"),
            *("IllegalLocationConstraintException", "InvalidRegionName"),
        ),
        _REGION,
    ),
    "InvalidBucketName": Meaning(
        StorageMisconfigured, "{bucket} is no name that a bucket can have ({answer})"
    ),
    "EntityTooLarge": Meaning(
        StorageMisconfigured, "the object is larger than the storage takes ({answer})"
    ),
    "InvalidObjectState": Meaning(
        ObjectArchived,
        "the object is archived, and cannot be read before it is restored ({answer}); the "
        "credentials are in order",
        "aws s3api restore-object --bucket {bucket} --key {key} --restore-request Days=7",
    ),
    **dict.fromkeys(
        ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "ServiceQuotaExceeded"),
        _FULL,
    ),
    **dict.fromkeys(("InvalidObjectName", "KeyTooLongError", "NoSuchKey"), _NO_SUCH_NAME),
    **dict.fromkeys(
        ("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
        Meaning(ChangedOnTheWay, "{answer}"),
    ),
    **dict.fromkeys(
        ("NoSuchUpload", "InvalidPart", "InvalidPartOrder"), Meaning(NoSuchUpload, "{answer}")
    ),
    **dict.fromkeys(
        ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"),
        Meaning(Throttled, "{answer}"),
    ),
    **dict.fromkeys(
        ("InternalError", "RequestTimeout", "ServiceUnavailable", "IncompleteBody"), _PASSES
    ),
    "KMS.ThrottlingException": Meaning(Throttled, "{answer}"),
    "NoSuchBucket": Meaning(NoSuchBucket, "there is no such bucket"),
}
"""By error code. Sources: Amazon S3 API reference, error responses; AWS KMS, error codes of
Decrypt; Ceph 16 `src/rgw/rgw_common.cc`; MinIO `cmd/api-errors.go`."""

_BY_STATUS: Mapping[int, Meaning] = {
    301: _REGION,
    401: _CREDENTIALS,
    403: _CREDENTIALS,
    404: _NO_SUCH_NAME,
    408: _PASSES,
    409: _PASSES,  # a conditional write that met another one: asking again tells who won
    412: _CONDITION,
    416: Meaning(ShortRead, "the object ends before the bytes that were asked for"),
    425: _PASSES,
    429: Meaning(Throttled, "{answer}"),
    501: Meaning(CannotCreate, "the storage does not implement this ({answer})"),
    507: _FULL,
}
"""For a code that `MEANINGS` does not have, or an answer without one (that to a HEAD)."""

_REFUSED = Meaning(StorageUnavailable, "the storage refused the request ({answer})")

_IN_REGION = (
    re.compile(r"<Region>([a-z0-9-]{1,63})</Region>"),
    re.compile(r"expecting '([a-z0-9-]{1,63})'"),
    re.compile(r"\bs3[.-]([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\."),
)
_KMS_KEY = re.compile(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d+:(?:key|alias)/[A-Za-z0-9/_-]{1,256}")


def error_of(
    status: int, code: str, *, bucket: str, key: str, text: str = "", region: str = ""
) -> StorageError:
    """The error for an answer with HTTP `status` and S3's error `code` (may be empty).

    Of `text`, the rest of the answer, a region and the name of an encryption key are taken,
    and nothing else; `region` is what a header said of it.
    """
    kms_key = _KMS_KEY.search(text)
    meaning = MEANINGS.get(code)
    if kms_key and meaning is _CREDENTIALS:
        meaning = _KEY_DENIED
    if meaning is None:
        meaning = _BY_STATUS.get(status, _PASSES if status >= 500 else _REFUSED)
    found = next((match[1] for at in _IN_REGION if (match := at.search(text))), "")
    region = region or found
    where = f"s3://{bucket}/{key}" if key else f"s3://{bucket}"
    words = {
        "answer": f"{status or ''} {code}".strip(),
        "where": where,
        "bucket": shlex.quote(bucket),
        "key": shlex.quote(key),
        "kms_key": kms_key[0] if kms_key else "KEY",
        "region": f"the region {region}" if region else "another region",
        "set_region": (
            f"export AWS_REGION={region} AWS_DEFAULT_REGION={region}"
            if region
            else f"aws s3api get-bucket-location --bucket {shlex.quote(bucket)}"
        ),
    }
    message = meaning.text.format(**words)
    if issubclass(meaning.error, NoSuchBucket):
        where = f"s3://{bucket}"
    if not issubclass(meaning.error, Transient) and not message.startswith(where):
        message = f"{where}: {message}"
    return meaning.error(message, next_command=meaning.next_command.format(**words) or None)


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
