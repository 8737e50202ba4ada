"""Split a log into segments: the rows that one attempt of the job wrote.

A segment begins at a line that announces a start, where the step goes back, or with a
new file. The rows that are kept of each segment are bounded, so a log of any size can be
split. `resumes` chooses the segments that are compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from statistics import median

from ckptctl.loss.rows import Marker, Place, Row

KEEP_FIRST = 1_000
"""Rows that are kept of the beginning of a leg."""
KEEP_LAST = 20_000
"""Rows that are kept of the end of a leg: a checkpoint interval is rarely longer."""
KEEP_LEGS = 8

_AROUND = 1_000  # steps on each side of a step that was asked for
_BROKEN = 6  # so many legs in a row of a few rows each are no restarts
_FEW_ROWS = 3


class Border(str, Enum):
    """What says that a leg begins here."""

    START = "start"
    MARKER = "marker"
    STEP = "step"
    FILE = "file"
    ASKED = "asked"


@dataclass(frozen=True, slots=True)
class ClockJump:
    """A row that is older than the one before it, by `back_s` seconds."""

    place: Place
    back_s: float


@dataclass(frozen=True, slots=True)
class Leg:
    """What one process logged.

    `number` counts from 1. `rows` are those that were kept, in the order logged; each
    step is there once. `n_rows` counts all of them. `marker` is the line that began the
    leg, the one that names a step where there were several.
    """

    number: int
    border: Border
    rows: tuple[Row, ...]
    n_rows: int
    marker: Marker | None = None
    clock_jump: ClockJump | None = None

    @property
    def first_step(self) -> int:
        """The first step logged."""
        return self.rows[0].step

    @property
    def last_step(self) -> int:
        """The last step logged."""
        return self.rows[-1].step


@dataclass(frozen=True, slots=True)
class Split:
    """The legs that were kept, the newest last, and how many there were in all.

    `interleaved` says that the steps jump to and fro: several runs, or several ranks,
    write into one log. `n_rows` and `n_losses` count rows, and those with a loss,
    `n_trained` the steps of all legs, and `n_again` those of them that an earlier leg had
    gone through already.
    """

    legs: tuple[Leg, ...]
    n_legs: int
    interleaved: bool
    n_rows: int
    n_losses: int
    n_trained: int = 0
    n_again: int = 0


def split(items: Iterable[Row | Marker], *, around: int | None = None) -> Split:
    """Split a whole log; `around` is a step whose neighbours must be kept."""
    splitter = Splitter(around=around)
    for item in items:
        splitter.feed(item)
    return splitter.split()


def log_interval(rows: Iterable[Row]) -> int:
    """How many steps lie between two rows, most of the time; 1 where there are too few rows."""
    steps = [row.step for row in rows]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    return int(median(gaps)) if gaps else 1


class Splitter:
    """Splits a log while it is being read: `feed` it, and ask for the `split` so far."""

    def __init__(self, *, around: int | None = None) -> None:
        self._around = around
        self._done: deque[Leg] = deque(maxlen=KEEP_LEGS)
        self._open: _OpenLeg | None = None
        self._markers: list[Marker] = []
        self._n_legs = 0
        self._n_short = 0
        self._interleaved = False
        self._n_rows = 0
        self._n_losses = 0
        self._n_trained = 0
        self._n_again = 0

    def feed(self, item: Row | Marker) -> None:
        """Take the next row or marker."""
        if isinstance(item, Marker):
            self._markers.append(item)
            return
        self._n_rows += 1
        self._n_losses += item.loss is not None
        border = self._border(item)
        leg = self._open
        if border is not None or leg is None:
            self._count(item, leg)
            leg = self._begin(border or Border.START, leg)
        leg.add(item)

    def split(self) -> Split:
        """What was split so far, the unfinished leg included."""
        legs = [*self._done, *([self._open.leg(self._n_legs)] if self._open else [])]
        steps = 0 if self._open is None else self._open.n_steps
        return Split(
            legs=tuple(legs),
            n_legs=self._n_legs,
            interleaved=self._interleaved,
            n_rows=self._n_rows,
            n_losses=self._n_losses,
            n_trained=self._n_trained + steps,
            n_again=self._n_again,
        )

    def _border(self, row: Row) -> Border | None:
        if self._open is None:
            return Border.MARKER if self._markers else None
        if self._markers:
            return Border.MARKER
        last = self._open.last
        if row.place.file != last.place.file:
            return Border.FILE
        if row.step < last.step or (row.step == last.step and not self._open.is_copy(row)):
            return Border.STEP
        return None

    def _count(self, row: Row, leg: _OpenLeg | None) -> None:
        if leg is not None:
            self._n_trained += leg.n_steps
            # A job that began anew is another run, not one that trains steps again.
            if leg.first_step < row.step:
                self._n_again += max(0, leg.last.step - row.step + 1)

    def _begin(self, border: Border, before: _OpenLeg | None) -> _OpenLeg:
        if before is not None:
            self._done.append(before.leg(self._n_legs))
            short = border is Border.STEP and before.n_rows <= _FEW_ROWS
            self._n_short = self._n_short + 1 if short else 0
            self._interleaved = self._interleaved or self._n_short >= _BROKEN
        self._n_legs += 1
        self._open = _OpenLeg(border, _telling(self._markers), self._around)
        self._markers = []
        return self._open


class _OpenLeg:
    """A leg that is being read."""

    def __init__(self, border: Border, marker: Marker | None, around: int | None) -> None:
        self.n_rows = 0
        self.last: Row
        self._border = border
        self._marker = marker
        self._asked = around
        self._first: list[Row] = []
        self._pinned: list[Row] = []
        self._last: deque[Row] = deque(maxlen=KEEP_LAST)
        self._has_copies = False
        self._clock_jump: ClockJump | None = None

    @property
    def first_step(self) -> int:
        return self._first[0].step

    @property
    def n_steps(self) -> int:
        return self.last.step - self.first_step + 1

    def is_copy(self, row: Row) -> bool:
        """Whether a row with the step of the last one says the same again, or says more of it.

        Where several ranks write into one log, the first step is there several times at
        once. A step that comes twice later on was trained twice.
        """
        if row.loss is None or self.last.loss is None:
            return True
        if len(self._first) == 1:
            self._has_copies = True
        return self._has_copies

    def add(self, row: Row) -> None:
        if self.n_rows and row.step == self.last.step:
            self._replace_last(_merged(self.last, row))
            return
        if self.n_rows and row.at is not None and self.last.at is not None:
            back_s = self.last.at - row.at
            if back_s > 0 and self._clock_jump is None:
                self._clock_jump = ClockJump(row.place, back_s)
        self.n_rows += 1
        self.last = row
        self._keep(row)

    def leg(self, number: int) -> Leg:
        rows = (*self._first, *self._pinned, *self._last)
        return Leg(number, self._border, rows, self.n_rows, self._marker, self._clock_jump)

    def _keep(self, row: Row) -> None:
        if len(self._first) < KEEP_FIRST:
            self._first.append(row)
            return
        if self._asked is not None and len(self._last) == KEEP_LAST:
            oldest = self._last[0]  # falls out now
            if abs(oldest.step - self._asked) <= _AROUND:
                self._pinned.append(oldest)
        self._last.append(row)

    def _replace_last(self, row: Row) -> None:
        self.last = row
        for kept in (self._last, self._first):
            if kept:
                kept[-1] = row
                return


def _telling(markers: list[Marker]) -> Marker | None:
    """Of the lines that announce one start, the last that names a step, else the last."""
    named = [marker for marker in markers if marker.step is not None or marker.fresh]
    if named or markers:
        return (named or markers)[-1]
    return None


def _merged(row: Row, more: Row) -> Row:
    """A row with what another of the same step says beyond it."""
    missing = {
        name: value
        for name in Row.__dataclass_fields__
        if getattr(row, name) is None and (value := getattr(more, name)) is not None
    }
    return replace(row, **missing) if missing else row
