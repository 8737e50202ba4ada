"""Record a run of a runbook, so that another person on another machine can continue it.

A run is a folder of small files, one per event, numbered from 1 and never changed:
`.ckptctl/runbooks/NAME/RUN/000001.json` under the checkpoint root. Each file is created
only if it does not exist: of two processes that continue the same run, one fails at its
next event and stops.

Whoever can write to the root can write such a file. An existing record is therefore
untrusted: it is bounded, and `formats.own.run_events` checks each event. Only values of inputs
that the page declares, and of names that its blocks set, are used.

The transcript is made from the recorded events alone, so that it can be made again later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

from ckptctl.errors import (
    AlreadyExists,
    CkptctlError,
    OwnFileUnreadable,
    PathNotFound,
    PathUntrusted,
    StorageError,
    UsageError,
)
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import line_bytes, time_now
from ckptctl.formats.own.run_events import (
    MAX_EVENT_BYTES,
    MAX_TEXT,
    BackEvent,
    BeganEvent,
    DecidedEvent,
    EndedEvent,
    Event,
    FinishedEvent,
    OpenedEvent,
    ResumedEvent,
    is_complete,
    read_event,
    without_secrets,
)
from ckptctl.formatting import duration, markdown_block, markdown_code, markdown_row, seconds_of
from ckptctl.runbook.document import DONE, NEXT, STOP, Block, Runbook, Value, shown, used_names
from ckptctl.storage.contract import NumberedFiles, Store, TooLarge
from ckptctl.storage.local import LocalStore
from ckptctl.storage.opening import join_url
from ckptctl.storage.shared_places import open_folder

AnyEvent = TypeVar("AnyEvent", bound=Event)

RUNS_FOLDER = f"{OWN_FOLDER}/runbooks"
MAX_RECORD_BYTES = 64 << 20
MAX_EVENTS = 10_000

_RUN_NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}")
_STAMP = "%Y%m%dT%H%M%SZ"
_LAST_YEAR = 9999
_DIGITS = 6
"""Of the number of an event."""


class TakenOver(CkptctlError, code="runbook.taken-over", exit_code=26):
    """Another process continued this run."""


class RunUnreadable(CkptctlError, code="runbook.unreadable", exit_code=21):
    """A file of a run was not written by ckptctl."""


class RunRecord:
    """One run: its events, and the number of the next one."""

    def __init__(self, store: Store, folder: str, events: Sequence[Event] = ()) -> None:
        self.store = store
        self.folder = folder
        self.events = list(events)
        # An object store takes equal bytes for a repeated request, whoever sent them.
        self._writer = os.urandom(8).hex()

    @property
    def name(self) -> str:
        """The name of the run; names sort by start time."""
        return self.folder.rpartition("/")[2]

    @property
    def url(self) -> str:
        """The address of its folder."""
        return join_url(self.store.url, self.folder)

    def add(self, event: AnyEvent) -> AnyEvent:
        """Write one event; raises `TakenOver` if another process wrote that event."""
        made = replace(event, at=time_now(), writer=self._writer)
        number, data = len(self.events) + 1, line_bytes(without_secrets(made))
        try:
            NumberedFiles(self.store, self.folder, _DIGITS).add(number, data)
        except AlreadyExists as error:
            raise TakenOver(
                f"{self.store.url}: another process continued the run {self.name}; this one stops "
                "so that nothing is done twice"
            ) from error
        self.events.append(made)
        return made

    @property
    def is_over(self) -> bool:
        """Whether the run ended, as opposed to being left unfinished."""
        return bool(self.events) and isinstance(self.events[-1], FinishedEvent)

    @property
    def opened(self) -> OpenedEvent:
        """The first event."""
        opened = self.events[0]
        assert isinstance(opened, OpenedEvent)  # noqa: S101 - `read_event` refuses any other
        return opened


class Unwritten(RunRecord):
    """The record of a dry run: events are kept only in memory."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, "dry-run")

    def add(self, event: AnyEvent) -> AnyEvent:
        """Keep one event."""
        made = replace(event, at=time_now())
        self.events.append(made)
        return made


