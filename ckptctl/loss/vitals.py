"""Are gradient norm, throughput and clock back where they were before the resume?

None of these proves a fault. A gradient norm far above all before is a suspicion, all
else a remark. The first rows of a process are left out: it compiles, and some loggers
divide the work of the whole run by the time since the resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from statistics import median

from ckptctl.findings import Finding
from ckptctl.loss.legs import ClockJump, Split
from ckptctl.loss.level import placebos
from ckptctl.loss.noise import wobble
from ckptctl.loss.resumes import Resume
from ckptctl.loss.rows import Number, Row

_N_BASE = 20
_N_FIRST = 5
_MEDIAN_LOSS = 1.57
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
