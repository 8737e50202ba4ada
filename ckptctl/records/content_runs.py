"""Divide the records of a file into runs, and verify them as their bytes are read.

Adjacent records form a run, which one thread reads: short ones whole, several at once; a
long one in pieces, its end first, where its directory is. Runs end at block boundaries, so
that a seal's digests use the same reads; a record that spans two runs is verified in parts,
and the last part completes it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptctl.errors import MissingExtra, RecordUnreadable
from ckptctl.formats.archive.directory import (
    TAIL,
    RecordDirectory,
    is_before_archives,
    read_directory,
)
from ckptctl.formats.digests import BLOCK_BYTES
from ckptctl.model import BytesEntry, TensorEntry
from ckptctl.records.byte_pass import Piece
from ckptctl.records.not_finite import Form
from ckptctl.records.opening import (
    FRAME_BYTES,
    Unpacker,
    is_plain_pickle,
    require_zstd,
    unpacked_limit,
)
from ckptctl.records.ranges import Owner
from ckptctl.records.reads import RecordSource
from ckptctl.records.verification import (
    NO_ZSTD,
    PLAIN,
    Checked,
    RecordPart,
    RecordPass,
    check_parts,
    check_whole,
)
from ckptctl.storage.contract import read_range

_MAGIC_BYTES = 32

Report = Callable[[int, Checked], None]
"""Called with the number and result of each record, once each, by one thread at a time."""

FormOf = Callable[[TensorEntry], Form | None]
"""In which form the values of a tensor are to be scanned; None for one that is not."""


def record_runs(
    source: RecordSource,
    by_file: Iterable[Sequence[int]],
    report: Report,
    form_of: FormOf | None = None,
) -> tuple[RecordRun, ...]:
    """The runs that read the records in `by_file` whole; each result is passed to `report`.

    The numbers of each file are in file order. The values of the tensors that `form_of` gives a
    form are scanned.
    """
    results = _Results(source, report, form_of)
    return tuple(run for numbers in by_file for run in _runs_of(results, numbers))


class _Results:
    """The shared state of the runs of one part: its records, and the parts of spanning records."""

    def __init__(self, source: RecordSource, report: Report, form_of: FormOf | None) -> None:
        self._store, self._folder, self.ranges = source
        self._report = report
        self._form_of = form_of
        self._lock = threading.Lock()
        self._parts: dict[int, list[RecordPart]] = defaultdict(list)

    def path_of(self, number: int) -> str:
        """The path of a record's file in the store."""
        name = self.ranges.file_names[self.ranges.files[number]]
        return f"{self._folder}/{name}" if self._folder else name

    def directory_of(self, number: int, tail: bytes) -> tuple[RecordDirectory, bytes]:
        """The directory of a record from its tail, reading more of it if necessary."""
        length = self.ranges.lengths[number]
        path, end = self.path_of(number), self.ranges.starts[number] + length
        return read_directory(lambda n: read_range(self._store, path, end - n, n), length, tail)

    def form_of(self, number: int) -> Form | None:
        """The form of a record's values if they are to be scanned."""
        entry = self.ranges.owner(number).entry
        if self._form_of is None or not isinstance(entry, TensorEntry):
            return None
        return self._form_of(entry)

    def report(self, number: int, checked: Checked) -> None:
        """Report the result of a record."""
        with self._lock:
            self._report(number, checked)

    def join(self, number: int, directory: RecordDirectory, part: RecordPart, tail: bytes) -> None:
        """Take a part of a record; the last part completes its verification."""
        with self._lock:
            parts = self._parts[number]
            parts.append(part)
            if sum(one.end - one.start for one in parts) < directory.length:
                return
            del self._parts[number]
        self.report(number, check_parts(directory, parts, tail, self.form_of(number)))


