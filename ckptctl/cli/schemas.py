"""Generate the JSON Schema of a document from the classes that hold its fields.

Types become constraints, and the docstring behind a field becomes its description. Lists of
words (`Enum`) are open, but for those in `_CLOSED`: a reader must accept words that are not
among the examples, and fields that the schema does not have. Files of a root are closed.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import Meta

from ckptctl.cli.documents import DOCUMENTS, OBJECTS, DocumentKind, field_names
from ckptctl.errors import UsageError

Schema = dict[str, Any]

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}

_CLOSED = frozenset(
    {
        "LossVerdict",
        "Agreement",
        "Origin",
        "Boundary",
        "CheckOutcome",
        "Decision",
        "MarkKind",
        "Algorithm",
    }
)
"""Lists of words that do not grow within a major version."""

_DIGEST: Schema = {
    "type": "string",
    "pattern": "^[0-9a-f]{64}$",
    "description": "SHA-256 of the document without `digest` and `hmac`: keys sorted, no spaces, "
    "ASCII only.",
}


def schema(name: str) -> Schema:
    """The JSON Schema of the documents whose field `schema` is `name`, such as `ckptctl.pick/1`.

    Raises `UsageError` for a name that no document has.
    """
    short = name.removeprefix("ckptctl.").removesuffix("/1")
    kind = DOCUMENTS.get(short)
    if kind is None:
        known = ", ".join(f"ckptctl.{short_name}/1" for short_name in DOCUMENTS)
        raise UsageError(f"there is no document {name!r}; the documents are {known}")
    definitions: dict[str, Schema] = {}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.title}
    if kind.is_line:
        (lines,) = _classes(kind)
        return {**head, **_of(lines, definitions, signed=False), "$defs": definitions}
    parts = [_object(holder, definitions) for holder in _classes(kind)]
    own: dict[str, Schema] = {"schema": {"const": f"ckptctl.{short}/1"}}
    if kind.has_digest:
        own["digest"] = _DIGEST
    parts = [{"properties": own, "required": list(own)}, *parts]
    properties = {
        key: property_schema
        for part in parts[::-1]
        for key, property_schema in part["properties"].items()
    }
    order = dict.fromkeys(key for part in parts for key in part["properties"])
    return {
        **head,
        "type": "object",
        "required": list(dict.fromkeys(key for part in parts for key in part["required"])),
        "properties": {key: properties[key] for key in order} | own,
        **({"additionalProperties": False} if kind.is_closed else {}),
        "$defs": {
            name: {**definition, "additionalProperties": False} if kind.is_closed else definition
            for name, definition in definitions.items()
        },
    }


def _classes(kind: DocumentKind) -> Iterator[Any]:
    for place in (*(("cli.documents:Envelope",) if kind.is_answer else ()), *kind.holds):
        module, _, name = place.partition(":")
        yield getattr(import_module(f"ckptctl.{module}"), name)


def _object(kind: type, definitions: dict[str, Schema]) -> Schema:
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for field in _fields(kind):
        made = _of(field.hint, definitions, signed=field.signed, pairs=field.name in OBJECTS)
        properties[field.name] = {**made, **({"description": field.text} if field.text else {})}
        if field.required:
            required.append(field.name)
    return {"type": "object", "required": required, "properties": properties}


def _of(hint: Any, definitions: dict[str, Schema], *, signed: bool, pairs: bool = False) -> Schema:
    def inner(inner_hint: Any) -> Schema:
        return _of(inner_hint, definitions, signed=signed)

    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return inner(of[0]) | {key: value for meta in of[1:] for key, value in _limits(meta)}
    if origin is typing.NotRequired:
        return inner(of[0])
    if origin in (typing.Union, types.UnionType):
        return _either([inner(choice) for choice in of])
    if origin is typing.Literal:
        return {"enum": list(of)}
    if pairs and of:
        return {"type": "object", "additionalProperties": inner(typing.get_args(of[0])[1])}
    if origin is tuple and of[-1] is not Ellipsis:
        return _array(map(inner, of))
    if origin in (tuple, list, Sequence):
        return {"type": "array", "items": inner(of[0])}
    if origin in (Mapping, dict):
        values = {} if of[1] is object else {"additionalProperties": inner(of[1])}
        return {"type": "object", **values}
    if hint in _TYPES:
        return {"type": _TYPES[hint], **({"minimum": 0} if hint is int and not signed else {})}
    if issubclass(hint, Enum):
        words = [word.value for word in hint]
        return {"type": "string", "enum" if hint.__name__ in _CLOSED else "examples": words}
    if issubclass(hint, tuple):
        return _array(inner(item) for item in typing.get_type_hints(hint).values())
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # a class that holds its own kind refers to it
        text = _text(hint.__doc__)
        definitions[hint.__name__] = {"description": text, **_object(hint, definitions)}
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _limits(meta: Meta) -> Iterator[tuple[str, object]]:
    """What is stated beside a type, as JSON Schema names it."""
    for name, key in _LIMITS.items():
        if (value := getattr(meta, name)) is not None:
            yield key, value
    yield from (meta.extra_json_schema or {}).items()


_LIMITS = {
    "ge": "minimum",
    "le": "maximum",
    "max_length": "maxLength",
    "pattern": "pattern",
    "description": "description",
}


def _array(items: Iterator[Schema]) -> Schema:
    of = list(items)
    return {"type": "array", "prefixItems": of, "minItems": len(of), "maxItems": len(of)}


def _either(choices: list[Schema]) -> Schema:
    """One of several; null is one of the types where that is equivalent."""
    some = [choice for choice in choices if choice != {"type": "null"}]
    if len(some) == 1 and "type" in some[0] and "enum" not in some[0]:
        return {**some[0], "type": [some[0]["type"], "null"]}
    return {"anyOf": choices}


class _Field(NamedTuple):
    name: str
    hint: Any
    text: str
    required: bool = True
    signed: bool = False
    """Integers may be negative: it comes from a log, which may hold anything."""


def _fields(kind: type) -> Iterator[_Field]:
    """The fields that documents have of a class: a dataclass or a `TypedDict`."""
    module = kind.__module__
    names = _names_for_types(module)
    hints = typing.get_type_hints(kind, localns=names, include_extras=True)
    texts = _texts(module, kind.__name__)
    required = getattr(kind, "__required_keys__", hints)
    for name in hints if typing.is_typeddict(kind) else field_names(kind):
        signed = module.startswith(("ckptctl.logs.", "ckptctl.loss.")) and not name.startswith("n_")
        if name in hints:
            yield _Field(name, hints[name], texts.get(name, ""), name in required, signed)
        else:
            get = getattr(kind, name).fget
            hint = typing.get_type_hints(get, localns=names, include_extras=True)["return"]
            yield _Field(name, hint, _text(get.__doc__), signed=signed)


def _text(docstring: str | None) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((docstring or "").partition("\n\n")[0].split())


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def _texts(module: str, name: str) -> Mapping[str, str]:
    """The docstring behind each field of a class, and of its bases in the same module."""
    classes = {node.name: node for node in _tree(module).body if isinstance(node, ast.ClassDef)}
    kind = classes[name]
    bases = [base.id for base in kind.bases if isinstance(base, ast.Name) and base.id in classes]
    return {key: text for base in bases for key, text in _texts(module, base).items()} | {
        field.target.id: _text(str(text.value.value))
        for field, text in pairwise(kind.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _names_for_types(module: str) -> Mapping[str, object]:
    """What a module imports for type checkers alone."""
    names: dict[str, object] = {}
    for node in _tree(module).body:
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            continue
        for statement in node.body:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                with suppress(ImportError):  # `_typeshed` exists for type checkers only
                    found = import_module(statement.module)
                    names |= {alias.name: getattr(found, alias.name) for alias in statement.names}
    return names
