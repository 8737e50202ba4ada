"""Did the loss stay at its level across a resume?

The weakest evidence there is, and often the only one: after a clean stop no step was
logged twice. The median of the first rows is held against the median of the last rows
before. A healthy loss falls, so a flat comparison in one direction is safe, where an
extrapolated slope raises false alarms; and the same comparison at earlier places of
the log, where nothing happened, says how large it gets by itself. What it cannot see
is anything smaller than `smallest_jump`: no optimizer state, no random numbers, no
data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ckptctl.loss.noise import N_NOISE, finite, measure_for, rounding, wobble
from ckptctl.loss.rows import Row

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
