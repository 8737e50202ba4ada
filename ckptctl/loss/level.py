"""Compare the level of loss, gradient norm and throughput before and after a resume.

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
from enum import Enum
from itertools import pairwise
from statistics import median

from ckptctl.findings import Finding
from ckptctl.loss.resumes import Resume
from ckptctl.loss.rows import Number, Row
from ckptctl.loss.segments import ClockJump, Split

N_NOISE = 60
"""Rows that the noise is measured on: the last before the resume."""
FLOOR = 1e-4
"""No log is less noisy than that: a whole run was never seen to be."""

_MAD = 1.4826  # the standard deviation of a normal distribution is so many MADs
_HALF_WINDOW = 4

Measure = Callable[[float], float]


def measure_for(losses: Sequence[float]) -> Measure:
    """What turns losses into numbers whose differences are relative."""
    if all(loss > 0 for loss in losses):
        return math.log
    scale = median(abs(loss) for loss in losses) or 1.0
    return lambda loss: loss / scale


def finite(rows: Sequence[Row]) -> list[tuple[Row, Number]]:
    """The rows that hold a loss which is a number, each with it."""
    return [(row, row.loss) for row in rows if row.loss and math.isfinite(row.loss.value)]


def rounding(numbers: Sequence[Number]) -> float:
    """Half a unit of the last printed digit, relative to the loss: what printing hides."""
    relative = [number.quantum / (2 * abs(number.value)) for number in numbers if number.value]
    return median(relative) if relative else 0.0


def wobble(values: Sequence[float], rounded: float) -> float:
    """The standard deviation of one row about the trend, by means that outliers do not move.

    Neighbours that differ see fast noise, distances from a running median see slow noise;
    the larger counts, and never less than printing hides.
    """
    recent = values[-N_NOISE:]
    steps = [abs(b - a) for a, b in pairwise(recent)]
    by_steps = _MAD * median(steps) / math.sqrt(2) if steps else 0.0
    about = [abs(value - median(_window(recent, i))) for i, value in enumerate(recent)]
    by_trend = 1.1 * _MAD * median(about) if about else 0.0
    return max(by_steps, by_trend, rounded, FLOOR)


def _window(values: Sequence[float], i: int) -> Sequence[float]:
    return values[max(0, i - _HALF_WINDOW) : i + _HALF_WINDOW + 1]


MIN_BEFORE = 20
"""Rows with a loss that must stand before the resume."""
WINDOWS = (5, 10, 20)
"""So many rows after the resume are taken together."""
LEAST_RISE = 0.02
"""Relative to the loss: smaller rises happen in healthy runs."""

_N_BASE = 20
_N_RECENT = 300
_MAX_PLACEBOS = 80
_MEDIAN_LOSS = 1.57  # a median is so much less efficient than a mean
_N_SPIKES = 20
_SPIKE = math.log(1.5)


@dataclass(frozen=True, slots=True)
class Shift:
    """The median of `n_rows` rows after the resume against that before, both relative.

    `found` is how far it rose, `threshold` how far a healthy run may rise.
    """

    n_rows: int
    found: float
    threshold: float

    @property
    def excess(self) -> float:
        """`found` in units of the threshold."""
        return self.found / self.threshold


@dataclass(frozen=True, slots=True)
class Level:
    """The level of the loss before and after.

    `noise` is the standard deviation of one row, `rounding` what printing hides, both
    relative. `n_before` and `n_after` are rows with a loss. `shifts` are empty where
    there were too few. `n_spikes` of the first 20 rows stand far above all recent ones.
    `base` is the loss before, in its own unit.
    """

    noise: float
    rounding: float
    n_before: int
    n_after: int
    base: float | None
    shifts: tuple[Shift, ...]
    n_spikes: int

    @property
    def smallest_jump(self) -> float | None:
        """A rise of the loss below this share of it would not have been seen."""
        return min((math.expm1(shift.threshold) for shift in self.shifts), default=None)


def measure_level(before: Sequence[Row], after: Sequence[Row]) -> Level:
    """Compare the level of the loss after a resume with that before."""
    earlier, later = finite(before), finite(after)
    measure = measure_for([number.value for _, number in (*earlier, *later)])
    y = [measure(number.value) for _, number in earlier]
    z = [measure(number.value) for _, number in later]
    rounded = rounding([number for _, number in earlier[-N_NOISE:]])
    noise = wobble(y, rounded)
    enough = len(y) >= MIN_BEFORE
    shifts = tuple(
        Shift(n, median(z[:n]) - median(y[-_N_BASE:]), _threshold(y, noise, n))
        for n in WINDOWS
        if enough and len(z) >= n
    )
    # The beginning of a run is high by nature: only recent rows say what is.
    high = max(y[-N_NOISE:]) + max(_SPIKE, 6 * noise) if enough else math.inf
    return Level(
        noise=noise,
        rounding=rounded,
        n_before=len(y),
        n_after=len(z),
        base=median(number.value for _, number in earlier[-_N_BASE:]) if earlier else None,
        shifts=shifts,
        n_spikes=sum(value > high for value in z[:_N_SPIKES]),
    )


def placebos(y: Sequence[float], n: int) -> list[float]:
    """The same comparison at places before the resume, where nothing happened."""
    recent = y[-_N_RECENT:]
    cuts = range(_N_BASE, len(recent) - n + 1)
    step = max(1, -(-len(cuts) // _MAX_PLACEBOS))
    return [
        median(recent[cut : cut + n]) - median(recent[cut - _N_BASE : cut]) for cut in cuts[::step]
    ]


def _threshold(y: Sequence[float], noise: float, n: int) -> float:
    by_noise = 4 * noise * math.sqrt(_MEDIAN_LOSS / n + _MEDIAN_LOSS / _N_BASE)
    by_place = placebos(y, n)
    # Few places say little about how far it can go.
    margin = 1.25 if len(by_place) >= 60 else 1.6
    return max(by_noise, LEAST_RISE, margin * max(by_place, default=0.0))


_N_FIRST = 5
_GRAD_LEAST = 0.25  # relative
_GRAD_PEAK = 3.0  # times the largest before
_WARM_UP = 10  # rows
_BAND = 0.1  # relative
_TOO_MUCH_AGAIN = 0.05  # of all steps


def check_grad_norm(resume: Resume) -> Iterator[Finding]:
    """Yield `loss.grad-norm` where the first rows stand far above those before.

    A bad conversion to another world size raised the loss by 5 % and this by ten times.
    """
    before = _logs(resume.before)
    after = _logs(resume.after[:_N_FIRST])
    if len(before) < _N_BASE or len(after) < _N_FIRST:
        return
    noise = wobble(before, 0.0)
    error = noise * math.sqrt(_MEDIAN_LOSS / _N_FIRST + _MEDIAN_LOSS / _N_BASE)
    by_place = max(placebos(before, _N_FIRST), default=0.0)
    base = median(before[-_N_BASE:])
    rise = median(after) - base
    peak = max(after) - max(before)
    if rise <= max(4 * error, _GRAD_LEAST, 1.25 * by_place) and peak <= math.log(_GRAD_PEAK):
        return
    row = resume.after[0]
    yield Finding(
        "loss.grad-norm",
        f"{row.place.file}:{row.place.line}",
        f"the gradient norm of the first {_N_FIRST} rows is {math.exp(rise):.2g} times that before",
        expected=f"about {math.exp(base):.4g}",
        found=f"{math.exp(median(after)):.4g}, at most {math.exp(max(after)):.4g}",
    )


def _logs(rows: Sequence[Row]) -> list[float]:
    return [
        math.log(row.grad_norm.value)
        for row in rows
        if row.grad_norm and row.grad_norm.value > 0 and math.isfinite(row.grad_norm.value)
    ]


@dataclass(frozen=True, slots=True)
class _Vital:
    """A number whose band of before is looked for after the resume."""

    name: str
    words: str
    unit: str
    of: Callable[[Row], Number | None]
    more_is_slower: bool = False


_VITALS = (
    _Vital("throughput", "the throughput", "/s", lambda row: row.throughput),
    _Vital(
        "step_time_s", "the time for a step", " s", lambda row: row.step_time_s, more_is_slower=True
    ),
    _Vital("mfu", "the MFU", "", lambda row: row.mfu),
)


@dataclass(frozen=True, slots=True)
class _Band:
    """A number before and after the resume; `row` is the first that was compared."""

    vital: _Vital
    row: Row
    low: float
    high: float
    then: float
    now: float

    @property
    def is_slower(self) -> bool:
        """Whether the job is slower than nine of ten rows before the resume."""
        if self.vital.more_is_slower:
            return self.now > self.high * (1 + _BAND)
        return self.now < self.low * (1 - _BAND)

    @property
    def is_faster(self) -> bool:
        """Whether the job is faster than nine of ten rows before the resume."""
        if self.vital.more_is_slower:
            return self.now < self.low * (1 - _BAND)
        return self.now > self.high * (1 + _BAND)


class Pace(str, Enum):
    """The speed after the resume, against the band of the run before it."""

    SLOWER = "slower"
    IN_BAND = "in-band"
    FASTER = "faster"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Throughput:
    """The speed after the resume: the answer, and the number that decided.

    `name` is `throughput`, `step_time_s` or `mfu`; `before` and `after` are medians,
    `low` and `high` the band of nine in ten rows before. All are None where `pace` is
    unknown: the log does not hold the number, or too few rows of it.
    """

    pace: Pace
    name: str | None = None
    before: float | None = None
    after: float | None = None
    low: float | None = None
    high: float | None = None


def measure_throughput(resume: Resume) -> Throughput:
    """Whether throughput, time for a step and MFU are back where they were.

    One of them that is slower decides, then one that is faster.
    """
    bands = list(_bands(resume))
    if not bands:
        return Throughput(Pace.UNKNOWN)
    slower = [each for each in bands if each.is_slower]
    faster = [each for each in bands if each.is_faster]
    pace = Pace.SLOWER if slower else Pace.FASTER if faster else Pace.IN_BAND
    band = (slower or faster or bands)[0]
    return Throughput(pace, band.vital.name, band.then, band.now, band.low, band.high)


def may_tell_throughput(resume: Resume) -> bool:
    """Whether enough rows before the resume hold a number, so that rows to come can tell."""
    return any(_base(resume, vital) is not None for vital in _VITALS)


def check_throughput(resume: Resume) -> Iterator[Finding]:
    """Yield `loss.throughput` for each number that has not come back into its band."""
    for band in _bands(resume):
        if not (band.is_slower or band.is_faster):
            continue
        vital = band.vital
        yield Finding(
            "loss.throughput",
            f"{band.row.place.file}:{band.row.place.line}",
            f"{vital.words} is {band.now:,.4g}{vital.unit} after the resume, "
            f"{band.now / band.then:.2f} times what it was",
            expected=f"{band.low:,.4g} to {band.high:,.4g}{vital.unit}",
            found=f"{band.now:,.4g}{vital.unit}",
        )


def _bands(resume: Resume) -> Iterator[_Band]:
    warm = _WARM_UP if resume.interval == 1 else 2
    for vital in _VITALS:
        before = _base(resume, vital)
        after = _values(resume.after[warm:], vital)[:_N_BASE]
        if before is None or len(after) < _N_FIRST:
            continue
        low, *_, high = sorted(before)[len(before) // 10 : len(before) - len(before) // 10]
        yield _Band(vital, resume.after[warm], low, high, median(before), median(after))


def _base(resume: Resume, vital: _Vital) -> list[float] | None:
    """The newest values before the resume; None where there are too few, or they are a clock."""
    before = _values(resume.before, vital)[-5 * _N_BASE :]
    return None if len(before) < _N_BASE or _is_clock(before) else before


def _values(rows: Sequence[Row], vital: _Vital) -> list[float]:
    numbers = [number for row in rows if (number := vital.of(row)) is not None]
    return [number.value for number in numbers if math.isfinite(number.value) and number.value > 0]


def _is_clock(values: Sequence[float]) -> bool:
    """Numbers that only rise are the time since the start, whatever the log calls them."""
    return all(later > earlier for earlier, later in pairwise(values))


def check_clock(jumps: Sequence[ClockJump]) -> Iterator[Finding]:
    """Yield `loss.clock` for a row that is older than the one before it."""
    for jump in jumps:
        yield Finding(
            "loss.clock",
            f"{jump.place.file}:{jump.place.line}",
            f"the clock goes back by {jump.back_s:,.0f} s here; times are not judged, steps are",
            found=f"{jump.back_s:,.0f} s back",
        )


def check_cadence(split: Split) -> Iterator[Finding]:
    """Yield `loss.cadence` where failures cost many steps that had to be trained again."""
    if split.n_again <= _TOO_MUCH_AGAIN * split.n_trained or split.n_legs < 3:
        return
    share = 100 * split.n_again / split.n_trained
    yield Finding(
        "loss.cadence",
        "",
        f"{split.n_again:,} of {split.n_trained:,} steps ({share:.0f} %) were trained again after "
        f"{split.n_legs - 1:,} resumes: save more often",
        expected=f"at most {100 * _TOO_MUCH_AGAIN:.0f} % trained again",
        found=f"{share:.0f} %",
    )
