"""Which bytes must be read to see how the records of a part are framed?

The head and the tail of each record, as few and as short reads as that takes:
the tail of one record and the head of the next lie side by side, and small
records are read whole, several at once. What is in the bytes is the question of
`structure`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptctl.formats.archive.directory import TAIL, View
from ckptctl.records.ranges import Ranges
from ckptctl.storage.contract import Span, Store

HEAD = 1024
"""Bytes that hold everything before the elements of a tensor's record."""

_READ_THROUGH = 32 << 10
"""Bytes that nobody needs but that cost less to read than to skip."""

LONGEST = 64 << 10
"""Reads are joined up to this length in bytes."""


@dataclass(frozen=True, slots=True)
class Need:
    """How much of a record to read: so many bytes at its beginning and at its end."""

    head: int = HEAD
    tail: int = TAIL


_USUAL = Need()


@dataclass(slots=True)
class Reading:
    """What reading has cost so far."""

    n_reads: int = 0
    n_bytes: int = 0


class _Window(NamedTuple):
    """Bytes of one record: `is_last` when its view is complete with them."""

    number: int
    start: int
    end: int
    is_last: bool


class _Read(NamedTuple):
    """One read of a file, and the windows that it fills."""

    file: int
    start: int
    end: int
    windows: Sequence[_Window]


def n_reads(ranges: Ranges, by_file: Iterable[Sequence[int]]) -> int:
    """How many reads it takes to look at the records in `by_file`, in the usual case."""
    return sum(1 for _ in _plan(ranges, by_file, {}, LONGEST))


def read_records(
    store: Store,
    folder: str,
    ranges: Ranges,
    by_file: Iterable[Sequence[int]],
    needs: Mapping[int, Need],
    reading: Reading,
    *,
    longest: int = LONGEST,
) -> Iterator[tuple[int, View]]:
    """Each record in `by_file`, with as much of it as `needs` says or is usual.

    What that costs is added to `reading`. `folder` is where the part is in the store,
    empty for the store's root. Reads are joined up to `longest` bytes. The records of a
    file come in the order in which they lie in it. Storage errors pass through.
    """
    planned: deque[_Read] = deque()

    def spans() -> Iterator[Span]:
        for read in _plan(ranges, by_file, needs, longest):
            planned.append(read)
            name = ranges.file_names[read.file]
            path = f"{folder}/{name}" if folder else name
            yield Span(path, read.start, read.end - read.start)

    heads: dict[int, bytes] = {}
    for _, data in store.read_spans(spans()):
        read = planned.popleft()
        reading.n_reads += 1
        reading.n_bytes += len(data)
        for window in read.windows:
            piece = data[window.start - read.start : window.end - read.start]
            if window.is_last:
                head = heads.pop(window.number, piece)
                yield window.number, View(ranges.lengths[window.number], head, piece)
            else:
                heads[window.number] = piece


def _plan(
    ranges: Ranges, by_file: Iterable[Sequence[int]], needs: Mapping[int, Need], longest: int
) -> Iterator[_Read]:
    for numbers in by_file:
        if not numbers:
            continue
        in_order = sorted(numbers, key=ranges.starts.__getitem__)
        file = ranges.files[in_order[0]]
        windows: list[_Window] = []
        start = end = 0
        for number in in_order:
            for window in _windows(ranges, number, needs.get(number, _USUAL)):
                far = window.start - end > _READ_THROUGH or window.end - start > longest
                if windows and (far or window.start < start):
                    yield _Read(file, start, end, windows)
                    windows = []
                if not windows:
                    start = end = window.start
                windows.append(window)
                end = max(end, window.end)
        yield _Read(file, start, end, windows)


def _windows(ranges: Ranges, number: int, need: Need) -> tuple[_Window, ...]:
    start, length = ranges.starts[number], ranges.lengths[number]
    end = start + length
    if length <= need.head + need.tail + _READ_THROUGH:
        return (_Window(number, start, end, is_last=True),)
    return (
        _Window(number, start, start + need.head, is_last=False),
        _Window(number, end - need.tail, end, is_last=True),
    )
