"""`ckptctl explain`: print the page of a code, a verdict, an exit code, a cause or a check.

A page of `ckptctl/pages` for each finding code; verdicts, exit codes, the causes that
`classify` names and the checks of `doctor` are explained from their tables.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from importlib import import_module, resources
from itertools import pairwise
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from ckptctl.cli.commands import exit_codes, explanations
from ckptctl.cli.documents import DOCUMENTS, OBJECTS, DocumentKind, field_names
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import EMPTY, Line, StyledText, line, next_line, padded, page_lines
from ckptctl.diagnostics.advice import CHECKS
from ckptctl.errors import UsageError
from ckptctl.failures.results import CLASSES, Restart
from ckptctl.findings import CODES, EXIT_DENIED, Verdict
from ckptctl.formatting import command_line, listed
from ckptctl.options import Parameter

EXAMPLES = ("ckptctl explain shard.truncated", "ckptctl explain 20")
EXIT_CODES = (0, 2)


def explain(
    name: Annotated[
        str | None,
        Parameter(
            "CODE",
            "A finding code, a verdict, an exit code, a cause of classify, a check of doctor, "
            "or the name of a document; without one all of them but the documents are listed.",
        ),
    ] = None,
    *,
    out: Output,
) -> int:
    """Explain a code or word that ckptctl prints, and what to do about it.

    With --quiet the title alone is printed. Of a document of --json (`ckptctl.pick/1`) the JSON
    Schema is printed.
    """
    if name is not None and name.startswith("ckptctl."):
        out.document(partial(schema, name))
        return 0
    pages = [page(name)] if name is not None else [*all_pages()]
    out.answer(
        document_of("explain", explained=pages),
        lambda: index_lines(pages) if name is None else page_lines(pages[0].text, out.out.width),
        bare=(page.name if name is None else page.title for page in pages),
    )
    return 0


_HEADINGS = {
    "finding": "finding codes",
    "verdict": "verdicts",
    "exit-code": "exit codes",
    "cause": "causes of failures",
    "check": "checks of doctor",
}


def index_lines(pages: Sequence[Page]) -> Iterator[Line]:
    """Every page by its name and title."""
    width = max(len(page.name) for page in pages)
    for kind, heading in _HEADINGS.items():
        yield line(StyledText(heading, "strong"))
        for page in pages:
            if page.kind == kind:
                yield line("  ", padded(page.name, width), "  ", page.title, hang=width + 4)
        yield EMPTY
    yield from next_line("ckptctl explain CODE")


@dataclass(frozen=True, slots=True)
class Page:
    """One thing that can be explained."""

    name: str
    """The code, verdict, exit code, cause or check."""
    kind: str
    """`finding`, `verdict`, `exit-code`, `cause` or `check`."""
    title: str
    """The meaning in a few words."""
    text: str
    """The page, in Markdown."""


class Explained(TypedDict):
    """The answer of `explain`."""

    explained: tuple[Page, ...]
    """One entry for each thing that was explained."""


def page(name: str) -> Page:
    """The page of a finding code, a verdict, an exit code, a cause or a check of `doctor`.

    Raises `UsageError` for anything else, with the names that come close.
    """
    own = name.lstrip("0") or "0" if name.isdecimal() else name
    if own in _names():
        return _page(own)
    message = f"there is nothing to explain under the name {name!r}"
    if below := [code for code in sorted((*CODES, *CHECKS)) if code.startswith(f"{name}.")]:
        raise UsageError(
            f"{message}; the codes below it are {listed(below)}",
            next_command=command_line("explain", below[0]),
        )
    from difflib import get_close_matches

    words = [known for known in _names() if not known.isdecimal()]
    close = get_close_matches(name.lower(), words, n=3)
    if not close:
        raise UsageError(message, next_command="ckptctl explain")
    raise UsageError(
        f"{message}; did you mean {listed(close, 'or')}?",
        next_command=command_line("explain", close[0]),
    )


def all_pages() -> Iterator[Page]:
    """Every page: finding codes, verdicts, exit codes, causes, then checks of `doctor`."""
    return map(_page, _names())


@cache
def _names() -> Mapping[str, None]:
    return dict.fromkeys(
        (
            *sorted(CODES),
            *(verdict.value for verdict in Verdict),
            *explanations()["loss-verdicts"],
            *map(str, exit_codes()),
            *(cause for cause in CLASSES if cause not in ("none", "unknown")),
            *CHECKS,
        )
    )


def _page(name: str) -> Page:
    if name in CODES:
        title = CODES[name].title
        file = resources.files("ckptctl") / "pages" / f"{name}.md"
        heading, _, rest = file.read_text("utf-8").rstrip("\n").partition("\n")
        return Page(name, "finding", title, f"{heading}: {title}\n\n{_consequence(name)}\n{rest}")
    if name in explanations()["verdicts"] or name in explanations()["loss-verdicts"]:
        return _verdict_page(name)
    if name.isdecimal():
        code = exit_codes()[int(name)]
        lines = [f"# exit code {name}: {code.title}", "", code.advice, "", f"Retry: {code.retry}."]
        return Page(name, "exit-code", code.title, "\n".join(lines))
    if name in CLASSES:
        cause = CLASSES[name]
        lines = [f"# {name}: {cause.means}", "", cause.advice, ""]
        lines.append(f"A restart {_RESTARTS[cause.restart]}.")
        lines.append(f"`ckptctl classify --quiet` prints `{cause.domain.value}`.")
        return Page(name, "cause", cause.means, "\n".join(lines))
    check = CHECKS[name]
    lines = [f"# {name}: {check.title}", "", check.effect, "", check.fix]
    return Page(name, "check", check.title, "\n".join(lines))


def _consequence(code: str) -> str:
    severity, verdict = CODES[code].severity.value.capitalize(), CODES[code].verdict
    if code.startswith("loss."):
        from ckptctl.loss.verdict import FORCES

        forced = FORCES.get(code)
        if forced is None:
            return f"{severity}: it does not change the verdict about the loss."
        exits = forced.exit_code()
        return f"{severity}: the loss is `{forced.value}` (`loss` exits with {exits})."
    if verdict is None:
        return f"{severity}: it does not make a step unusable by itself."
    exit_code = EXIT_DENIED if code == "step.denied" else verdict.exit_code
    return f"{severity}: the step is `{verdict.value}` (`verify` exits with {exit_code})."


def _verdict_page(word: str) -> Page:
    if word in explanations()["verdicts"]:
        means = explanations()["verdicts"][word]
        (exit_code,) = (verdict.exit_code for verdict in Verdict if verdict == word)
        exits = f"`ckptctl verify` exits with {exit_code}"
        codes = sorted(code for code, meaning in CODES.items() if meaning.verdict == word)
    else:
        from ckptctl.loss.verdict import FORCES, LossVerdict

        verdict, means = LossVerdict(word), explanations()["loss-verdicts"][word]
        exits = f"`ckptctl loss` exits with {verdict.exit_code()}"
        if verdict is LossVerdict.NO_JUMP:
            exits += f", with `--strict` {verdict.exit_code(strict=True)}"
        codes = [code for code, forced in FORCES.items() if forced is verdict]
    lines = [f"# {word}", "", means, "", f"{exits}."]
    lines += ["", "Findings with this verdict:", ""] if codes else []
    lines += [f"- `{code}`: {CODES[code].title}" for code in codes]
    return Page(word, "verdict", means, "\n".join(lines))


_RESTARTS = {
    Restart.FREE: "helps, and is not counted against a budget",
    Restart.YES: "helps",
    Restart.ONCE: "can help once; the same failure again is caused by the job",
    Restart.NO: "does not help",
}


# The JSON Schema of a document, from the classes that hold its fields. Types become constraints,
# and the docstring behind a field becomes its description. Lists of words (`Enum`) are open, but
# for those in `CLOSED`: a reader must accept words that are not among the examples, and fields
# that the schema does not have. Files of a root are closed.


Schema = dict[str, Any]

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}

CLOSED = frozenset(
    {
        "LossVerdict",
        "Agreement",
        "RowOrigin",
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
    "description": "SHA-256 of the document without `digest`, `hmac` and `signature`: keys sorted, "
    "no spaces, ASCII only.",
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
    """The fields that documents have of a class: a dataclass or a `TypedDict`."""
    hints = typing.get_type_hints(kind, include_extras=True)
    texts = _texts(kind)
    optional = getattr(kind, "__optional_keys__", ())
    # What comes from a log may hold anything.
    of_logs = kind.__module__.startswith(("ckptctl.logs.", "ckptctl.loss."))
    properties: dict[str, Schema] = {}
    names = tuple(hints if typing.is_typeddict(kind) else field_names(kind))
    for name in names:
        hint, text = hints.get(name), texts.get(name, "")
        if name not in hints:
            get = getattr(kind, name).fget
            hint = typing.get_type_hints(get, include_extras=True)["return"]
            text = _text(get.__doc__)
        signed = of_logs and not name.startswith("n_")
        made = _of(hint, definitions, signed=signed, pairs=name in OBJECTS)
        properties[name] = {**made, **({"description": text} if text else {})}
    required = [name for name in names if name not in optional]
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
        return {"type": "string", "enum" if hint.__name__ in CLOSED else "examples": words}
    if issubclass(hint, tuple):
        return _array(inner(item) for item in typing.get_type_hints(hint).values())
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # a class that holds its own kind refers to it
        text = _text(hint.__doc__)
        definitions[hint.__name__] = {"description": text, **_object(hint, definitions)}
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _limits(meta: Meta) -> Iterator[tuple[str, object]]:
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


def _text(docstring: str | None) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((docstring or "").partition("\n\n")[0].split())


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def _texts(kind: type) -> Mapping[str, str]:
    """The docstring behind each field of a class, and of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("ckptctl."):
            continue
        classes = (node for node in _tree(base.__module__).body if isinstance(node, ast.ClassDef))
        (about,) = (node for node in classes if node.name == base.__name__)
        texts |= {
            field.target.id: _text(str(text.value.value))
            for field, text in pairwise(about.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        }
    return texts
