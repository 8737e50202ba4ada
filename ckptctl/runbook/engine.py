"""Run a runbook: a state machine that follows the tables of the page.

The position of a run is computed from its recorded events, so that an interrupted run
continues where it stopped. `executing` runs commands; the caller's `Talk` informs and asks
the operator.

A record is untrusted: whoever can write to the root can write one. Only values of inputs
that the page declares, and of names that its blocks set, are used. An operator confirms a
command that is an input (`eval "$RESUME"`) before it runs with a recorded value, and what
blocks set is determined again before such a command uses it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckptctl.errors import CkptctlError, UsageError
from ckptctl.runbook.document import (
    DONE,
    NEXT,
    STOP,
    Block,
    Input,
    Outcome,
    Runbook,
    State,
    Value,
    shown,
    used_names,
)
from ckptctl.runbook.executing import Ended, OnLine, execute
from ckptctl.runbook.holding import myself
from ckptctl.runbook.record import MAX_TEXT, Event, Record, RecordUnreadable

_ASSUMED = "dry run"
_LEFT = "left"

MAX_BLOCKS = 200
"""A run that has executed more blocks than this is stopped."""

EXIT_DO_NOT_RESTART = 93

_STEP_HOLDS = (0, 31, 32)
"""Exit codes of a run after which the chosen step remains verified."""


class NoTerminal(UsageError):
    """A decision is needed, but no terminal is attached."""

    code = "runbook.nobody-to-ask"


class Talk(Protocol):
    """How a run informs and asks its operator."""

    @property
    def attended(self) -> bool:
        """Whether a person can be asked."""
        ...

    @property
    def assumes(self) -> bool:
        """Whether this is a dry run, which assumes the decisions that the page expects."""
        ...

    @property
    def repeated(self) -> Sequence[str]:
        """The options of this call that a next command must repeat."""
        ...

    @property
    def columns(self) -> int | None:
        """The width of a block's output; None if unknown."""
        ...

    def told(self, text: str) -> None:
        """Report a fact about the run that belongs to no block."""
        ...

    def continues(self, run: str, begun: str) -> bool | None:
        """Whether to continue the unfinished run that was found; None to leave.

        False starts a new run. Raises `NoTerminal`.
        """
        ...

    def entering(self, state: State) -> None:
        """A state begins."""
        ...

    def about_to(self, block: Block, values: Mapping[str, Value]) -> None:
        """A block is about to run, or would be; `values` are those of the names in it."""
        ...

    def printed(self, text: str) -> None:
        """The command printed a line, on standard output or standard error."""
        ...

    def ended(self, block: Block, outcome: Outcome, ended: Ended | None) -> None:
        """A block ended or was not run (`ended` is None); `outcome` follows."""
        ...

    def decided(self, block: Block, decision: Input) -> str | None:
        """The person's decision for a block that needs one; empty for no, None to leave the run.

        Raises `NoTerminal`.
        """
        ...

    def may(self, block: Block, *, again: bool, found: Sequence[str]) -> bool | None:
        """Whether the block that was just shown may change something; None to leave the run.

        `again` means that the command was started before and its end is unknown. `found`
        are the names whose values come from an existing record, not from this call. Raises
        `NoTerminal`.
        """
        ...


@dataclass(slots=True)
class Place:
    """The position of a run: the next block, and the current values.

    `found` are the names whose values come from recorded events and were neither given nor
    determined again since. `begun` are the blocks that started and whose end is unknown.
    `after_change` is the position after the last block that may change something, with
    `times` as it was there: an existing record is relied on up to that position. `repeats`
    is the state and name of the first block whose recorded end is never relied on.
    """

    state: str
    block: int = 0
    variables: dict[str, Value] = field(default_factory=dict)
    found: set[str] = field(default_factory=set)
    times: dict[str, int] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    over: int | None = None
    because: str = ""
    after_change: tuple[str, int, dict[str, int]] = ("", 0, {})
    leads: str = ""
    repeats: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """How a run ended: with this exit code, or unfinished if `over` is not set.

    `step` is the chosen step, unless the run ended with a code outside `_STEP_HOLDS`.
    `leads` is the runbook to run next, `missing` are the inputs that the last block needed,
    and `undecided` means that a decision was not made.
    """

    exit_code: int
    over: bool
    because: str
    state: str
    step: str | None
    variables: Mapping[str, Value]
    leads: str = ""
    missing: tuple[str, ...] = ()
    undecided: bool = False


