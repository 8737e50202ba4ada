"""What the clients for S3 share: settings that are checked first, and the meaning of answers.

The clients read the same settings and fail on bad ones in different ways, one of them with a
panic. Here each bad setting is a `UsageError` that names it and never shows a secret.

Errors are identified by status and error code: the texts differ between servers, and some quote
parts of the request. `s3_answers.toml` holds what each code means, for every client: the exception
with its exit code, the message and the next command.
"""

from __future__ import annotations

import binascii
import os
import re
import shlex
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple
from urllib.parse import urlsplit

from ckptctl.errors import (
    AccessDenied,
    AlreadyExists,
    ObjectArchived,
    OptionError,
    PathNotFound,
    StorageError,
    StorageFull,
    StorageMisconfigured,
    StorageUnavailable,
    UsageError,
)
from ckptctl.model import Checksum
from ckptctl.storage.contract import ShortRead
from ckptctl.storage.objects import CannotCreate
from ckptctl.storage.waiting import Throttled, Transient

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Variables for the endpoint, in order of precedence."""

_SECRETS = {
    "key": "AWS_ACCESS_KEY_ID",
    "secret": "AWS_SECRET_ACCESS_KEY",
    "token": "AWS_SESSION_TOKEN",
    "access_key_id": "",
    "secret_access_key": "",
    "session_token": "",
}
"""Options of the two clients for credentials, each with the equivalent variable."""

_REGIONS = {"region": "AWS_REGION", "region_name": "AWS_DEFAULT_REGION"}
_REGION_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}")
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]+\](:[0-9]*)?")  # obstore does not support zones
_FLAGS = {"true": True, "false": False}


def checked_settings(options: Mapping[str, object]) -> dict[str, object]:
    """The options without those that are None, with `anon` as a bool.

    Raises `UsageError` for an endpoint that is not a URL, and for invalid credentials,
    regions and nested options, whether from options or variables.
    """
    given = {name: value for name, value in options.items() if value is not None}
    nested = given.get("client_kwargs", {})
    for name in ("client_kwargs", "config_kwargs"):
        if not isinstance(given.get(name, {}), Mapping):
            raise OptionError(
                "--storage-option",
                f"{name} is {given[name]!r}; a JSON object is expected, such as "
                """client_kwargs='{"region_name": "eu-west-1"}'""",
            )
    for source, value in _named(given, nested if isinstance(nested, Mapping) else {}, _SECRETS):
        _check_secret(source, value)
    for source, value in _named(given, nested if isinstance(nested, Mapping) else {}, _REGIONS):
        if not isinstance(value, str) or not _REGION_NAME.fullmatch(value):
            raise UsageError(f"{source} is {value!r}, which is not a region name such as us-east-1")
    source, endpoint = endpoint_of(given)
    if endpoint:
        check_endpoint(endpoint, source)
    if "anon" in given:
        flag = _FLAGS.get(str(given["anon"]).lower())
        if flag is None:
            raise OptionError(
                "--storage-option", f"anon is {given['anon']!r}; true or false is expected"
            )
        given["anon"] = flag
    return given


def endpoint_of(options: Mapping[str, object]) -> tuple[str, str]:
    """Where the endpoint was set, and its value; two empty texts if it was not."""
    nested = options.get("client_kwargs")
    places = (
        *((f"the endpoint ({name})", options.get(name)) for name in ("endpoint_url", "endpoint")),
        (
            "client_kwargs' endpoint_url",
            nested.get("endpoint_url") if isinstance(nested, Mapping) else None,
        ),
        *((name, os.environ.get(name)) for name in ENDPOINTS),
    )
    return next(((source, str(value)) for source, value in places if value), ("", ""))


def check_endpoint(endpoint: str, source: str) -> None:
    """Raise `UsageError` if the endpoint is not the URL of a host, with or without a path."""
    expected = "http://HOST:PORT or https://HOST is expected"
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port
    except ValueError as exc:
        raise UsageError(f"{source} is {endpoint!r} ({exc}); {expected}") from exc
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{source} contains a user name; set credentials separately")
    sound = _IPV6.fullmatch(parts.netloc) or _HOST.fullmatch(host)
    if (
        parts.scheme not in ("http", "https")
        or not endpoint.startswith(f"{parts.scheme}://")
        or not sound
        or port == 0
        or parts.query
        or parts.fragment
        or not _PRINTABLE.fullmatch(endpoint)
    ):
        raise UsageError(f"{source} is {endpoint!r}; {expected}")


def _named(
    options: Mapping[str, object], nested: Mapping[str, object], names: Mapping[str, str]
) -> Iterator[tuple[str, object]]:
    """Each setting of these names, with its source."""
    for name, variable in names.items():
        if name in options:
            yield f"--storage-option {name}", options[name]
        if name in nested:
            yield f"client_kwargs' {name}", nested[name]
        if os.environ.get(variable):  # both clients treat an empty variable as unset
            yield variable, os.environ[variable]


def _check_secret(source: str, value: object) -> None:
    if not isinstance(value, str):
        raise UsageError(
            f"{source} is read as {type(value).__name__}, but text is expected; quote a value of "
            "digits twice: --storage-option key='\"0123\"'"
        )
    if not _PRINTABLE.fullmatch(value):
        raise UsageError(
            f"{source} is empty or contains white space or a control character, often from a file "
            "with Windows line ends (value not shown)"
        )


NO_CREDENTIALS = (
    "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or --storage-option anon=true for a public bucket"
)


class NoSuchBucket(PathNotFound):
    """The only 404 that a listing may raise; a prefix without keys lists as empty."""


class ChangedOnTheWay(Transient):
    """The storage received other bytes than were sent."""


class NoSuchUpload(Transient):
    """The multipart upload has ended: completed, aborted, or expired by a lifecycle rule.

    A writer also gets this if the answer to its own completion was lost.
    """


@contextmanager
def needs_no_key() -> Iterator[None]:
    """A context for listings and writes, where a 404 is valid only for the bucket."""
    try:
        yield
    except NoSuchBucket:
        raise
    except PathNotFound as error:
        raise Transient("404 for a request that needs no object") from error


class Meaning(NamedTuple):
    """The meaning of an answer: `text` and `next_command` are templates filled by `error_of`."""

    error: type[StorageError]
    text: str
    next_command: str


_ERRORS: Mapping[str, type[StorageError]] = {
    error.__name__: error
    for error in (
        *(AccessDenied, AlreadyExists, CannotCreate, ChangedOnTheWay, NoSuchBucket, NoSuchUpload),
        *(ObjectArchived, PathNotFound, ShortRead, StorageFull, StorageMisconfigured),
        *(StorageUnavailable, Throttled, Transient),
    )
}


@cache
def meanings() -> Mapping[str | int, Meaning]:
    """The meanings in `s3_answers.toml`, by their names, by error codes and by HTTP status."""
    import tomllib  # for S3 alone

    found: dict[str | int, Meaning] = {}
    with open(os.path.join(os.path.dirname(__file__), "s3_answers.toml"), "rb") as file:
        answers = tomllib.load(file)
    for name, row in answers.items():
        error = _ERRORS[row["error"]]
        meaning = Meaning(error, row.get("text", "{answer}"), row.get("next", ""))
        keys = (name, *row.get("codes", "").split(), *row.get("statuses", ()))
        found.update(dict.fromkeys(keys, meaning))
    return found


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

    Only a region and the name of an encryption key are taken from `text`, the rest of the
    answer; `region` is the value of a header.
    """
    kms_key = _KMS_KEY.search(text)
    known = meanings()
    meaning = known.get(code)
    if kms_key and meaning is known["denied"]:
        meaning = known["key-denied"]
    if meaning is None:
        meaning = known.get(status, known["passes" if status >= 500 else "refused"])
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


ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""The storage classes whose objects must be restored before they can be read.

