"""Split a log into segments: the rows that one attempt of the job wrote.

A segment begins at a line that announces a start, where the step goes back, or with a
new file. Rows that repeat earlier ones together with their time are copies: a log shipper
or a logger wrote them twice, and they are left out. So are those that a `trainer_state.json` has
from that of an older checkpoint. The rows that are kept of each segment
are bounded, so a log of any size can be split. `resumes` chooses the segments that are
compared.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, pairwise
from statistics import median

from msgspec.structs import replace

from ckptctl.logs.rows import Marker, Number, Row
from ckptctl.logs.sources import rotated_base

KEEP_FIRST = 1_000
"""Rows that are kept from the beginning of a segment."""
KEEP_LAST = 20_000
"""Rows that are kept from the end of a segment: a checkpoint interval is rarely longer."""
KEEP_SEGMENTS = 64
"""Segments that are kept: the newest ones, and those that they continue."""
KEEP_ROWS = 200_000
"""Rows that are kept of all segments; the newest segments are always kept."""
_KEEP_NEWEST = 4
_RECENT = 20  # rows
_LEAST_START_S = 2.0  # no process starts, loads a checkpoint and trains in less
_SAMPLED = 100
"""One in so many of the rows that are not kept is tested for a finite loss: a test parses it."""

_AROUND = 1_000  # steps kept on each side of the step that the caller names
# A log with so many consecutive segments of at most 3 rows is interleaved: no job restarts
# that often.
_MIN_SHORT_SEGMENTS = 6
_SHORT_SEGMENT_ROWS = 3


class Boundary(StrEnum):
    """What separates a segment from the one before it.

    `START` is the first segment, `MARKER` a line that announces a start, `STEP` a step that
    goes back, `FILE` a new file, `ASKED` the step that the caller named, `CANARY` the log
    that the caller named as that of a canary.
    """

    START = "start"
    MARKER = "marker"
    STEP = "step"
    FILE = "file"
    ASKED = "asked"
    CANARY = "canary"


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows that one attempt wrote.

    `number` counts from 1. `rows` are those that were kept, in the order logged; each step
    occurs once. `n_rows` counts all rows. `marker` is the line that began the segment; of
    several lines, the one that names a step. `finite` is the last row with a finite loss
    among a sample of the rows that were not kept.
    """

    number: int
    boundary: Boundary
    rows: tuple[Row, ...]
    n_rows: int
    marker: Marker | None = None
    finite: Row | None = None

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
    """The segments that were kept, the newest last; `n_segments` counts all of them.

    `interleaved` means that the steps go forward and back every few rows, because several
    runs write to one log. `n_rows` counts rows, `n_losses` rows with a loss, `n_copies` rows
    that were left out as copies. `files` are the logs that have rows.
    """

    segments: tuple[Segment, ...]
    n_segments: int
    interleaved: bool
    n_rows: int
    n_losses: int
    n_copies: int = 0
    files: tuple[str, ...] = ()


def split(items: Iterable[Row | Marker], *, around: int | None = None) -> Split:
    """Split a whole log; the rows around the step `around` are kept."""
    splitter = Splitter(around=around)
    for item in items:
        splitter.feed(item)
    return splitter.split()


def log_interval(rows: Iterable[Row]) -> int:
    """The median number of steps from one row to the next; 1 where there are too few rows."""
    steps = [row.step for row in rows]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    return int(median(gaps)) if gaps else 1