def begun(store: Store, runbook: str) -> RunRecord:
    """A new, empty run.

    Its name sorts after that of the newest run, even if another host's clock was ahead or a
    name is dated in the future: the newest run is always the one that was started last.
    """
    at = datetime.now(UTC)
    if names := _names(store, runbook):
        at = max(at, _began_at(names[0]) + timedelta(seconds=1))
    return RunRecord(store, f"{RUNS_FOLDER}/{runbook}/{at.strftime(_STAMP)}-{os.urandom(3).hex()}")


def newest(store: Store, runbook: str) -> RunRecord | None:
    """The newest run of this runbook with an event; raises `RunUnreadable`.

    A call that was killed before its first event leaves a run without one.
    """
    for name in _names(store, runbook):
        record = _loaded(store, f"{RUNS_FOLDER}/{runbook}/{name}")
        if record.events:
            return record
    return None


def _names(store: Store, runbook: str) -> list[str]:
    try:
        entries = store.list_dir(f"{RUNS_FOLDER}/{runbook}")
    except PathNotFound:
        return []
    names = (entry.path.rpartition("/")[2] for entry in entries if entry.kind == "dir")
    return sorted((name for name in names if _is_run_name(name)), reverse=True)


def _is_run_name(name: str) -> bool:
    """Whether this is the name of a run, with a date that another run can follow."""
    with suppress(ValueError):
        return bool(_RUN_NAME.fullmatch(name)) and _began_at(name).year < _LAST_YEAR
    return False


def _began_at(name: str) -> datetime:
    return datetime.strptime(name.partition("-")[0], _STAMP).replace(tzinfo=UTC)


def _loaded(store: Store, folder: str) -> RunRecord:
    files = NumberedFiles(store, folder, _DIGITS)
    numbers = files.numbers()
    if len(numbers) > MAX_EVENTS:
        _refuse(store, folder, f"it holds {len(numbers):,} events, more than {MAX_EVENTS:,}")
    events: list[Event] = []
    n_bytes = 0
    for expected, number in enumerate(numbers, start=1):
        if number != expected:
            _refuse(store, folder, f"event {expected} is missing")
        path = files.path(number)
        try:
            data = files.read(number, MAX_EVENT_BYTES)
        except TooLarge as error:
            _refuse(store, path, f"it has more than {MAX_EVENT_BYTES:,} bytes", error)
        n_bytes += len(data)
        if n_bytes > MAX_RECORD_BYTES:
            _refuse(store, folder, f"its events have more than {MAX_RECORD_BYTES >> 20} MiB")
        try:
            events.append(read_event(data, first=number == 1))
        except OwnFileUnreadable as error:
            _refuse(store, path, error.message[:120], error)
    return RunRecord(store, folder, events)


