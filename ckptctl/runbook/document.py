"""A runbook: its inputs, its state diagram, its command blocks and their tables.

A runbook is a page of Markdown for people. The engine uses three parts of it: the table of
inputs, the state diagram, and below the heading of each state its named command blocks,
each followed by a table that maps exit codes to the next state. `parse` reads the page
and rejects syntax errors; `engine` runs it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


_TITLE = re.compile(r"# (?P<name>[A-Za-z0-9][A-Za-z0-9-]*): (?P<title>\S.*)")
_HEADING = re.compile(r"#{2,6} (?P<text>\S.*?)\s*")
_FENCE = re.compile(r"```(?P<info>.*)")
_INPUT_NAME = re.compile(
    r"`(?P<name>[A-Z][A-Z0-9_]*)(?P<list>\.\.\.)?(?:: (?P<type>[a-z]+(?:[/-][a-z]+)*))?`"
)
_CODED = re.compile(r"`(?P<text>.*)`")
_CODES = re.compile(r"(?P<first>\d{1,3})(?:-(?P<last>\d{1,3}))?")

_COUNT = re.compile(r"[0-9]{1,3}")

_INPUTS_HEAD = ("input", "what it is", "if not given")
_DECISIONS_HEAD = ("decision", "what a person states", "if nobody does")
_OUTCOMES_HEAD = ("ends with", "prints", "then", "because")
_SHORT_HEAD = ("ends with", "then", "because")
_EVENTS = ("not run", "too often", "dry run", "other")
_OF_A_BLOCK = frozenset(
    (
        *("name", "reads", "changes", "attended", "repeats", "brief", "decides", "overrides"),
        *("asks", "needs", "runs", "sets", "at-most"),
    )
)

_PACKAGED = Path(__file__).parent / "pages"
# In a source tree, the pages are at the top level.
_SOURCE = Path(__file__).parent.parent.parent / "runbooks"


def _pages() -> dict[str, Path]:
    folder = _PACKAGED if _PACKAGED.is_dir() else _SOURCE
    return {path.stem: path for path in sorted(folder.glob("*.md"))}


def runbook_names() -> tuple[str, ...]:
    """The names of all runbooks, sorted."""
    return tuple(_pages())


def find_runbook(name: str) -> Runbook:
    """The runbook of that name; raises `UsageError`."""
    path = _pages().get(name.lower())
    if path is None:
        raise UsageError(
            f"there is no runbook {name!r}; there are {', '.join(runbook_names())}",
            next_command="ckptctl runbook list",
        )
    return parse(path.read_text(encoding="utf-8"), path.name)


def parse(text: str, file: str) -> Runbook:
    """Read a page; raises `UsageError` with file and line where it is not in form."""
    reader = _RunbookParser(text, file)
    title = reader.title()
    inputs: tuple[Input, ...] = ()
    states: list[State] = []
    for heading, body in reader.parts():
        if heading == "Inputs":
            inputs = (*reader.inputs(body, _INPUTS_HEAD), *inputs)
        elif heading == "Decisions":
            inputs = (*inputs, *reader.inputs(body, _DECISIONS_HEAD))
        elif blocks := tuple(reader.blocks(body)):
            states.append(State(heading, _prose(body), blocks))
    return Runbook(title["name"].lower(), title["title"], inputs, tuple(states), text)


_Body = Sequence[tuple[int, str]]
"""Lines with their numbers, counted from 1."""


class _RunbookParser:
    def __init__(self, text: str, file: str) -> None:
        self.lines = tuple(enumerate(text.splitlines(), start=1))
        self.file = file

    def error(self, line: int, message: str) -> UsageError:
        return UsageError(f"{self.file}:{line}: {message}")

    def title(self) -> re.Match[str]:
        found = _TITLE.fullmatch(self.lines[0][1]) if self.lines else None
        if found is None:
            raise self.error(1, "a runbook begins with a line `# NAME: TITLE`")
        return found

    def parts(self) -> Iterator[tuple[str, _Body]]:
        """Each heading with the lines below it, up to the next heading."""
        heading = ""
        body: list[tuple[int, str]] = []
        fenced = False
        for number, text in self.lines:
            fenced ^= text.startswith("```")
            found = None if fenced else _HEADING.fullmatch(text)
            if found is None:
                body.append((number, text))
                continue
            yield heading, body
            heading, body = found["text"], []
        if fenced:
            raise self.error(len(self.lines), "a block is not closed: ``` is missing")
        yield heading, body

    def inputs(self, body: _Body, head: Sequence[str]) -> Iterator[Input]:
        for number, (name, meaning, otherwise) in self._table(body, head):
            found = _INPUT_NAME.fullmatch(name)
            if found is None:
                raise self.error(
                    number, f"an input is a name like `ROOT` or `N: number`, not {name}"
                )
            coded = _CODED.fullmatch(otherwise)
            yield Input(
                found["name"],
                found["list"] is not None,
                meaning,
                otherwise == "required",
                coded["text"] if coded else None,
                otherwise,
                found["type"] or "text",
                head is _DECISIONS_HEAD,
            )

    def blocks(self, body: _Body) -> Iterator[Block]:
        """The named blocks of a section, each with the table that follows it."""
        rest = list(body)
        while rest:
            number, text = rest.pop(0)
            found = _FENCE.fullmatch(text)
            if found is None:
                continue
            code: list[str] = []
            while not rest[0][1].startswith("```"):
                code.append(rest.pop(0)[1])
            rest.pop(0)
            if "name=" in found["info"]:
                yield self._block(number, found["info"].split(), "\n".join(code), rest)

    def _block(self, number: int, words: Sequence[str], code: str, after: _Body) -> Block:
        if words[0] != "sh":
            raise self.error(number, f"a named block is of sh, not of {words[0]}")
        given = dict(word.partition("=")[::2] for word in words[1:])
        unknown = sorted(given.keys() - _OF_A_BLOCK)
        if unknown:
            raise self.error(number, f"a block has no {unknown[0]!r}")
        if sum(kind in given for kind in ("reads", "changes", "decides")) != 1:
            raise self.error(
                number,
                "a block needs `reads`, `changes` if it changes anything, or `decides=NAME` if a "
                "person decides",
            )
        at_most = given.get("at-most", "0")
        if _COUNT.fullmatch(at_most) is None:
            raise self.error(number, f"at-most is a number up to 999, not {at_most!r}")
        return Block(
            given["name"],
            code,
            "changes" in given,
            "attended" in given,
            "repeats" in given,
            "brief" in given,
            given.get("decides"),
            "overrides" in given,
            tuple(filter(None, given.get("asks", "").split(","))),
            tuple(filter(None, given.get("needs", "").split(","))),
            tuple(filter(None, given.get("runs", "").split(","))),
            given.get("sets"),
            int(at_most),
            tuple(self._outcomes(after)),
        )

    def _outcomes(self, after: _Body) -> Iterator[Outcome]:
        """The rows of a block; most tables need no column `prints`."""
        is_short = any(_cells(text) == [*_SHORT_HEAD] for _, text in _until_fence(after))
        for number, cells in self._table(after, _SHORT_HEAD if is_short else _OUTCOMES_HEAD):
            ends, *prints, then, because = cells
            yield self._outcome(number, ends, "".join(prints), then, because)

    def _outcome(self, number: int, ends: str, prints: str, then: str, because: str) -> Outcome:
        words = then.split(" ")
        word, code, leads = [*words, "", ""][:3]
        is_code = _COUNT.fullmatch(code) is not None and 0 < int(code) < 256
        if len(words) > 3 or (code and not (word == STOP and is_code)):
            raise self.error(
                number,
                "the next step is `next`, `done`, `stop`, `stop N`, `stop N RUNBOOK` with N from 1 "
                f"to 255, or a state: {then}",
            )
        codes = _CODES.fullmatch(ends)
        if codes is None and ends not in _EVENTS:
            raise self.error(
                number,
                "a row is for an exit code, `not run`, `too often`, `dry run` or `other`, "
                f"not {ends}",
            )
        return Outcome(
            first=int(codes["first"]) if codes else None,
            last=int(codes["last"]) if codes and codes["last"] else None,
            event="" if codes else ends,
            prints=prints,
            then=word,
            code=int(code) if code else None,
            leads=leads,
            because=because,
        )

    def _table(self, body: _Body, head: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        """The rows of the next table, which must have the columns `head`."""
        rows = [(number, text) for number, text in _until_fence(body) if text.startswith("|")]
        if not rows:
            raise self.error(body[0][0] if body else 1, f"a table is missing: {' | '.join(head)}")
        if tuple(_cells(rows[0][1])) != tuple(head):
            raise self.error(rows[0][0], f"the columns are {' | '.join(head)}")
        for number, text in rows[2:]:
            cells = _cells(text)
            if len(cells) != len(head):
                raise self.error(number, f"the row has {len(cells)} cells, not {len(head)}")
            yield number, cells


def _until_fence(body: _Body) -> Iterator[tuple[int, str]]:
    for number, text in body:
        if text.startswith("```"):
            return
        yield number, text


def _cells(row: str) -> list[str]:
    parts = re.split(r"(?<!\\)\|", row.strip().strip("|"))
    return [part.replace(r"\|", "|").strip() for part in parts]


def _prose(body: _Body) -> str:
    return "\n".join(text for _, text in _until_fence(body)).strip()
