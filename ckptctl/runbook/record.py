"""Record a run of a runbook, so that another person on another machine can continue it.

A run is a folder of small files, one per event, numbered from 1 and never changed:
`.ckptctl/runbooks/NAME/RUN/000001.json` under the checkpoint root. Each file is created
only if it does not exist: of two processes that continue the same run, one fails at its
next event and stops.

Whoever can write to the root can write such a file. An existing record is therefore
untrusted: it is bounded, and `formats.own.run_events` checks each event. `engine` decides what
its values may be used for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NoReturn, TypeVar

from ckptctl.errors import (
    AlreadyExists,
    CkptctlError,
    OwnFileUnreadable,
    PathNotFound,
)
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import line_bytes, time_now
from ckptctl.formats.own.run_events import (
    MAX_EVENT_BYTES,
    Event,
    FinishedEvent,
    OpenedEvent,
    read_event,
    without_secrets,
)
from ckptctl.storage.contract import Store, TooLarge
from ckptctl.storage.numbered_files import NumberedFiles
from ckptctl.storage.opening import join_url

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
    """The names of the runs, newest first."""
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