class Splitter:
    """Splits a log while it is being read: `feed` adds to it, `split` returns the result so far."""

    def __init__(self, *, around: int | None = None) -> None:
        self._around = around
        self._done: list[Segment] = []
        self._open: _OpenSegment | None = None
        self._markers: list[Marker] = []
        self._n_segments = 0
        self._n_short = 0
        self._interleaved = False
        self._n_rows = 0
        self._n_losses = 0
        self._n_copies = 0
        self._files: dict[str, None] = {}

    def feed(self, item: Row | Marker) -> None:
        """Take the next row or marker."""
        if isinstance(item, Marker):
            self._markers.append(item)
            return
        if self._open is not None and self._is_copy(item, self._open):
            return
        self._n_rows += 1
        self._n_losses += item.has_loss
        self._files[item.position.file] = None
        boundary = self._boundary(item)
        segment = self._open
        if boundary is not None or segment is None:
            segment = self._begin(boundary or Boundary.START, segment)
        segment.add(item)

    def split(self) -> Split:
        """The segments so far, including the unfinished one."""
        segments = [*self._done, *([self._open.segment(self._n_segments)] if self._open else [])]
        return Split(
            segments=tuple(segments),
            n_segments=self._n_segments,
            interleaved=self._interleaved,
            n_rows=self._n_rows,
            n_losses=self._n_losses,
            n_copies=self._n_copies,
            files=tuple(self._files),
        )

    def _is_copy(self, row: Row, segment: _OpenSegment) -> bool:
        """Whether a row has the step, the time and the values of a row that was read before."""
        # The history of a checkpoint begins with that of the checkpoint that it continues.
        is_history = _is_history(row) and row.position.file != segment.last.position.file
        if row.at is None and not is_history:
            return False
        # Several ranks that write to one log may repeat the last step.
        if row.step > segment.last.step or (row.step == segment.last.step and not is_history):
            return False
        kept = (segment.row_of(row.step), *(_row_of(done.rows, row.step) for done in self._done))
        if not any(earlier is not None and _is_same(earlier, row) for earlier in kept):
            return False
        self._n_copies += 1
        # The line that announced these rows was copied with them.
        self._markers = []
        return True

    def _boundary(self, row: Row) -> Boundary | None:
        if self._open is None:
            return Boundary.MARKER if self._markers else None
        last = self._open.last
        if self._markers and row.step > last.step and self._open.announces(self._markers):
            # Another rank announces the resume of this segment, after some of its rows.
            self._markers = []
        if self._markers:
            return Boundary.MARKER
        if row.position.file != last.position.file:
            return None if self._is_next_part(self._open, row) else Boundary.FILE
        if row.step < last.step or (row.step == last.step and not self._open.repeats(row)):
            return Boundary.STEP
        return None

    def _is_next_part(self, segment: _OpenSegment, row: Row) -> bool:
        """Whether a new file continues the log before it: rotated, or divided by a shipper.

        The step that the caller names is a boundary, wherever it is.
        """
        last = segment.last
        if not last.step < row.step <= last.step + segment.interval:
            return False
        if self._around is not None and last.step <= self._around < row.step:
            return False
        rotated = rotated_base(last.position.file) == rotated_base(row.position.file)
        return rotated or segment.continues_at_once(row)

    def _begin(self, boundary: Boundary, before: _OpenSegment | None) -> _OpenSegment:
        if before is not None:
            self._done.append(before.segment(self._n_segments))
            self._drop()
            short = boundary is Boundary.STEP and before.n_rows <= _SHORT_SEGMENT_ROWS
            self._n_short = self._n_short + 1 if short else 0
            self._interleaved = self._interleaved or self._n_short >= _MIN_SHORT_SEGMENTS
        self._n_segments += 1
        # Of several lines the last one that names a step counts.
        named = [marker for marker in self._markers if marker.step is not None or marker.fresh]
        marker = next(reversed(named or self._markers), None)
        self._open = _OpenSegment(boundary, marker, self._around)
        self._markers = []
        return self._open

    def _drop(self) -> None:
        """Drop segments that are too many: first those whose steps were all trained again."""
        while len(self._done) > KEEP_SEGMENTS or (
            len(self._done) > _KEEP_NEWEST
            and sum(len(segment.rows) for segment in self._done) > KEEP_ROWS
        ):
            older = range(len(self._done) - _KEEP_NEWEST)
            earliest = min(segment.first_step for segment in self._done[-_KEEP_NEWEST:])
            retries = (i for i in older if self._done[i].first_step >= earliest)
            del self._done[next(retries, 0)]


