"""Record a run of a runbook, so that another person on another machine can continue it.

A run is a folder of small files, one per event, numbered from 1 and never changed:
`.ckptctl/runbooks/NAME/RUN/000001.json` under the checkpoint root. Each file is created
only if it does not exist: of two processes that continue the same run, one fails at its
next event and stops. Whoever works on a run also keeps a small file beside its events up to
date (`held`), which names the person to contact; it prevents nothing from being done twice.

Whoever can write to the root can write such a file. An existing record is therefore
untrusted: it is bounded, and `formats.own.run_events` checks each event. `engine` decides what
its values may be used for.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import NoReturn, TypeVar

from ckptctl.errors import (
    AlreadyExists,
    CkptctlError,
    OwnFileUnreadable,
    PathNotFound,
    StorageError,
    UsageError,
)
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import line_bytes, parsed, time_now, typed
from ckptctl.formats.own.run_events import (
    MAX_EVENT_BYTES,
    EndedEvent,
    Event,
    FinishedEvent,
    OpenedEvent,
    read_event,
    without_secrets,
)
from ckptctl.formatting import seconds_of
from ckptctl.model import Pid
from ckptctl.selection.marking import user_name
from ckptctl.storage.contract import Store, TooLarge, storage_time_s
from ckptctl.storage.opening import join_url

AnyEvent = TypeVar("AnyEvent", bound=Event)

RUNS_FOLDER = f"{OWN_FOLDER}/runbooks"
MAX_RECORD_BYTES = 64 << 20
MAX_EVENTS = 10_000
_KEPT_BYTES = 2 * MAX_EVENT_BYTES
_KEPT_EVENTS = 1_000
"""The room in both for the ends of blocks that have begun: more than one call adds."""

_RUN_NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}")
_STAMP = "%Y%m%dT%H%M%SZ"
_LAST_YEAR = 9999
_EVENT_NAME = re.compile(r"[0-9]{6}\.json")


class TakenOver(CkptctlError, code="runbook.taken-over", exit_code=26):
    """Another process continued this run."""


class RunUnreadable(CkptctlError, code="runbook.unreadable", exit_code=21):
    """A file of a run was not written by ckptctl."""


class RunFull(UsageError, code="runbook.full"):
    """The record of a run has no space for a further block."""


class RunRecord:
    """One run: its events, and the number of the next one."""

    def __init__(
        self, store: Store, folder: str, events: Sequence[Event] = (), n_bytes: int = 0
    ) -> None:
        self.store = store
        self.folder = folder
        self.events = list(events)
        self._n_bytes = n_bytes
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
        """Write one event; raises `TakenOver` if another process wrote that event.

        Raises `RunFull` where there is no room; the end of a block always fits.
        """
        made = replace(event, at=time_now(), writer=self._writer)
        number, data = len(self.events) + 1, line_bytes(without_secrets(made))
        is_full = (
            self._n_bytes + len(data) > MAX_RECORD_BYTES - _KEPT_BYTES
            or number > MAX_EVENTS - _KEPT_EVENTS
        )
        if is_full and not isinstance(made, EndedEvent | FinishedEvent):
            raise RunFull(
                f"the record of the run {self.name} is full: {number - 1:,} events, "
                f"{self._n_bytes >> 20} MiB; --new starts a new run"
            )
        try:
            self.store.put(f"{self.folder}/{number:06d}.json", data)
        except AlreadyExists as error:
            raise TakenOver(
                f"{self.store.url}: another process continued the run {self.name}; this one stops "
                "so that nothing is done twice"
            ) from error
        self.events.append(made)
        self._n_bytes += len(data)
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
    names = sorted(
        name
        for entry in store.list_dir(folder)
        if _EVENT_NAME.fullmatch(name := entry.path.rpartition("/")[2])
    )
    if len(names) > MAX_EVENTS:
        _refuse(store, folder, f"it holds {len(names):,} events, more than {MAX_EVENTS:,}")
    events: list[Event] = []
    n_bytes = 0
    for number, name in enumerate(names, start=1):
        path = f"{folder}/{name}"
        if name != f"{number:06d}.json":
            _refuse(store, folder, f"event {number} is missing")
        try:
            data = store.read(path, limit=MAX_EVENT_BYTES)
        except TooLarge as error:
            _refuse(store, path, f"it has more than {MAX_EVENT_BYTES:,} bytes", error)
        n_bytes += len(data)
        if n_bytes > MAX_RECORD_BYTES:
            _refuse(store, folder, f"its events have more than {MAX_RECORD_BYTES >> 20} MiB")
        try:
            events.append(read_event(data, first=number == 1))
        except OwnFileUnreadable as error:
            _refuse(store, path, error.message[:120], error)
    return RunRecord(store, folder, events, n_bytes)


def _refuse(store: Store, path: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise RunUnreadable(
        f"{join_url(store.url, path)} is not the record of a runbook: {why}; --new starts a new run"
    ) from cause


BEAT_S = 10.0
SILENT_S = 60.0
"""Without a heartbeat for this long, the other process is gone."""

_MAX_BYTES = 4096


class RunHeld(CkptctlError, code="runbook.held", exit_code=26):
    """Another person is working on the run."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who works on a run: `at` is the last heartbeat; `gone` means that they left."""

    by: str
    host: str
    pid: Pid
    at: str
    gone: bool = False


