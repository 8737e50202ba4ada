"""Give a command its options, and repeat them in the command that comes next.

A command takes options objects whole; `with_common` puts the options of the command line
in their place, and adds those that every command has.

An answer that was given under `--require`, `--level` or `--endpoint-url` leads to a
command that asks under the same. An option is repeated where the next command has the
very same one, which is one of those that several commands share, or the next command is
the caller's own with a change: two options of one name that are defined apart mean
different things.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from ckptctl.cli.commands import COMMANDS, load
from ckptctl.cli.options import (
    COMMAND_LINE_ONLY,
    COMMON,
    COMMON_GROUP,
    GROUPS,
    OFFERS,
    Declared,
    Offer,
    variable_of,
)
from ckptctl.cli.output import Output
from ckptctl.cli.parsing import TRUE, Parameter, parameters_of
from ckptctl.cli.rendering import Line, line
from ckptctl.errors import StorageUnavailable, UsageError
from ckptctl.formatting import command_line, path_word
from ckptctl.options import TIMEOUT_S
from ckptctl.redaction import keep, shell_command
from ckptctl.storage.waiting import Watchdog


def _offers_of(annotation: Any) -> tuple[type, Mapping[str, Offer]] | None:
    """The options object that a parameter takes, with what the command offers of it."""
    made = getattr(annotation, "__origin__", annotation)
    if not isinstance(made, type) or made not in OFFERS:
        return None
    chosen = next(iter(getattr(annotation, "__metadata__", ())), None)
    offers = OFFERS[made]
    return made, {name: each for name, each in offers.items() if chosen is None or name in chosen}


_PATIENCE = 4
"""A mounted file system may be silent for so many times `--timeout`: then the process ends."""


class Bound(NamedTuple):
    """A command as the command line has it: its parameters, and the call that takes them."""

    parameters: tuple[Parameter, ...]
    run: Callable[..., int]


def with_common(command: Callable[..., int], out: Output) -> Bound:
    """The command with the options of the objects that it takes, and those that every one has.

    `--debug` has no effect but in `main`, which prints tracebacks. A storage that hangs in
    the kernel ends the process with 75.
    """
    own = parameters_of(command)
    del own["out"]
    objects = {name: found for name, each in own.items() if (found := _offers_of(each.annotation))}
    parameters = _expanded(own)

    def run(**given: Any) -> int:
        paths = {each.name: _as_words(given[each.name]) for each in parameters if each.is_path}
        keep(*(str(path) for each in paths.values() if each for path in _several(each)))
        given |= paths
        common = {name: given.pop(name) for name in COMMON}
        timeout_s = given.get("timeout") or TIMEOUT_S
        if not math.isfinite(timeout_s):
            raise UsageError(f"--timeout is {timeout_s} s", instead="--timeout 120")
        # How an answer is shown is no part of what was asked.
        asked = [each for each in parameters if each.name not in COMMON]
        repeated = given_options(asked, given)
        out.configure(
            as_json=common["as_json"],
            quiet=common["quiet"],
            color=common["color"],
            report_file=common["report"],
            complete=lambda each: with_options(each, repeated, partial(_takes, out.command)),
        )
        out.lines(_ignored_lines(given), to=out.err)
        for name, (made, offers) in objects.items():
            given[name] = _made(made, offers, given, keep=own)
        if "storage" not in objects:
            return command(**given, out=out)

        def stalled(error: StorageUnavailable) -> None:
            error.next_command = command_line("explain", error.exit_code)
            out.error(error)

        with Watchdog(_PATIENCE * timeout_s, stalled):
            return command(**given, out=out)

    return Bound(parameters, run)


def _as_words(paths: Any) -> Any:
    """The value of a parameter whose paths no later command takes for an option."""
    if isinstance(paths, list):
        return [*map(path_word, paths)]
    return path_word(paths) if isinstance(paths, str) else paths


def _expanded(own: Mapping[str, Parameter]) -> tuple[Parameter, ...]:
    """The parameters of a command, with options in the place of options objects."""
    found = {name: _offers_of(each.annotation) for name, each in own.items()}
    # A command may have its own words for one of them.
    added = {
        name: (offer, GROUPS[made])
        for made, offers in filter(None, found.values())
        for name, offer in offers.items()
        if name not in own
    } | {name: (offer, COMMON_GROUP) for name, offer in COMMON.items()}
    plain = (each for name, each in own.items() if found[name] is None)
    options = (
        Parameter(name, offer.option, offer.default, group)
        for name, (offer, group) in added.items()
    )
    return (*plain, *options)


def _made(
    made: type, offers: Mapping[str, Offer], given: dict[str, Any], *, keep: Collection[str]
) -> object:
    """The options object of what the command line gave, which is taken out of `given`.

    A parameter of the command's own stays there: its own words mean something else, but
    for `--timeout`, which the storage obeys, too.
    """
    values = {}
    for name, offer in offers.items():
        value = given[name] if name in keep else given.pop(name)
        if name in keep and value is None:
            continue
        values[offer.field or name] = value if offer.read is None else offer.read(value)
    return made(**values)


def _ignored_lines(given: Mapping[str, Any]) -> Iterator[Line]:
    """Name each variable that is set for an option which is read from the command line only."""
    for parameter, value in given.items():
        name = "--" + parameter.replace("_", "-")
        if name in COMMAND_LINE_ONLY and not value and os.environ.get(variable_of(name)):
            yield line(
                f"warning: {variable_of(name)} is set and has no effect: {name} is read from the "
                "command line only"
            )


_WRITES = frozenset({"--metrics", "--html"})
"""Options with a file, in which another command would write something else."""


def _takes(own: str | None, command: str, definition: Declared) -> bool:
    """Whether a command takes an option that was given to the command `own`."""
    if command == own:
        return True
    if command not in COMMANDS or definition.names[0] in _WRITES:
        return False
    theirs = _expanded(parameters_of(load(command).function))
    return any(each.declared is definition for each in theirs)


_OF_ONE_ACT = frozenset(
    {
        *("--reason", "--evidence", "--by"),
        *("--new", "--continue", "--dry-run", "--set"),
        *("--subset", "--deadline"),
    }
)
"""Options of one mark, one run of a runbook, one partial inspection: not repeated in the next."""


class Given(NamedTuple):
    """An option as the caller gave it: its definition, its name, and how it is written."""

    definition: Declared
    name: str
    words: tuple[str, ...]


def given_options(parameters: Iterable[Parameter], values: Mapping[str, Any]) -> tuple[Given, ...]:
    """The options that the caller gave on the command line.

    Those in the environment are not repeated: the next command reads them there. Nor are
    switches that change something, which have no variable: consent is given each time.
    """
    return tuple(
        Given(found, name, words)
        for each in parameters
        if (found := each.declared) is not None and found.envvar is not None
        for name in (found.names[0],)
        if name not in _OF_ONE_ACT
        if (words := tuple(_written(name, values[each.name], each.default)))
        if not _in_environment(found.envvar, words)
    )


def _written(name: str, value: object, default: object) -> Iterator[str]:
    """An option as words of a command line; nothing where it has its default."""
    if value == default or value is None:
        return
    if isinstance(value, bool):
        yield name
        return
    for each in _several(value):
        yield from (name, _text(each))


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

    `takes` returns whether a command of ckptctl has an option of that definition.
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
            own += f" {shell_command(each.words)}"
    return own + dashes + behind
