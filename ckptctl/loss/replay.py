"""Compare the steps that were logged twice, before and after a resume.

A job that dies some steps after its checkpoint trains these steps again. From the same
weights, optimizer, random numbers and data it logs the same losses, to the last digit or
up to the order in which a GPU adds. This is the strongest evidence in a log. The kind of
difference shows what was lost: an equal first step followed by a drift means that the
update differs; the same batches at a higher loss mean wrong weights; differences as large
as those between batches mean other batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median

from ckptctl.loss.level import Measure, finite, measure_for, noise_of, rounding_of
from ckptctl.loss.rows import Row

MIN_ROWS = 3
"""The fewest steps logged twice from which anything is concluded."""
GOOD_ROWS = 5
"""With so many steps, 97 % or more of all lost optimizer states are detected."""
MAX_ROWS = 50
"""The most steps that are compared: later ones diverge chaotically, whatever the resume did."""

FINE = 1e-4
"""The largest relative rounding error with which an equality is evidence."""

# Measured on resumes of Megatron-LM on three generations of GPUs: the median of the
# relative difference was 3e-6, at most 2e-5 in nine of ten, never above 5.5e-4.
_EXACT, _SAME_MEDIAN, _SAME_MOST = 1e-6, 3e-4, 1.5e-3
# Numerical noise shrinks in a mean of several steps, at most to a third.
_MOST_AVERAGED = 10
_BY_CHANCE = 0.05
# An update that differs shows from the second step on; the first is equal to the last digit.
_DRIFT, _DRIFT_ROWS = 2e-4, 12
_SAME_BATCHES_FEW, _SAME_BATCHES = 0.15, 0.35  # of the noise between batches
_SAME_SHAPE = 0.9
_SURE = 3.0  # standard errors
_MAD = 1.4826
_MEDIAN_LOSS = 1.57


class Agreement(str, Enum):
    """How the steps that were logged twice compare."""

    NONE = "none"
    FEW = "few"
    IDENTICAL = "identical"
    WITHIN_NUMERICS = "within-numerics"
    DRIFT = "drift"
    HIGHER = "higher"
    LOWER = "lower"
    DIFFERENT = "different"
    OTHER_DATA = "other-data"


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step that was logged twice; `difference` is relative to the loss before.

    `averaged` means that the second log printed a mean with the step before, and that the
    loss of the step alone was computed from it.
    """

    step: int
    before: Row
    after: Row
    difference: float
    averaged: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """The steps that were logged twice, and how they compare.

    `rounding` is the relative error of printing, `noise` the standard deviation from one
    batch to the next. `median` and `most` are of the differences without sign. `middle` is
    the median with its sign, `z_score` the same in units of its standard error.
    `not_compared` are steps whose two rows are means over different numbers of steps.
    """

    agreement: Agreement
    rows: tuple[Replayed, ...]
    rounding: float = 0.0
    noise: float = 0.0
    median: float = 0.0
    most: float = 0.0
    middle: float = 0.0
    z_score: float = 0.0
    not_compared: tuple[int, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the differences are no larger than those of the order of additions."""
        return self.agreement in (Agreement.IDENTICAL, Agreement.WITHIN_NUMERICS)

    @property
    def fine_enough(self) -> bool:
        """Whether the log prints enough digits for an equality to be evidence."""
        return self.rounding <= FINE

    @property
    def first_is_equal(self) -> bool:
        """Whether the first step agrees: then weights, batch and random numbers are the same."""
        return bool(self.rows) and abs(self.rows[0].difference) <= _same_median(self.rounding)


def compare_replay(
    before: Sequence[Row],
    overwritten: Sequence[Row],
    after: Sequence[Row],
    *,
    interval: int = 1,
) -> Replay:
    """Compare the rows of the steps that were logged before and after.

    `interval` is the number of steps between two rows: a log with one row in ten steps
    usually prints the mean of ten.
    """
    pairs, not_compared = _pairs(overwritten, after)
    if not pairs:
        return Replay(Agreement.NONE, (), not_compared=not_compared)
    # The noise is that of the run, so only rows from before the resume count.
    untouched = [number for _, number in finite((*before, *overwritten))]
    numbers = [n for row in pairs for n in (row[0].loss, row[1].loss) if n is not None]
    measure = measure_for([number.value for number in (*untouched, *numbers)])
    rounding = rounding_of(numbers)
    noise = noise_of([measure(number.value) for number in untouched], rounding)
    rows = _without_first_mean(
        [_replayed(old, new, measure(_loss(new)) - measure(_loss(old))) for old, new in pairs],
        measure,
        rounding,
    )
    d = [row.difference for row in rows]
    shapes = (
        [measure(_loss(row.before)) for row in rows],
        [measure(_loss(row.after)) for row in rows],
    )
    agreement = _agreement(d, shapes, rounding, noise, max(1, interval))
    other = agreement is Agreement.OTHER_DATA
    return Replay(
        agreement=agreement,
        rows=rows,
        rounding=rounding,
        noise=noise,
        median=median(abs(each) for each in d),
        most=max(abs(each) for each in d),
        middle=median(d),
        z_score=median(d) / _error(d, noise if other else rounding),
        not_compared=not_compared,
    )


def _pairs(
    overwritten: Sequence[Row], after: Sequence[Row]
) -> tuple[list[tuple[Row, Row]], tuple[int, ...]]:
    old = {row.step: row for row, _ in finite(overwritten)}
    pairs: list[tuple[Row, Row]] = []
    not_compared: list[int] = []
    for row, _ in finite(after):
        earlier = old.get(row.step)
        if earlier is None:
            continue
        if _differently_averaged(earlier, row):
            not_compared.append(row.step)
        else:
            pairs.append((earlier, row))
    return pairs[:MAX_ROWS], tuple(not_compared)


def _differently_averaged(a: Row, b: Row) -> bool:
    return a.interval is not None and b.interval is not None and a.interval != b.interval


def _loss(row: Row) -> float:
    return row.loss.value if row.loss is not None else math.nan


def _replayed(old: Row, new: Row, difference: float, *, averaged: bool = False) -> Replayed:
    return Replayed(old.step, old, new, difference, averaged)


def _without_first_mean(
    rows: Sequence[Replayed], measure: Measure, rounding: float
) -> tuple[Replayed, ...]:
    """Undo the mean that Megatron prints in the second row of a process.

    That row is the mean of the first two steps. The mean is undone only where the row then
    agrees, so a row that differs for another reason still differs.
    Source: NVIDIA/Megatron-LM 6237.
    """
    if len(rows) < 2 or abs(rows[0].difference) > _same_median(rounding):
        return tuple(rows)
    first, second = rows[0], rows[1]
    own = 2 * _loss(second.after) - _loss(first.after)
    if abs(second.difference) <= _same_median(rounding) or own <= 0:
        return tuple(rows)
    difference = measure(own) - measure(_loss(second.before))
    if abs(difference) > 2 * _same_median(rounding):
        return tuple(rows)
    undone = _replayed(second.before, second.after, difference, averaged=True)
    return (first, undone, *rows[2:])


def _agreement(
    d: Sequence[float],
    shapes: tuple[list[float], list[float]],
    rounding: float,
    noise: float,
    interval: int,
) -> Agreement:
    if len(d) < MIN_ROWS:
        return Agreement.FEW
    sizes = [abs(each) for each in d]
    if max(sizes) <= max(_EXACT, 2 * rounding):
        return Agreement.IDENTICAL
    if sizes[0] <= max(_EXACT, rounding) and _rms(d[1:_DRIFT_ROWS]) > max(_DRIFT, 3 * rounding):
        return Agreement.DRIFT
    same_median = _same_median(rounding, interval)
    same_most = max(_SAME_MOST / math.sqrt(min(interval, _MOST_AVERAGED)), 5 * rounding)
    if median(sizes) <= same_median and max(sizes) <= same_most:
        return Agreement.WITHIN_NUMERICS
    same_batches = _same_batches(d, shapes, noise)
    # With coarse printing or similar batches, other batches may begin equal by chance.
    is_evidence = same_median < _BY_CHANCE * math.sqrt(2) * noise
    if sizes[0] <= same_median and (is_evidence or same_batches):
        return Agreement.DRIFT
    if not same_batches:
        return Agreement.OTHER_DATA
    if len(d) < GOOD_ROWS:
        return Agreement.DIFFERENT  # so few rows can rise and fall together by chance
    middle = median(d)
    if middle > _SURE * _error(d, rounding):
        return Agreement.HIGHER
    return Agreement.LOWER if middle < 0 else Agreement.DIFFERENT


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(fmean(value * value for value in values))


def _error(d: Sequence[float], noise: float) -> float:
    """The standard error of the median, from the spread of the differences or `noise`."""
    middle = median(d)
    spread = _MAD * median(abs(each - middle) for each in d)
    return max(spread, math.sqrt(2) * noise, _EXACT) * math.sqrt(_MEDIAN_LOSS / len(d))


def _same_median(rounding: float, interval: int = 1) -> float:
    return max(_SAME_MEDIAN / math.sqrt(min(interval, _MOST_AVERAGED)), 3 * rounding)


def _same_batches(
    d: Sequence[float], shapes: tuple[list[float], list[float]], noise: float
) -> bool:
    """Whether both logs rise and fall together, as over the same batches."""
    spread = math.sqrt(fmean((each - median(d)) ** 2 for each in d))
    ratio = spread / (math.sqrt(2) * noise)
    if ratio < (_SAME_BATCHES_FEW if len(d) < GOOD_ROWS else _SAME_BATCHES):
        return True
    return len(d) >= GOOD_ROWS and _correlation(*map(_detrended, shapes)) > _SAME_SHAPE


def _detrended(values: Sequence[float]) -> list[float]:
    n = len(values)
    middle, mean = (n - 1) / 2, fmean(values)
    slope = sum((i - middle) * (v - mean) for i, v in enumerate(values))
    slope /= sum((i - middle) ** 2 for i in range(n))
    return [v - mean - slope * (i - middle) for i, v in enumerate(values)]


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    norm = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else 0.0