def place_of(
    book: Runbook, events: Sequence[Event], n_found: int, *, attended: bool = True
) -> Place:
    """The position of a run with these events; a stopped run is at the block where it stopped.

    The first `n_found` events existed before this call; `attended` means that a person
    confirmed continuing them. Raises `RecordUnreadable` for events that do not match the
    page.
    """
    defaults = {each.name: each.default for each in book.inputs if each.default is not None}
    place = Place(book.start, variables=dict(defaults), after_change=(book.start, 0, {}))
    for number, event in enumerate(events):
        try:
            _apply(book, place, event, found=number < n_found, attended=attended)
        except (_OffThePage, UsageError) as error:
            raise RecordUnreadable(
                f"event {number + 1} of the run does not match the page of {book.name}: {error}; "
                "--new starts a new run"
            ) from error
    _drop_foreign_addresses(book, place)
    return place


def _drop_foreign_addresses(book: Runbook, place: Place) -> None:
    """Forget an address that a recorded block set, unless it is below a root given in this call."""
    given = [value for name, value in place.variables.items() if name not in place.found]
    items = [item for value in given for item in ((value,) if isinstance(value, str) else value)]
    roots = [_absolute(item) + "/" for item in items if item]
    for name in place.found:
        value = place.variables[name]
        if book.input(name) is not None:
            continue
        if isinstance(value, str) and "/" in value:
            address = _absolute(value)
            is_below = any(address.startswith(root) for root in roots)
            if not is_below or ".." in address.split("/"):
                place.variables[name] = ""


def _absolute(address: str) -> str:
    return address.rstrip("/") if "://" in address else os.path.abspath(address)


class _OffThePage(Exception):
    """An event that the page does not allow at this position."""


def _apply(
    book: Runbook, place: Place, event: Event, *, found: bool, attended: bool = True
) -> None:
    kind = event["event"]
    if kind in ("opened", "resumed"):
        _take_inputs(book, place, event, found=found)
        place.over = None
    elif kind == "back":
        _take_back(book, place, event)
    elif kind == "decided":
        _take_inputs(book, place, event, found=found)
    elif kind == "began":
        place.begun.add(str(event["block"]))
    elif kind == "ended":
        block, state = _block(book, place), place.state
        _take_end(book, place, event, found=found)
        if found and block.repeats:
            place.repeats = place.repeats or (state, block.name)
        elif block.changes and (attended or not (found and block.attended)):
            place.after_change = (place.state, place.block, dict(place.times))
    elif kind == "finished":
        place.over = int(str(event["exit_code"]))
        place.because = str(event["because"])


def _take_inputs(book: Runbook, place: Place, event: Event, *, found: bool) -> None:
    """Take the inputs that the page declares, and no others."""
    given = event["inputs"]
    for each in book.inputs:
        value = given.get(each.name) if isinstance(given, Mapping) else None
        if value is None:
            continue
        if isinstance(value, str) is each.is_list:
            raise _OffThePage(f"the input {each.name} is {'no' if each.is_list else 'a'} list")
        items = (value,) if isinstance(value, str) else tuple(value)
        if found and each.name not in book.commands and not all(map(is_argument, items)):
            raise _OffThePage(f"the input {each.name} is not a valid argument")
        place.variables[each.name] = items if each.is_list else items[0]
        place.found.discard(each.name)
        # A default always comes from the page, never from the record.
        if found and value != each.default:
            place.found.add(each.name)


def _take_end(book: Runbook, place: Place, event: Event, *, found: bool) -> None:
    block = _block(book, place)
    then = str(event["then"])
    if event["block"] != block.name or then not in {row.then for row in block.outcomes}:
        raise _OffThePage(f"the block {event['block']!r} cannot end with {then!r} here")
    place.begun.discard(block.name)
    ran = event.get("exit_code") is not None
    place.times[block.name] = place.times.get(block.name, 0) + ran
    place.because = str(event["because"])
    if block.sets is not None and event.get("exit_code") == 0:
        said = event.get("says")
        lines = tuple(filter(is_argument, said if isinstance(said, (list, tuple)) else ()))
        last = lines[-1] if lines else ""
        is_list = block.sets in book.lists
        place.variables[block.sets] = tuple(dict.fromkeys(lines)) if is_list else last
        (place.found.add if found else place.found.discard)(block.sets)
    _go(book, place, then)


def is_argument(value: str) -> bool:
    """Whether a text is a valid argument: no option, printable, of bounded length.

    Bytes of a file name that are not UTF-8 are allowed, as Python represents them in a
    `str`.
    """
    try:
        text = os.fsencode(value).decode("utf-8", "ignore")
    except UnicodeEncodeError:
        return False
    return text.isprintable() and not value.startswith("-") and len(value) <= MAX_TEXT


