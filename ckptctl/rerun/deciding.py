"""Decide from runs of the same steps whether a suspicious value is the hardware's or the job's.

The answers are those of the rerun state machine of Megatron-LM, which asks the same of one
forward and backward pass inside the job: `transient_error` (not reproduced on the same GPU),
`persistent_error` (reproduced there, and not on another), `correct_result` (reproduced on
another). Its default tolerance is 0.

Values that are equal bit for bit on different nodes prove that the job is deterministic. Where
no two runs are equal, or the log prints few digits, only a difference far beyond that of runs
that should be equal decides; what does not decide is undecided.

Source: Megatron-LM `megatron/core/rerun_state_machine.py`, `RerunDiagnostic`, `validate_result`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import combinations
from statistics import median
from typing import NamedTuple

from ckptctl.logs.rows import Number
from ckptctl.loss.level import finite, measure_for, noise_of, rounding_of
from ckptctl.loss.replay import FINE
from ckptctl.rerun.recording import Comparison, Record, Rows, aligned, compare

_FAR = 10.0
"""A difference decides if it is so many times as large as those between runs that should be
equal."""
_NUMERICS = 1.5e-3
"""Another order of additions changes a loss by less, relative. Source: resumes of Megatron-LM on
three generations of GPUs, as in `loss.replay`."""
_LAST_BITS = 1e-6
"""A loss of 32 bits has a relative precision of 1.2e-7."""
_JUMP = 6.0
"""A value stands out if it is so many standard deviations away from those before it."""
_N_BEFORE = 60


class ValueOrigin(StrEnum):
    """Where a suspicious value comes from."""

    TRANSIENT = "transient"
    PERSISTENT = "persistent"
    JOB = "job"
    UNDECIDED = "undecided"


class ReplayNodes(StrEnum):
    """The nodes of a replay: those of the record, or others."""

    SAME = "same"
    OTHER = "other"


class RerunDecision(NamedTuple):
    """An answer with its reason; `more` are nodes on which a further replay could change it.

    `scatter` is the largest relative difference between replays on the same nodes.
    """

    answer: ValueOrigin
    reason: str
    more: ReplayNodes | None = None
    scatter: float | None = None


class _Runs(NamedTuple):
    """How all runs compare: the record with each replay, and replays with each other."""

    with_same: list[Comparison]
    with_others: list[Comparison]
    between: list[list[Comparison]]
    among_same: list[Comparison]
    among_others: list[Comparison]
    step: int
    has_others: bool
    is_finite: bool
    """The loss of the suspicious step is finite in every replay."""
    others_are_finite: bool
    """It is finite in every replay on other nodes."""

    @property
    def wants_others(self) -> bool:
        """Whether one more replay on other nodes can be had, which could disagree."""
        return self.has_others and len(self.with_others) < _REPLAYS

    @property
    def wants_same(self) -> bool:
        """Whether one more replay on the same nodes can be had."""
        return len(self.with_same) < _REPLAYS


def decide(
    record: Record, same: Sequence[Record], others: Sequence[Record], step: int, *, has_others: bool
) -> RerunDecision:
    """Decide from the record and from replays on the same nodes and on others.

    Each run has a row for `step`; one that ended there with a failure has a NaN. `has_others`
    is whether there are other nodes to replay on.
    """
    if has_others and not others:
        return RerunDecision(
            ValueOrigin.UNDECIDED, "no other nodes were tried yet", ReplayNodes.OTHER
        )
    runs = _Runs(
        [compare(record, each, step) for each in same],
        [compare(record, each, step) for each in others],
        [[compare(a, b, step) for b in others] for a in same],
        [compare(a, b, step) for a, b in combinations(same, 2)],
        [compare(a, b, step) for a, b in combinations(others, 2)],
        step,
        has_others,
        all(math.isfinite(_loss(each, step)) for each in (*same, *others)),
        all(math.isfinite(_loss(each, step)) for each in others),
    )
    sizes = [size for each in runs.among_same for size in (each.before, each.at)]
    scatter = max(filter(math.isfinite, sizes), default=None)
    samples = [each.other_samples for each in (*runs.with_same, *runs.with_others)]
    others_from = next((number for number in samples if number is not None), None)
    if others_from is not None:
        return RerunDecision(
            ValueOrigin.UNDECIDED,
            f"a replay consumes other samples than the record from step {others_from} on: it does "
            "not repeat the run",
            scatter=scatter,
        )
    rows = aligned(record, same[0])[0][1]
    rounding = rounding_of([loss for number, loss in _losses(rows) if number <= step])
    found = _by_bits(runs) if rounding <= FINE else None
    found = found or _beyond_scatter(runs, rounding, _jump(rows, step))
    return found._replace(scatter=scatter)


_REPLAYS = 2
"""Replays on the same nodes, and on others: two that agree show that a difference is none of
chance."""


def _by_bits(runs: _Runs) -> RerunDecision | None:
    """What equal values prove; None where they prove nothing."""
    if any(each.is_equal for each in runs.with_others):
        return RerunDecision(
            ValueOrigin.JOB,
            f"other nodes repeat the record up to step {runs.step}, bit for bit: the cause is in "
            "the data or in the code",
        )
    repeats = any(each.is_equal for each in runs.with_same)
    if not runs.has_others and repeats:
        return _only_same(runs)
    agree = [any(each.is_equal for each in row) for row in runs.between]
    if all(agree) if runs.has_others else _all_equal(runs.among_same):
        return _record_differs(runs)
    if runs.wants_others:
        return RerunDecision(
            ValueOrigin.UNDECIDED, "other nodes differ from the record", ReplayNodes.OTHER
        )
    if runs.has_others and _all_equal(runs.among_others):
        return _others_agree(runs, repeats=repeats)
    if runs.wants_same:
        return RerunDecision(ValueOrigin.UNDECIDED, "no two runs agree", ReplayNodes.SAME)
    return None


def _only_same(runs: _Runs) -> RerunDecision:
    return RerunDecision(
        ValueOrigin.UNDECIDED,
        f"the same nodes repeat the value of step {runs.step}; only other nodes show whether the "
        "hardware or the job computes it (--other-nodes)",
    )


def _record_differs(runs: _Runs) -> RerunDecision | None:
    """All replays agree, and the record differs from them."""
    first = runs.with_same[0].first
    if first is None or not runs.with_same[0].starts_equal:
        return None
    if not runs.is_finite:
        return RerunDecision(
            ValueOrigin.UNDECIDED,
            f"the replays agree on a loss of step {runs.step} that is not finite, and the record "
            "has another",
        )
    if (small := _small(runs, runs.with_same)) is not None:
        return small
    if not all(each.is_equal for each in (*runs.among_same, *runs.among_others)):
        return None
    return RerunDecision(
        ValueOrigin.TRANSIENT,
        f"the replays agree with each other bit for bit, and the record differs from them, first "
        f"at step {first.step}",
    )


def _small(runs: _Runs, different: Sequence[Comparison]) -> RerunDecision | None:
    """What a difference lacks that is as small as one by chance; None where it is large enough.

    Jobs that are not deterministic often have few outcomes, such as two algorithms to choose
    from, so that two runs may agree by chance.
    """
    size = max(max(each.before, each.at) for each in different)
    if size <= _LAST_BITS:
        return RerunDecision(
            ValueOrigin.UNDECIDED,
            f"the runs differ by {size:.1e} of the loss, which two runs of a sound job may: replay "
            "more steps (--from-step) so that a difference grows",
        )
    if size <= _NUMERICS and (runs.wants_same or runs.wants_others):
        more = ReplayNodes.SAME if runs.wants_same else ReplayNodes.OTHER
        return RerunDecision(
            ValueOrigin.UNDECIDED, f"the runs differ by {size:.1e} of the loss only", more
        )
    return None


def _others_agree(runs: _Runs, *, repeats: bool) -> RerunDecision | None:
    """Other nodes repeat each other bit for bit, and not the record."""
    if not runs.others_are_finite:
        return RerunDecision(
            ValueOrigin.UNDECIDED,
            f"other nodes compute a loss of step {runs.step} that is not finite, and the record is "
            "another: replay on nodes that are known to be sound",
        )
    between = [each for row in runs.between for each in row if not each.is_equal]
    if (small := _small(runs, between)) is not None:
        return small
    size = max(max(each.before, each.at) for each in between)
    starts_equal = runs.with_others[0].starts_equal
    first = runs.with_others[0].first
    at = f", first at step {first.step}" if first is not None else ""
    if not starts_equal and size <= _NUMERICS:
        return RerunDecision(
            ValueOrigin.UNDECIDED,
            f"other nodes differ from the same ones from the first step on, by at most {size:.1e}: "
            "that can be another order of additions on other hardware",
        )
    if repeats:
        return RerunDecision(
            ValueOrigin.PERSISTENT,
            f"the same nodes repeat the record bit for bit; other nodes agree with each other and "
            f"differ from it{at}",
        )
    if runs.wants_same:
        return RerunDecision(
            ValueOrigin.UNDECIDED, "the same nodes repeat nothing yet", ReplayNodes.SAME
        )
    now = runs.between[0][0].first
    if starts_equal and first is not None and now is not None and now.step < first.step:
        return RerunDecision(
            ValueOrigin.PERSISTENT,
            f"other nodes repeat the record bit for bit up to step {first.step}; the same nodes "
            f"do not any more, from step {now.step} on",
        )
    if size <= _NUMERICS:
        return None
    if _all_equal(runs.among_same):
        return RerunDecision(
            ValueOrigin.UNDECIDED,
            "the same nodes and the others each repeat themselves, with values of their own that "
            "the record does not have: replay on a third group of nodes",
        )
    return RerunDecision(
        ValueOrigin.PERSISTENT,
        "the same nodes do not repeat themselves; other nodes do, bit for bit",
    )


def _beyond_scatter(runs: _Runs, rounding: float, jump: float) -> RerunDecision:
    """What a difference shows that is far larger than those between runs that should agree."""
    among = [*runs.among_same, *runs.among_others]
    between = [each for row in runs.between for each in row]
    may_agree = rounding <= FINE and not _all_equal(between)
    if may_agree and (runs.wants_same or runs.wants_others):
        more = ReplayNodes.SAME if runs.wants_same else ReplayNodes.OTHER
        return RerunDecision(ValueOrigin.UNDECIDED, "no two runs agree", more)
    compared = [*runs.with_same, *runs.with_others, *between, *among]
    scatter = max([*(each.before for each in compared), *(each.at for each in among)])
    if not math.isfinite(scatter):
        return RerunDecision(
            ValueOrigin.UNDECIDED,
            "a loss is finite in one replay and not in another on the same nodes, or before step "
            f"{runs.step}: nothing is repeated",
        )
    far = _FAR * max(scatter, rounding)
    because = _because(runs, scatter, rounding)
    off_same = min(each.at for each in runs.with_same)
    off_others = min((each.at for each in runs.with_others), default=off_same)
    if off_others > far and off_same > far:
        if runs.is_finite and all(each.at <= far for each in (*between, *among)):
            return RerunDecision(
                ValueOrigin.TRANSIENT,
                f"no replay repeats the value of step {runs.step}, which is off by "
                f"{_relative(off_same)}; {because}",
            )
    elif off_others > far:
        if runs.wants_others:
            return RerunDecision(ValueOrigin.UNDECIDED, "other nodes differ", ReplayNodes.OTHER)
        return RerunDecision(
            ValueOrigin.PERSISTENT,
            f"the same nodes repeat the value of step {runs.step}, from which other nodes are off "
            f"by {_relative(off_others)}; {because}",
        )
    elif off_same <= far < jump:
        if not runs.has_others:
            return _only_same(runs)
        return RerunDecision(
            ValueOrigin.JOB,
            f"the same nodes and others repeat the value of step {runs.step}, which is off the "
            f"values before it by {_relative(jump)}; {because}",
        )
    return RerunDecision(
        ValueOrigin.UNDECIDED,
        f"{because}, and only a value that is off by more than {far:.1e} decides",
    )


def _because(runs: _Runs, scatter: float, rounding: float) -> str:
    """Why equal values prove nothing."""
    if rounding >= scatter:
        return f"the log prints losses to {rounding:.1e} of their size"
    if _all_equal(runs.between[0] if runs.has_others else runs.among_same):
        return (
            f"the replays agree with each other, and differ from the record by up to {scatter:.1e} "
            "before that step, so they do not repeat the run"
        )
    if _all_equal(runs.among_same) and not _all_equal(runs.among_others):
        return f"other nodes do not repeat themselves: their replays differ by up to {scatter:.1e}"
    return f"the job is not deterministic: runs that should be equal differ by up to {scatter:.1e}"


def _relative(size: float) -> str:
    return f"{size:.1e}" if math.isfinite(size) else "a loss that is not finite"


def _all_equal(found: Sequence[Comparison]) -> bool:
    return bool(found) and all(each.is_equal for each in found)


def _losses(rows: Rows) -> list[tuple[int, Number]]:
    return [(row.step, loss) for row, loss in finite([*rows.values()])]


def _loss(record: Record, step: int) -> float:
    """The loss of a step in the first log that has it."""
    found = (rows[step].loss for rows in record.values() if step in rows)
    return next((loss.value for loss in found if loss is not None), math.nan)


def _jump(rows: Rows, step: int) -> float:
    """How far the loss of a step is from those before it, relative; 0 within their noise."""
    loss = rows[step].loss
    before = [number.value for each, number in _losses(rows) if each < step][-_N_BEFORE:]
    if loss is None or not math.isfinite(loss.value):
        return math.inf
    if not before:
        return 0.0
    measure = measure_for([*before, loss.value])
    values = [measure(each) for each in before]
    size = abs(measure(loss.value) - median(values[-_N_BEFORE // 3 :]))
    return size if size > _JUMP * noise_of(values, 0.0) else 0.0