class _OpenSegment:
    """A segment that is being read."""

    def __init__(self, boundary: Boundary, marker: Marker | None, around: int | None) -> None:
        self.n_rows = 0
        self.last: Row
        self._boundary = boundary
        self._marker = marker
        self._asked = around
        self._first: list[Row] = []
        self._pinned: list[Row] = []
        self._last: deque[Row] = deque(maxlen=KEEP_LAST)
        self._has_copies = False
        self._finite: Row | None = None

    @property
    def first_step(self) -> int:
        return self._first[0].step

    @property
    def interval(self) -> int:
        """Steps from one row to the next, at the end of the segment."""
        recent = [row.step for row in islice(reversed(self._last or self._first), _RECENT)]
        return max(1, max((a - b for a, b in pairwise(recent)), default=1))

    def continues_at_once(self, row: Row) -> bool:
        """Whether a row follows the last one sooner than another process could write it."""
        recent = [earlier.at for earlier in islice(reversed(self._last or self._first), _RECENT)]
        times = [at for at in reversed(recent) if at is not None]
        if row.at is None or len(times) < len(recent) or len(times) < 2:
            return False
        usual = median(later - earlier for earlier, later in pairwise(times))
        return 0 <= row.at - times[-1] <= usual + _LEAST_START_S

    def announces(self, markers: Sequence[Marker]) -> bool:
        """Whether lines name the checkpoint that the line above this segment named."""
        own = None if self._marker is None else self._marker.step
        return own is not None and all(marker.step == own for marker in markers)

    def row_of(self, step: int) -> Row | None:
        kept = (self._last, self._pinned, self._first)
        return next((row for rows in kept if (row := _row_of(rows, step)) is not None), None)

    def repeats(self, row: Row) -> bool:
        """Whether a row with the step of the last one is another record of the same training step.

        Where several ranks write to one log, the first step already occurs several times in
        a row. A later step that occurs twice at another time was trained twice.
        """
        if not (row.has_loss and self.last.has_loss):
            return True
        if row.at is not None and _is_same(self.last, row):
            return True
        if len(self._first) == 1:
            self._has_copies = True
        return self._has_copies

    def add(self, row: Row) -> None:
        if self.n_rows and row.step == self.last.step:
            self.last = _merged(self.last, row)
            (self._last or self._first)[-1] = self.last
            return
        self.n_rows += 1
        self.last = row
        self._keep(row)

    def segment(self, number: int) -> Segment:
        rows = (*self._first, *self._pinned, *self._last)
        return Segment(*(number, self._boundary, rows, self.n_rows), *(self._marker, self._finite))

    def _keep(self, row: Row) -> None:
        if len(self._first) < KEEP_FIRST:
            self._first.append(row)
            return
        if len(self._last) == KEEP_LAST:
            oldest = self._last[0]  # the append below drops it
            if self._asked is not None and abs(oldest.step - self._asked) <= _AROUND:
                self._pinned.append(oldest)
            if self.n_rows % _SAMPLED == 0 and oldest.loss and math.isfinite(oldest.loss.value):
                self._finite = oldest
        self._last.append(row)


def _is_history(row: Row) -> bool:
    return row.position.file.endswith("trainer_state.json")


def _row_of(rows: Sequence[Row], step: int) -> Row | None:
    """The row of a step; the steps rise."""
    i = bisect_left(rows, step, key=lambda row: row.step)
    return rows[i] if i < len(rows) and rows[i].step == step else None


def _is_same(a: Row, b: Row) -> bool:
    """Whether two rows hold the same values, wherever they are in the logs."""
    return all(_value(getattr(a, name)) == _value(getattr(b, name)) for name in _COMPARED)


def _value(field: object) -> object:
    return field.value if isinstance(field, Number) else field


_COMPARED = tuple(name for name in Row.__struct_fields__ if name not in ("position", "interval"))


def _merged(row: Row, more: Row) -> Row:
    """The row with the values of another row of the same step where it has none."""
    missing = {
        name: value
        for name in Row.__struct_fields__
        if getattr(row, name) is None and (value := getattr(more, name)) is not None
    }
    return replace(row, **missing) if missing else row
