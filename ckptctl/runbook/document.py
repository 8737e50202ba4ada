"""A runbook: its inputs, its state diagram, its command blocks and their tables.

A runbook is a page of Markdown for people. The engine uses three parts of it: the table of
inputs, the state diagram, and below the heading of each state its named command blocks,
each followed by a table that maps exit codes to the next state. `reading` parses the page
and rejects syntax errors; `engine` runs it.

`problems` checks that a page is sound: every end of every command leads somewhere, the diagram
agrees with the tables, and a value reaches a command as one argument: quoted, or as a list.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    line: int

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
class Arrow:
    """One arrow of the diagram; `[*]` as target is the end."""

    source: str
    target: str
    label: str


@dataclass(frozen=True, slots=True)
class Runbook:
    """A page that can be run: `start` is its first state, `text` the page.

    `called` is how a command refers to it: its name, or its file if it belongs to the user.
    """

    name: str
    called: str
    title: str
    inputs: tuple[Input, ...]
    start: str
    arrows: tuple[Arrow, ...]
    states: tuple[State, ...]
    sections: tuple[str, ...]
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


SECTIONS = ("Trigger", "Severity", "Inputs", "Flow", "Procedure", "Rollback", "References")
"""The required sections, in this order; others may stand between them."""

_OF_THE_ENGINE = frozenset({"BECAUSE", "RECORD"})
_END = "[*]"
_OF_THE_SHELL = re.compile(
    r"(BASH|CKPTCTL|DYLD|GIT|LC|LD|PYTHON|SHELL)_?[A-Z0-9_]*|ENV|HOME|IFS|LANG|PATH|PS[0-9]|SHELLOPTS"
)
_OTHER_SHELL = re.compile(r"\b(?:ba|da|z)?sh\s+-\w*c\b|`")
_LAUNCHED = re.compile(r"--launcher[ =]\"\$\{?([A-Z][A-Z0-9_]*)")
_EVAL = re.compile(r"\beval\b")


def problems(book: Runbook) -> tuple[str, ...]:
    """The problems of a runbook, one sentence each; empty for a sound one."""
    return (
        *_sections(book),
        *_inputs(book),
        *_names(book),
        *_diagram(book),
        *(problem for state in book.states for problem in _state(book, state)),
    )


def _sections(book: Runbook) -> Iterator[str]:
    for name in SECTIONS:
        if name not in book.sections:
            yield f"the section {name} is missing"
    there = [name for name in book.sections if name in SECTIONS]
    if there != [name for name in SECTIONS if name in there]:
        yield f"the sections are in another order than {', '.join(SECTIONS)}"


def _inputs(book: Runbook) -> Iterator[str]:
    if not any(given.name == "ROOT" and given.required for given in book.inputs):
        yield "the input `ROOT` is missing, or not required: the state of a run lies under it"
    for given in book.inputs:
        if not given.words and given.type not in TYPES:
            yield f"`{given.name}` has the type {given.type!r}; types are {', '.join(TYPES)}"
        elif given.default is not None and given.mistake(given.default) is not None:
            yield f"the default of `{given.name}` must be {given.mistake(given.default)}"
    for name in book.variables:
        if _OF_THE_SHELL.fullmatch(name):
            yield f"`{name}` changes how a shell or a program works, and cannot be an input"


def _names(book: Runbook) -> Iterator[str]:
    names = [block.name for state in book.states for block in state.blocks]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"the block name {name!r} occurs {names.count(name)} times"


def _diagram(book: Runbook) -> Iterator[str]:
    drawn = {(arrow.source, arrow.target) for arrow in book.arrows}
    stated = set(_transitions(book))
    known = {state.name for state in book.states}
    for name in sorted({name for arrow in drawn for name in arrow} - known - {_END}):
        yield f"the state {name!r} of the diagram has no section with a command block"
    for source, target in sorted(stated - drawn):
        yield f"a table leads from {source} to {target}, but the diagram has no such arrow"
    for source, target in sorted(drawn - stated):
        yield f"the diagram has an arrow from {source} to {target}, but no table leads there"
    reached = _reached(book)
    for name in sorted(known - reached):
        yield f"the state {name!r} is never reached from {book.start}"


def _transitions(book: Runbook) -> Iterator[tuple[str, str]]:
    for state in book.states:
        for block in state.blocks:
            for row in block.outcomes:
                if row.then == DONE:
                    yield state.name, _END
                elif row.then not in (NEXT, STOP):
                    yield state.name, row.then


def _reached(book: Runbook) -> set[str]:
    reached = {book.start}
    stated = tuple(_transitions(book))
    while more := {target for source, target in stated if source in reached} - reached:
        reached |= more
    return reached


def _state(book: Runbook, state: State) -> Iterator[str]:
    for block in state.blocks:
        where = f"{state.name}, block {block.name!r}"
        yield from (f"{where}: {problem}" for problem in _block(book, block))
        if block is state.blocks[-1] and any(row.then == NEXT for row in block.outcomes):
            yield f"{where}: it is the last of its state, so `next` leads nowhere"


def _block(book: Runbook, block: Block) -> Iterator[str]:
    if block.on("other") is None and block.decides is None:
        yield "the table has no row `other`, so an unexpected end leads nowhere"
    elif block.on("other") is not None and block.outcomes[-1].event != "other":
        yield "rows behind `other` are never reached"
    if (block.attended or block.repeats) and not block.changes:
        yield "`attended` and `repeats` are for a block that `changes`"
    if block.overrides and block.decides is None:
        yield "`overrides` is for a block that `decides`"
    decision = book.input(block.decides) if block.decides is not None else None
    if block.decides is not None and (decision is None or not decision.is_decision):
        yield f"it decides {block.decides}, which is not in the table of decisions"
    for name in block.asks:
        if book.input(name) is None:
            yield f"it asks for {name}, which is not an input"
    if (block.needs or block.changes or block.decides) and block.on("not run") is None:
        yield "it may be skipped, but the table has no row `not run`"
    if block.at_most and block.on("too often") is None:
        yield "it has at-most, but the table has no row `too often`"
    for row in block.outcomes:
        if (
            row.then == STOP
            and row.code is None
            and row.event in ("not run", "too often", "dry run")
        ):
            yield f"`{row.event}` has no exit code; use `stop N`"
        if not row.because:
            yield "a row has no reason (`because`)"
    for name in unquoted(block.code):
        yield f"${name} is not quoted, so that its value becomes several words"
    if len(_EVAL.findall(block.code)) != len(block.commands) - len(block.runs):
        yield 'eval runs one input and nothing else: eval "$NAME"'
    if _OTHER_SHELL.search(block.code):
        yield 'the value would be run as code: use eval "$NAME" for an input, $( ) for output'
    if len(block.commands) > len(block.runs) and not block.changes:
        yield "it runs an input as a command, so it needs `changes`"
    for name in _LAUNCHED.findall(block.code):
        if name not in block.runs:
            yield f"${name} is started by a program, so the block needs `runs={name}`"
    for name in block.commands:
        declared = book.input(name)
        if declared is None or declared.is_list:
            yield f"${name} is run as a command, but is not an input with one value"
    for each in book.inputs:
        uses = len(re.findall(rf"\$\{{?{each.name}\b", block.code))
        whole = len(re.findall(rf'"\$\{{{each.name}\[@\][^"}}]*\}}"', block.code))
        if each.is_list and uses != whole:
            yield f'use the whole list {each.name}: "${{{each.name}[@]}}"'
    known = _OF_THE_ENGINE.union(book.variables)
    for name in (*block.needs, *used_names(block.code)):
        if name not in known:
            yield f"${name} is not an input, and no block sets it"


_TOKEN = re.compile(
    r"""\\. | \$\( | \$\{[!\#]?(?P<braced>\w+)(?P<alternative>:?\+)? | \$(?P<plain>[A-Za-z_]\w*)
    | (?:(?<=[\s;])|^)(?P<comment>\#)[^\n]* | [(){}"']""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_QUOTED = ('"', 'in " }')
"""Contexts in which bash does not split words: a quotation, and a `${…}` in one."""


def unquoted(code: str) -> Iterator[str]:
    """The names of the variables that bash would split into words, in order of use.

    `${NAME:+word}` expands to `word`, not to the value of NAME, so only `word` counts.
    """
    within = [""]
    at = 0
    while (found := _TOKEN.search(code, at)) is not None:
        at = found.end()
        sign, is_quoted = found[0], within[-1] in _QUOTED
        if name := found["braced"] or found["plain"]:
            if not is_quoted and not found["alternative"]:
                yield name
            if found["braced"]:
                within.append(_QUOTED[1] if is_quoted else "}")
        elif sign == within[-1] or (sign == "}" and within[-1] == _QUOTED[1]):
            within.pop()
        elif found["comment"]:
            at = found.start("comment") + 1 if is_quoted else at
        elif sign == "'" and not is_quoted:
            at = code.find("'", at) + 1 or len(code)
        elif sign == '"':
            within.append('"')
        elif sign == "$(" or (sign == "(" and not is_quoted):
            within.append(")")
