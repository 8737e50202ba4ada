"""Write and read the small JSON files of ckptctl.

Seals and marks are JSON documents in one form: a schema, a closed set of
fields, and the digest of the document itself. Here they become bytes and are
read back strictly: truncated, with a field too many, twice or not at all, of
another type, or with one bit changed, they are refused. `documents` lists the
fields; `seals` and `marks` give them meaning.

The digest shows damage. Whoever can write the file can make it anew; only a
seal with a key withstands that.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from ckptctl.errors import OwnFileUnreadable, OwnFileUnsupported
from ckptctl.formats.bounded_json import NotJson, decode_json

Fields = dict[str, object]

MAX_STRING = 4096
"""Characters of one string: what a person writes into a mark, or a path."""

_LARGEST = 2**63 - 1


def time_now() -> str:
    """When a file is written: RFC 3339 in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def utc_now() -> str:
    """Now, as RFC 3339 in UTC with microseconds."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return now.isoformat(timespec="microseconds").replace("+00:00", "Z")


def canonical(fields: Mapping[str, object]) -> bytes:
    """The one way to write a document: keys sorted, no spaces, ASCII alone."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def digest_of(fields: Mapping[str, object]) -> str:
    """The SHA-256 of a document in its canonical form, in hex."""
    return hashlib.sha256(canonical(fields)).hexdigest()


def as_stored(schema: str, fields: Mapping[str, object]) -> bytes:
    """The document as it is stored: with its schema, its own digest, and a line end."""
    fields = {**fields, "schema": schema}
    return canonical({**fields, "digest": digest_of(fields)}) + b"\n"


Kind = TypeVar("Kind")


def read_back(data: bytes, schema: str, kind: type[Kind], *, max_objects: int) -> Kind:
    """The fields of a stored document; see `opened` and `typed`."""
    return typed(kind, opened(data, schema, max_objects=max_objects)[0])


def opened(
    data: bytes, schema: str, *, beside: Collection[str] = (), max_objects: int
) -> tuple[Fields, Fields]:
    """The fields of a stored document, and those `beside` them that the digest does not cover.

    `schema` is `NAME/1`. `max_objects` bounds the lists and objects in the document before
    any is made. Raises `OwnFileUnsupported` for another version, `OwnFileUnreadable` for
    anything else that is wrong.
    """
    # Counted inside strings too: a name with a thousand braces is no name of ours.
    if data.count(b"{") + data.count(b"[") > max_objects:
        raise OwnFileUnreadable(f"it holds more than {max_objects:,} lists and objects")
    document = _parsed(data)
    _check_schema(document, schema)
    found_beside = {name: document.pop(name) for name in beside if name in document}
    digest = document.pop("digest", None)
    if digest != digest_of(document):
        raise OwnFileUnreadable("it does not match its own digest: it was changed or damaged")
    del document["schema"]
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


def typed(kind: type[Kind], fields: Fields) -> Kind:
    """The fields as a `TypedDict`, none missing and none more.

    Raises `OwnFileUnreadable`, with the place of the first that does not fit.
    """
    try:
        check = _check_of(cast(Any, kind))
        return cast(Kind, check(fields))
    except _Misfit as misfit:
        raise OwnFileUnreadable(f"{misfit.where.lstrip('.') or 'it'} {misfit.what}") from None


class _Misfit(Exception):
    """A value is not of its type; `where` is extended on the way out."""

    def __init__(self, what: str, where: str = "") -> None:
        self.what = what
        self.where = where


_Check = Callable[[Any], object]


@cache
def _check_of(hint: Any, /) -> _Check:
    """The check of a type: it returns the value, or raises `_Misfit`."""
    origin, of = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _constrained(_check_of(of[0]), dict(of[1:]))
    if origin is list:
        return partial(_check_list, _check_of(of[0]))
    if origin is dict:
        return partial(_check_values, _check_of(of[1]))
    if of:  # `X | None`
        inner = _check_of(of[0])
        return lambda value: None if value is None else inner(value)
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    hints = get_type_hints(hint, include_extras=True)
    checks = {name: _check_of(each) for name, each in hints.items()}
    return partial(_check_fields, checks, hint.__required_keys__)


def _check_text(value: object) -> object:
    if not isinstance(value, str) or len(value) > MAX_STRING:
        raise _Misfit(f"is not a string of at most {MAX_STRING:,} characters")
    return value


def _check_count(value: object) -> object:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise _Misfit("is not an integer from 0 on")
    return value


def _check_flag(value: object) -> object:
    if not isinstance(value, bool):
        raise _Misfit("is not true or false")
    return value


_SIMPLE: Mapping[object, _Check] = {str: _check_text, int: _check_count, bool: _check_flag}


def _constrained(check: _Check, constraints: Mapping[str, Any]) -> _Check:
    """A check of a pattern or a minimum as well; who reads a document checks the others."""
    pattern, minimum = constraints.get("pattern"), constraints.get("minimum")
    fits = re.compile(pattern).fullmatch if pattern else None

    def constrained(value: Any) -> object:
        check(value)
        if fits and not fits(value):
            raise _Misfit(f"is not hexadecimal digits: {pattern}")
        if minimum is not None and value < minimum:
            raise _Misfit(f"is not an integer from {minimum} on")
        return value

    return constrained


def _check_list(check: _Check, value: object) -> object:
    if not isinstance(value, list):
        raise _Misfit("is not a list")
    n_checked = 0
    try:
        for each in value:
            check(each)
            n_checked += 1
    except _Misfit as misfit:
        raise _Misfit(misfit.what, f"[{n_checked}]{misfit.where}") from None
    return value


def _check_values(check: _Check, value: object) -> object:
    if not isinstance(value, dict):
        raise _Misfit("is not an object")
    return _check_fields(dict.fromkeys(value, check), frozenset(), value)


def _check_fields(checks: Mapping[str, _Check], required: frozenset[str], value: object) -> object:
    if not isinstance(value, dict):
        raise _Misfit("is not an object")
    for name in sorted(required - value.keys()):
        raise _Misfit(f"lacks the field {name!r}")
    for name in sorted(value.keys() - checks.keys()):
        raise _Misfit(f"has the unknown field {name[:64]!r}")
    name = ""
    try:
        for name, each in value.items():
            checks[name](each)
    except _Misfit as misfit:
        raise _Misfit(misfit.what, f".{name[:64]}{misfit.where}") from None
    return value
