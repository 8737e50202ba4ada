"""Report what the attempts of a run, or of several, did and what they cost.

The first part divides the time into what was training that is kept and what was not. Every second
of an attempt is in one of the fields of `PastAttempt`; what was not recorded is None, never a
guess. The buckets are those of ml-goodput-measurement (57092cf, `goodput_utils.py`). Training is
kept up to the step from which a later attempt resumed; all after that step is lost.

The last part reads what a root records about its attempts: their ledgers, and the state of
`ckptctl run`. Either is enough, and each is data from outside: lines that are damaged are left out,
values of another type count as not recorded. An attempt in both is one record: the ledger names the
attempt of `run`; without that name, the time decides.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Unpack

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
from ckptctl.formatting import DAY_S, counted, duration, percent, rfc3339, seconds_of
from ckptctl.model import ExitCode, Fraction, Message, NextCommand, NonNegative, Positive, Time
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.selection.empty_roots import check_has_steps
from ckptctl.selection.history import read_attempts
from ckptctl.selection.roots import list_root
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.holding import STATE_FOLDER, Revisions


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt(Attempt):
    """One attempt of a run: how it ended, and how its time was spent. Times in seconds."""

    root: str = ""
    """The root that it saved to."""
    number: Positive = 1
    """Its place in the record, counted from 1."""
    ended_at: Time | None = None
    """When it ended, or its last record where its end was not recorded; null while it runs."""
    step: int | None = None
    """The newest step that it recorded."""
    resumed_from: int | None = None
    """The step that it loaded; null for a fresh run, and where it did not resume."""
    saved: int | None = None
    """The newest step that it saved."""
    n_saves: int = 0
    """How many steps it saved."""
    interval_s: NonNegative | None = None
    """Mean time from the resume, and then from save to save; null without a save."""
    kept: int | None = None
    """The newest step of its training that is kept."""
    failed: bool = False
    """It ended, not as planned and not by a signal to `ckptctl run`."""
    restart_s: NonNegative | None = None
    """T1: from the end of the attempt before to its start; null for the first."""
    idle_s: NonNegative = 0.0
    """Time before it that no failure caused: the run was done."""
    startup_s: NonNegative | None = None
    """T2: from its start to the call of `resume`: processes, imports, connecting the ranks; all
    of an attempt that did not resume."""
    load_s: NonNegative | None = None
    """T3: choosing, loading and restoring the step."""
    first_step_s: NonNegative | None = None
    """T4: what its first step took longer than the others: compilation, warm-up."""
    productive_s: NonNegative | None = None
    """Training that is kept."""
    save_s: NonNegative | None = None
    """Time that training waited for saves."""
    lost_s: NonNegative | None = None
    """T0: training after the step that a later attempt resumed from, and until its end."""
    other_s: NonNegative | None = None
    """The rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """What is recorded of one attempt. Times of day are seconds since 1970.

    `attempt` holds the durations as they were recorded; its time is not divided yet. `began_s`
    and `ended_s` are by the clocks of the hosts, which may jump; `attempt.seconds` is not.
    `points` are steps with the training time since the start of the attempt at which each was
    reached, stalls of saves left out; the first is the resume.
    """

    attempt: PastAttempt
    began_s: float
    ended_s: float
    running: bool = False
    done: bool = False
    """It ended as planned."""
    resumed: bool = False
    """It has a ledger, so it loaded a step or began a fresh run."""
    points: tuple[tuple[float, int], ...] = ()
    has_first_step: bool = False
    """The second point is the first report of training, not a save."""
    job: str | None = None
    requeued: bool = False
    supervised: str = ""
    """The attempt of `ckptctl run` that its ledger names; empty without one."""
    jumped_s: float = 0.0
    """By how much the clock of its host jumped meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Badput:
    """Time that was not training, or is lost, in seconds; null where it was not recorded."""

    wasted_progress_from_disruption: NonNegative | None = None
    """T0: training that was lost, and the time until the failure was noticed."""
    infrastructure_recovery_from_disruption: NonNegative | None = None
    """T1: from the end of an attempt to the start of the next."""
    training_prep: NonNegative | None = None
    """T2: from the start of an attempt to the call of `resume`; attempts that did not resume."""
    unproductive_checkpoint_restore_time: NonNegative | None = None
    """T3: loading the step."""
    program_startup: NonNegative | None = None
    """T4: what first steps took longer than others."""
    unproductive_checkpoint_save_time: NonNegative | None = None
    """Time that training waited for saves."""
    other: NonNegative | None = None
    """The rest; what attempts ran of which nothing else is recorded."""


BUCKETS = {
    "wasted_progress_from_disruption": "lost_s",
    "infrastructure_recovery_from_disruption": "restart_s",
    "training_prep": "startup_s",
    "unproductive_checkpoint_restore_time": "load_s",
    "program_startup": "first_step_s",
    "unproductive_checkpoint_save_time": "save_s",
    "other": "other_s",
}
"""The field of an attempt that each bucket is the sum of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtbf:
    """The mean time between failures, in seconds, as it was measured."""

    failures: int
    """How many attempts failed."""
    observed_s: NonNegative
    """How long the attempts ran."""
    mean_s: NonNegative | None
    """Running time per failure; null without a failure."""
    low_s: NonNegative | None
    """The lower bound at 95 % confidence, for independent failures; null without running time."""
    high_s: NonNegative | None
    """The upper bound; null without a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """How the time of a run was spent. Times in seconds; null where it was not recorded."""

    elapsed_s: NonNegative
    """From the start of the first attempt to the end of the last."""
    excluded_s: NonNegative
    """Time between attempts that no failure caused."""
    goodput_s: NonNegative | None
    """Training that is kept."""
    goodput: Fraction | None
    """Its share of the elapsed time without the excluded."""
    ettr: Fraction | None
    """Effective training time ratio: its share of the elapsed time."""
    badput: Badput
    """The time that was not."""
    disruptions: int
    """How often training had to start again."""
    max_productive_step: int | None
    """The newest step that is kept."""
    mtbf: Mtbf
    """The mean time between failures, over all of the record."""
    recent: Mtbf
    """The same over the last 24 hours of running time."""


def attempts_of(root: str, records: Sequence[AttemptRecord]) -> tuple[PastAttempt, ...]:
    """The attempts of one root, in order, with what became of their time.

    `records` are in the order of the attempts. An attempt that another took over while it ran
    counts until the other began.
    """
    bounds = [record.attempt.resumed_from or 0 if record.resumed else None for record in records]
    kept: list[int | None] = []  # the lowest step that a later attempt resumed from
    lowest: int | None = None
    for bound in reversed(bounds):
        kept.append(lowest)
        if bound is not None:
            lowest = bound if lowest is None else min(bound, lowest)
    kept.reverse()
    has_ledger = any(record.resumed for record in records)
    found: list[PastAttempt] = []
    for place, record in enumerate(records):
        before = records[place - 1] if place else None
        after = records[place + 1] if place + 1 < len(records) else None
        ran_s = record.attempt.seconds
        if after is not None and record.began_s < after.began_s < record.ended_s:
            ran_s = min(ran_s, after.began_s - record.began_s)
        gap_s = 0.0 if before is None else max(0.0, record.began_s - before.ended_s)
        planned = before is not None and before.done
        # A job that closed its record and was requeued had not ended as planned.
        if before is not None and before.attempt.decision is None and record.requeued:
            planned = planned and record.job != before.job
        attempt = replace(
            record.attempt,
            root=root,
            number=place + 1,
            started_at=rfc3339(record.began_s),
            ended_at=None if record.running else rfc3339(record.ended_s),
            seconds=ran_s,
            restart_s=None if before is None or planned else gap_s,
            idle_s=gap_s if planned else 0.0,
        )
        divided = _divided(replace(record, attempt=attempt), kept[place], known=has_ledger)
        found.append(divided)
    return tuple(found)


def _divided(record: AttemptRecord, kept_until: int | None, *, known: bool) -> PastAttempt:
    """One attempt with its time divided; `known` where the job keeps ledgers at all."""
    attempt = record.attempt
    left_s = attempt.seconds

    def taken(seconds: float | None) -> float | None:
        """So much of the time that is left, so that the parts never exceed the whole."""
        nonlocal left_s
        if seconds is None:
            return None
        part_s = min(max(0.0, seconds), left_s)
        left_s -= part_s
        return part_s

    startup_s = taken(attempt.startup_s)
    load_s = taken(attempt.load_s)
    last = record.points[-1][1] if record.points else None
    ended = not (record.running or record.done)
    until = kept_until
    if until is None and ended:
        until = attempt.saved if attempt.saved is not None else attempt.resumed_from or 0
    first_step_s = productive_s = save_s = lost_s = other_s = None
    if record.resumed:
        first_step_s = taken(_first_step(record))
        save_s = taken(attempt.save_s)
        if record.points:
            kept_s = _trained(record.points, until)
            productive_s = taken(max(0.0, kept_s - (first_step_s or 0.0)))
            is_lost = ended or (until is not None and last is not None and until < last)
            rest_s, left_s = left_s, 0.0
            lost_s, other_s = (rest_s, 0.0) if is_lost else (0.0, rest_s)
    elif known:
        startup_s = left_s
    return replace(
        attempt,
        step=last if last is not None else attempt.saved,
        kept=last if until is None or last is None else min(last, until),
        failed=ended and attempt.decision is not Decision.STOPPED,
        startup_s=startup_s,
        load_s=load_s,
        first_step_s=first_step_s,
        productive_s=productive_s,
        save_s=save_s,
        lost_s=lost_s,
        other_s=other_s,
    )


def _first_step(record: AttemptRecord) -> float | None:
    """What the first report of training took longer than its steps usually do."""
    if not record.has_first_step or len(record.points) < 3:
        return None
    (began_s, before), (first_s, first), *_, (last_s, last) = record.points
    if last <= first:
        return None
    step_s = (last_s - first_s) / (last - first)
    return max(0.0, first_s - began_s - step_s * (first - before))


def _trained(points: Sequence[tuple[float, int]], until: int | None) -> float:
    """The training time from the resume to a step, interpolated; to the last without one."""
    times, steps = [each[0] for each in points], [each[1] for each in points]
    if until is None or until >= steps[-1]:
        return times[-1] - times[0]
    at = bisect_left(steps, until)
    if at == 0:
        return 0.0
    part = (until - steps[at - 1]) / (steps[at] - steps[at - 1])
    return times[at - 1] + part * (times[at] - times[at - 1]) - times[0]


def goodput_of(attempts: Sequence[PastAttempt]) -> Goodput:
    """How the time of all these attempts was spent, added up over several roots."""
    excluded_s = sum(attempt.idle_s for attempt in attempts)
    counted_s = sum(attempt.seconds + (attempt.restart_s or 0.0) for attempt in attempts)
    goodput_s = _sum(attempt.productive_s for attempt in attempts)
    return Goodput(
        elapsed_s=counted_s + excluded_s,
        excluded_s=excluded_s,
        goodput_s=goodput_s,
        goodput=_share(goodput_s, counted_s),
        ettr=_share(goodput_s, counted_s + excluded_s),
        badput=Badput(
            **{
                bucket: _sum(getattr(attempt, name) for attempt in attempts)
                for bucket, name in BUCKETS.items()
            }
        ),
        disruptions=sum(attempt.restart_s is not None for attempt in attempts),
        max_productive_step=max((e.kept for e in attempts if e.kept is not None), default=None),
        mtbf=measured_mtbf(attempts),
        recent=measured_mtbf(attempts, DAY_S),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _share(seconds: float | None, of_s: float) -> float | None:
    return None if seconds is None or of_s <= 0 else min(1.0, seconds / of_s)


def measured_mtbf(attempts: Iterable[PastAttempt], last_s: float = math.inf) -> Mtbf:
    """The mean time between failures, over the last `last_s` of running time."""
    observed_s, failures = 0.0, 0
    for attempt in sorted(attempts, key=lambda each: each.started_at, reverse=True):
        if observed_s >= last_s:
            break
        failures += attempt.failed
        observed_s += min(attempt.seconds, last_s - observed_s)
    few, many = poisson_bounds(failures)
    return Mtbf(
        failures=failures,
        observed_s=observed_s,
        mean_s=observed_s / failures if failures else None,
        low_s=observed_s / many if observed_s else None,
        high_s=observed_s / few if few else None,
    )


_TAIL = 0.025


def poisson_bounds(n: int) -> tuple[float, float]:
    """The exact bounds of the expected number of events where `n` were counted, at 95 %.

    The lower one is 0 for none. Source: F. Garwood, 1936; the same as half the quantiles of
    chi-square with 2n and 2n + 2 degrees of freedom.
    """
    low = _solved(lambda mean: 1 - _at_most(n - 1, mean), _TAIL, n) if n else 0.0
    high = _solved(lambda mean: -_at_most(n, mean), -_TAIL, n)
    return low, high


def _at_most(n: int, mean: float) -> float:
    if mean <= 0:
        return 1.0
    logs = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(n + 1))
    return min(1.0, math.fsum(math.exp(each) for each in logs))


def _solved(rising: Callable[[float], float], value: float, n: int) -> float:
    low, high = 0.0, n + 10 * math.sqrt(n + 1) + 10
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high


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
