"""Write and read the small JSON files of ckptctl.

Seals and marks are JSON documents in one form: a schema, a closed set of
fields, and the digest of the document itself. Here they become bytes and are
read back strictly: cut short, with a field too many, twice or not at all, or
with one bit changed, they are refused. What the fields mean is the question of
`seals` and `marks`.

The digest shows damage. Whoever can write the file can make it anew; only a
seal with a key withstands that.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Collection, Mapping

from ckptctl.errors import OwnFileUnreadable, OwnFileUnsupported
from ckptctl.formats.bounded_json import NotJson, decode_json

Fields = dict[str, object]

MAX_STRING = 4096
"""Characters of one string: what a person writes into a mark, or a path."""

_LARGEST = 2**63 - 1


def time_now() -> str:
    """When a file is written: RFC 3339 in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def canonical(fields: Mapping[str, object]) -> bytes:
    """The one way to write a document: keys sorted, no spaces, ASCII alone."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def digest_of(fields: Mapping[str, object]) -> str:
    """The SHA-256 of a document in its canonical form, in hex."""
    return hashlib.sha256(canonical(fields)).hexdigest()


def with_digest(fields: Mapping[str, object]) -> bytes:
    """The document as it is stored: with its own digest in it, and a line end."""
    return canonical({**fields, "digest": digest_of(fields)}) + b"\n"


def read_back(
    data: bytes,
    schema: str,
    fields: Collection[str],
    *,
    optional: Collection[str] = (),
    beside: Collection[str] = (),
    max_objects: int,
) -> tuple[Fields, Fields]:
    """The fields of a stored document, and those `beside` them that the digest does not cover.

    `schema` is `NAME/1`; `fields` are the names that must be there, `optional` those that
    may be, and no others; `beside` are optional, too. `max_objects` bounds the lists and
    objects in the document before any is made. Raises `OwnFileUnsupported` for another version,
    `OwnFileUnreadable` for anything else that is wrong.
    """
    # Counted inside strings too: a name with a thousand braces is no name of ours.
    if data.count(b"{") + data.count(b"[") > max_objects:
        raise OwnFileUnreadable(f"it holds more than {max_objects:,} lists and objects")
    document = _parsed(data)
    _check_schema(document, schema)
    found_beside = {name: document.pop(name) for name in beside if name in document}
    digest = document.pop("digest", None)
    same_names(document, {*fields, *(set(optional) & document.keys())}, "it")
    if digest != digest_of(document):
        raise OwnFileUnreadable("it does not match its own digest: it was changed or damaged")
    return document, found_beside


def _parsed(data: bytes) -> Fields:
    try:
        # Every caller bounds the size, and `max_objects` what is in it.
        document = decode_json(data, max_bytes=len(data), numbers="integers", unique_keys=True)
    except NotJson as error:
        raise OwnFileUnreadable(f"it is not JSON, or was cut short: {str(error)[:80]}") from error
    if not isinstance(document, dict):
        raise OwnFileUnreadable("it is JSON, but no object")
    return document


def _check_schema(document: Fields, schema: str) -> None:
    said = document.get("schema")
    if said == schema:
        return
    name = schema.partition("/")[0]
    if isinstance(said, str) and said.startswith(f"{name}/"):
        raise OwnFileUnsupported(
            f"it is of version {said[:64]}, and this ckptctl knows {schema} alone"
        )
    raise OwnFileUnreadable(f"it does not say that it is {schema}")


def same_names(document: Mapping[str, object], fields: Collection[str], what: str) -> None:
    """Raise `OwnFileUnreadable` unless the document has exactly these fields."""
    missing = sorted(set(fields) - document.keys())
    unknown = sorted(document.keys() - set(fields))
    if missing:
        raise OwnFileUnreadable(f"{what} lacks the field {missing[0]!r}")
    if unknown:
        raise OwnFileUnreadable(f"{what} has the unknown field {unknown[0][:64]!r}")


# One value each, or `OwnFileUnreadable`.


def object_in(value: object, what: str) -> Fields:
    """An object."""
    if not isinstance(value, dict):
        raise _wrong(what, "an object")
    return value


def list_in(value: object, what: str) -> list[object]:
    """A list."""
    if not isinstance(value, list):
        raise _wrong(what, "a list")
    return value


def text_in(value: object, what: str) -> str:
    """A string of bounded length."""
    if not isinstance(value, str) or len(value) > MAX_STRING:
        raise _wrong(what, f"a string of at most {MAX_STRING:,} characters")
    return value


def texts_in(value: object, what: str) -> tuple[str, ...]:
    """A list of strings."""
    return tuple(text_in(item, what) for item in list_in(value, what))


def count_in(value: object, what: str) -> int:
    """An integer from 0 on that fits 63 bits."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise _wrong(what, "an integer from 0 on")
    return value


def optional_count_in(value: object, what: str) -> int | None:
    """The same, or null."""
    return None if value is None else count_in(value, what)


def flag_in(value: object, what: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong(what, "true or false")
    return value


def hex_in(value: object, what: str, n_digits: int) -> str:
    """A digest: so many hexadecimal digits, in small letters."""
    if not isinstance(value, str) or len(value) != n_digits or not set(value) <= _HEX:
        raise _wrong(what, f"{n_digits} hexadecimal digits")
    return value


_HEX = frozenset("0123456789abcdef")


def _wrong(what: str, expected: str) -> OwnFileUnreadable:
    return OwnFileUnreadable(f"{what} is not {expected}")