def _refuse(store: Store, path: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise RunUnreadable(
        f"{join_url(store.url, path)} is not the record of a runbook: {why}; --new starts a new run"
    ) from cause


class _OffThePage(Exception):
    """An event that the page does not allow at this position."""


@dataclass(slots=True)
class Position:
    """The position of a run: the next block, and the current values.

    `found` are the names whose values come from recorded events and were neither given nor
    determined again since. `begun` are the blocks that started and whose end is unknown.
    `after_change` is the position after the last block that may change something, with
    `times` as it was there: an existing record is relied on up to that position. `repeats`
    is the state and name of the first block whose recorded end is never relied on.
    `over` is the exit code of a run that has ended, and `because` why it did. `leads` is the
    runbook to run next, `advice` the next command of the command with which the run stopped.
    `given_by` names who gave each input. `overridden` is what a person accepted against what a
    check found, by block.
    `since_change` are the blocks that ended after `after_change`, with their states, and
    `changed` the inputs to which a call that continues the run gave other values.
    """

    book: Runbook
    state: str
    index: int = 0
    variables: dict[str, Value] = field(default_factory=dict)
    found: set[str] = field(default_factory=set)
    times: dict[str, int] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    over: int | None = None
    because: str = ""
    advice: str | None = None
    after_change: tuple[str, int, dict[str, int]] = ("", 0, {})
    leads: str = ""
    repeats: tuple[str, str] | None = None
    given_by: dict[str, str] = field(default_factory=dict)
    overridden: dict[str, str] = field(default_factory=dict)
    since_change: list[tuple[str, Block]] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)

    @property
    def block(self) -> Block:
        """The next block; that at which a run stopped."""
        return self.book.state(self.state).blocks[self.index]

    @property
    def missing(self) -> tuple[str, ...]:
        """The inputs that the block needs and that have no value."""
        return tuple(name for name in self.block.needs if not self.variables.get(name))

    @property
    def undecided(self) -> bool:
        """Whether a person decides or agrees to the block, and nobody else can."""
        return self.block.attended or self.block.decides is not None

    def step(self, *, attended: bool) -> str | None:
        """The chosen step; None if it comes from a record and cannot be confirmed."""
        step = self.variables.get("STEP")
        is_found = "STEP" in self.found and not attended
        return step if isinstance(step, str) and step and not is_found else None

    def names(self, record_url: str) -> dict[str, Value]:
        """The values of the page's names; empty if none was given.

        A variable of the same name in the operator's environment is ignored.
        """
        names: dict[str, Value] = dict.fromkeys(self.book.variables, "")
        names |= dict.fromkeys(self.book.lists, ())
        return {**names, **self.variables, "BECAUSE": self.because, "RECORD": record_url}

    def used(self, record_url: str) -> dict[str, Value]:
        """The values of the names that the block uses, directly or through other values."""
        names = self.names(record_url)
        used: dict[str, Value] = {}
        left = [*used_names(self.block.code), *self.block.needs]
        while left:
            name = left.pop(0)
            if name in names and name not in used:
                used[name] = names[name]
                left += used_names(shown(names[name]))
        return used

    def apply(self, event: Event, *, found: bool, attended: bool = True) -> None:
        """Move to the position after an event; `found` means that it existed before this call."""
        match event:
            case OpenedEvent() | ResumedEvent():
                if isinstance(event, OpenedEvent) and event.title != self.book.title:
                    raise _OffThePage("it has another title")
                if isinstance(event, ResumedEvent) and not found:
                    self.changed = {
                        name
                        for name, value in event.inputs.items()
                        if name != "ROOT" and shown(value) != shown(self.variables.get(name, ""))
                    }
                if self.over is not None and self.block.decides is not None:
                    # The run stopped at this decision, so it is made again.
                    self.variables.pop(self.block.decides, None)
                self._take_inputs(event.inputs, event.by, found=found)
                self.over = None
            case BackEvent():
                self._take_back(event)
            case DecidedEvent():
                self._take_inputs(event.inputs, event.by, found=found)
            case BeganEvent():
                self._check_place(event)
                self.begun.add(event.block)
            case EndedEvent():
                block, state = self.block, self.state
                self._take_end(event, found=found)
                if found and block.repeats:
                    self.repeats = self.repeats or (state, block.name)
                elif block.changes and (attended or not (found and block.attended)):
                    self.after_change = (self.state, self.index, dict(self.times))
                    self.since_change = []
                    return
                self.since_change.append((state, block))
            case FinishedEvent():
                self.over, self.because = event.exit_code, event.because

    def _take_inputs(
        self, given: Mapping[str, str | Sequence[str]], by: str, *, found: bool
    ) -> None:
        for each in self.book.inputs:
            value = given.get(each.name)
            if value is None or (found and not is_complete(value)):
                continue
            if isinstance(value, str) is each.is_list:
                raise _OffThePage(f"the input {each.name} is {'no' if each.is_list else 'a'} list")
            items = (value,) if isinstance(value, str) else tuple(value)
            if found and each.name not in self.book.commands and not all(map(is_argument, items)):
                raise _OffThePage(f"the input {each.name} is not a valid argument")
            if found and any(item and each.mistake(item) for item in items):
                raise _OffThePage(f"the input {each.name} is no {each.type}")
            self.variables[each.name] = items if each.is_list else items[0]
            self.given_by[each.name] = by
            self.found.discard(each.name)
            # A default always comes from the page, never from the record.
            if found and value != each.default:
                self.found.add(each.name)

    def _take_end(self, event: EndedEvent, *, found: bool) -> None:
        self._check_place(event)
        block, then = self.block, event.then
        if (then, event.because) not in {(row.then, row.because) for row in block.outcomes}:
            raise _OffThePage(f"the block {event.block!r} cannot end with {then!r} here")
        self.begun.discard(block.name)
        ran = event.exit_code is not None
        self.times[block.name] = self.times.get(block.name, 0) + ran
        self.because = event.because
        if block.overrides and event.exit_code == 0 and block.decides is not None:
            value, by = self.variables.get(block.decides, ""), self.given_by.get(block.decides, "")
            self.overridden[block.name] = f"{event.because} ({by}: {shown(value)})"
        if block.sets is not None and event.exit_code == 0:
            printed = (
                () if event.printed is None or isinstance(event.printed, str) else event.printed
            )
            lines = tuple(filter(is_argument, printed))
            last = lines[-1] if lines else ""
            is_list = block.sets in self.book.lists
            self.variables[block.sets] = tuple(dict.fromkeys(lines)) if is_list else last
            (self.found.add if found else self.found.discard)(block.sets)
        self._go(then)

    def _check_place(self, event: BeganEvent | EndedEvent) -> None:
        if (event.state, event.block) != (self.state, self.block.name):
            raise _OffThePage(f"the block {event.block!r} of {event.state} is not the next one")

    def _take_back(self, event: BackEvent) -> None:
        """Return to a state and a block in it; all that follows is repeated."""
        self._go(event.state)
        blocks = [block.name for block in self.book.state(self.state).blocks]
        if event.block is not None:
            if event.block not in blocks:
                raise _OffThePage(f"the state {self.state} has no block {event.block!r}")
            self.index = blocks.index(event.block)
            self.times = dict(self.after_change[2])

    def _go(self, then: str) -> None:
        if then == NEXT:
            self.index += 1
        elif then not in (DONE, STOP):
            self.book.state(then)
            self.state, self.index = then, 0

    def drop_foreign_addresses(self) -> None:
        """Forget the addresses that recorded blocks set, except below a root given in this call."""
        given = [value for name, value in self.variables.items() if name not in self.found]
        items = [
            item for value in given for item in ((value,) if isinstance(value, str) else value)
        ]
        roots = [_absolute(item) + "/" for item in items if item]
        for name in self.found:
            value = self.variables[name]
            if self.book.input(name) is None and isinstance(value, str) and "/" in value:
                address = _absolute(value)
                is_below = any(address.startswith(root) for root in roots)
                if not is_below or ".." in address.split("/"):
                    self.variables[name] = ""


