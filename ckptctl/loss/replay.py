"""Compare the steps that were logged twice, before and after a resume.

A job that dies some steps after its checkpoint trains these steps again. From the same
weights, optimizer, random numbers and data it logs the same losses, to the last digit or
up to the order in which a GPU adds. This is the strongest evidence in a log. The kind of
difference shows what was lost: an equal first step followed by a drift means that the
update differs; the same batches at a higher loss mean wrong weights; differences as large
as those between batches mean other batches.

Equal rows are evidence only where they could have differed: the loss has to vary from row
to row, the log has to print enough digits, and another attempt has to have trained the
steps. Loggers and log shippers write rows twice; a copy repeats the times as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median

from ckptctl.logs.rows import Number, Row
from ckptctl.loss.level import finite, measure_for, noise_of, relative_for, rounding_of
from ckptctl.loss.resumes import LoggedResume
from ckptctl.loss.segments import Boundary

MIN_ROWS = 3
"""The fewest steps logged twice from which anything is concluded, but for equal ones."""
EXACT_ROWS = 2
"""So many are enough where the log prints the loss in single precision and they are equal."""
GOOD_ROWS = 5
"""With so many steps, 97 % or more of all lost optimizer states are detected."""
MAX_ROWS = 50
"""The most steps that are compared: later ones diverge chaotically, whatever the resume did."""

FINE = 1e-4
"""The largest relative rounding error with which an equality is evidence."""
FINE_DIGITS = "five significant digits"
"""What a log has to print for it, whatever the loss is."""
# With four significant digits the loss alone is not evidence. None of 380 faulty resumes
# repeated five or more losses and gradient norms to four digits.
_COARSE = 1e-3

EXACT = 1e-6
"""What single precision leaves of an exact resume, relative to the loss."""
# Measured on resumes of Megatron-LM on three generations of GPUs: the median of the
# relative difference was 3e-6, at most 2e-5 in nine of ten, never above 5.5e-4.
_SAME_MEDIAN, _SAME_MOST = 3e-4, 1.5e-3
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

# No process ends, starts, loads a checkpoint and trains a step in less time.
_LEAST_START_S = 5.0

# Values vary where they would repeat by chance less often than this.
_BY_CHANCE_LOSS, _BY_CHANCE_TIME = 1e-2, 1e-3
_N_AMONG = 100  # rows
# Gradient norms before any update differ by less than this through the order of additions.
_SAME_NORM = 5e-3


class Agreement(StrEnum):
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


class RowOrigin(StrEnum):
    """Where the second rows of the steps that were logged twice are from.

    `RETRAINED`: digits, times or the attempt differ, so the steps were trained again.
    `COPIED`: the times repeat, or the log ends with rows that repeat the rows before them.
    `ASSUMED`: equal rows without times, where something besides the rows shows another
    attempt. `UNKNOWN`: equal rows without times, and nothing shows another attempt.
    """

    RETRAINED = "retrained"
    ASSUMED = "assumed"
    UNKNOWN = "unknown"
    COPIED = "copied"


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step that was logged twice; `difference` is relative to the loss before."""

    step: int
    """The training step."""
    before: Row
    """The row of the step before the resume."""
    after: Row
    """The row of the step after it."""
    difference: float
    """The difference of the second loss from the first, relative to the first."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The steps that were logged twice, and how they compare."""

    agreement: Agreement
    """How the two runs of the steps compare."""
    rows: tuple[Replayed, ...]
    """The rows, in the order of steps."""
    rounding: float = 0.0
    """The rounding error of printing, relative to the loss."""
    noise: float = 0.0
    """The standard deviation from one batch to the next, relative."""
    median: float = 0.0
    """The median of the differences without sign."""
    most: float = 0.0
    """The largest difference without sign."""
    middle: float = 0.0
    """The median of the differences with sign."""
    z_score: float = 0.0
    """That median in units of its standard error."""
    not_compared: tuple[int, ...] = ()
    """Steps whose rows are means over different numbers of steps."""
    origin: RowOrigin = RowOrigin.UNKNOWN
    """Where the second rows are from: another attempt (shown by the rows, or assumed because a
    file, a line or the caller states it), a copy, or unknown."""
    copied_because: str = ""
    """Why the second rows are a copy; empty where they are not known to be one."""
    varies: bool = False
    """The loss differs from step to step, so that an equality is evidence."""
    fine_enough: bool = False
    """The log prints enough digits for an equality to be evidence."""
    same_first_norm: bool | None = None
    """The gradient norms of the first step, before any update, agree; null where they were not
    logged."""

    @property
    def is_proof(self) -> bool:
        """Whether the steps logged twice prove that the resume was correct."""
        trained = self.origin in (RowOrigin.RETRAINED, RowOrigin.ASSUMED)
        return self.agrees and self.fine_enough and self.varies and trained

    @property
    def agrees(self) -> bool:
        """Whether the differences are no larger than those of the order of additions."""
        return self.agreement in (Agreement.IDENTICAL, Agreement.WITHIN_NUMERICS)

    @property
    def first_is_equal(self) -> bool:
        """Whether the first step agrees: then weights, batch and random numbers are the same."""
        return bool(self.rows) and abs(self.rows[0].difference) <= _same_median(self.rounding)

    @property
    def first_is_exact(self) -> bool:
        """Whether the first step agrees to the last digit: noise, too, would be in it."""
        return bool(self.rows) and abs(self.rows[0].difference) <= max(EXACT, 2 * self.rounding)


