"""The ledger of the attempts of a run, and the report of a resume.

Each attempt has one file under `.ckptctl/attempts/` of the root, whose lines `formats.own.ledger`
defines. The report of the resume is beside it; rank 0 prints its lines to standard error unless
the script gives a function of its own. No other module of `train/` prints.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

from ckptctl.distributed.launcher import Cluster
from ckptctl.distributed.process_table import own_process
from ckptctl.errors import AlreadyExists, CkptctlError, OwnFileUnreadable, StorageError
from ckptctl.findings import Report
from ckptctl.formats.own.contract import Drift, drift, stated_by_one, terms_of
from ckptctl.formats.own.files import ATTEMPTS_FOLDER, REPORT_SUFFIX, as_fields, line_bytes, utc_now
from ckptctl.formats.own.ledger import (
    REPORT_SCHEMA,
    EndedLine,
    FailedLine,
    LedgerLine,
    ProgressLine,
    ResumedLine,
)
from ckptctl.formats.own.marks import MARKS_FOLDER, MarkKind
from ckptctl.formats.own.seals import Origin
from ckptctl.formatting import counted, duration
from ckptctl.redaction import redacted, redacted_values
from ckptctl.selection.history import Token, read_attempts
from ckptctl.selection.roots import list_root
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name, join_url
from ckptctl.storage.waiting import start_daemon
from ckptctl.train.abandoning import HeldRoot, inspect_listed
from ckptctl.train.restoring import Job, Restored

_TIME = "%Y%m%dT%H%M%S.%fZ"


def new_attempt(previous: str | None = None) -> str:
    """The name of a new attempt after the attempt `previous`.

    Names sort in the order of the fencing tokens, even if the clocks of the hosts differ:
    if this host's clock is behind the name of the previous attempt, the new name is one
    microsecond after that.
    """
    now = datetime.datetime.now(datetime.UTC)
    with suppress(ValueError, OverflowError):  # no previous attempt, or its token is damaged
        time = (previous or "").partition("-")[0]
        before = datetime.datetime.strptime(f"{time}+0000", f"{_TIME}%z")
        now = max(now, before + datetime.timedelta(microseconds=1))
    return f"{now.strftime(_TIME)}-{os.urandom(4).hex()}"


def clock_s() -> float:
    """Seconds of a clock that nobody sets, and that counts while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _process_began_s() -> float:
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
    began_s: float = field(default_factory=_process_began_s)
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
    path = f"{ATTEMPTS_FOLDER}/{attempt}{REPORT_SUFFIX}"
    data = json.dumps(report, indent=2, allow_nan=False, default=as_fields) + "\n"
    store.put(path, data.encode(), replace=True)
    return join_url(store.url, path)


def to_stderr(line: str) -> None:
    """Print one line, and flush it."""
    sys.stderr.write(f"ckptctl: {line}\n")
    sys.stderr.flush()


STATE_LISTS = ("restored", "derived", "lost")
"""What a report states of the kinds of state."""


def report_of(root: str, attempt: str | None, world_size: int) -> dict[str, Any]:
    """A report (schema `ckptctl.resume/1`) of a fresh run, of which nothing was restored."""
    return {
        "schema": REPORT_SCHEMA,
        "attempt": attempt,
        "at": utc_now(),
        "root": root,
        "step": None,
        "path": None,
        "tokens": None,
        "fell_back": False,
        "rejected": [],
        "superseded": [],
        "warnings": [],
        "world_size": world_size,
        "saved_world_size": None,
        "previous_attempt": None,
        "state": {name: [] for name in STATE_LISTS},
        "cluster": None,
    }


def resume_document(job: Job, restored: Restored) -> dict[str, Any]:
    """The report of a resume without the fields of the attempt; on rank 0 only."""
    decision, saved = restored.decision, restored.saved
    chosen = decision.chosen
    return report_of(job.root, None, job.group.size) | {
        "step": None if chosen is None else chosen.number,
        "path": None if chosen is None else chosen.url,
        "tokens": saved.tokens,
        "fell_back": chosen is not None and bool(decision.passed_over),
        "rejected": [
            {
                "step": over.step,
                "path": over.path,
                "verdict": over.report.verdict.value,
                "reason": redacted(over.reason),
            }
            for over in decision.passed_over
        ],
        "saved_world_size": saved.world_size,
        "state": {name: getattr(restored.inventory, name) for name in STATE_LISTS},
        "drift": [redacted_values(as_fields(each)) for each in _drift_of(job, restored)],
    }


def _drift_of(job: Job, restored: Restored) -> tuple[Drift, ...]:
    """Where the job differs from the contract of the step; a note says what is not compared."""
    if restored.opened is None or not job.options.contract:
        return ()
    now, notes = terms_of(job.options.contract), restored.inventory.notes
    why = f"{restored.opened.name} has no contract"
    try:
        saved = restored.opened.read_contract()
    except OwnFileUnreadable as error:
        saved, why = None, error.message
    if saved is None:
        notes.append(f"{why}; the job is compared with none")
        return ()
    if alone := stated_by_one(saved, now):
        notes.append(f"of the contract {alone}")
    return drift(saved, now)


