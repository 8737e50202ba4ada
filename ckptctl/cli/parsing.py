"""Parse the command line of one command without importing typer.

Importing typer takes 4.5 times as long as starting Python. A command line that this parser
understands means the same to typer; a test compares the two. Everything else is left to
typer: help, completion, and whatever it refuses, for the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from ckptctl.cli.options import Declared

REQUIRED = ...
"""The default of a parameter that must be given."""

TRUE = ("1", "true", "t", "yes", "y", "on")
"""The values of a variable that turn a switch on."""

_PATHS = frozenset({"A", "B", "DIR", "DST", "FILE", "LOG", "PATH", "ROOT", "SRC", "STEP", "TARGET"})
"""What help calls a value that is a path or an address."""

_SWITCH = {
    **dict.fromkeys(TRUE, True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


class Parameter(NamedTuple):
    """A parameter of a command, with the type and the declaration that `Annotated` holds."""

    name: str
    annotation: Any
    default: Any = REQUIRED
    group: str = ""
    """The heading of help under which it stands; that of the command's own by default."""

    @property
    def declared(self) -> Declared | None:
        """How the command line has it; None for an options object."""
        found = (each for each in _metadata(self.annotation) if isinstance(each, Declared))
        return next(found, None)

    @property
    def kind(self) -> Callable[[str], Any]:
        """The type of one value; `list` of one is `several`."""
        of = next(each for each in _choices(self.annotation) if each is not NoneType)
        kind: Callable[[str], Any] = get_args(of)[0] if get_origin(of) is list else of
        return kind

    @property
    def words(self) -> tuple[str, ...]:
        """The values that are allowed, where they are listed."""
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return tuple(each.value for each in self.kind)
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def is_path(self) -> bool:
        """Whether its values are paths or addresses."""
        declared = self.declared
        metavar = declared.metavar if declared is not None else None
        return self.kind is str and (metavar or "").removesuffix("...") in _PATHS

    @property
    def several(self) -> bool:
        """Whether it takes more than one value."""
        return any(get_origin(each) is list for each in _choices(self.annotation))


def _metadata(annotation: Any) -> tuple[object, ...]:
    return getattr(annotation, "__metadata__", ())


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the only one."""
    plain = getattr(annotation, "__origin__", annotation) if _metadata(annotation) else annotation
    is_one = get_origin(plain) in (list, Literal)
    return (plain,) if is_one else get_args(plain) or (plain,)


def parameters_of(function: Callable[..., object]) -> dict[str, Parameter]:
    """The parameters of a function by name, in order; `inspect` takes long to import."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = names[: code.co_argcount]
    values = function.__defaults__ or ()
    defaults = {
        **dict(zip(reversed(positional), reversed(values), strict=False)),
        **(function.__kwdefaults__ or {}),
    }
    hints = get_type_hints(function, include_extras=True)
    return {name: Parameter(name, hints[name], defaults.get(name, REQUIRED)) for name in names}


class _NotUnderstood(Exception):
    """typer has to answer."""


def parse(
    parameters: Sequence[Parameter], argv: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any] | None:
    """The values of the parameters of a command by name; None where typer has to answer."""
    try:
        return _parsed(parameters, argv, environment)
    except _NotUnderstood:
        return None


def _parsed(
    parameters: Sequence[Parameter], argv: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    options = {name: each for each in parameters for name in _of(each).names}
    arguments = [each for each in parameters if not _of(each).names]
    given, words = _split(argv, options)
    values = {}
    for each in parameters:
        texts = given.get(each.name)
        if not _of(each).names:
            texts = _taken(each, words, is_last=each is arguments[-1])
        elif texts is None:
            texts = _from_environment(each, environment)
        values[each.name] = _value(each, texts)
    if words:
        raise _NotUnderstood
    return values


def _of(parameter: Parameter) -> Declared:
    declared = parameter.declared
    if declared is None:
        raise _NotUnderstood
    return declared


def _split(
    argv: Sequence[str], options: Mapping[str, Parameter]
) -> tuple[dict[str, list[str]], list[str]]:
    """The texts of each option that is given, and the other words."""
    given: dict[str, list[str]] = {}
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        if word == "--":
            words += rest
        elif not word.startswith("-") or word == "-":
            words.append(word)
        else:
            name, has_value, text = word.partition("=")
            option = options.get(name)
            if option is None or (has_value and not name.startswith("--")):
                raise _NotUnderstood
            if option.kind is bool:
                if has_value:
                    raise _NotUnderstood
                text = "true"
            elif not has_value:
                text = _next(rest)
            given.setdefault(option.name, []).append(text)
    return given, words


def _next(rest: Iterable[str]) -> str:
    for text in rest:
        return text
    raise _NotUnderstood


def _taken(argument: Parameter, words: list[str], *, is_last: bool) -> list[str] | None:
    """The words of an argument, which are taken out of `words`; None where there are none."""
    if argument.several and not is_last:
        raise _NotUnderstood
    n_taken = len(words) if argument.several else 1
    taken = words[:n_taken]
    del words[:n_taken]
    return taken or None


def _from_environment(option: Parameter, environment: Mapping[str, str]) -> list[str] | None:
    text = environment.get(_of(option).envvar or "")
    if not text:
        return None
    return text.split() if option.several else [text]


def _value(parameter: Parameter, texts: list[str] | None) -> object:
    if texts is None:
        if parameter.default is REQUIRED:
            raise _NotUnderstood
        return parameter.default
    values = [_converted(parameter, text) for text in texts]
    return values if parameter.several else values[-1]


def _converted(parameter: Parameter, text: str) -> Any:
    kind, least = parameter.kind, _of(parameter).min
    try:
        if kind is bool:
            return _SWITCH[text.strip().lower()]
        value: Any = text if get_origin(kind) is Literal else kind(text)
    except (ValueError, KeyError):
        raise _NotUnderstood from None
    is_no_word = bool(parameter.words) and text not in parameter.words
    if is_no_word or (least is not None and value < least):
        raise _NotUnderstood
    return value
