"""What has been done in a run of a runbook, and how do two people not do it twice?

A run is a folder of small files, one an event, numbered from 1 and never
changed: `.ckptctl/runbooks/NAME/RUN/000001.json` under the checkpoint root, so
that another person on another machine can go on with it. Each file is put only
where it is not there yet: of two processes that go on at once one notices at
its next event, and stops.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from ckptctl.errors import AlreadyExists, CkptctlError, PathNotFound
from ckptctl.formats.layouts import OWN_FOLDER
from ckptctl.formats.own_files import time_now
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import join_url

Event = Mapping[str, object]

RUNS_FOLDER = f"{OWN_FOLDER}/runbooks"
MAX_EVENT_BYTES = 8 << 20
_MAX_EVENTS = 10_000


class TakenOver(CkptctlError):
    """Another process has gone on with this run."""

    exit_code = 26
    code = "runbook.taken-over"


class RecordUnreadable(CkptctlError):
    """A file of a run is not what ckptctl wrote."""

    exit_code = 21
    code = "runbook.unreadable"


class Record:
    """One run: its events, and where the next one goes."""

    def __init__(self, store: Store, folder: str, events: Sequence[Event] = ()) -> None:
        self.store = store
        self.folder = folder
        self.events = list(events)

    @property
    def name(self) -> str:
        """The name of the run, which sorts by the time of its start."""
        return self.folder.rpartition("/")[2]

    @property
    def url(self) -> str:
        """The address of its folder."""
        return join_url(self.store.url, self.folder)

    def add(self, event: str, **fields: object) -> Event:
        """Write one event; raises `TakenOver` where somebody else wrote one meanwhile."""
        made: Event = {"event": event, "at": time_now(), **fields}
        number = len(self.events) + 1
        data = json.dumps(made, ensure_ascii=False).encode() + b"\n"
        try:
            self.store.put(f"{self.folder}/{number:06d}.json", data)
        except AlreadyExists as error:
            raise TakenOver(
                f"{self.store.url}: somebody else has gone on with the run {self.name}; "
                "this process stops before it does anything twice",
            ) from error
        self.events.append(made)
        return made

    @property
    def is_over(self) -> bool:
        """It came to an end, and was not left in the middle."""
        return bool(self.events) and self.events[-1]["event"] == "finished"


class Unwritten(Record):
    """The record of a dry run: events are kept in memory alone."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, "dry-run")

    def add(self, event: str, **fields: object) -> Event:
        """Keep one event."""
        made: Event = {"event": event, "at": time_now(), **fields}
        self.events.append(made)
        return made


def begun(store: Store, runbook: str) -> Record:
    """A new, empty run."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return Record(store, f"{RUNS_FOLDER}/{runbook}/{stamp}-{os.urandom(3).hex()}")


def newest(store: Store, runbook: str) -> Record | None:
    """The run of this runbook that was begun last, with its events."""
    folder = f"{RUNS_FOLDER}/{runbook}"
    try:
        runs = [entry.path for entry in store.list_dir(folder) if entry.kind == "dir"]
    except PathNotFound:
        return None
    return _loaded(store, max(runs)) if runs else None


def _loaded(store: Store, folder: str) -> Record:
    files = [
        entry.path
        for entry in store.list_dir(folder)
        if entry.path.rpartition("/")[2].removesuffix(".json").isdecimal()
    ]
    events = [_read(store, path) for path in sorted(files)[:_MAX_EVENTS]]
    return Record(store, folder, events)


def _read(store: Store, path: str) -> Event:
    data = store.read(path, limit=MAX_EVENT_BYTES)
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordUnreadable(f"{store.url}/{path} is no JSON: {str(error)[:80]}") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise RecordUnreadable(f"{store.url}/{path} is no event of a run")
    return event
