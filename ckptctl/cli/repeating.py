"""Repeat the caller's options in the command that comes next.

An answer that was given under `--require`, `--level` or `--endpoint-url` leads to a
command that asks under the same. An option is repeated where the next command has the
very same one, which is one of those that several commands share, or the next command is
the caller's own with a change: two options of one name that are defined apart mean
different things.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from ckptctl.cli.values import without_secrets

_OF_ONE_ACT = frozenset(
    {
        *("--reason", "--evidence", "--by"),
        *("--new", "--continue", "--dry-run", "--set"),
        *("--subset", "--deadline"),
    }
)
"""What is said of one mark, of one run of a runbook, of one partial look, not of the next."""


TRUE = ("1", "true", "t", "yes", "y", "on")
"""What a variable of a switch says for yes."""


class Given(NamedTuple):
    """An option as the caller gave it: its definition, its name, and how it is written."""

    definition: object
    name: str
    words: tuple[str, ...]


def given_options(
    parameters: Iterable[inspect.Parameter], values: Mapping[str, Any]
) -> tuple[Given, ...]:
    """The options that the caller gave on the command line.

    Those in the environment are not repeated: the next command reads them there. Nor are
    switches that change something, which have no variable: consent is given each time.
    """
    return tuple(
        Given(found, name, words)
        for each in parameters
        if (found := definition_of(each.annotation)) is not None
        for name in (_name(found),)
        if name not in _OF_ONE_ACT
        if (words := tuple(_written(name, values[each.name], each.default)))
        if not _in_environment(found.envvar, words)
    )


def definition_of(annotation: object) -> Any:
    """What `option` returned for an annotation; None for an argument or a bare switch."""
    found = (each for each in getattr(annotation, "__metadata__", ()) if _variable(each))
    return next(found, None)


def _variable(definition: object) -> str | None:
    variable = getattr(definition, "envvar", None)
    return variable if isinstance(variable, str) else None


def _name(definition: object) -> str:
    return "--" + str(_variable(definition)).removeprefix("CKPTCTL_").lower().replace("_", "-")


def _written(name: str, value: object, default: object) -> Iterator[str]:
    """An option as words of a command line; nothing where it has its default."""
    if value == default or value is None:
        return
    if isinstance(value, bool):
        yield name
        return
    for each in without_secrets([_text(one) for one in _several(value)]):
        yield from (name, each)


def _several(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _text(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _in_environment(variable: str, words: Sequence[str]) -> bool:
    here = os.environ.get(variable, "")
    if len(words) == 1:
        return here.lower() in TRUE
    return here.split() == list(words[1::2])


def with_options(command: str, given: Sequence[Given], takes: Callable[[str, object], bool]) -> str:
    """A next command with the caller's options that it takes and does not have yet.

    `takes` says whether a command of ckptctl has an option of that definition.
    """
    own, dashes, behind = command.partition(" -- ")
    try:
        words = shlex.split(own)
    except ValueError:
        return command
    if not given or words[:1] != ["ckptctl"] or len(words) < 2 or words[-1] == "--help":
        return command
    if words[1] == "runbook" and words[2:3] != ["run"]:
        return command  # it runs nothing
    there = {word.partition("=")[0] for word in words}
    for each in given:
        if each.name not in there and takes(words[1], each.definition):
            own += f" {shlex.join(each.words)}"
    return own + dashes + behind