A listing does not show the archive tiers of `INTELLIGENT_TIERING`, nor which objects are restored.
Source: Amazon S3 user guide, storage classes.
"""

_IN_PARTS = re.compile(r"-\d+$")


def checksums_in(answer: Mapping[str, object]) -> tuple[Checksum, ...]:
    """The checksums in an answer to HeadObject, by botocore's field names.

    If a server does not state the type, the checksum is of the whole object unless the
    value ends in `-N`: composite checksums, and ETags of objects in parts, do. Source:
    Amazon S3 API reference, HeadObject; user guide, checking object integrity.
    """
    kind = answer.get("ChecksumType")
    in_parts = bool(_IN_PARTS.search(str(answer.get("ETag", "")).strip('"')))
    found = []
    for name, value in answer.items():
        if not name.startswith("Checksum") or name == "ChecksumType" or not isinstance(value, str):
            continue
        number, _, parts = value.partition("-")
        whole = not parts and (not in_parts if kind is None else kind == "FULL_OBJECT")
        digest = hex_of(number)
        if digest:
            algorithm = name.removeprefix("Checksum").lower()
            found.append(Checksum(algorithm, digest, whole))
    return tuple(found)


def hex_of(base64: str) -> str:
    """A checksum from a header, in hex; empty if it is malformed."""
    try:
        return b64decode(base64, validate=True).hex()
    except (binascii.Error, ValueError):
        return ""
