"""Record a run of a runbook, so that another person on another machine can continue it.

A run is a folder of small files, one per event, numbered from 1 and never changed:
`.ckptctl/runbooks/NAME/RUN/000001.json` under the checkpoint root. Each file is created
only if it does not exist: of two processes that continue the same run, one fails at its
next event and stops.

Whoever can write to the root can write such a file. An existing record is therefore
untrusted: it is bounded, and each field is checked before use. `engine` decides what its
values may be used for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import NoReturn

from ckptctl.errors import AlreadyExists, CkptctlError, PathNotFound
from ckptctl.formats.bounded_json import decode_json
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import time_now
from ckptctl.storage.contract import Store, TooLarge
from ckptctl.storage.opening import join_url

Event = Mapping[str, object]

RUNS_FOLDER = f"{OWN_FOLDER}/runbooks"
MAX_EVENT_BYTES = 8 << 20
MAX_RECORD_BYTES = 64 << 20
MAX_EVENTS = 10_000
MAX_TEXT = 32 << 10
"""The most characters of one text in an event, except for output lines: Linux passes 128 KiB."""

_RUN_NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}")
_STAMP = "%Y%m%dT%H%M%SZ"
_LAST_YEAR = 9999
_EVENT_NAME = re.compile(r"[0-9]{6}\.json")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


class TakenOver(CkptctlError):
    """Another process continued this run."""

    exit_code = 26
    code = "runbook.taken-over"


class RecordUnreadable(CkptctlError):
    """A file of a run was not written by ckptctl."""

    exit_code = 21
    code = "runbook.unreadable"


class Record:
    """One run: its events, and the number of the next one."""

    def __init__(self, store: Store, folder: str, events: Sequence[Event] = ()) -> None:
        self.store = store
        self.folder = folder
        self.events = list(events)

    @property
    def name(self) -> str:
        """The name of the run; names sort by start time."""
        return self.folder.rpartition("/")[2]

    @property
    def url(self) -> str:
        """The address of its folder."""
        return join_url(self.store.url, self.folder)

    def add(self, event: str, **fields: object) -> Event:
        """Write one event; raises `TakenOver` if another process wrote that event."""
        made: Event = {"event": event, "at": time_now(), **fields}
        number = len(self.events) + 1
        # In ASCII, because a file name need not be valid UTF-8.
        data = json.dumps(made).encode() + b"\n"
        try:
            self.store.put(f"{self.folder}/{number:06d}.json", data)
        except AlreadyExists as error:
            raise TakenOver(
                f"{self.store.url}: another process continued the run {self.name}; this one stops "
                "so that nothing is done twice",
            ) from error
        self.events.append(made)
        return made

    @property
    def is_over(self) -> bool:
        """Whether the run ended, as opposed to being left unfinished."""
        return bool(self.events) and self.events[-1]["event"] == "finished"


class Unwritten(Record):
    """The record of a dry run: events are kept only in memory."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, "dry-run")

    def add(self, event: str, **fields: object) -> Event:
        """Keep one event."""
        made: Event = {"event": event, "at": time_now(), **fields}
        self.events.append(made)
        return made


def begun(store: Store, runbook: str) -> Record:
    """A new, empty run.

    Its name sorts after that of the newest run, even if another host's clock was ahead or a
    name is dated in the future: the newest run is always the one that was started last.
    """
    at = datetime.now(timezone.utc)
    last = _newest_name(store, runbook)
    if last is not None:
        at = max(at, _began_at(last) + timedelta(seconds=1))
    return Record(store, f"{RUNS_FOLDER}/{runbook}/{at.strftime(_STAMP)}-{os.urandom(3).hex()}")


def newest(store: Store, runbook: str) -> Record | None:
    """The newest run of this runbook, with its events; raises `RecordUnreadable`."""
    last = _newest_name(store, runbook)
    return None if last is None else _loaded(store, f"{RUNS_FOLDER}/{runbook}/{last}")