def compare_replay(resume: LoggedResume) -> Replay:
    """Compare the rows of the steps that were logged before and after a resume."""
    pairs, not_compared = _pairs(resume.overwritten, resume.after)
    if not pairs:
        return Replay(Agreement.NONE, (), not_compared=not_compared)
    # The noise is that of the run, so only rows from before the resume count.
    earlier = (*resume.before, *resume.overwritten)
    untouched = [number for _, number in finite(earlier)]
    numbers = [n for row in pairs for n in (row[0].loss, row[1].loss) if n is not None]
    measure = measure_for([number.value for number in (*untouched, *numbers)])
    rounding = rounding_of(numbers)
    noise = noise_of([measure(number.value) for number in untouched], rounding)
    shapes = [measure(_loss(old)) for old, _ in pairs], [measure(_loss(new)) for _, new in pairs]
    d = [new - old for old, new in zip(*shapes, strict=True)]
    # The rules compare logarithms; a reader compares the two losses of the row.
    relative = relative_for(measure)
    rows = tuple(
        Replayed(old.step, old, new, relative(change))
        for (old, new), change in zip(pairs, d, strict=True)
    )
    # A log with one row in ten steps usually prints the mean of ten.
    agreement = _agreement(d, shapes, rounding, noise, max(1, resume.interval))
    same_norm = _same_first_norm(rows[0])
    if agreement is Agreement.DRIFT and same_norm is False:
        # The norm of the first step is computed before any update.
        agreement = Agreement.DIFFERENT
    other = agreement is Agreement.OTHER_DATA
    origin, copied_because = _origin(resume, rows, earlier[-_N_AMONG - len(rows) :])
    recent = [measure(number.value) for number in untouched[-_N_AMONG - len(pairs) :]]
    most = max(abs(change) for change in d)
    sizes = [abs(row.difference) for row in rows]
    return Replay(
        agreement=agreement,
        rows=rows,
        rounding=rounding,
        noise=noise,
        median=median(sizes),
        most=max(sizes),
        middle=relative(median(d)),
        z_score=median(d) / _error(d, noise if other else rounding),
        not_compared=not_compared,
        origin=origin,
        copied_because=copied_because,
        varies=_varies(shapes[0], recent, max(EXACT, 2 * rounding, most)),
        fine_enough=rounding <= FINE or _norms_repeat(rows, rounding),
        same_first_norm=same_norm,
    )