def position_of(
    book: Runbook, events: Sequence[Event], n_found: int, *, attended: bool = True
) -> Position:
    """The position of a run with these events; a stopped run is at the block where it stopped.

    The first `n_found` events existed before this call; `attended` means that a person
    confirmed continuing them. Raises `RunUnreadable` for events that do not match the
    page.
    """
    defaults = {each.name: each.default for each in book.inputs if each.default is not None}
    start = book.states[0].name
    position = Position(book, start, variables=dict(defaults), after_change=(start, 0, {}))
    for number, event in enumerate(events):
        try:
            position.apply(event, found=number < n_found, attended=attended)
        except (_OffThePage, UsageError) as error:
            raise RunUnreadable(
                f"event {number + 1} of the run does not match the page of {book.name}: {error}; "
                "--new starts a new run"
            ) from error
    position.drop_foreign_addresses()
    return position


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def is_argument(value: str) -> bool:
    """Whether a text is a valid argument: no option, no control characters, of bounded length.

    Bytes of a file name that are not UTF-8 are allowed, as Python represents them in a
    `str`.
    """
    try:
        text = os.fsencode(value).decode("utf-8", "ignore")
    except UnicodeEncodeError:
        return False
    return not (_CONTROL.search(text) or value.startswith("-") or len(value) > MAX_TEXT)


def _absolute(address: str) -> str:
    return address.rstrip("/") if "://" in address else os.path.abspath(address)