def resume_lines(report: Mapping[str, Any], restored: Restored) -> Iterator[str]:
    """The lines of a resume: its step and age, what was refused and why, and the inventory."""
    if report["step"] is None:
        what = "no save was completed in it" if report["rejected"] else "it contains no step"
        yield f"fresh run in {report['root']}: {what}"
    else:
        chosen = restored.decision.chosen
        written_s = None if chosen is None else chosen.written_s
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
    for each in report["drift"]:
        yield f"warning: the job differs from the step in {Drift(**each)}"
    for note in restored.inventory.notes:
        yield f"note: {note}"


# An attempt of the job, and what the records of several prove against a step
#
# A step is marked rejected where two failures came soon after the attempts had resumed from it; it
# is passed over from then on, and stays where it is. Evidence names the digests of the metadata
# that was loaded, as marks do: a failure after an older save of the same number is no evidence
# against the present one. A failure that followed another step too is the script's. Signals,
# preemption and ends without a known cause do not count.


PROGRESS_EVERY_S = 30.0
"""How often progress is recorded, in seconds."""

RECORD_TIMEOUT_S = 5.0
"""The timeout of a background write of one line, and of the wait at the end."""

Hook = Callable[..., Any]


@dataclass(slots=True)
class RankAttempt:
    """One attempt of the job, on one of its ranks.

    `resumed` is the step that it loaded, `step` the current training step, `saved` the newest
    step that is saved or being saved, `loss` the last one that was noted. It `is_sound` while
    neither a failure nor a loss that is not finite was noted on this rank.
    """

    token: Token
    ledger: Ledger
    resumed: Report | None = None
    step: int = 0
    saved: int = 0
    loss: float | None = None
    is_sound: bool = True
    cluster: Cluster | None = None
    _noted_s: float = -math.inf
    _stalled_s: float = 0.0
    _stalled_since_s: float | None = None
    _has_failed: bool = False
    _error: str | None = None
    _over: bool = False
    _hooks: tuple[Hook, Hook] | None = None

    @property
    def resumed_from(self) -> int | None:
        """The number of the step that it loaded; None for a run from step 0."""
        return None if self.resumed is None else self.resumed.number

    @property
    def origin(self) -> Origin:
        job, node = (self.cluster.job, self.cluster.node) if self.cluster else (None, None)
        return Origin(self.token.attempt, self.resumed_from, job or "", node or "")

    def record(self, line: LedgerLine) -> None:
        """Write a line in a thread; does not delay training and never raises."""
        with suppress(CkptctlError):
            self.ledger.add_later(replace(line, stalled_s=round(self.stalled_s, 3)))

    @property
    def stalled_s(self) -> float:
        """How long saves have kept this rank from training so far."""
        since_s = self._stalled_since_s
        return self._stalled_s + (0.0 if since_s is None else clock_s() - since_s)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Count the time inside as a stall; inside another stall it is counted once."""
        if self._stalled_since_s is not None:
            yield
            return
        self._stalled_since_s = clock_s()
        try:
            yield
        finally:
            self._stalled_s, self._stalled_since_s = self.stalled_s, None

    def note(self, step: int, loss: float | None) -> None:
        """Set the current step; rank 0 records it from time to time."""
        self.step = step
        self.loss = self.loss if loss is None else loss
        is_lost = loss is not None and not math.isfinite(loss)
        self.is_sound &= not is_lost
        if self.ledger.rank != 0:
            return
        if is_lost:
            self.failed(NOT_FINITE)
        elif time.monotonic() - self._noted_s > PROGRESS_EVERY_S:
            self._noted_s = time.monotonic()
            self.record(ProgressLine(step=step, loss=loss))

    def failed(self, evidence: str) -> None:
        """Record the first failure only: later ones are its consequences."""
        if self._has_failed:
            return
        self._has_failed, self.is_sound = True, False
        self.record(FailedLine(step=self.step, evidence=evidence))

    def ended_by(self, error: BaseException) -> None:
        """Take note of what ends the attempt, and record it if it is evidence against the step."""
        self._error = error.code if isinstance(error, CkptctlError) else _class_of(error)
        evidence = signature_of(error)
        if evidence is not None:
            self.failed(evidence)
        self._has_failed, self.is_sound = True, False

    def watch(self) -> None:
        before = sys.excepthook

        def seen(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self.ended_by(error)
            before(kind, error, trace)

        sys.excepthook = seen
        self._hooks = (before, seen)

    def leave(self, how: str) -> None:
        """Record the end, once, and restore the hook that `watch` replaced."""
        if self._hooks is not None and sys.excepthook is self._hooks[1]:
            sys.excepthook = self._hooks[0]
        self._hooks = None
        if not self._over and self.ledger.rank == 0:
            how = "exception" if self._has_failed else how
            self.record(EndedLine(step=self.step, how=how, error=self._error))
        self._over = True
        self.ledger.close(RECORD_TIMEOUT_S)


WITHIN_STEPS = 20
"""A failure within this many steps of a resume may be caused by the loaded step."""

NOT_FINITE = "non-finite loss"

Attempts = Sequence[tuple[str, Sequence[LedgerLine]]]
"""The attempts and their lines, oldest first."""

_OF_OTHERS = ("DistBackendError", "DistNetworkError", "DistStoreError", "OutOfMemoryError")
_MESSAGES_OF_OTHERS = ("connection closed", "connection reset", "timed out", "gloo", "nccl")


def signature_of(error: BaseException) -> str | None:
    """A description that is equal for equal failures; None if it proves nothing.

    A lost rank, a failing storage and a lack of memory are no evidence against a step.
    """
    if not isinstance(error, Exception) or isinstance(error, (CkptctlError, OSError, MemoryError)):
        return None
    message = str(error).lower()
    if type(error).__name__ in _OF_OTHERS or any(one in message for one in _MESSAGES_OF_OTHERS):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name}" if frames else ""
    return f"{_class_of(error)}{where}"


def _class_of(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")


class Failures(NamedTuple):
    """Attempts that failed with equal evidence soon after they had resumed from one save.

    `metadata` are the SHA-256 of the metadata files that they loaded, by path.
    """

    metadata: Mapping[str, str]
    evidence: str
    attempts: list[str]


def read_failures(store: Store) -> Attempts:
    """What the newest attempts resumed from, and how they failed; raises `StorageError`."""
    return tuple(read_attempts(store, events=("resumed", "failed")))


def proven(attempts: Attempts) -> Mapping[int, Sequence[Failures]]:
    """By step: the failures of at least two attempts with equal evidence after one save of it.

    Of each attempt the first that has evidence counts. Evidence that also applies to another step
    is left out.
    """
    steps_of: dict[str, set[int]] = defaultdict(set)
    held: dict[tuple[int, str, str], Failures] = {}
    for attempt, lines in attempts:
        resumed = next((line for line in lines if isinstance(line, ResumedLine)), None)
        if resumed is None or resumed.step is None or resumed.metadata is None:
            continue
        save = repr(sorted(resumed.metadata.items()))
        for line in lines:
            match line:
                case FailedLine(step=int(at), evidence=str(evidence)):
                    if 0 <= at - resumed.step <= WITHIN_STEPS:
                        steps_of[evidence].add(resumed.step)
                        failures = Failures(resumed.metadata, evidence, [])
                        failures = held.setdefault((resumed.step, save, evidence), failures)
                        failures.attempts.append(attempt)
                        break
    found: dict[int, list[Failures]] = defaultdict(list)
    for (step, _, evidence), against in held.items():
        if len(against.attempts) >= 2 and len(steps_of[evidence]) == 1:
            found[step].append(against)
    return found


def reject_proven(
    held: HeldRoot, store: Store, attempts: Attempts
) -> tuple[tuple[Report, bool], ...]:
    """Reject the steps of a root that the ledgers prove bad; each with whether it was marked.

    An accepted or rejected step keeps its mark. A root other than the held one may be
    read-only; then nothing is marked. Raises `Fenced`, `StorageError`. Cost: an inspection
    at `listing` and a write per marked step.
    """
    against = proven(attempts)
    if not against:
        return ()
    done = []
    for named in list_root(store).steps:
        if named.number not in against or _is_marked(store, named.name):
            continue
        report = inspect_listed(store, named).report
        there = dict(report.digests)
        failures = next((found for found in against[named.number] if found.metadata == there), None)
        if failures is None:
            continue
        try:
            held.mark(
                store,
                named.name,
                report,
                MarkKind.REJECTED,
                reason=f"{len(failures.attempts)} attempts that resumed from it failed in the same "
                f"way within {WITHIN_STEPS} steps: {failures.evidence}",
                evidence=[
                    join_url(held.store.url, f"{ATTEMPTS_FOLDER}/{attempt}.jsonl")
                    for attempt in failures.attempts[:8]
                ],
            )
            done.append((report, True))
        except StorageError:
            if store is held.store:
                raise
            done.append((report, False))
    return tuple(done)


def _is_marked(store: Store, name: str) -> bool:
    """Whether the step is already accepted or rejected; that mark takes precedence."""
    try:
        entries = store.list_dir(f"{name}/{MARKS_FOLDER}")
    except StorageError:
        return False
    words = (MarkKind.REJECTED.value, MarkKind.ACCEPTED.value)
    return any(f"-{word}-" in base_name(entry.path) for entry in entries for word in words)