def _origin(
    resume: LoggedResume, rows: Sequence[Replayed], earlier: Sequence[Row]
) -> tuple[RowOrigin, str]:
    """Determine whether another attempt trained the steps, or rows were written twice, and why."""
    attempts = {row.before.attempt for row in rows}, {row.after.attempt for row in rows}
    if None not in attempts[0] | attempts[1] and not attempts[0] & attempts[1]:
        return RowOrigin.RETRAINED, ""
    if any(row.difference or _norms_differ(row) for row in rows):
        return RowOrigin.RETRAINED, ""
    if _starts_at_once(resume):
        return RowOrigin.COPIED, "they follow the rows before them sooner than a process can start"
    differs = False
    for field in _TIMES:
        pairs = [(_time(row.before, field), _time(row.after, field)) for row in rows]
        pairs = [pair for pair in pairs if None not in pair]
        if any(a != b for a, b in pairs):
            differs = True
        elif len(pairs) == len(rows) and _time_repeats(field, [a for a, _ in pairs], earlier):
            return RowOrigin.COPIED, "their times repeat, which would not happen in another attempt"
    if differs:
        return RowOrigin.RETRAINED, ""
    last_step = resume.last_step or resume.after[-1].step
    is_tail = last_step <= resume.overwritten[-1].step
    if is_tail and resume.boundary is not Boundary.CANARY:
        last = resume.overwritten[-1].step
        return RowOrigin.COPIED, f"no time differs in them and no step follows {last:,}"
    return (RowOrigin.ASSUMED if resume.is_of_another_attempt else RowOrigin.UNKNOWN), ""


def _starts_at_once(resume: LoggedResume) -> bool:
    """Whether the rows follow those before with no time for a start, and nothing marks one.

    A log shipper that sends lines again stamps them with its own clock.
    """
    if resume.boundary in (Boundary.FILE, Boundary.MARKER, Boundary.CANARY):
        return False
    times = [row.at for row in (*resume.overwritten, resume.after[0]) if row.at is not None]
    if len(times) < MIN_ROWS or resume.after[0].at is None:
        return False
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return 0 <= gaps[-1] <= min(2 * median(gaps), _LEAST_START_S)


_TIMES = ("at", "step_time_s", "throughput", "device_throughput", "mfu")
"""The fields of which another attempt has other values."""


def _time(row: Row, field: str) -> float | None:
    value: Number | float | None = getattr(row, field)
    return value.value if isinstance(value, Number) else value


def _time_repeats(field: str, values: Sequence[float | None], earlier: Sequence[Row]) -> bool:
    """Whether equal times show a copy: a clock always, a duration where it would have varied."""
    if field == "at":
        return True
    among = [value for row in earlier if (value := _time(row, field)) is not None]
    return _vary([value for value in values if value is not None], among, _BY_CHANCE_TIME)


def _varies(losses: Sequence[float], among: Sequence[float], within: float) -> bool:
    """Whether equal losses are evidence: a loss that only goes to and fro would repeat."""
    levels = sorted(losses)
    n_levels = 1 + sum(b - a > within for a, b in pairwise(levels))
    return n_levels >= min(MIN_ROWS, len(losses)) and _vary(losses, among, _BY_CHANCE_LOSS, within)


def _vary(
    values: Sequence[float], among: Sequence[float], by_chance: float, within: float = 0.0
) -> bool:
    """Whether values would hardly repeat by chance, as often as each occurs in `among`.

    Values that differ by no more than `within` are taken as equal.
    """

    def share(value: float, of: Sequence[float]) -> float:
        # The value itself is among them; half a further one is added for those not seen.
        same = sum(abs(other - value) <= within for other in of)
        return (max(0, same - 1) + 0.5) / max(1, len(of))

    if max(share(value, values) for value in values) > 0.5:
        return False
    return math.prod(share(value, among) for value in values) < by_chance


