"""Write and read the small JSON files of ckptctl.

Each is one document: a schema, a closed set of fields, and the digest of the document itself.
The classes of the documents are in this package; msgspec compares the fields with them. A
document that was truncated, has a field too many, twice or not at all, of another type, or one
changed bit, is refused.

The lines of a ledger and the events of a runbook are objects of the kind that their field `event`
names, without a digest.

The digest shows damage. Whoever can write the file can compute it again; only a seal with a key
withstands that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

import msgspec

from ckptctl.errors import OwnFileUnreadable, OwnFileUnsupported
from ckptctl.formats.bounded_json import NotJson, Numbers, decode_json
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formatting import rfc3339

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Fields = dict[str, object]

ATTEMPTS_FOLDER = f"{OWN_FOLDER}/attempts"
"""The folder of a root with the ledgers of its attempts and the reports of their resumes."""
REPORT_SUFFIX = ".resume.json"
"""Behind the name of the attempt, the name of the report of its resume."""

MAX_STRING = 4096
"""Characters of one string: what a person writes into a mark, or a path."""


def time_now() -> str:
    """When a file is written: RFC 3339 in UTC, to the second."""
    return rfc3339(time.time(), "seconds")


def utc_now() -> str:
    """Now, as RFC 3339 in UTC with microseconds."""
    return rfc3339(time.time(), "microseconds")


def canonical(fields: Mapping[str, object]) -> bytes:
    """The one way to write a document: keys sorted, no spaces, ASCII alone."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def digest_of(fields: Mapping[str, object]) -> str:
    """The SHA-256 of a document in its canonical form, in hex."""
    return sha256_of(canonical(fields))


def as_stored(schema: str, document: object) -> bytes:
    """The document as it is stored: with its schema, its own digest, and a line end."""
    fields = {**msgspec.to_builtins(document), "schema": schema}
    return canonical({**fields, "digest": digest_of(fields)}) + b"\n"


Struct = TypeVar("Struct")


def read_back(
    data: bytes, schema: str, kind: type[Struct], *, max_objects: int, numbers: Numbers = "integers"
) -> Struct:
    """A stored document, whose class is `kind`; see `document_of`.

    The digest is computed of the fields of `kind`, so that a document with others, or without
    one of them, does not match it.
    """
    fields = document_of(data, schema, max_objects=max_objects, numbers=numbers)
    document = typed(kind, fields)
    check_digest(fields, {**msgspec.to_builtins(document), "schema": schema})
    return document


def document_of(
    data: bytes, schema: str, *, max_objects: int, numbers: Numbers = "integers"
) -> Fields:
    """All fields of a stored document with this schema, which is `NAME/1`.

    `max_objects` bounds the lists and objects in the document before any is made. Raises
    `OwnFileUnsupported` for another version, `OwnFileUnreadable` for another document.
    """
    # Counted inside strings too: a name with a thousand braces is no name of ours.
    if data.count(b"{") + data.count(b"[") > max_objects:
        raise OwnFileUnreadable(f"it has more than {max_objects:,} lists and objects")
    document = parsed(data, len(data), numbers=numbers)  # the caller bounds the size
    stated = document.get("schema")
    if stated == schema:
        return document
    if isinstance(stated, str) and stated.startswith(f"{schema.partition('/')[0]}/"):
        raise OwnFileUnsupported(
            f"it is of version {stated[:64]}, and this ckptctl knows {schema} alone"
        )
    raise OwnFileUnreadable(f"it does not say that it is {schema}")


def check_digest(stated: Fields, fields: Mapping[str, object]) -> None:
    """Raise `OwnFileUnreadable` where the `digest` among `stated` is not that of `fields`."""
    if stated.get("digest") != digest_of(fields):
        raise OwnFileUnreadable(
            "it does not match its own digest: it was changed or damaged, or has other fields"
        )


def parsed(
    data: bytes, max_bytes: int, *, numbers: Numbers = "integers", unique_keys: bool = True
) -> Fields:
    """The fields of an object of JSON. Raises `OwnFileUnreadable` for anything else."""
    try:
        document = decode_json(data, max_bytes=max_bytes, numbers=numbers, unique_keys=unique_keys)
    except NotJson as error:
        raise OwnFileUnreadable(f"it is not JSON, or was truncated: {str(error)[:80]}") from error
    if not isinstance(document, dict):
        raise OwnFileUnreadable("it is JSON, but no object")
    return document


def as_fields(made: DataclassInstance) -> Fields:
    """The fields of a data class."""
    return {field.name: getattr(made, field.name) for field in fields_of(made)}


def line_bytes(made: DataclassInstance) -> bytes:
    """A data class as one line of JSON, as `made_of` reads it back."""
    text = json.dumps(as_fields(made), allow_nan=False, separators=(",", ":"), default=as_fields)
    return text.encode("ascii") + b"\n"


def classes_by_event(union: Any) -> Mapping[object, Any]:
    """The data classes of a union, by the word that the field `event` of each holds."""
    return {get_args(each.__annotations__["event"])[0]: each for each in get_args(union)}


def made_of(kind: type[Struct], fields: Fields, *, lenient: bool = False) -> Struct:
    """A data class of the fields that it has; others are those of a later version.

    A missing value is the default of its field, or null. A value that is not of its type
    raises `OwnFileUnreadable`; with `lenient` it counts as missing.
    """
    values = {}
    for name, hint, default in _fields_of(cast(Any, kind)):
        value = fields.get(name, default)
        try:
            values[name] = msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            if not lenient:
                raise OwnFileUnreadable(f"{name}: {error}") from None
            values[name] = default
    return kind(**values)


@cache
def _fields_of(kind: Any, /) -> Sequence[tuple[str, Any, object]]:
    """The fields of a data class: name, type, and the value where none is given."""
    defaults = kind.__init__.__kwdefaults__ or {}
    hints = get_type_hints(kind, include_extras=True)
    return [(name, hint, defaults.get(name)) for name, hint in hints.items()]


def typed(kind: type[Struct], fields: Fields) -> Struct:
    """The fields as a `TypedDict` or data class; those that it does not have are left out.

    Raises `OwnFileUnreadable`, with the place of the first that is missing or does not fit.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise OwnFileUnreadable(str(error)) from None
