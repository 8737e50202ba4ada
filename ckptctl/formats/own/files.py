"""Write and read the small JSON files of ckptctl.

Seals and marks are JSON documents in one form: a schema, a closed set of
fields, and the digest of the document itself. Here they become bytes and are
read back strictly: truncated, with a field too many, twice or not at all, of
another type, or with one bit changed, they are refused. `documents` lists the
fields; `seals` and `marks` give them meaning.

The lines of a ledger and the events of a runbook are data classes: an object each,
of the kind that its field `event` names, without a digest.

The digest shows damage. Whoever can write the file can make it anew; only a
seal with a key withstands that.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields as fields_of
from functools import cache, partial
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from ckptctl.errors import OwnFileUnreadable, OwnFileUnsupported
from ckptctl.formats.bounded_json import NotJson, Numbers, decode_json
from ckptctl.formats.digests import sha256_of
from ckptctl.formatting import rfc3339

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Fields = dict[str, object]

MAX_STRING = 4096
"""Characters of one string: what a person writes into a mark, or a path."""

_LARGEST = 2**63 - 1


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


def as_stored(schema: str, fields: Mapping[str, object]) -> bytes:
    """The document as it is stored: with its schema, its own digest, and a line end."""
    fields = {**fields, "schema": schema}
    return canonical({**fields, "digest": digest_of(fields)}) + b"\n"


Struct = TypeVar("Struct")


def read_back(data: bytes, schema: str, kind: type[Struct], *, max_objects: int) -> Struct:
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
    document = parsed(data, len(data))  # every caller bounds the size
    _check_schema(document, schema)
    found_beside = {name: document.pop(name) for name in beside if name in document}
    digest = document.pop("digest", None)
    if digest != digest_of(document):
        raise OwnFileUnreadable("it does not match its own digest: it was changed or damaged")
    del document["schema"]
    return document, found_beside


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


def _check_schema(document: Fields, schema: str) -> None:
    stated = document.get("schema")
    if stated == schema:
        return
    name = schema.partition("/")[0]
    if isinstance(stated, str) and stated.startswith(f"{name}/"):
        raise OwnFileUnsupported(
            f"it is of version {stated[:64]}, and this ckptctl knows {schema} alone"
        )
    raise OwnFileUnreadable(f"it does not say that it is {schema}")


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
    try:
        return cast(Struct, _made(kind, fields, lenient=lenient))
    except _Misfit as misfit:
        raise OwnFileUnreadable(f"{misfit.where.lstrip('.')} {misfit.what}") from None


def typed(kind: type[Struct], fields: Fields) -> Struct:
    """The fields as a `TypedDict` or data class, as those in it: none missing and none more.

    Raises `OwnFileUnreadable`, with the place of the first that does not fit.
    """
    try:
        check = _check_of(cast(Any, kind), strict=True)
        return cast(Struct, check(fields))
    except _Misfit as misfit:
        raise OwnFileUnreadable(f"{misfit.where.lstrip('.') or 'it'} {misfit.what}") from None


class _Misfit(Exception):
    """A value is not of its type; `where` is extended on the way out."""

    def __init__(self, what: str, where: str = "") -> None:
        self.what = what
        self.where = where


_Check = Callable[[Any], object]


@cache
def _check_of(hint: Any, /, *, strict: bool = False) -> _Check:
    """The check of a type: it returns the value, or raises `_Misfit`.

    With `strict`, a data class has no fields but its own, and none is absent.
    """
    origin, of = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = dict(of[1:])
        if of[0] is str:
            return _check_text(limits.get("maxLength", MAX_STRING), limits.get("pattern"))
        if of[0] not in (int, float):
            return _check_of(of[0], strict=strict)
        return _check_number(of[0], limits.get("minimum"), limits.get("maximum"))
    if origin in (list, Sequence, tuple):
        return partial(
            _check_list, _check_of(of[0], strict=strict), tuple if origin is tuple else list
        )
    if origin in (dict, Mapping):
        return partial(_check_values, _check_of(of[1], strict=strict))
    if origin is Literal:
        return partial(_check_word, of)
    if of:  # a union
        check, *others = [_check_of(each, strict=strict) for each in of if each is not NoneType]
        if others:
            check = partial(_check_any, (check, *others))
        return (lambda value: None if value is None else check(value)) if NoneType in of else check
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if strict or is_typeddict(hint):
        hints = get_type_hints(hint, include_extras=True)
        checks = {name: _check_of(each, strict=strict) for name, each in hints.items()}
        if is_typeddict(hint):
            return partial(_check_fields, checks, hint.__required_keys__)
        return lambda value: hint(**_check_fields(checks, frozenset(checks), value))
    return partial(_check_object, hint)


@cache
def _fields_of(kind: Any, /) -> Sequence[tuple[str, _Check, object]]:
    """The fields of a data class: name, check, and the value where none is given."""
    defaults = kind.__init__.__kwdefaults__ or {}
    return [
        (name, _check_of(hint), defaults.get(name))
        for name, hint in get_type_hints(kind, include_extras=True).items()
    ]


def _made(kind: Any, fields: Fields, *, lenient: bool) -> object:
    values = {}
    for name, check, default in _fields_of(kind):
        try:
            values[name] = check(fields.get(name, default))
        except _Misfit as misfit:
            if not lenient:
                raise _Misfit(misfit.what, f".{name}{misfit.where}") from None
            values[name] = default
    return kind(**values)


def _check_object(kind: Any, value: object) -> object:
    if not isinstance(value, dict):
        raise _Misfit("is not an object")
    return _made(kind, value, lenient=False)


def _check_any(checks: Sequence[_Check], value: object) -> object:
    *others, last = checks
    for check in others:
        with suppress(_Misfit):
            return check(value)
    return last(value)


def _check_word(words: Sequence[object], value: object) -> object:
    if value not in words:
        raise _Misfit(f"is not {' or '.join(map(str, words))}")
    return value


def _check_text(limit: int = MAX_STRING, pattern: str | None = None) -> _Check:
    fits = re.compile(pattern) if pattern else None

    def check(value: object) -> object:
        if not isinstance(value, str) or len(value) > limit:
            raise _Misfit(f"is not a string of at most {limit:,} characters")
        if fits and not fits.fullmatch(value):
            form = "is not hexadecimal digits:" if "[0-9a-f]" in fits.pattern else "does not match"
            raise _Misfit(f"{form} {fits.pattern}")
        return value

    return check


def _check_number(kind: type, least: float | None = None, most: float | None = None) -> _Check:
    """The check of a finite number; an integer is never negative."""
    kinds, what = ((int,), "an integer") if kind is int else ((int, float), "a number")
    largest = _LARGEST if kind is int else sys.float_info.max
    least = (0 if kind is int else -largest) if least is None else least
    most = largest if most is None else most

    def check(value: Any) -> object:
        if type(value) not in kinds or not least <= value <= most:
            bounds = f"from {least} on" if most == largest else f"from {least} to {most}"
            raise _Misfit(f"is not {what} {bounds}")
        return value

    return check


def _check_flag(value: object) -> object:
    if not isinstance(value, bool):
        raise _Misfit("is not true or false")
    return value


_SIMPLE: Mapping[object, _Check] = {
    str: _check_text(),
    int: _check_number(int),
    float: _check_number(float),
    bool: _check_flag,
    object: lambda value: value,
}


def _check_list(check: _Check, kind: Callable[[list[object]], object], value: object) -> object:
    if not isinstance(value, list):
        raise _Misfit("is not a list")
    checked: list[object] = []
    try:
        for each in value:
            checked.append(check(each))
    except _Misfit as misfit:
        raise _Misfit(misfit.what, f"[{len(checked)}]{misfit.where}") from None
    return kind(checked)


def _check_values(check: _Check, value: object) -> object:
    if not isinstance(value, dict):
        raise _Misfit("is not an object")
    return _check_fields(dict.fromkeys(value, check), frozenset(), value)


def _check_fields(checks: Mapping[str, _Check], required: frozenset[str], value: object) -> Fields:
    if not isinstance(value, dict):
        raise _Misfit("is not an object")
    if not required <= value.keys():
        raise _Misfit(f"lacks the field {min(required - value.keys())!r}")
    if not value.keys() <= checks.keys():
        raise _Misfit(f"has the unknown field {min(value.keys() - checks.keys())[:64]!r}")
    checked: Fields = {}
    name = ""
    try:
        for name, each in value.items():
            checked[name] = checks[name](each)
    except _Misfit as misfit:
        raise _Misfit(misfit.what, f".{name[:64]}{misfit.where}") from None
    return checked