def _newest_name(store: Store, runbook: str) -> str | None:
    try:
        entries = store.list_dir(f"{RUNS_FOLDER}/{runbook}")
    except PathNotFound:
        return None
    names = (entry.path.rpartition("/")[2] for entry in entries if entry.kind == "dir")
    return max((name for name in names if _is_run_name(name)), default=None)


def _is_run_name(name: str) -> bool:
    """Whether this is the name of a run, with a date that another run can follow."""
    with suppress(ValueError):
        return bool(_RUN_NAME.fullmatch(name)) and _began_at(name).year < _LAST_YEAR
    return False


def _began_at(name: str) -> datetime:
    return datetime.strptime(name.partition("-")[0], _STAMP).replace(tzinfo=timezone.utc)


def _loaded(store: Store, folder: str) -> Record:
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
            events.append(_checked(data, first=number == 1))
        except ValueError as error:
            _refuse(store, path, str(error)[:120], error)
    return Record(store, folder, events)


def _refuse(store: Store, path: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise RecordUnreadable(
        f"{join_url(store.url, path)} is not the record of a runbook: {why}; --new starts a new run"
    ) from cause


def _checked(data: bytes, *, first: bool) -> Event:
    """One event, with each field checked against what `Record.add` and the engine write.

    Raises `ValueError`.
    """
    event = decode_json(data, max_bytes=MAX_EVENT_BYTES, numbers="finite")
    if not isinstance(event, dict):
        raise ValueError("an event is a JSON object")
    fields = _FIELDS.get(event["event"]) if isinstance(event.get("event"), str) else None
    if fields is None or (event["event"] == "opened") is not first:
        raise ValueError("the kind of event is unknown, or not possible here")
    for name, is_valid in {"at": _is_time, **fields}.items():
        if not is_valid(event.get(name)):
            raise ValueError(f"the field {name!r} is missing or not valid")
    if event["event"] == "ended":
        ran = event.get("exit_code") is not None
        if event.get("duration_s" if ran else "not_run") is None:
            raise ValueError("a block needs either a duration or a reason why it did not run")
    return event


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT and "\0" not in value


def _is_value(value: object) -> bool:
    return _is_text(value) or (isinstance(value, list) and all(_is_text(each) for each in value))


def _is_time(value: object) -> bool:
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        return False
    datetime.fromisoformat(value.removesuffix("Z"))
    return True


def _is_exit_code(value: object) -> bool:
    return type(value) is int and 0 <= value <= 255


def _is_duration(value: object) -> bool:
    return type(value) in (int, float) and 0 <= float(str(value)) < 1e9


def _is_values(value: object) -> bool:
    return isinstance(value, dict) and all(_is_value(each) for each in value.values())


def _is_lines(value: object) -> bool:
    return value is None or (
        isinstance(value, list) and all(isinstance(each, str) for each in value)
    )


def _or_none(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_valid(value)


_FIELDS: Mapping[str, Mapping[str, Callable[[object], bool]]] = {
    "opened": {
        **dict.fromkeys(("by", "runbook", "title", "page"), _is_text),
        "inputs": _is_values,
    },
    "resumed": {"by": _is_text, "inputs": _is_values},
    "decided": {"by": _is_text, "inputs": _is_values},
    "back": {"state": _is_text, "block": _or_none(_is_text), "because": _is_text},
    "began": {
        **dict.fromkeys(("state", "block", "command"), _is_text),
        "values": _is_values,
    },
    "ended": {
        **dict.fromkeys(("state", "block", "then", "because"), _is_text),
        "says": _or_none(_is_value),
        "not_run": _or_none(_is_text),
        "exit_code": _or_none(_is_exit_code),
        "duration_s": _or_none(_is_duration),
        "lines": _or_none(_is_lines),
        "report": _or_none(lambda value: isinstance(value, dict)),
        "picture": _or_none(lambda value: isinstance(value, str)),
    },
    "finished": {"exit_code": _is_exit_code, "because": _is_text},
}
"""The fields of each kind of event, and the check of each field."""
