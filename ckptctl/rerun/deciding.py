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
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from statistics import median
from typing import NamedTuple

from ckptctl.errors import LogWithoutLoss, UsageError
from ckptctl.formatting import command_line
from ckptctl.logs.reading import DamageLog, read_logs
from ckptctl.logs.rows import Number, Row
from ckptctl.logs.sources import expanded
from ckptctl.loss.level import finite, measure_for, noise_of, rounding_of
from ckptctl.loss.replay import FINE
from ckptctl.options import StorageOptions

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


def _undecided(
    reason: str, more: ReplayNodes | None = None, scatter: float | None = None
) -> RerunDecision:
    return RerunDecision(ValueOrigin.UNDECIDED, reason, more, scatter)


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
        return _undecided("no other nodes were tried yet", ReplayNodes.OTHER)
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
        return _undecided(
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
        return _undecided("other nodes differ from the record", ReplayNodes.OTHER)
    if runs.has_others and _all_equal(runs.among_others):
        return _others_agree(runs, repeats=repeats)
    if runs.wants_same:
        return _undecided("no two runs agree", ReplayNodes.SAME)
    return None


def _only_same(runs: _Runs) -> RerunDecision:
    return _undecided(
        f"the same nodes repeat the value of step {runs.step}; only other nodes show whether the "
        "hardware or the job computes it (--other-nodes)"
    )


def _record_differs(runs: _Runs) -> RerunDecision | None:
    """All replays agree, and the record differs from them."""
    first = runs.with_same[0].first
    if first is None or not runs.with_same[0].starts_equal:
        return None
    if not runs.is_finite:
        return _undecided(
            f"the replays agree on a loss of step {runs.step} that is not finite, and the record "
            "has another"
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
        return _undecided(
            f"the runs differ by {size:.1e} of the loss, which two runs of a sound job may: replay "
            "more steps (--from-step) so that a difference grows"
        )
    if size <= _NUMERICS and (runs.wants_same or runs.wants_others):
        more = ReplayNodes.SAME if runs.wants_same else ReplayNodes.OTHER
        return _undecided(f"the runs differ by {size:.1e} of the loss only", more)
    return None


def _others_agree(runs: _Runs, *, repeats: bool) -> RerunDecision | None:
    """Other nodes repeat each other bit for bit, and not the record."""
    if not runs.others_are_finite:
        return _undecided(
            f"other nodes compute a loss of step {runs.step} that is not finite, and the record is "
            "another: replay on nodes that are known to be sound"
        )
    between = [each for row in runs.between for each in row if not each.is_equal]
    if (small := _small(runs, between)) is not None:
        return small
    size = max(max(each.before, each.at) for each in between)
    starts_equal = runs.with_others[0].starts_equal
    first = runs.with_others[0].first
    at = f", first at step {first.step}" if first is not None else ""
    if not starts_equal and size <= _NUMERICS:
        return _undecided(
            f"other nodes differ from the same ones from the first step on, by at most {size:.1e}: "
            "that can be another order of additions on other hardware"
        )
    if repeats:
        return RerunDecision(
            ValueOrigin.PERSISTENT,
            f"the same nodes repeat the record bit for bit; other nodes agree with each other and "
            f"differ from it{at}",
        )
    if runs.wants_same:
        return _undecided("the same nodes repeat nothing yet", ReplayNodes.SAME)
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
        return _undecided(
            "the same nodes and the others each repeat themselves, with values of their own that "
            "the record does not have: replay on a third group of nodes"
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
        return _undecided("no two runs agree", more)
    compared = [*runs.with_same, *runs.with_others, *between, *among]
    scatter = max([*(each.before for each in compared), *(each.at for each in among)])
    if not math.isfinite(scatter):
        return _undecided(
            "a loss is finite in one replay and not in another on the same nodes, or before step "
            f"{runs.step}: nothing is repeated"
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
            return _undecided("other nodes differ", ReplayNodes.OTHER)
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
    return _undecided(f"{because}, and only a value that is off by more than {far:.1e} decides")


def _because(runs: _Runs, scatter: float, rounding: float) -> str:
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


Rows = Mapping[int, Row]
"""The rows of one log by their steps."""
Record = Mapping[str, Rows]
"""What one run logged, by log: one log, or one for each rank."""

_MOST_ROWS = 20_000
"""Rows that are kept of one log; a replay trains far fewer steps."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first value in which two runs differ."""

    step: int
    """The training step."""
    log: str
    """The log that holds it, where a run has several; else empty."""
    name: str
    """`loss` or `grad_norm`."""
    relative: float | None
    """How large the difference is, relative; null where one of both is not finite."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the values of two runs compare, up to and with the suspicious step."""

    n_values: int
    """How many values both runs logged."""
    first: FirstDifference | None
    """The first difference; null where all values are equal."""
    largest_before: float | None
    """The largest relative difference of losses before the suspicious step; null where one of
    two losses is not finite."""
    largest_at: float | None
    """That of its loss; null where one of both is not finite."""
    starts_equal: bool
    """The values of the first common step are equal."""
    other_samples: int | None
    """The first step that consumed other samples; null where none did, or it was not logged."""

    @property
    def before(self) -> float:
        """`largest_before`, as a number."""
        return math.inf if self.largest_before is None else self.largest_before

    @property
    def at(self) -> float:
        """`largest_at`, as a number."""
        return math.inf if self.largest_at is None else self.largest_at

    @property
    def is_equal(self) -> bool:
        """Whether no value differs."""
        return self.first is None


def read_record(logs: Sequence[str], step: int, storage: StorageOptions) -> Record:
    """What a run logged up to `step` and a little beyond, by log; empty without a loss.

    Where an attempt logged the step again, the first one counts. Logs that lack the step are
    left out, unless all do. Raises `PathNotFound` where a log or a folder of logs is missing.
    """
    passes = {path: _first_pass(path, step, storage) for path in expanded(logs, storage)}
    found = {path: rows for path, rows in passes.items() if rows}
    found = {path: rows for path, rows in found.items() if step in rows} or found
    return dict(zip(_short_names([*found]), found.values(), strict=True))


def _first_pass(path: str, step: int, storage: StorageOptions) -> Rows:
    """The rows of the first attempt that logged `step`; else of the one that came nearest."""
    best: dict[int, Row] = {}
    rows: dict[int, Row] = {}
    last = -1
    try:
        for row in read_logs([path], storage=storage, damage=DamageLog()):
            if not isinstance(row, Row) or not row.has_loss or row.step == last:
                continue  # the second of two rows of one step is another rank's
            if row.step < last:
                if step in rows:
                    return rows
                best, rows = max(best, rows, key=lambda each: max(each, default=-1)), {}
            last = row.step
            rows[row.step] = row
            if len(rows) > _MOST_ROWS:
                if step in rows:
                    return rows
                del rows[next(iter(rows))]
    except LogWithoutLoss:
        pass
    if step in rows:
        return rows
    return max(best, rows, key=lambda each: max(each, default=-1))


def _short_names(paths: Sequence[str]) -> list[str]:
    parts = [path.split("/") for path in paths]
    for n in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-n:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def first_record(logs: Sequence[str], step: int, storage: StorageOptions) -> Record:
    """The record of the suspicious run, which has a row for `step`.

    Raises `UsageError` where it has none, and did not end right before it.
    """
    record = read_record(logs, step, storage)
    names = " ".join(map(shlex.quote, logs))
    if not record:
        raise UsageError(f"{names}: no loss was found", next_command=command_line("loss", *logs))
    rows = main_rows(record)
    if step not in rows:
        if not ended_at(rows, step):
            near = min(rows, key=lambda each: abs(each - step))
            raise UsageError(f"{names}: step {step} has no row; the nearest step logged is {near}")
        record = with_failure(record, step)
    return record


def ended_at(rows: Rows, step: int, before: int | None = None) -> bool:
    """Whether the log ends right before `step`: at `before`, or one interval of logging ago."""
    last = max(rows)
    if before is not None:
        return last == before
    earlier = max((each for each in rows if each < last), default=last - 1)
    return 0 < step - last <= last - earlier


def with_failure(record: Record, step: int) -> Record:
    """The record of a run that failed at `step` where it logs none: no number is its loss."""
    failed: dict[str, Rows] = {}
    for name, rows in record.items():
        position = rows[max(rows)].position
        failed[name] = {step: Row(step, position, loss=Number(math.nan, 0.0)), **rows}
    return failed


def main_rows(record: Record) -> Rows:
    """The rows of the first log."""
    return next(iter(record.values()))


def compare(a: Record, b: Record, step: int) -> Comparison:
    """Compare two runs over the steps that both logged, up to and with `step`."""
    values: list[tuple[int, str, str, float]] = []
    other_samples: list[int] = []
    for log, old, new in aligned(a, b):
        for number in sorted(n for n in old.keys() & new.keys() if n <= step):
            x, y = old[number], new[number]
            for name, one, other in (
                ("loss", x.loss, y.loss),
                ("grad_norm", x.grad_norm, y.grad_norm),
            ):
                if one is not None and other is not None:
                    values.append((number, log, name, _difference(one, other)))
            if None not in (x.samples_digest, y.samples_digest):
                other_samples += [number] if x.samples_digest != y.samples_digest else []
    different = sorted(each for each in values if each[3])
    first = different[0] if different else None
    losses = [(number, size) for number, _, name, size in values if name == "loss"]
    return Comparison(
        len(values),
        first and FirstDifference(*first[:3], _finite(first[3])),
        _finite(max((size for number, size in losses if number < step), default=0.0)),
        _finite(max((size for number, size in losses if number == step), default=math.inf)),
        bool(values) and (first is None or min(values)[0] < first[0]),
        min(other_samples, default=None),
    )


def _finite(size: float) -> float | None:
    return size if math.isfinite(size) else None


def aligned(a: Record, b: Record) -> list[tuple[str, Rows, Rows]]:
    """The logs of two runs that belong together, by name where both have several."""
    shared = [name for name in a if name in b]
    if len(a) > 1 and len(b) > 1 and shared:
        return [(name, a[name], b[name]) for name in shared]
    names = shared * 2 or [*list(a)[:1], *list(b)[:1]]
    return [("", a[names[0]], b[names[1]])] if a and b else []


def _difference(x: Number, y: Number) -> float:
    """The relative difference; 0 for two numbers that may be one, as they were printed."""
    if not (math.isfinite(x.value) and math.isfinite(y.value)):
        both = not (math.isfinite(x.value) or math.isfinite(y.value))
        return 0.0 if both else math.inf
    off = abs(x.value - y.value)
    if off <= 0.501 * max(x.quantum, y.quantum):
        return 0.0
    return off / max(abs(x.value), abs(y.value))
