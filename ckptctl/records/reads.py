"""Plan the reads that opening records takes: merged, in file order, of bounded length.

Of each record the head and the tail are read. The tail of one record and the head of the next lie
side by side and are read together; small records are read whole, several at once. `opening`
interprets the bytes. The headers and indexes of safetensors files, which state where their tensors
lie, are read here as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

from ckptctl.formats.archive.directory import View
from ckptctl.formats.archive.safetensors import INDEX_SUFFIX, MAX_HEADER, PREFIX, SUFFIX
from ckptctl.formatting import inside
from ckptctl.model import FileInfo
from ckptctl.records.opening import Need
from ckptctl.records.ranges import Ranges
from ckptctl.storage.contract import Span, Store

_READ_THROUGH = 32 << 10
"""Bytes that are not needed but cost less to read than to skip."""

LONGEST = 64 << 10
"""The default length in bytes up to which reads are merged."""

Opened = TypeVar("Opened")


_USUAL = Need()


@dataclass(slots=True)
class ReadCost:
    """The cost of reading so far."""

    n_reads: int = 0
    n_bytes: int = 0


class RecordSource(NamedTuple):
    """The records of one part: its folder in the store (empty for the root), and its ranges."""

    store: Store
    folder: str
    ranges: Ranges


class _RecordWindow(NamedTuple):
    """Bytes of one record; `is_last` if they complete its view."""

    number: int
    start: int
    end: int
    is_last: bool


class _PlannedRead(NamedTuple):
    """One read of a file, and the windows that it fills."""

    file: int
    start: int
    end: int
    windows: Sequence[_RecordWindow]


def n_reads(ranges: Ranges, by_file: Iterable[Sequence[int]], most: int) -> int:
    """How many reads opening the records in `by_file` usually takes; counts up to `most`."""
    return sum(1 for _ in islice(_plan(ranges, by_file, {}, LONGEST), most))


def open_records(
    source: RecordSource,
    by_file: Sequence[Sequence[int]],
    open_one: Callable[[int, View], Opened | Need],
    reading: ReadCost,
    *,
    needs: Mapping[int, Need] | None = None,
    longest: int = LONGEST,
) -> Iterator[tuple[int, Opened]]:
    """Each record in `by_file` with the result of `open_one`.

    `open_one` is called again with more of a record if it returns a `Need`. `needs`
    overrides what is read first; the cost is added to `reading`. Reads are merged up to
    `longest` bytes. Storage errors and exceptions of `open_one` are raised.
    """
    needs = needs or {}
    while any(by_file):
        more: dict[int, Need] = {}
        for number, view in _read(source, by_file, needs, reading, longest):
            found = open_one(number, view)
            if isinstance(found, Need):
                more[number] = found
            else:
                yield number, found
        needs = more
        by_file = [[number for number in numbers if number in more] for numbers in by_file]


def _read(
    source: RecordSource,
    by_file: Iterable[Sequence[int]],
    needs: Mapping[int, Need],
    reading: ReadCost,
    longest: int,
) -> Iterator[tuple[int, View]]:
    """Each record with as much of it as is needed, in file order."""
    store, folder, ranges = source
    planned: deque[_PlannedRead] = deque()

    def spans() -> Iterator[Span]:
        for read in _plan(ranges, by_file, needs, longest):
            planned.append(read)
            path = inside(folder, ranges.file_names[read.file])
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
) -> Iterator[_PlannedRead]:
    for numbers in by_file:
        if not numbers:
            continue
        in_order = sorted(numbers, key=ranges.starts.__getitem__)
        file = ranges.files[in_order[0]]
        windows: list[_RecordWindow] = []
        start = end = 0
        for number in in_order:
            for window in _windows(ranges, number, needs.get(number, _USUAL)):
                far = window.start - end > _READ_THROUGH or window.end - start > longest
                if windows and (far or window.start < start):
                    yield _PlannedRead(file, start, end, windows)
                    windows = []
                if not windows:
                    start = end = window.start
                windows.append(window)
                end = max(end, window.end)
        yield _PlannedRead(file, start, end, windows)


def _windows(ranges: Ranges, number: int, need: Need) -> tuple[_RecordWindow, ...]:
    start, length = ranges.starts[number], ranges.lengths[number]
    end = start + length
    if length <= need.head + need.tail + _READ_THROUGH:
        return (_RecordWindow(number, start, end, is_last=True),)
    return (
        _RecordWindow(number, start, start + need.head, is_last=False),
        _RecordWindow(number, end - need.tail, end, is_last=True),
    )


_FIRST_HEADER = 64 << 10
"""The bytes of a file that are read first, for its header."""


def read_headers(
    store: Store, folder: str, files: Sequence[FileInfo]
) -> Iterator[tuple[FileInfo, bytes]]:
    """Each safetensors file with its header, including the length in front of it.

    A truncated header is returned as far as it goes. Links and other non-regular files are
    left out. Storage errors are raised. Cost: one read per file; a second one for headers
    of more than 64 KiB.
    """
    regular = [file for file in files if file.kind == "file" and file.path.endswith(SUFFIX)]
    yield from ((file, b"") for file in regular if file.size == 0)
    others = [file for file in regular if file.size > 0]
    first = [Span(inside(folder, file.path), 0, min(file.size, _FIRST_HEADER)) for file in others]
    longer = []
    for file, (_, data) in zip(others, store.read_spans(first), strict=True):
        end = PREFIX + int.from_bytes(data[:PREFIX], "little")
        if len(data) < end <= min(file.size, PREFIX + MAX_HEADER):
            longer.append((file, end))
        else:
            yield file, data[:end]
    rest = [Span(inside(folder, file.path), 0, end) for file, end in longer]
    for (file, _), (_, data) in zip(longer, store.read_spans(rest), strict=True):
        yield file, data


def read_indexes(
    store: Store, folder: str, files: Sequence[FileInfo]
) -> Iterator[tuple[FileInfo, bytes]]:
    """Each index of safetensors files with its content. Cost: one read each.

    Indexes of more than `MAX_HEADER` bytes, and non-regular files, are left out.
    """
    for file in files:
        if file.path.endswith(INDEX_SUFFIX) and file.kind == "file" and file.size <= MAX_HEADER:
            yield file, store.read(inside(folder, file.path), limit=MAX_HEADER)
