"""The ledger of the attempts of a run, and the report of a resume.

Each attempt has one file under `.ckptctl/attempts/` of the root, whose lines `formats.own.ledger`
defines. The report of the resume is beside it; rank 0 prints its lines to standard error unless
the script gives a function of its own. No other module of `train/` prints.
`attempt` decides what the records of several attempts prove against a step.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from ckptctl.distributed.process_table import own_process
from ckptctl.errors import AlreadyExists, CkptctlError
from ckptctl.formats.own.files import as_fields, line_bytes, utc_now
from ckptctl.formats.own.ledger import REPORT_SCHEMA, LedgerLine
from ckptctl.formatting import counted, duration
from ckptctl.redaction import redacted
from ckptctl.selection.history import ATTEMPTS_FOLDER
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import join_url
from ckptctl.storage.waiting import start_daemon
from ckptctl.train.job import Job, Restored

_TIME = "%Y%m%dT%H%M%S.%fZ"


def new_attempt(previous: str | None = None) -> str:
    """The name of a new attempt after the attempt `previous`.

    Names sort in the order of the fencing tokens, even if the clocks of the hosts differ:
    if this host's clock is behind the name of the previous attempt, the new name is one
    microsecond after that.
    """
    now = datetime.datetime.now(datetime.UTC)
    try:
        time = (previous or "").partition("-")[0]
        before = datetime.datetime.strptime(f"{time}+0000", f"{_TIME}%z")
        now = max(now, before + datetime.timedelta(microseconds=1))
    except (ValueError, OverflowError):  # no previous attempt, or its token is damaged
        pass
    return f"{now.strftime(_TIME)}-{os.urandom(4).hex()}"


def clock_s() -> float:
    """Seconds of a clock that nobody sets, and that counts while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def process_began_s() -> float:
    """When this process began, by `clock_s`; now where the system does not report it."""
    ticks = own_process().started
    return min(ticks / os.sysconf("SC_CLK_TCK") if ticks else math.inf, clock_s())


@dataclass(slots=True)
class Ledger:
    """The record of one attempt, written by one of its ranks.

    On a file system every rank appends to the one file; an object store cannot append, so
    there each rank has its own object, rewritten for each line.

    `add` writes synchronously. `add_later` passes the line to a thread, which writes it
    once through `later`, a store with a short timeout, so that a hung storage does not
    delay training. A line that could not be written is written with the next one.
    """

    store: Store
    attempt: str
    rank: int = 0
    later: Store | None = None
    began_s: float = field(default_factory=process_began_s)
    _lines: list[bytes] = field(default_factory=list)
    _queue: SimpleQueue[bytes | Event | None] = field(default_factory=SimpleQueue)
    _thread: Thread | None = None

    def add(self, line: LedgerLine) -> None:
        """Append one line, durably. Raises `StorageError`.

        Must not be called after `add_later`, because two threads would write.
        """
        # Lines of `add_later` create no folder: below the mount point of a storage that is not
        # mounted any more, they would look like the record of another run.
        if self.store.folders is not None:
            with suppress(AlreadyExists):
                self.store.folders.make_folder(ATTEMPTS_FOLDER)
        self._write(self.store, self._stored(line))

    def add_later(self, line: LedgerLine) -> None:
        """Append one line in a thread; does not wait and never raises."""
        if self._thread is None:
            self._thread = start_daemon("ckptctl-ledger", self._write_queued)
        self._queue.put(self._stored(line))

    def drain(self, timeout_s: float) -> None:
        """Wait until the thread has tried to write every line, at most `timeout_s`."""
        if self._thread is not None:
            tried = Event()
            self._queue.put(tried)
            tried.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Drain, and end the thread."""
        self.drain(timeout_s)
        if self._thread is not None:
            self._queue.put(None)

    def _write_queued(self) -> None:
        store = self.store if self.later is None else self.later
        unwritten: list[bytes] = []
        while (item := self._queue.get()) is not None:
            if isinstance(item, Event):
                item.set()
                continue
            unwritten.append(item)
            with suppress(CkptctlError, OSError):
                self._write(store, b"".join(unwritten))
                unwritten.clear()

    def _stored(self, line: LedgerLine) -> bytes:
        age_s = round(clock_s() - self.began_s, 3)
        return line_bytes(
            replace(line, at=utc_now(), attempt=self.attempt, rank=self.rank, process_s=age_s)
        )

    def _write(self, store: Store, lines: bytes) -> None:
        if store.folders is not None:
            store.folders.append_line(f"{ATTEMPTS_FOLDER}/{self.attempt}.jsonl", lines)
            return
        own = "" if self.rank == 0 else f".rank{self.rank}"
        path = f"{ATTEMPTS_FOLDER}/{self.attempt}{own}.jsonl"
        store.put(path, b"".join((*self._lines, lines)), replace=True)
        self._lines.append(lines)


def put_report(store: Store, attempt: str, report: Mapping[str, object]) -> str:
    """Write the report of a resume (schema `ckptctl.resume/1`); returns its address."""
    path = f"{ATTEMPTS_FOLDER}/{attempt}.resume.json"
    data = json.dumps(report, indent=2, allow_nan=False, default=as_fields) + "\n"
    store.put(path, data.encode(), replace=True)
    return join_url(store.url, path)


def to_stderr(line: str) -> None:
    """Print one line, and flush it."""
    sys.stderr.write(f"ckptctl: {line}\n")
    sys.stderr.flush()


def resume_document(job: Job, restored: Restored) -> dict[str, Any]:
    """The report (schema `ckptctl.resume/1`) without the fields of the attempt; on rank 0 only."""
    decision, saved, rejected = restored.decision, restored.saved, restored.rejected
    return {
        "schema": REPORT_SCHEMA,
        "attempt": None,
        "at": utc_now(),
        "root": job.root,
        "step": decision.step,
        "path": decision.path,
        "tokens": saved.tokens,
        "fell_back": decision.step is not None and (decision.fell_back or bool(rejected)),
        "rejected": [
            {
                "step": one.step,
                "path": one.path,
                "verdict": one.verdict,
                "reason": redacted(one.reason),
            }
            for one in rejected
        ],
        "superseded": [],
        "warnings": [],
        "world_size": job.group.size,
        "saved_world_size": saved.world_size,
        "previous_attempt": None,
        "state": restored.inventory.document(),
        "cluster": None,
    }


def resume_lines(report: Mapping[str, Any], restored: Restored) -> Iterator[str]:
    """The lines of a resume: its step and age, what was refused and why, and the inventory."""
    if report["step"] is None:
        what = "no save was completed in it" if report["rejected"] else "it contains no step"
        yield f"fresh run in {report['root']}: {what}"
    else:
        written_s = restored.decision.written_s
        age = "" if written_s is None else f", saved {duration(time.time() - written_s)} ago"
        ranks = report["saved_world_size"]
        by = "" if ranks is None else f" by {counted(ranks, 'rank')}"
        tokens = "" if report["tokens"] is None else f", {report['tokens']:,} tokens"
        back = ", falling back" if report["fell_back"] else ""
        yield f"resumed from step {report['step']}{back}: {report['path']}{age}{by}{tokens}"
    for refused in report["rejected"]:
        yield f"not from step {refused['step']}: {refused['reason']}"
    if report["superseded"]:
        steps = ", ".join(str(step) for step in report["superseded"])
        yield f"superseded from now on: step {steps}"
    for warning in report["warnings"]:
        yield f"warning: {warning}"
    for word, names in report["state"].items():
        if names:
            yield f"{word}: {', '.join(names)}"
    for note in restored.inventory.notes:
        yield f"note: {note}"