def _take_back(book: Runbook, place: Place, event: Event) -> None:
    """Return to a state and a block in it; all that follows is repeated."""
    _go(book, place, str(event["state"]))
    blocks = [block.name for block in book.state(place.state).blocks]
    name = event.get("block")
    if name is not None:
        if name not in blocks:
            raise _OffThePage(f"the state {place.state} has no block {name!r}")
        place.block = blocks.index(str(name))
        place.times = dict(place.after_change[2])


def _go(book: Runbook, place: Place, then: str) -> None:
    if then == NEXT:
        place.block += 1
    elif then not in (DONE, STOP):
        book.state(then)
        place.state, place.block = then, 0


def _block(book: Runbook, place: Place) -> Block:
    return book.state(place.state).blocks[place.block]


def proceed(
    book: Runbook,
    record: Record,
    talk: Talk,
    handed_on: Mapping[str, str],
    *,
    n_found: int = 0,
) -> Left:
    """Run the blocks from the current position until the run ends or is left.

    `handed_on` are unrecorded variables for the commands (addresses and credentials of a
    storage); the first `n_found` events were found under the root. Every block is recorded
    before and after it runs. Raises `NoTerminal`, `TakenOver`, `RecordUnreadable`, and
    storage errors of the record.
    """
    place = place_of(book, record.events, n_found, attended=talk.attended)
    if n_found:
        _read_again(book, place, record, talk)
    shown_state = ""
    for _ in range(MAX_BLOCKS):
        if place.over is not None:
            step = _step_of(place, talk) if place.over in _STEP_HOLDS else None
            return Left(
                place.over,
                True,
                place.because,
                place.state,
                step,
                place.variables,
                place.leads,
                _missing(place, _block(book, place)),
                _undecided(place, _block(book, place)),
            )
        if _went_back(book, place, record, talk):
            continue
        if shown_state != place.state:
            shown_state = place.state
            talk.entering(book.state(place.state))
        if not _step(book, place, record, talk, handed_on):
            return left_by_reader(place, talk)
    raise CkptctlError(
        f"the runbook {book.name} ran {MAX_BLOCKS} blocks without reaching an end, so its tables "
        "form a loop"
    )


def left_by_reader(place: Place, talk: Talk) -> Left:
    """The result of a run that its operator leaves unfinished."""
    step = _step_of(place, talk)
    return Left(
        EXIT_DO_NOT_RESTART, False, "left by the operator", place.state, step, place.variables
    )


def _missing(place: Place, block: Block) -> tuple[str, ...]:
    return tuple(name for name in block.needs if not place.variables.get(name))


def _undecided(place: Place, block: Block) -> bool:
    return block.decides is not None and not place.variables.get(block.decides)


def _step_of(place: Place, talk: Talk) -> str | None:
    """The chosen step; None if it comes from a record and cannot be confirmed."""
    step = place.variables.get("STEP")
    is_found = "STEP" in place.found and not talk.attended
    return step if isinstance(step, str) and step and not is_found else None


def _read_again(book: Runbook, place: Place, record: Record, talk: Talk) -> None:
    """Return to the position after the last change of an existing run, if nobody can be asked.

    Whoever can write to the root can write that a step was verified or that the loss
    continues. Blocks that only read are therefore run again, so that this call itself
    proves an exit code of 0.
    """
    state, number, _ = place.after_change
    if (place.state, place.block) == (state, number):
        return
    if talk.attended and place.repeats is not None:
        state, name = place.repeats
        because = f"{name} is run again, because its recorded end is not relied on"
        talk.told(f"back to {state}: {because}")
        event = record.add("back", state=state, block=name, because=because)
        _apply(book, place, event, found=False)
        return
    if talk.attended:
        talk.told(f"continued in {place.state}; earlier results are taken from the record")
        return
    block = book.state(state).blocks[number]
    because = "results in the record are determined again"
    talk.told(f"back to {state}: {because}")
    event = record.add("back", state=state, block=block.name, because=because)
    _apply(book, place, event, found=False)


def _went_back(book: Runbook, place: Place, record: Record, talk: Talk) -> bool:
    """Return to where a value is determined that a command of the next block would use.

    A step that a record names is not passed to a command: it is chosen and checked again.
    """
    block = _block(book, place)
    if not block.commands or set(_missing(place, block)) - place.found:
        return False
    used = set(_values(book, place, block, record)) & place.found
    setters = ((state, each) for state in book.states for each in state.blocks)
    for state, each in setters:
        if each.sets in used and book.input(each.sets) is None:
            because = f"{each.sets} comes from the record and is determined again"
            talk.told(f"back to {state.name}: {because}")
            _apply(book, place, record.add("back", state=state.name, because=because), found=False)
            return True
    return False


