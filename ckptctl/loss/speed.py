"""Compare the speed before and after a resume.

A measure of speed is compared with the band that holds eight in ten rows before the resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from operator import attrgetter
from statistics import median

from ckptctl.findings import Finding
from ckptctl.logs.rows import Number, Row
from ckptctl.loss.resumes import LoggedResume
from ckptctl.model import NonNegative

_N_BASE = 20  # rows before the resume that a band needs
_N_FIRST = 5  # rows after it
_WARM_UP = 10  # rows
_BAND = 0.1  # relative


class Pace(StrEnum):
    """The speed after the resume, compared with the band before it.

    `WATCHING`: the rows after the resume are too few for a comparison.
    `UNKNOWN`: the rows before it hold no measure of speed, or too few.
    """

    SLOWER = "slower"
    IN_BAND = "in-band"
    FASTER = "faster"
    WATCHING = "watching"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class _Metric:
    """A measure of speed, a field of a row, that is compared with its band before the resume.

    `scales` is how it changes with the number of ranks: a throughput of the whole job in
    proportion, a step time inversely, a measure of one device not at all.
    """

    name: str
    label: str
    unit: str
    scales: int = 0
    more_is_slower: bool = False


_METRICS = (
    _Metric("throughput", "the throughput", "/s", scales=1),
    _Metric("device_throughput", "the throughput of one device", ""),
    _Metric("step_time_s", "the time for a step", " s", scales=-1, more_is_slower=True),
    _Metric("mfu", "the MFU", ""),
)


@dataclass(frozen=True, slots=True)
class _Band:
    """A measure of speed before and after the resume; `row` is the first that was compared.

    `low` and `high` bound eight in ten rows before; `then` and `now` are medians. Those of
    before are scaled to the number of ranks after the resume.
    """

    metric: _Metric
    row: Row
    low: float
    high: float
    then: float
    now: float

    @property
    def pace(self) -> Pace:
        """Whether the job is slower, or faster, than nine in ten rows before the resume."""
        is_above, is_below = self.now > self.high * (1 + _BAND), self.now < self.low * (1 - _BAND)
        if not (is_above or is_below):
            return Pace.IN_BAND
        return Pace.SLOWER if is_above is self.metric.more_is_slower else Pace.FASTER


@dataclass(frozen=True, slots=True)
class Throughput:
    """The speed after the resume, and the measure that decided.

    Speeds before are scaled to the number of ranks after the resume, where both numbers are
    known. All fields are None where `pace` is unknown or watching.
    """

    pace: Pace
    """The comparison."""
    name: str | None = None
    """The measure that decided: `throughput`, `device_throughput`, `step_time_s` or `mfu`."""
    before: NonNegative | None = None
    """Its median before the resume."""
    after: NonNegative | None = None
    """Its median after the resume."""
    low: NonNegative | None = None
    """The lower end of the band that holds eight in ten rows before."""
    high: NonNegative | None = None
    """Its upper end."""

    @property
    def is_known(self) -> bool:
        """Whether the speed was compared."""
        return self.name is not None


def measure_throughput(resume: LoggedResume) -> Throughput:
    """Compare the measures of speed with their bands before the resume.

    A slower measure decides, then a faster one.
    """
    bands = list(_bands(resume))
    if not bands:
        waits = any(_base(resume, metric) is not None for metric in _METRICS)
        return Throughput(Pace.WATCHING if waits else Pace.UNKNOWN)
    band = min(bands, key=lambda band: _DECIDING.index(band.pace))
    return Throughput(band.pace, band.metric.name, band.then, band.now, band.low, band.high)


_DECIDING = (Pace.SLOWER, Pace.FASTER, Pace.IN_BAND)


def check_throughput(resume: LoggedResume) -> Iterator[Finding]:
    """Yield `loss.throughput` for each measure of speed outside its band."""
    for band in _bands(resume):
        if band.pace is Pace.IN_BAND:
            continue
        metric = band.metric
        scaled = ""
        if metric.scales and (point := resume.resume_point) is not None and point.growth != 1:
            scaled = f", scaled from {point.saved_world_size} to {point.world_size} ranks"
        yield Finding(
            "loss.throughput",
            str(band.row.position),
            f"{metric.label} is {band.now:,.4g}{metric.unit} after the resume, "
            f"{band.now / band.then:.2f} times the value before it{scaled}",
            expected=f"{band.low:,.4g} to {band.high:,.4g}{metric.unit}",
            found=f"{band.now:,.4g}{metric.unit}",
        )


def _bands(resume: LoggedResume) -> Iterator[_Band]:
    warm = _WARM_UP if resume.interval == 1 else 2
    for metric in _METRICS:
        before = _base(resume, metric)
        after = _values(resume.after[warm:], metric)[:_N_BASE]
        if before is None or len(after) < _N_FIRST:
            continue
        low, *_, high = sorted(before)[len(before) // 10 : len(before) - len(before) // 10]
        growth = 1.0 if resume.resume_point is None else resume.resume_point.growth
        scale = growth**metric.scales
        now = median(after)
        yield _Band(
            metric, resume.after[warm], low * scale, high * scale, median(before) * scale, now
        )


def _base(resume: LoggedResume, metric: _Metric) -> list[float] | None:
    """The fastest hundred values before the resume; None where they are too few, or a clock.

    An attempt that was slow is no baseline for the next one.
    """
    values = _values(resume.before, metric)
    parts = [values[max(0, end - 5 * _N_BASE) : end] for end in range(len(values), 0, -5 * _N_BASE)]
    # Values that only rise are the time since the start, whatever their name is.
    parts = [
        part
        for part in parts
        if len(part) >= _N_BASE and any(later <= earlier for earlier, later in pairwise(part))
    ]
    fastest = min if metric.more_is_slower else max
    return fastest(parts, key=median, default=None)


def _values(rows: Sequence[Row], metric: _Metric) -> list[float]:
    of_rows: Iterable[Number | None] = map(attrgetter(metric.name), rows)
    numbers = [number for number in of_rows if number is not None]
    return [number.value for number in numbers if math.isfinite(number.value) and number.value > 0]