def _same_first_norm(first: Replayed) -> bool | None:
    a, b = first.before.grad_norm, first.after.grad_norm
    if a is None or b is None:
        return None
    return abs(a.value - b.value) <= max(a.quantum, b.quantum, _SAME_NORM * abs(a.value))


def _norms_differ(row: Replayed) -> bool:
    a, b = row.before.grad_norm, row.after.grad_norm
    return a is not None and b is not None and a.value != b.value


def _norms_repeat(rows: Sequence[Replayed], rounding: float) -> bool:
    """Whether losses of few digits and gradient norms are all equal, which is evidence as well."""
    norms = [row.before.grad_norm for row in rows if row.before.grad_norm and row.after.grad_norm]
    if len(norms) < len(rows) or len(rows) < GOOD_ROWS:
        return False
    if any(row.difference or _norms_differ(row) for row in rows):
        return False
    values = [norm.value for norm in norms]
    fine = max(rounding, rounding_of(norms)) <= _COARSE
    return fine and _vary(values, values, _BY_CHANCE_LOSS)


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
        if None in (earlier.interval, row.interval) or earlier.interval == row.interval:
            pairs.append((earlier, row))
        else:
            not_compared.append(row.step)
    return pairs[:MAX_ROWS], tuple(not_compared)


def _loss(row: Row) -> float:
    return row.loss.value if row.loss is not None else math.nan


def _agreement(
    d: Sequence[float],
    shapes: tuple[list[float], list[float]],
    rounding: float,
    noise: float,
    interval: int,
) -> Agreement:
    sizes = [abs(change) for change in d]
    if len(d) < MIN_ROWS:
        exact = len(d) >= EXACT_ROWS and max(sizes) <= EXACT and rounding <= EXACT / 2
        return Agreement.IDENTICAL if exact else Agreement.FEW
    if max(sizes) <= max(EXACT, 2 * rounding):
        return Agreement.IDENTICAL
    same_batches = _same_batches(d, shapes, noise)
    # With coarse printing or similar batches, other batches may begin equal by chance.
    by_chance = _BY_CHANCE * math.sqrt(2) * noise
    equal = max(EXACT, rounding)
    begins_equal = sizes[0] <= equal and (equal < by_chance or same_batches)
    later = math.sqrt(fmean(change * change for change in d[1:_DRIFT_ROWS]))
    if begins_equal and later > max(_DRIFT, 3 * rounding):
        return Agreement.DRIFT
    same_median = _same_median(rounding, interval)
    same_most = max(_SAME_MOST / math.sqrt(min(interval, _MOST_AVERAGED)), 5 * rounding)
    if median(sizes) <= same_median and max(sizes) <= same_most:
        return Agreement.WITHIN_NUMERICS
    if sizes[0] <= same_median and (same_median < by_chance or same_batches):
        return Agreement.DRIFT
    if not same_batches:
        return Agreement.OTHER_DATA
    if len(d) < GOOD_ROWS:
        return Agreement.DIFFERENT  # so few rows can rise and fall together by chance
    middle, sure = median(d), _SURE * _error(d, rounding)
    if abs(middle) <= sure:
        return Agreement.DIFFERENT
    return Agreement.HIGHER if middle > 0 else Agreement.LOWER


def _error(d: Sequence[float], noise: float) -> float:
    """The standard error of the median, from the spread of the differences or `noise`."""
    middle = median(d)
    spread = _MAD * median(abs(change - middle) for change in d)
    return max(spread, math.sqrt(2) * noise, EXACT) * math.sqrt(_MEDIAN_LOSS / len(d))


def _same_median(rounding: float, interval: int = 1) -> float:
    return max(_SAME_MEDIAN / math.sqrt(min(interval, _MOST_AVERAGED)), 3 * rounding)


def _same_batches(
    d: Sequence[float], shapes: tuple[list[float], list[float]], noise: float
) -> bool:
    """Whether both logs rise and fall together, as over the same batches."""
    spread = math.sqrt(fmean((change - median(d)) ** 2 for change in d))
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
