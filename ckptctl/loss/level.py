"""Compare the levels of loss and gradient norm before and after a resume.

The level of the loss is the weakest evidence, and often the only one: after a clean stop
no step was logged twice. The median of the first rows after the resume is compared with
the median of the last rows before it. A healthy loss falls, so a flat baseline with a
test in one direction is safe; an extrapolated slope raises false alarms. The same
comparison at earlier places of the log, where nothing happened, shows how far the median
moves without a resume. The comparison does not detect rises below `smallest_jump`: lost
optimizer state, lost random numbers, or repeated data.

Differences are relative. A loss is measured by its logarithm, so a difference of 0.01 is
one percent; a loss that can be zero or negative is measured in units of its usual size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from statistics import median

from ckptctl.findings import Finding
from ckptctl.logs.rows import Number, Row
from ckptctl.loss.resumes import LoggedResume

N_NOISE = 60
"""The noise is measured on so many rows, the last before the resume."""
FLOOR = 1e-4
"""The least noise that is assumed: no measured run had less."""

_MAD = 1.4826  # MADs in one standard deviation of a normal distribution
_HALF_WINDOW = 4

MIN_BEFORE = 20
"""Rows with a loss that are needed before the resume."""
WINDOWS = (5, 10, 20)
"""The numbers of rows after the resume whose medians are compared."""
LEAST_RISE = 0.02
"""Relative to the loss: smaller rises happen in healthy runs."""

LEAST_DROP = 0.5
"""Of the logarithm of the loss, or of its usual size: at an epoch of a fine-tuning, a loss may fall
by 30 %."""
_N_SAME = 20  # rows
_TIMES_SAME = 4
_ABOVE_ZERO = 20  # units of the last digit

_N_BASE = 20
_N_RECENT = 300
_MAX_PLACEBOS = 80
_MEDIAN_LOSS = 1.57  # variance of a median over that of a mean
_N_SPIKES = 20
_SPIKE = math.log(1.5)

# Gradient norm.
_N_FIRST = 5
_GRAD_LEAST = 0.25  # relative
_GRAD_PEAK = 3.0  # times the largest before

Measure = Callable[[float], float]


def measure_for(losses: Sequence[float]) -> Measure:
    """A function that maps losses to numbers whose differences are relative."""
    if all(loss > 0 for loss in losses):
        return math.log
    scale = median(abs(loss) for loss in losses) or 1.0
    return lambda loss: loss / scale


def relative_for(measure: Measure) -> Measure:
    """A function that makes a difference of two measured losses relative to the first of them."""
    return math.expm1 if measure is math.log else float


def finite(rows: Sequence[Row]) -> list[tuple[Row, Number]]:
    """The rows with a finite loss, each with that loss."""
    return [(row, row.loss) for row in rows if row.loss and math.isfinite(row.loss.value)]


def rounding_of(numbers: Sequence[Number]) -> float:
    """The rounding error of printing, relative to the loss: half a unit of the last digit."""
    relative = [number.quantum / (2 * abs(number.value)) for number in numbers if number.value]
    return median(relative) if relative else 0.0


def noise_of(values: Sequence[float], rounded: float) -> float:
    """The standard deviation of one row about the trend, robust against outliers.

    Differences of neighbours measure fast noise, distances from a running median measure
    slow noise; the larger one is taken, and at least the rounding error.
    """
    recent = values[-N_NOISE:]
    steps = [abs(b - a) for a, b in pairwise(recent)]
    by_steps = _MAD * median(steps) / math.sqrt(2) if steps else 0.0
    about = []
    for i, value in enumerate(recent):
        window = recent[max(0, i - _HALF_WINDOW) : i + _HALF_WINDOW + 1]
        about.append(abs(value - median(window)))
    by_trend = 1.1 * _MAD * median(about) if about else 0.0
    return max(by_steps, by_trend, rounded, FLOOR)


@dataclass(frozen=True, slots=True)
class Shift:
    """The median of the first `n_rows` rows after the resume against that before."""

    n_rows: int
    """How many rows after the resume."""
    found: float
    """The relative rise of the loss."""
    threshold: float
    """The largest relative rise of a healthy run."""
    excess: float
    """The rise in units of the threshold; of a loss above zero, their logarithms are compared."""


@dataclass(frozen=True, slots=True)
class LossLevel:
    """The level of the loss before and after a resume."""

    noise: float
    """Standard deviation of one row, relative."""
    rounding: float
    """The rounding error of printing, relative to the loss."""
    n_before: int
    """Rows with a loss before the resume."""
    n_after: int
    """Rows with a loss after it."""
    base: float | None
    """The loss before, not relative; null where there is none."""
    shifts: tuple[Shift, ...]
    """Empty where there were too few rows."""
    n_spikes: int
    """First rows after the resume that are far above all recent ones."""

    @property
    def smallest_jump(self) -> float | None:
        """The smallest relative rise of the loss that would have been detected."""
        return min((shift.threshold for shift in self.shifts), default=None)


def measure_level(before: Sequence[Row], after: Sequence[Row]) -> LossLevel:
    """Compare the level of the loss after a resume with the level before it."""
    earlier, later = finite(before), finite(after)
    measure = measure_for([number.value for _, number in (*earlier, *later)])
    y = [measure(number.value) for _, number in earlier]
    z = [measure(number.value) for _, number in later]
    rounded = rounding_of([number for _, number in earlier[-N_NOISE:]])
    noise = noise_of(y, rounded)
    enough = len(y) >= MIN_BEFORE
    relative = relative_for(measure)
    shifts = []
    for n in WINDOWS:
        if enough and len(z) >= n:
            rise, threshold = median(z[:n]) - median(y[-_N_BASE:]), _threshold(y, noise, n)
            shifts.append(Shift(n, relative(rise), relative(threshold), rise / threshold))
    # The loss at the start of a run is high, so only recent rows define a spike.
    high = max(y[-N_NOISE:]) + max(_SPIKE, 6 * noise) if enough else math.inf
    return LossLevel(
        noise=noise,
        rounding=rounded,
        n_before=len(y),
        n_after=len(z),
        base=median(number.value for _, number in earlier[-_N_BASE:]) if earlier else None,
        shifts=tuple(shifts),
        n_spikes=sum(value > high for value in z[:_N_SPIKES]),
    )


def is_above(after: Sequence[Row], before: Sequence[Row], noise: float) -> bool:
    """Whether the first rows `after` are above the last rows `before`, by more than noise.

    The rise may begin within the longest of the windows.
    """
    y = [number.value for _, number in finite(before)][-WINDOWS[0] :]
    z = [number.value for _, number in finite(after)][: WINDOWS[-1]]
    if not y or not z:
        return False
    measure = measure_for([*y, *z])
    for n in WINDOWS:
        rise = median(map(measure, z[:n])) - median(map(measure, y))
        error = noise * math.sqrt(_MEDIAN_LOSS / len(y) + _MEDIAN_LOSS / min(n, len(z)))
        if rise > max(4 * error, LEAST_RISE):
            return True
    return False


def placebos(y: Sequence[float], n: int) -> list[float]:
    """The same comparison at rows before the resume, where nothing happened."""
    recent = y[-_N_RECENT:]
    cuts = range(_N_BASE, len(recent) - n + 1)
    step = max(1, -(-len(cuts) // _MAX_PLACEBOS))
    return [
        median(recent[cut : cut + n]) - median(recent[cut - _N_BASE : cut]) for cut in cuts[::step]
    ]


def _threshold(y: Sequence[float], noise: float, n: int) -> float:
    by_noise = 4 * noise * math.sqrt(_MEDIAN_LOSS / n + _MEDIAN_LOSS / _N_BASE)
    by_placebo = placebos(y, n)
    # A few comparisons underestimate the largest rise.
    margin = 1.25 if len(by_placebo) >= 60 else 1.6
    return max(by_noise, LEAST_RISE, margin * max(by_placebo, default=0.0))


def check_collapse(resume: LoggedResume) -> Iterator[Finding]:
    """Yield `loss.collapse` where the loss falls as it never did, or is one value at the end.

    A loss that falls by less than `LEAST_DROP`, or no faster than in the rows before the resume,
    is none; nor are zeros and equal values of a log that had as many in a row.
    """
    earlier, later = finite(resume.before), finite(resume.after)
    if len(earlier) < MIN_BEFORE or len(later) < WINDOWS[0]:
        return
    same = _same_at_end(earlier, later)
    if same:
        row, number = same[0]
        yield Finding(
            "loss.collapse",
            str(row.position),
            f"the last {len(same):,} rows from step {row.step:,} on all have the loss "
            f"{number.value:.7g}; the loss varied before",
            expected="a loss that differs from step to step",
            found=f"{number.value:.7g} in {len(same):,} rows",
        )
        return
    measure = measure_for([number.value for _, number in (*earlier, *later)])
    y = [measure(number.value) for _, number in earlier]
    z = [measure(number.value) for _, number in later]
    noise = noise_of(y, rounding_of([number for _, number in earlier[-N_NOISE:]]))
    n_unseen = (later[0][0].step - earlier[-1][0].step) / max(1, resume.interval) - 1
    stretch = 1 + max(0.0, n_unseen) / _N_BASE
    drops = []
    for n in (n for n in WINDOWS if n <= len(z)):
        drop = median(y[-_N_BASE:]) - median(z[:n])
        usual = [-rise for rise in placebos(y, n)] or [median(y[: len(y) // 2]) - median(y[-n:])]
        by_noise = 4 * noise * math.sqrt(_MEDIAN_LOSS / n + _MEDIAN_LOSS / _N_BASE)
        if drop <= stretch * max(LEAST_DROP, by_noise, 1.6 * max(usual)):
            return
        drops.append(drop)
    least = relative_for(measure)(-min(drops))
    yield Finding(
        "loss.collapse",
        str(resume.position),
        f"the loss of the first {min(len(z), WINDOWS[-1])} rows is {signed(least)} from the one "
        "before; it never fell as far in as many rows",
        expected="a loss at the level of the rows before",
        found=signed(least),
    )


def _same_at_end(
    earlier: Sequence[tuple[Row, Number]], later: Sequence[tuple[Row, Number]]
) -> list[tuple[Row, Number]]:
    """The rows at the end that have one loss, where that is unlike the rows before."""
    end = later[-1][1].value
    same = list(takewhile(lambda pair: pair[1].value == end, reversed(later)))[::-1]
    values = [number.value for _, number in (*earlier, *later[: -len(same)])]
    longest = max((len(list(run)) for _, run in groupby(values)), default=0)
    recent = earlier[-_N_BASE:]
    # A loss that is small against its last digit becomes zero by rounding.
    is_new_zero = end == 0 and all(
        abs(number.value) > _ABOVE_ZERO * number.quantum for _, number in recent
    )
    least = WINDOWS[0] if is_new_zero and 0 not in values else _N_SAME
    return same if len(same) >= max(least, _TIMES_SAME * longest) else []


def check_grad_norm(resume: LoggedResume) -> Iterator[Finding]:
    """Yield `loss.grad-norm` where the gradient norm of the first rows is far above that before.

    It is more sensitive than the loss: a bad conversion to another world size raised the
    loss by 5 % and the gradient norm by a factor of ten.
    """
    before = _logs(resume.before)
    after = _logs(resume.after[:_N_FIRST])
    if len(before) < _N_BASE or len(after) < _N_FIRST:
        return
    noise = noise_of(before, 0.0)
    error = noise * math.sqrt(_MEDIAN_LOSS / _N_FIRST + _MEDIAN_LOSS / _N_BASE)
    by_placebo = max(placebos(before, _N_FIRST), default=0.0)
    base = median(before[-_N_BASE:])
    rise = median(after) - base
    peak = max(after) - max(before)
    if rise <= max(4 * error, _GRAD_LEAST, 1.25 * by_placebo) and peak <= math.log(_GRAD_PEAK):
        return
    row = resume.after[0]
    yield Finding(
        "loss.grad-norm",
        str(row.position),
        f"the gradient norm of the first {_N_FIRST} rows is {math.exp(rise):.2g} times that "
        "before the resume",
        expected=f"about {math.exp(base):.4g}",
        found=f"{math.exp(median(after)):.4g}, at most {math.exp(max(after)):.4g}",
    )


def _logs(rows: Sequence[Row]) -> list[float]:
    return [
        math.log(row.grad_norm.value)
        for row in rows
        if row.grad_norm and row.grad_norm.value > 0 and math.isfinite(row.grad_norm.value)
    ]


def share(value: float) -> str:
    """A fraction in percent, with two digits, or all before the point."""
    return f"{100 * value:{_digits(value)}} %"


def signed(value: float) -> str:
    """A relative difference in percent, with its sign and two digits, or all before the point."""
    return f"{100 * value:+{_digits(value)}} %"


def _digits(value: float) -> str:
    # `.2g` writes 113 % as 1.1e+02 %.
    return ".2g" if abs(value) < 0.995 else ",.0f"
