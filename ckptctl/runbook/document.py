"""A runbook: its inputs, its state diagram, its command blocks and their tables.

A runbook is a page of Markdown for people. The engine uses three parts of it: the table of
inputs, the state diagram, and below the heading of each state its named command blocks,
each followed by a table that maps exit codes to the next state. `reading` parses the page
and rejects syntax errors; `engine` runs it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.errors import UsageError
from ckptctl.formatting import listed

DONE = "done"
STOP = "stop"
NEXT = "next"

NOTHING = "(nothing)"
"""In the column `prints`: standard output is empty."""

_VARIABLE = re.compile(r"\$\{?([A-Z][A-Z0-9_]*)")
_EVALUATED = re.compile(r'\beval "\$\{?([A-Z][A-Z0-9_]*)\}?"')


Value = str | tuple[str, ...]
"""The value of an input: one text, or the items of a list."""


@dataclass(frozen=True, slots=True)
class Input:
    """A value that the operator gives; `default` is None if there is none.

    `type` is one of `TYPES`, or the words that are allowed: `yes/no`.
    """

    name: str
    """The name in commands."""
    is_list: bool
    """Whether it is a list: an array in the shell of the blocks."""
    meaning: str
    """The description."""
    required: bool
    """Whether a run requires it."""
    default: str | None
    """The value if none is given."""
    otherwise: str
    """What a run does without a value."""
    type: str = "text"
    """What a value must be."""
    is_decision: bool = False
    """Whether a person decides it, where the run needs it."""

    @property
    def words(self) -> tuple[str, ...]:
        """The words that are allowed; none if any text of the type is."""
        return tuple(self.type.split("/")) if "/" in self.type else ()

    def mistake(self, text: str) -> str | None:
        """What a value must be, if this one is not; None if it is sound."""
        if self.words:
            return None if text in self.words else listed(self.words, "or")
        wanted, is_sound = TYPES[self.type]
        return None if is_sound(text) else wanted


def _is_reason(text: str) -> bool:
    """Whether a text is more than an answer out of habit."""
    words = re.findall(r"\w+", text.lower())
    return len(words) >= _REASON_WORDS and len(set(words) - _REFLEXES) > 1


def _is_duration(text: str) -> bool:
    number = _DURATION.fullmatch(text)
    return number is not None and float(number[1]) > 0


_REASON_WORDS = 3
_REFLEXES = frozenset({"y", "yes", "ok", "okay", "yeah", "yep", "sure", "n", "no", "none", "x"})
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:s|m|min|h|d)?", re.ASCII)

TYPES: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "text": ("a text", lambda text: bool(text.strip())),
    "reason": ("a reason in three words or more", _is_reason),
    "log": ("the path of a log", lambda text: bool(text.strip())),
    "new-log": ("the path of a log that may not exist yet", lambda text: bool(text.strip())),
    "number": ("a whole number", lambda text: text.isascii() and text.isdigit()),
    "duration": ("a time like 90s, 5m, 8h or 2d", _is_duration),
}
"""The types of inputs: what a value is, and whether a text is one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of a block's table: how the command ended, and what follows.

    `first` and `last` bound the exit code; `event` is `not run`, `too often`, `dry run` or
    `other` in rows without one. `then` is `next`, `done`, `stop` or a state; `code` is the
    exit code that a stop states, None for the block's own, and `leads` is the runbook to
    run next.
    """

    first: int | None
    last: int | None
    event: str
    prints: str
    then: str
    code: int | None
    leads: str
    because: str

    def matches(self, exit_code: int, printed: str) -> bool:
        """Whether this row applies to a command that ended so."""
        if self.event:
            return self.event == "other"
        inside = self.first is not None and self.first <= exit_code <= (self.last or self.first)
        return inside and self.prints in ("", printed or NOTHING)


@dataclass(frozen=True, slots=True)
class Block:
    """One named command block: a bash script and its table of outcomes.

    `changes` marks a block that changes something: the operator is asked first. With
    `attended`, `--yes` does not confirm it. With `repeats`, it may run again, so a recorded
    end is not relied on. Of a `brief` one that ends as expected, a terminal shows the first lines.
    `decides` names an input that states a person's decision: the
    block runs once that input is given. A decision that `overrides` is against what a check
    found: the run then ends with `EXIT_OVERRIDDEN` instead of 0. The block does not run unless
    every input of `needs` is given; those of `asks` are asked for at a terminal. `runs` names
    inputs that it passes to a program as commands. `sets`
    takes the last line of standard output, or all lines if it names a list. The block runs
    at most `at_most` times in one run; 0 means no limit.
    """

    name: str
    code: str
    changes: bool
    attended: bool
    repeats: bool
    brief: bool
    decides: str | None
    overrides: bool
    asks: tuple[str, ...]
    needs: tuple[str, ...]
    runs: tuple[str, ...]
    sets: str | None
    at_most: int
    outcomes: tuple[Outcome, ...]

    @property
    def commands(self) -> tuple[str, ...]:
        """The inputs that the block runs as commands: NAME of each `eval "$NAME"`, and `runs`."""
        return (*_EVALUATED.findall(self.code), *self.runs)

    def outcome(self, exit_code: int, printed: str) -> Outcome | None:
        """The first row that applies to this end; None if no row does."""
        return next((row for row in self.outcomes if row.matches(exit_code, printed)), None)

    def on(self, event: str) -> Outcome | None:
        """The row of `not run`, `too often` or `dry run`."""
        return next((row for row in self.outcomes if row.event == event), None)


@dataclass(frozen=True, slots=True)
class State:
    """One state of the diagram: its description from the page, and its blocks."""

    name: str
    about: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Runbook:
    """A page that can be run: its first state is the start; `text` is the page."""

    name: str
    title: str
    inputs: tuple[Input, ...]
    states: tuple[State, ...]
    text: str

    def input(self, name: str) -> Input | None:
        """The input of that name."""
        return next((each for each in self.inputs if each.name == name), None)

    @property
    def commands(self) -> frozenset[str]:
        """The names of the inputs that blocks run as commands."""
        blocks = (block for state in self.states for block in state.blocks)
        return frozenset(name for block in blocks for name in block.commands)

    @property
    def lists(self) -> tuple[str, ...]:
        """The names of the inputs that are lists."""
        return tuple(each.name for each in self.inputs if each.is_list)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names that blocks may use: the inputs, and what blocks set."""
        blocks = (block for state in self.states for block in state.blocks)
        found = {block.sets for block in blocks if block.sets is not None}
        return tuple(sorted(found.union(given.name for given in self.inputs)))

    def state(self, name: str) -> State:
        """The state of that name; raises `UsageError`."""
        for state in self.states:
            if state.name == name:
                return state
        raise UsageError(f"the runbook {self.name} has no state {name!r}")


def used_names(code: str) -> list[str]:
    """The names of the variables in a command, in order of use."""
    return _VARIABLE.findall(code)


def shown(value: str | Sequence[str]) -> str:
    """A value as it is typed in bash: a list in brackets, each item quoted."""
    return value if isinstance(value, str) else f"({shlex.join(value)})"