TRANSCRIPT = "transcript.md"
"""Its name, beside the record and in the folder that a person names."""
SHOWN_LINES = 60


def transcript(events: Sequence[Event]) -> str:
    """The run as Markdown, without secrets."""
    return "\n".join(_markdown([without_secrets(event) for event in events])) + "\n"


def write_transcript(folder: Path, events: Sequence[Event]) -> None:
    """Write the transcript into a folder, which is created if missing.

    Its owner alone can read it. Raises `UsageError` if nothing can be written there.
    """
    try:
        open_folder(str(folder), make=True).close()
        with LocalStore(str(folder), private=True) as store:
            text = transcript(events).encode("utf-8", "backslashreplace")
            store.put(TRANSCRIPT, text, replace=True)
    except OSError as error:
        raise UsageError(f"the transcript {folder}: {error.strerror}") from error
    except (PathUntrusted, StorageError) as error:
        raise UsageError(f"the transcript {error.message}") from error


_Personal = OpenedEvent | ResumedEvent | DecidedEvent
"""The events of a person, who gives inputs."""


def _markdown(events: Sequence[Event]) -> Iterator[str]:
    opened = next(event for event in events if isinstance(event, OpenedEvent))
    yield f"# {opened.runbook.upper()}: {opened.title}"
    yield ""
    yield from (f"- {text}" for text in _facts(events))
    yield ""
    yield markdown_row("given", "value")
    yield markdown_row("---", "---")
    given: dict[str, str | Sequence[str]] = {}
    for event in events:
        if isinstance(event, _Personal):
            given.update(event.inputs)
    for name, value in given.items():
        yield markdown_row(f"`{name}`", markdown_code(shown(value)))
    began: BeganEvent | None = None
    decided: DecidedEvent | None = None
    for event in events:
        if isinstance(event, DecidedEvent):
            decided = event
        elif isinstance(event, BeganEvent):
            if began is not None:
                yield from _block(began, None, decided)
            began = event
        elif isinstance(event, EndedEvent):
            yield from _block(began, event, decided)
            began = decided = None
    if began is not None:
        yield from _block(began, None, decided)


def _facts(events: Sequence[Event]) -> Iterator[str]:
    first, last = events[0], events[-1]
    by = dict.fromkeys(event.by for event in events if isinstance(event, _Personal))
    starter, *others = map(markdown_code, by)
    continued = f"; continued by {', '.join(others)}" if others else ""
    yield f"started {first.at} by {starter}{continued}"
    if isinstance(last, FinishedEvent):
        yield f"ended {last.at} with exit code {last.exit_code}: {last.because}"
    else:
        yield f"not ended; last entry {last.at}"
    took_s = (seconds_of(last.at) or 0.0) - (seconds_of(first.at) or 0.0)
    yield f"took {duration(took_s, digits=3)}"


def _block(
    began: BeganEvent | None, ended: EndedEvent | None, decided: DecidedEvent | None
) -> Iterator[str]:
    """A block that `began`, unless it did not run, and `ended`, unless its end is unknown."""
    event = ended or began
    if event is None:
        return
    yield from ("", f"## {event.state}: {event.block}", "")
    if began is not None:
        values = (f"# {name}={shown(value)}" for name, value in began.values.items())
        yield from (*markdown_block("sh", [*began.command.split("\n"), *values]), "")
    by = "" if decided is None else f"Decided by {markdown_code(decided.by)} at {decided.at}. "
    started = "" if began is None else f"Started {began.at}"
    if ended is None:
        yield f"{by}{started}; its end is unknown."
        return
    follows = f"{ended.because}. Then: {ended.then}."
    if ended.exit_code is None:
        yield f"{by}{(ended.not_run or '').capitalize()}: {follows}"
    else:
        took = duration(ended.duration_s or 0.0, digits=3)
        yield f"{by}{started}, exit code {ended.exit_code} after {took}: {follows}"
    lines = ended.lines or ()
    if len(lines) > SHOWN_LINES:
        n_left = len(lines) - SHOWN_LINES
        lines = [f"({n_left} lines before these)", *lines[-SHOWN_LINES:]]
    if lines:
        yield from ("", *markdown_block("text", lines))
