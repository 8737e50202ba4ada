"""How much does a loss wobble from one row to the next, and how finely was it printed?

Everything that is compared later is compared with these two. A loss is taken by its
logarithm, so that a difference of 0.01 is one percent; a loss that can be zero or
negative is measured in units of its usual size instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from ckptctl.loss.rows import Number, Row

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