def myself(*, gone: bool = False) -> Holder:
    """The user and process that run this."""
    return Holder(user_name(), socket.gethostname(), os.getpid(), time_now(), gone)


@contextmanager
def held(record: RunRecord, *, take_over: bool) -> Iterator[None]:
    """Hold a run while working on it; raises `RunHeld` if somebody else does."""
    other = holder_of(record)
    if other is not None and not take_over and _is_here(record, other):
        raise RunHeld(
            f"{other.by} on {other.host} (process {other.pid}) is working on the run "
            f"{record.name} of "
            f"this runbook, last seen {other.at}; talk to them, or add --take-over"
        )
    _put(record, myself())
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(record, over), daemon=True)
    beating.start()
    try:
        yield
    finally:
        over.set()
        beating.join(timeout=1.0)
        with suppress(StorageError):
            if _is_mine(holder_of(record)):
                _put(record, myself(gone=True))


def holder_of(record: RunRecord) -> Holder | None:
    """The last holder of a run; None if there was none or it cannot be determined."""
    try:
        data = record.store.read(_path(record), limit=_MAX_BYTES)
        found = typed(Holder, parsed(data, _MAX_BYTES))
    except (PathNotFound, TooLarge, OwnFileUnreadable):
        return None
    return None if seconds_of(found.at) is None else found


def _is_here(record: RunRecord, holder: Holder) -> bool:
    """Whether a holder is probably still working on the run."""
    if holder.gone:
        return False
    if holder.host == socket.gethostname() and not _is_alive(holder.pid):
        return False
    # By the clock of the storage: that of another host may be wrong by hours.
    now_s = storage_time_s(record.store, f"{record.folder}/clock")
    listed = record.store.list_dir(record.folder)
    beat_s = next((info.mtime_s for info in listed if info.path == _path(record)), None)
    seen_s = seconds_of(holder.at) if beat_s is None else beat_s
    # A time far in the future is no heartbeat either.
    return abs(now_s - (seen_s or 0.0)) < SILENT_S


def _beat(record: RunRecord, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        # If the storage is gone, the next event reports it.
        with suppress(StorageError):
            if not _is_mine(holder_of(record)):
                return  # another process has taken the run over
            _put(record, myself())


def _is_mine(holder: Holder | None) -> bool:
    me = myself()
    return holder is None or (holder.host, holder.pid) == (me.host, me.pid)


def _put(record: RunRecord, holder: Holder) -> None:
    record.store.put(_path(record), line_bytes(holder), replace=True)


def _path(record: RunRecord) -> str:
    return f"{record.folder}/holder.json"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
