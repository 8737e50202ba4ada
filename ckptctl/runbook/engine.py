"""Where is a run in its runbook, what comes next, and when is it over?

A state machine over the page: it runs the blocks of a state in their order and
goes where the tables say. Its place is worked out from the events that were
recorded, so that a run that was left in the middle goes on where it was. How a
command runs is `executing`'s question, how the reader is talked to the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckptctl.errors import CkptctlError, UsageError
from ckptctl.runbook.document import DONE, NEXT, STOP, Block, Outcome, Runbook, State, used_names
from ckptctl.runbook.executing import Ended, OnLine, execute
from ckptctl.runbook.record import Event, Record

MAX_BLOCKS = 200
"""A run that goes round in circles longer than this is stopped."""

EXIT_DO_NOT_RESTART = 93


class NobodyToAsk(UsageError):
    """A block changes something, and there is nobody who could say yes."""

    code = "runbook.nobody-to-ask"


class Talk(Protocol):
    """How a run talks to whoever follows it."""

    def entering(self, state: State) -> None:
        """A state begins."""
        ...

    def about_to(self, block: Block, values: Mapping[str, str]) -> None:
        """A block is about to run, or would be; `values` are those of the names in it."""
        ...

    def printed(self, text: str) -> None:
        """The command printed a line, on standard output or standard error."""
        ...

    def ended(self, block: Block, outcome: Outcome, ended: Ended | None) -> None:
        """A block came to an end, or was not run (`ended` is None), and this follows."""
        ...

    def may(self, block: Block, *, again: bool) -> bool | None:
        """Whether the block, just shown, may change something; None to leave the run here.

        `again` says that the command was begun before, and nobody knows how it ended.
        Raises `NobodyToAsk` where there is nobody.
        """
        ...


@dataclass(slots=True)
class Place:
    """Where a run is: the next block, and what is known by now."""

    state: str
    block: int = 0
    variables: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    begun: bool = False
    over: int | None = None
    because: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """How a run was left: with this exit code, or in the middle where `over` is not set."""

    exit_code: int
    over: bool
    because: str
    state: str
    variables: Mapping[str, str]


def place_of(book: Runbook, events: Sequence[Event]) -> Place:
    """Where the run with these events is; a run that stopped is at the block where it did."""
    place = Place(book.start)
    for event in events:
        _apply(book, place, event)
    return place


def _apply(book: Runbook, place: Place, event: Event) -> None:
    kind = event["event"]
    if kind in ("opened", "resumed"):
        given = event.get("inputs")
        if isinstance(given, dict):
            place.variables.update(given)
        place.over = None
    elif kind == "began":
        place.begun = True
    elif kind == "ended":
        place.begun = False
        name = str(event["block"])
        place.times[name] = place.times.get(name, 0) + (event.get("exit_code") is not None)
        place.because = str(event["because"])
        block = _block(book, place)
        if block.sets is not None and event.get("exit_code") == 0:
            place.variables[block.sets] = str(event["says"])
        _go(book, place, str(event["then"]))
    elif kind == "finished":
        place.over = int(str(event["exit_code"]))
        place.because = str(event["because"])


def _go(book: Runbook, place: Place, then: str) -> None:
    if then == NEXT:
        place.block += 1
    elif then not in (DONE, STOP):
        book.state(then)
        place.state, place.block = then, 0


def _block(book: Runbook, place: Place) -> Block:
    return book.state(place.state).blocks[place.block]


def proceed(book: Runbook, record: Record, talk: Talk, handed_on: Mapping[str, str]) -> Left:
    """Go on from where the run is, until it is over or left.

    `handed_on` are variables for the commands that are not recorded (addresses and
    credentials of a storage). Every step is recorded before and after it is done.
    Raises `NobodyToAsk`, `TakenOver`, and whatever the storage of the record raises.
    """
    place = place_of(book, record.events)
    shown = ""
    for _ in range(MAX_BLOCKS):
        if place.over is not None:
            return Left(place.over, True, place.because, place.state, place.variables)
        if shown != place.state:
            shown = place.state
            talk.entering(book.state(place.state))
        if not _step(book, place, record, talk, handed_on):
            return Left(EXIT_DO_NOT_RESTART, False, "left by its reader", shown, place.variables)
    raise CkptctlError(
        f"the runbook {book.name} ran {MAX_BLOCKS} blocks without an end; it goes in a circle"
    )


def _step(
    book: Runbook, place: Place, record: Record, talk: Talk, handed_on: Mapping[str, str]
) -> bool:
    """Run the next block, or find that it is not to be; False where the reader leaves."""
    block = _block(book, place)
    event = _kept_from(place, block)
    talk.about_to(block, _values(book, place, block, record))
    if event is None and block.changes:
        answer = talk.may(block, again=place.begun)
        if answer is None:
            return False
        event = None if answer else "not run"
    if event is None:
        ended = _run(book, place, block, record, talk.printed, handed_on)
        outcome = block.outcome(ended.exit_code, ended.said)
    else:
        ended, outcome = None, block.on(event)
    if outcome is None:
        raise UsageError(
            f"the runbook {book.name} does not say what follows when {block.name!r} "
            f"{f'ends with {ended.exit_code}' if ended else f'is {event}'}"
        )
    talk.ended(block, outcome, ended)
    _record(record, place, block, event, outcome, ended)
    _apply(book, place, record.events[-1])
    if outcome.then in (DONE, STOP):
        exit_code = 0 if outcome.then == DONE else _exit_code(outcome, ended)
        finished = record.add("finished", exit_code=exit_code, because=outcome.because)
        _apply(book, place, finished)
    return True


def _kept_from(place: Place, block: Block) -> str | None:
    """Why a block is not to run, if there is a reason."""
    if any(not place.variables.get(name) for name in block.needs):
        return "not run"
    if block.at_most and place.times.get(block.name, 0) >= block.at_most:
        return "too often"
    return None


def _run(
    book: Runbook,
    place: Place,
    block: Block,
    record: Record,
    on_line: OnLine,
    handed_on: Mapping[str, str],
) -> Ended:
    values = _values(book, place, block, record)
    record.add("began", state=place.state, block=block.name, command=block.code, values=values)
    return execute(block.code, {**_variables(book, place, record), **handed_on}, on_line)


def _variables(book: Runbook, place: Place, record: Record) -> dict[str, str]:
    """What the names in a block stand for.

    One that nothing was given for is empty, and not what the shell outside calls so.
    """
    names = dict.fromkeys(book.variables, "")
    return {**names, **place.variables, "BECAUSE": place.because, "RECORD": record.url}


def _values(book: Runbook, place: Place, block: Block, record: Record) -> dict[str, str]:
    """The values of the names in a block, and of those in these values."""
    variables = _variables(book, place, record)
    found: dict[str, str] = {}
    left = used_names(block.code)
    while left:
        name = left.pop(0)
        if name in variables and name not in found:
            found[name] = variables[name]
            left += used_names(variables[name])
    return found


def _record(
    record: Record,
    place: Place,
    block: Block,
    event: str | None,
    outcome: Outcome,
    ended: Ended | None,
) -> None:
    fields: dict[str, object] = {
        "state": place.state,
        "block": block.name,
        "then": outcome.then,
        "because": outcome.because,
        "exit_code": None,
        "not_run": event,
    }
    if ended is not None:
        fields |= {
            "exit_code": ended.exit_code,
            "says": ended.said,
            "lines": ended.lines,
            "duration_s": round(ended.duration_s, 3),
            "report": ended.report,
            "picture": ended.picture,
        }
    record.add("ended", **fields)


def _exit_code(outcome: Outcome, ended: Ended | None) -> int:
    """What a stop says, or else what the command said."""
    if outcome.code is not None:
        return outcome.code
    return ended.exit_code if ended is not None else EXIT_DO_NOT_RESTART