def _step(
    book: Runbook, place: Place, record: Record, talk: Talk, handed_on: Mapping[str, str]
) -> bool:
    """Run the next block, or decide that it is not to be run; False if the operator leaves."""
    block = _block(book, place)
    event = _kept_from(place, block, talk)
    talk.about_to(block, _values(book, place, block, record))
    if event is None and block.decides is not None:
        event = _decided(book, place, block, record, talk)
        if event == _LEFT:
            return False
    found = _found_names(book, place, block, record)
    if event is None and (block.changes or found):
        answer = talk.may(block, again=block.name in place.begun, found=found)
        if answer is None:
            return False
        event = None if answer else _ASSUMED if talk.assumes else "not run"
    if event is None:
        ended = _run(book, place, block, record, talk.printed, handed_on)
        outcome = block.outcome(ended.exit_code, ended.said[-1] if ended.said else "")
    else:
        ended = None
        outcome = block.on(event) or _assumed(block, event)
    if outcome is None:
        raise UsageError(
            f"the runbook {book.name} does not define what follows when {block.name!r} "
            f"{f'ends with {ended.exit_code}' if ended else f'is {event}'}"
        )
    talk.ended(block, outcome, ended)
    _record(record, place, block, event, outcome, ended)
    _apply(book, place, record.events[-1], found=False)
    if outcome.then in (DONE, STOP):
        exit_code = 0 if outcome.then == DONE else _exit_code(outcome, ended)
        place.leads = outcome.leads
        finished = record.add("finished", exit_code=exit_code, because=outcome.because)
        _apply(book, place, finished, found=False)
    return True


def _decided(book: Runbook, place: Place, block: Block, record: Record, talk: Talk) -> str | None:
    """Ask for a decision and record it; the reason not to run the block if there is none.

    A recorded decision counts only if a person can review it.
    """
    name = block.decides or ""
    decision = book.input(name)
    if decision is None:
        raise UsageError(f"the runbook {book.name} has no input {name!r} for a decision")
    if place.variables.get(name) and (name not in place.found or talk.attended):
        return None
    if talk.assumes:
        return _ASSUMED
    made = talk.decided(block, decision)
    if not made:
        return _LEFT if made is None else "not run"
    _apply(book, place, record.add("decided", by=who(), inputs={name: made}), found=False)
    return None


def who() -> str:
    """The user and host of this process."""
    me = myself()
    return f"{me.by}@{me.host}"


def _assumed(block: Block, event: str) -> Outcome | None:
    """What follows in a dry run: decisions as the page expects them, and no changes."""
    if event != _ASSUMED:
        return None
    return block.outcomes[0] if block.attended or block.decides else block.on("not run")


def _found_names(book: Runbook, place: Place, block: Block, record: Record) -> tuple[str, ...]:
    """The names whose values a command of the block would take from the record."""
    if not block.commands:
        return ()
    return tuple(name for name in _values(book, place, block, record) if name in place.found)


def _kept_from(place: Place, block: Block, talk: Talk) -> str | None:
    """The reason not to run a block, if there is one."""
    if _missing(place, block):
        return "not run"
    if block.at_most and place.times.get(block.name, 0) >= block.at_most:
        return "too often"
    return _ASSUMED if talk.assumes and block.on(_ASSUMED) is not None else None


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
    return execute(block.code, _variables(book, place, record), handed_on, on_line)


def _variables(book: Runbook, place: Place, record: Record) -> dict[str, Value]:
    """The values of the page's names; empty if none was given.

    A variable of the same name in the operator's environment is ignored.
    """
    names: dict[str, Value] = dict.fromkeys(book.variables, "")
    names |= dict.fromkeys(book.lists, ())
    return {**names, **place.variables, "BECAUSE": place.because, "RECORD": record.url}


def _values(book: Runbook, place: Place, block: Block, record: Record) -> dict[str, Value]:
    """The values of the names that a block uses, directly or through other values."""
    variables = _variables(book, place, record)
    found: dict[str, Value] = {}
    left = [*used_names(block.code), *block.needs]
    while left:
        name = left.pop(0)
        if name in variables and name not in found:
            found[name] = variables[name]
            left += used_names(shown(variables[name]))
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
    """The exit code that a stop states, else that of the command."""
    if outcome.code is not None:
        return outcome.code
    return ended.exit_code if ended is not None else EXIT_DO_NOT_RESTART
