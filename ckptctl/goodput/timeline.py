"""Divide the time of a run into what was training that is kept and what was not.

Pure: `records` reads what attempts recorded, this module computes. Every second of an attempt
is in one of the fields of `PastAttempt`; what was not recorded is None, never a guess.

The buckets are those of ml-goodput-measurement (57092cf, `goodput_utils.py`). Training is kept
up to the step from which a later attempt resumed; all after that step is lost.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ckptctl.formats.own.supervision import Attempt, Decision
from ckptctl.formatting import DAY_S, rfc3339
from ckptctl.model import Fraction, NonNegative, Positive, Time


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
    bounds = [each.attempt.resumed_from or 0 if each.resumed else None for each in records]
    later = [*accumulate(reversed(bounds), _lower)][::-1]
    kept = [*later[1:], None]
    has_ledger = any(each.resumed for each in records)
    found: list[PastAttempt] = []
    for place, record in enumerate(records):
        before = records[place - 1] if place else None
        after = records[place + 1] if place + 1 < len(records) else None
        ran_s = record.attempt.seconds
        if after is not None and record.began_s < after.began_s < record.ended_s:
            ran_s = min(ran_s, after.began_s - record.began_s)
        gap_s = 0.0 if before is None else max(0.0, record.began_s - before.ended_s)
        planned = before is not None and before.done and not _continues(before, record)
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


def _lower(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _continues(before: AttemptRecord, record: AttemptRecord) -> bool:
    """Whether a job that closed its record was requeued: then it had not ended as planned."""
    return before.attempt.decision is None and record.requeued and record.job == before.job


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
    excluded_s = sum(each.idle_s for each in attempts)
    counted_s = sum(each.seconds + (each.restart_s or 0.0) for each in attempts)
    goodput_s = _sum(each.productive_s for each in attempts)
    return Goodput(
        elapsed_s=counted_s + excluded_s,
        excluded_s=excluded_s,
        goodput_s=goodput_s,
        goodput=_share(goodput_s, counted_s),
        ettr=_share(goodput_s, counted_s + excluded_s),
        badput=Badput(
            **{
                bucket: _sum(getattr(each, name) for each in attempts)
                for bucket, name in BUCKETS.items()
            }
        ),
        disruptions=sum(each.restart_s is not None for each in attempts),
        max_productive_step=max((e.kept for e in attempts if e.kept is not None), default=None),
        mtbf=measured_mtbf(attempts),
        recent=measured_mtbf(attempts, DAY_S),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
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
    """The probability of `n` events or fewer where `mean` are expected."""
    if mean <= 0:
        return 1.0
    logs = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(n + 1))
    return min(1.0, math.fsum(math.exp(each) for each in logs))


def _solved(rising: Callable[[float], float], value: float, n: int) -> float:
    """Where a rising function of the expected number has a value, by bisection."""
    low, high = 0.0, n + 10 * math.sqrt(n + 1) + 10
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high
