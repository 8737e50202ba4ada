"""Report what the attempts of a run, or of several, did and what they cost."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING

from ckptctl.errors import CkptctlError, OptionError, OwnFileUnreadable, UsageError
from ckptctl.formats.own.ledger import (
    EndedLine,
    FailedLine,
    LedgerLine,
    ProgressLine,
    ResumedLine,
    SavedLine,
    SavingLine,
    StartedLine,
)
from ckptctl.formats.own.supervision import Attempt, Decision, SupervisorDocument
from ckptctl.formatting import counted, duration, percent, rfc3339, seconds_of
from ckptctl.goodput.timeline import AttemptRecord, Goodput, PastAttempt, attempts_of, goodput_of
from ckptctl.model import ExitCode, Message, NextCommand
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.selection.empty_roots import check_has_steps
from ckptctl.selection.history import read_attempts
from ckptctl.selection.roots import list_root
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.holding import STATE_FOLDER, Revisions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class RootHistory:
    """The history of one root of several."""

    root: str
    """Its address."""
    goodput: Goodput | None
    """What became of its time; null where it could not be read."""
    warnings: tuple[str, ...]
    """What of its record could not be read, and why."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The attempts of one run or several, and how their time was spent."""

    attempts: tuple[PastAttempt, ...]
    """Every attempt, root by root, the oldest first."""
    goodput: Goodput
    """How the time of all of them was spent; the sum over several roots."""
    roots: tuple[RootHistory, ...]
    """The roots, in the order in which they were given."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand


def run_history(
    *roots: str,
    state: str | None = None,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> RunHistory:
    """The attempts of one run or several, and how their time was spent.

    Reads the ledgers that `ckptctl.train` keeps in a root, and the state of `ckptctl run`; either
    is enough. `state` is the folder or URL where `run --state` kept it. Of several roots, one
    that cannot be read does not keep the others from being reported: the exit code is its.

    Raises `UsageError` without a root, and the error of a single root that cannot be read.
    """
    if not roots:
        raise UsageError("the root of a run is missing", next_command="ckptctl history ROOT")
    if state is not None and len(roots) > 1:
        raise OptionError("--state", "is the state of one root; give one", without=("--state",))
    (storage,) = options_from(keywords, storage)
    attempts: list[PastAttempt] = []
    histories: list[RootHistory] = []
    exit_code = 0
    for root in roots:
        try:
            own, warnings = _read(root, state, storage)
        except CkptctlError as error:
            if len(roots) == 1:
                raise
            exit_code = max(exit_code, error.exit_code)
            histories.append(RootHistory(root, None, (error.message,)))
            continue
        attempts += own
        histories.append(RootHistory(root, goodput_of(own), tuple(warnings)))
    goodput = goodput_of(attempts)
    return RunHistory(
        attempts=tuple(attempts),
        goodput=goodput,
        roots=tuple(histories),
        message="; ".join(_message(attempts, goodput)),
        exit_code=exit_code,
        next_command=None,
    )


def _read(
    root: str, state: str | None, storage: StorageOptions
) -> tuple[tuple[PastAttempt, ...], list[str]]:
    with ExitStack() as stack:
        store = stack.enter_context(open_store(root, storage))
        kept = None if state is None else stack.enter_context(open_store(state, storage))
        records, warnings = read_records(store, kept, time.time())
        if not records:
            # A wrong path is an error; a root without a record is not.
            check_has_steps(store, list_root(store))
    return attempts_of(root, records), warnings


def _message(attempts: list[PastAttempt], goodput: Goodput) -> Iterator[str]:
    if not attempts:
        yield "no attempt is recorded: ckptctl.train and ckptctl run record them"
        return
    yield counted(len(attempts), "attempt") + f" in {duration(goodput.elapsed_s, digits=3)}"
    yield counted(goodput.disruptions, "disruption")
    share = goodput.goodput
    yield "goodput unknown" if share is None else f"goodput {percent(share)}"


# What a root records about its attempts: their ledgers, and the state of `ckptctl run`. Either is
# enough, and each is data from outside: lines that are damaged are left out, values of another type
# count as not recorded. An attempt in both is one record: the ledger names the attempt of `run`;
# without that name, the time decides.


MAX_ATTEMPTS = 5_000
"""Ledgers of a root that are read; the newest."""

FRESH_S = 600.0
"""An attempt without an end whose last line is younger runs: a step has that limit as well."""

_JUMP_S = 5.0
"""A clock that differs by more from one that nobody sets has jumped."""

_MOST_S = 1e10
_MOST_TEXT = 200


def read_records(
    store: Store, state: Store | None, now_s: float
) -> tuple[list[AttemptRecord], list[str]]:
    """The attempts of a root in order, and warnings about what could not be read.

    `state` is where `ckptctl run --state` kept its state, None for the root itself. Cost: three
    listings, one read per attempt and one of the state. Raises `StorageError`.
    """
    warnings: list[str] = []
    kept = None
    try:
        kept = Revisions(state or store, "" if state else STATE_FOLDER, of_root=False).newest()
    except OwnFileUnreadable as error:
        warnings.append(error.message)
    ledgers = [
        ledger
        for _, lines in read_attempts(store, last=MAX_ATTEMPTS)
        if (ledger := _ledger(lines, now_s)) is not None
    ]
    jumps = [each.jumped_s for each in ledgers if abs(each.jumped_s) > _JUMP_S]
    if jumps:
        warnings.append(
            f"the clock jumped during {len(jumps)} of {len(ledgers)} attempts, by up to "
            f"{max(map(abs, jumps)):.0f} s; times between attempts may be wrong by that"
        )
    return _merged(kept, ledgers, now_s), warnings


# One ledger


def _ledger(lines: Sequence[LedgerLine], now_s: float) -> AttemptRecord | None:
    """The record that the lines of rank 0 give; None where none of them has a time."""
    own = [
        (at_s, line)
        for line in lines
        if line.rank == 0 and line.at is not None and (at_s := _moment(line.at)) is not None
    ]
    if not own:
        return None
    aged = sorted(((line.process_s or 0.0, at_s, line) for at_s, line in own), key=itemgetter(0))
    (first_age, first_at, _), (last_age, last_at, _) = aged[0], aged[-1]
    by_age = [(age, line) for age, _, line in aged]
    # Nearly all lines report progress: the others are searched several times.
    others = [(age, line) for age, line in by_age if not isinstance(line, ProgressLine)]
    started = next((line for _, line in others if isinstance(line, StartedLine)), None)
    resumed_age, resumed = next(
        ((age, line) for age, line in others if isinstance(line, ResumedLine)), (math.nan, None)
    )
    ended = [line for _, line in others if isinstance(line, EndedLine)]
    failed = [line for _, line in others if isinstance(line, FailedLine)]
    causes = [*(line.evidence or line.reason for line in failed), *(line.error for line in ended)]
    saved = (line.step for _, line in others if isinstance(line, SavedLine))
    saves = [step for step in saved if step is not None]
    begins = [age for age, line in others if isinstance(line, SavingLine) and age > resumed_age]
    after = [
        (age, line, step)
        for age, line in by_age
        if age > resumed_age and (step := _reached(line)) is not None
    ]
    load_s = None if resumed is None else resumed.load_s
    cluster = None if started is None else started.cluster
    job = None if cluster is None else cluster.job
    nodes = None if cluster is None else cluster.node_list or cluster.node
    began_s = first_at - first_age
    attempt = PastAttempt(
        started_at=rfc3339(began_s),
        seconds=last_age,
        resumed_from=None if resumed is None else resumed.step,
        startup_s=None if load_s is None else max(0.0, resumed_age - load_s),
        load_s=load_s,
        save_s=max((s for _, line in own if (s := line.stalled_s) is not None), default=None),
        saved=max(saves, default=None),
        n_saves=len(saves),
        interval_s=(begins[-1] - resumed_age) / len(begins) if begins else None,
        world_size=None if started is None else started.world_size,
        allocation=(nodes or "")[:_MOST_TEXT],
        cause=next((cause[:_MOST_TEXT] for cause in causes if cause), None),
    )
    return AttemptRecord(
        attempt=attempt,
        began_s=began_s,
        ended_s=last_at,
        running=not ended and now_s - last_at < FRESH_S,
        done=bool(ended) and ended[-1].how != "exception" and not failed,
        resumed=resumed is not None,
        points=() if resumed is None else tuple(_points(resumed_age, resumed, after)),
        has_first_step=bool(after) and isinstance(after[0][1], ProgressLine),
        job=(job or "")[:_MOST_TEXT] or None,
        requeued=cluster is not None and bool(cluster.requeues),
        supervised=(started.supervised if started is not None else None) or "",
        jumped_s=(last_at - first_at) - (last_age - first_age),
    )


def _reached(line: LedgerLine) -> int | None:
    """The step that training had reached at a line; None if that is not known from it."""
    match line:
        case ProgressLine(step=step):
            return step
        case EndedLine(step=step, how=how) if how != "exception":
            return step
        # A line about a save that is done has the time of its end, which a save in the background
        # reaches later than the step.
        case SavingLine(step=step):
            return step
    return None


def _points(
    resumed_age: float, resumed: ResumedLine, after: Sequence[tuple[float, LedgerLine, int]]
) -> Iterator[tuple[float, int]]:
    """The steps with their training time, rising in both."""
    last_s, last = resumed_age - (resumed.stalled_s or 0.0), resumed.step or 0
    yield last_s, last
    for age, line, step in after:
        trained_s = age - (line.stalled_s or 0.0)
        if trained_s >= last_s and step > last:
            last_s, last = trained_s, step
            yield trained_s, step


def _moment(at: str) -> float | None:
    """A time in seconds since 1970; None for what is none."""
    seconds = seconds_of(at)
    return seconds if seconds is not None and 0 <= seconds < _MOST_S else None


# Ledgers and states together


def _merged(
    state: SupervisorDocument | None, ledgers: Sequence[AttemptRecord], now_s: float
) -> list[AttemptRecord]:
    """Every attempt once, in order; clocks that go back do not change the order of a record."""
    attempts = () if state is None else state["attempts"]
    held = state is not None and state["owner"] is not None
    run = "" if state is None else state["run"]
    numbers = {f"{run}/{attempt.number}": attempt.number for attempt in attempts}
    spans = [*map(_span, attempts)]
    of: dict[int | None, list[AttemptRecord]] = defaultdict(list)
    for ledger in ledgers:
        number = numbers.get(ledger.supervised)
        if not ledger.supervised:
            # Without a name the time decides: the attempt during which it was begun.
            during = (n for began_s, ended_s, n in spans if began_s <= ledger.began_s <= ended_s)
            number = next(during, None)
        of[number].append(ledger)
    supervised = [
        record
        for attempt in attempts
        for record in _supervised(attempt, of[attempt.number], now_s, held=held)
    ]
    keyed: list[tuple[float, AttemptRecord]] = []
    for sequence in (of[None], supervised):
        keyed += zip(accumulate((each.began_s for each in sequence), max), sequence, strict=True)
    return [record for _, record in sorted(keyed, key=itemgetter(0))]


def _span(attempt: Attempt) -> tuple[float, float, int]:
    """When an attempt of `run` began and ended, and its number; without an end it may still run."""
    began_s = _moment(attempt.started_at)
    began_s = math.inf if began_s is None else began_s
    runs = attempt.decision is None and not attempt.seconds
    return began_s, math.inf if runs else began_s + attempt.seconds, attempt.number


def _supervised(
    attempt: Attempt, ledgers: Sequence[AttemptRecord], now_s: float, *, held: bool
) -> Iterator[AttemptRecord]:
    """The records of one attempt of `run`: more than one where the launcher restarted the ranks."""
    last = ledgers[-1] if ledgers else None
    start_s = _moment(attempt.started_at)
    began_s = start_s if start_s is not None else last.began_s if last else now_s
    runs = attempt.decision is None and held and (last is None or last.running)
    ran_s = attempt.seconds
    if not ran_s and last is not None:
        ran_s = max(0.0, last.began_s - began_s) + last.attempt.seconds
    elif not ran_s and runs:
        ran_s = max(0.0, now_s - began_s)
    done = attempt.decision is Decision.DONE
    if attempt.decision is Decision.STOPPED:
        done = last is not None and last.done

    def stated(past: PastAttempt) -> PastAttempt:
        """The attempt with what `run` alone knows."""
        known = {name: getattr(attempt, name) for name in _STATED_BY_RUN}
        return replace(
            past,
            **known,
            cause=attempt.cause or past.cause,
            world_size=attempt.world_size or past.world_size,
            allocation=attempt.allocation or past.allocation,
        )

    if last is None:
        past = PastAttempt(
            started_at=attempt.started_at,
            seconds=ran_s,
            saved=attempt.step,
            allocation=attempt.host,
        )
        yield AttemptRecord(
            attempt=stated(past),
            began_s=began_s,
            ended_s=began_s + ran_s,
            running=runs,
            done=done,
        )
        return
    for place, record in enumerate(ledgers):
        past, head_s = record.attempt, max(0.0, record.began_s - began_s)
        if place == 0 and head_s <= ran_s:
            # The launcher began before the processes: what it took is part of their startup.
            startup_s = None if past.startup_s is None else past.startup_s + head_s
            past = replace(past, seconds=head_s + past.seconds, startup_s=startup_s)
            record, head_s = replace(record, began_s=began_s, attempt=past), 0.0
        if place < len(ledgers) - 1:
            yield replace(record, running=False, done=False)
            continue
        whole_s = ran_s - head_s if attempt.seconds else past.seconds
        more_s = max(0.0, whole_s - past.seconds)
        yield replace(
            record,
            attempt=stated(replace(past, seconds=max(0.0, whole_s))),
            ended_s=record.ended_s + more_s,
            running=runs,
            done=done,
        )


_STATED_BY_RUN = (
    *("inspected", "progress", "free", "left", "decision", "reason"),
    *("exit_code", "section", "ranks", "nodes", "host"),
)
"""The fields of an attempt that no ledger holds."""