def _runs_of(results: _Results, numbers: Sequence[int]) -> Iterator[RecordRun]:
    """Runs of adjacent records, split at the block boundaries of the file.

    `numbers` are records of one file, in file order.
    """
    ranges = results.ranges
    run: list[int] = []
    start = end = 0
    for number in numbers:
        begin = ranges.starts[number]
        stop = begin + ranges.lengths[number]
        if run and begin != end:
            yield RecordRun(results, run, start, end)
            run = []
        if not run:
            start = begin
        run.append(number)
        end = stop
        cut = (start // BLOCK_BYTES + 1) * BLOCK_BYTES
        if end >= cut and ranges.owner(number).transforms:
            yield RecordRun(results, run, start, end)  # they cannot be read from the middle
            run = []
        while run and end >= cut:
            yield RecordRun(results, run, start, cut)
            run = [number] if end > cut else []
            start, cut = cut, cut + BLOCK_BYTES
    if run:
        yield RecordRun(results, run, start, end)


@dataclass(frozen=True, slots=True)
class _RecordPiece(Piece):
    """A piece of a run: whole records from place `first` to `last`, or bytes of one."""

    first: int = 0
    last: int = 0


class RecordRun:
    """Adjacent records in one file; the first and the last may be partial."""

    def __init__(self, results: _Results, numbers: Sequence[int], start: int, end: int) -> None:
        self._results = results
        self._numbers = tuple(numbers)
        self.start = start
        self._end = end
        self._passing: _LongRecord | _Unpacking | None = None

    @property
    def path(self) -> str:
        return self._results.path_of(self._numbers[0])

    @property
    def n_bytes(self) -> int:
        return self._end - self.start

    def pieces(self, limit: int) -> Iterator[Piece]:
        """As many whole records at once as the limit allows; a long one by itself."""
        ranges = self._results.ranges
        ends = [ranges.starts[number] + ranges.lengths[number] for number in self._numbers]
        at, place = self.start, 0
        while place < len(ends):
            last = place
            if at == ranges.starts[self._numbers[place]]:
                while last < len(ends) and ends[last] <= min(self._end, at + limit):
                    last += 1
            if last > place:
                yield _RecordPiece(at, ends[last - 1] - at, first=place, last=last)
                at, place = ends[last - 1], last
                continue
            stop = min(self._end, ends[place])
            yield from self._pieces_of(place, at, stop, limit)
            at, place = stop, place + 1

    def _pieces_of(self, place: int, start: int, stop: int, limit: int) -> Iterator[Piece]:
        number = self._numbers[place]
        ranges = self._results.ranges
        if ranges.owner(number).transforms:
            # Its directory is known only after decompressing all of it once.
            yield from _in_turn(start, stop, limit, place, ahead=True)
        else:
            end = ranges.starts[number] + ranges.lengths[number]
            tail = min(TAIL, ranges.lengths[number])
            yield _RecordPiece(end - tail, tail, ahead=True, first=place)
        yield from _in_turn(start, stop, limit, place)

    def take(self, piece: Piece, data: memoryview) -> None:
        assert isinstance(piece, _RecordPiece)  # noqa: S101 - it comes from `pieces`
        ranges = self._results.ranges
        if piece.last:
            for number in self._numbers[piece.first : piece.last]:
                begin = ranges.starts[number] - piece.start
                self._take_whole(number, data[begin : begin + ranges.lengths[number]])
            return
        number = self._numbers[piece.first]
        begin = ranges.starts[number]
        end = begin + ranges.lengths[number]
        if self._passing is None or self._passing.number != number:
            owner = ranges.owner(number)
            self._passing = (
                _Unpacking(self._results, number, owner)
                if owner.transforms
                else _LongRecord(self._results, number, max(0, self.start - begin))
            )
        if piece.ahead:
            self._passing.read_ahead(data, last=piece.start + piece.length == end)
        else:
            self._passing.take(data)
            if piece.start + piece.length == min(self._end, end):
                self._passing.finish()
                self._passing = None

    def _take_whole(self, number: int, data: memoryview) -> None:
        owner = self._results.ranges.owner(number)
        if owner.transforms:
            unpacking = _Unpacking(self._results, number, owner)
            unpacking.read_ahead(data, last=True)
            unpacking.take(data)
            unpacking.finish()
        elif _is_unframed(owner, bytes(data[:_MAGIC_BYTES]), bytes(data[-1:])):
            self._results.report(number, Checked(PLAIN))
        else:
            self._results.report(number, check_whole(data, self._results.form_of(number)))


def _in_turn(
    start: int, stop: int, limit: int, place: int, *, ahead: bool = False
) -> Iterator[Piece]:
    for at in range(start, stop, limit):
        yield _RecordPiece(at, min(limit, stop - at), ahead, first=place)


def _is_unframed(owner: Owner, head: bytes, last: bytes) -> bool:
    """Whether a record is a planner's own bytes, or in torch's format before archives."""
    plain = is_plain_pickle(head, last) and isinstance(owner.entry, BytesEntry)
    return plain or is_before_archives(head)


class _LongRecord:
    """A long record, or a part of one, whose bytes pass through one thread."""

    def __init__(self, results: _Results, number: int, start: int) -> None:
        self._results = results
        self.number = number
        self._start = start
        self._passing: RecordPass | None = None
        self._tail = b""
        self._error = ""
        self._head = b""

    def read_ahead(self, data: memoryview, *, last: bool) -> None:  # noqa: ARG002 - always
        """Read the directory from the end of the record."""
        self._tail = bytes(data)
        try:
            directory, self._tail = self._results.directory_of(self.number, self._tail)
            self._passing = RecordPass(directory, self._start, self._results.form_of(self.number))
        except RecordUnreadable as error:
            self._error = error.message

    def take(self, data: memoryview) -> None:
        """Take the next bytes."""
        self._head = self._head or bytes(data[:_MAGIC_BYTES])
        if self._passing is not None:
            self._passing.take(data)

    def finish(self) -> None:
        """All bytes of the record that lie in the run have passed."""
        if self._passing is not None:
            directory, part = self._passing.directory, self._passing.part
            self._results.join(self.number, directory, part, self._tail)
        elif self._start == 0:  # reported once, by the run that holds its beginning
            owner = self._results.ranges.owner(self.number)
            if _is_unframed(owner, self._head, self._tail[-1:]):
                self._results.report(self.number, Checked(PLAIN))
            else:
                self._results.report(self.number, Checked(unreadable=self._error))


class _Unpacking:
    """A compressed record: decompressed twice, first to find its directory."""

    def __init__(self, results: _Results, number: int, owner: Owner) -> None:
        self._results = results
        self.number = number
        self._owner = owner
        self._limit = unpacked_limit(owner)
        self._tail = b""
        self._error = ""
        self._passing: RecordPass | None = None
        try:
            require_zstd()
            self._unpacker: Unpacker | None = Unpacker(self._limit)
        except MissingExtra:
            self._unpacker = None

    def read_ahead(self, data: memoryview, *, last: bool) -> None:
        """Decompress the next bytes for the first time."""
        if self._unpacker is None or self._error:
            return
        try:
            for out in self._unpacker.feed(data):
                self._tail = (self._tail + out)[-FRAME_BYTES:]
            if last:
                self._begin_again(self._unpacker)
        except RecordUnreadable as error:
            self._error = error.message

    def _begin_again(self, unpacker: Unpacker) -> None:
        unpacker.check_ended()
        held = self._tail
        directory, self._tail = read_directory(
            lambda n: held[max(0, len(held) - n) :], unpacker.n_bytes
        )
        self._passing = RecordPass(directory, 0, self._results.form_of(self.number))
        self._unpacker = Unpacker(self._limit)

    def take(self, data: memoryview) -> None:
        """Decompress the next bytes for the second time."""
        if self._passing is None or self._unpacker is None:
            return
        try:
            for out in self._unpacker.feed(data):
                self._passing.take(memoryview(out))
        except RecordUnreadable as error:
            self._error, self._passing = error.message, None

    def finish(self) -> None:
        """All bytes have passed."""
        if self._passing is not None:
            directory, part = self._passing.directory, self._passing.part
            form = self._results.form_of(self.number)
            checked = check_parts(directory, [part], self._tail, form, self._owner)
        elif self._unpacker is None:
            self._results.report(self.number, Checked(NO_ZSTD))
            return
        else:
            checked = Checked(unreadable=self._error)
        self._results.report(self.number, checked)
