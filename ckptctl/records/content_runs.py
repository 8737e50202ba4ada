"""Divide the records of a file into runs, and verify them as their bytes pass.

Records that lie side by side are one run, which one thread reads: short ones whole,
several at once; a long one in pieces, its end first, where its directory is. Runs end
where the blocks of a file end, so that a seal's digests use the same reads; a record
that spans two runs is verified in parts. Results go to a `RecordSink`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptctl.errors import MissingExtra, RecordUnreadable
from ckptctl.formats.archive.directory import TAIL, RecordDirectory, read_directory
from ckptctl.formats.digests import BLOCK_BYTES
from ckptctl.model import BytesEntry, TensorEntry
from ckptctl.records.byte_pass import Piece
from ckptctl.records.not_finite import Form
from ckptctl.records.opening import is_before_archives
from ckptctl.records.ranges import Owner, Ranges
from ckptctl.records.verification import Checked, Part, Passing, check_parts, check_whole
from ckptctl.records.zstd import (
    FRAME_BYTES,
    MAX_ENTRY_BYTES,
    Unpacker,
    require_zstd,
    tensor_limit,
)

_MAGIC_BYTES = 32


class RecordSink(Protocol):
    """Takes the results of records, from several threads at once."""

    @property
    def ranges(self) -> Ranges:
        """The byte ranges of the part; records are numbers in them."""
        ...

    def path_of(self, number: int) -> str:
        """The path of a record's file in the store."""
        ...

    def directory_of(self, number: int, tail: bytes) -> tuple[RecordDirectory, bytes]:
        """The directory of a record from its tail, of which more is read where it takes that."""
        ...

    def form_of(self, number: int) -> Form | None:
        """The form of a record's values if they are to be scanned."""
        ...

    def report(self, number: int, checked: Checked) -> None:
        """Take the result of a record."""
        ...

    def report_plain(self, number: int) -> None:
        """Take a record that is a pickle without a frame."""
        ...

    def report_no_zstd(self, number: int) -> None:
        """Take a compressed record that cannot be read for lack of zstandard."""
        ...

    def join(self, number: int, directory: RecordDirectory, part: Part, tail: bytes) -> None:
        """Take a part of a record; the last part completes its verification."""
        ...


def runs_of(sink: RecordSink, numbers: Sequence[int]) -> Iterator[RecordRun]:
    """Runs of records side by side, split where the blocks of the file end, as a seal has it.

    `numbers` are records of one file, in the order in which they lie in it.
    """
    ranges = sink.ranges
    run: list[int] = []
    start = end = 0
    for number in numbers:
        begin = ranges.starts[number]
        stop = begin + ranges.lengths[number]
        if run and begin != end:
            yield RecordRun(sink, run, start, end)
            run = []
        if not run:
            start = begin
        run.append(number)
        end = stop
        cut = (start // BLOCK_BYTES + 1) * BLOCK_BYTES
        if end >= cut and ranges.owner(number).transforms:
            yield RecordRun(sink, run, start, end)  # they cannot be read from their middle on
            run = []
        while run and end >= cut:
            yield RecordRun(sink, run, start, cut)
            run = [number] if end > cut else []
            start, cut = cut, cut + BLOCK_BYTES
    if run:
        yield RecordRun(sink, run, start, end)


@dataclass(frozen=True, slots=True)
class _Piece(Piece):
    """A piece of a run: whole records from place `first` to `last`, or bytes of one."""

    first: int = 0
    last: int = 0


class RecordRun:
    """Records side by side in one file; of the first and the last it may hold a part."""

    def __init__(self, sink: RecordSink, numbers: Sequence[int], start: int, end: int) -> None:
        self._sink = sink
        self._numbers = tuple(numbers)
        self.start = start
        self._end = end
        self._passing: _Passing | _Unpacking | None = None

    @property
    def path(self) -> str:
        """See `byte_pass.Run`."""
        return self._sink.path_of(self._numbers[0])

    @property
    def n_bytes(self) -> int:
        """See `byte_pass.Run`."""
        return self._end - self.start

    def pieces(self, limit: int) -> Iterator[Piece]:
        """As many whole records at once as the limit allows; a long one by itself."""
        ranges = self._sink.ranges
        ends = [ranges.starts[number] + ranges.lengths[number] for number in self._numbers]
        at, place = self.start, 0
        while place < len(ends):
            last = place
            if at == ranges.starts[self._numbers[place]]:
                while last < len(ends) and ends[last] <= min(self._end, at + limit):
                    last += 1
            if last > place:
                yield _Piece(at, ends[last - 1] - at, first=place, last=last)
                at, place = ends[last - 1], last
                continue
            stop = min(self._end, ends[place])
            yield from self._pieces_of(place, at, stop, limit)
            at, place = stop, place + 1

    def _pieces_of(self, place: int, start: int, stop: int, limit: int) -> Iterator[Piece]:
        number = self._numbers[place]
        ranges = self._sink.ranges
        if ranges.owner(number).transforms:
            # Its directory is known only when all of it was decompressed once.
            yield from _in_turn(start, stop, limit, place, ahead=True)
        else:
            end = ranges.starts[number] + ranges.lengths[number]
            tail = min(TAIL, ranges.lengths[number])
            yield _Piece(end - tail, tail, ahead=True, first=place)
        yield from _in_turn(start, stop, limit, place)

    def take(self, piece: Piece, data: memoryview) -> None:
        """See `byte_pass.Run`."""
        assert isinstance(piece, _Piece)  # noqa: S101 - it comes from `pieces`
        ranges = self._sink.ranges
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
                _Unpacking(self._sink, number, owner)
                if owner.transforms
                else _Passing(self._sink, number, max(0, self.start - begin))
            )
        if piece.ahead:
            self._passing.read_ahead(data, last=piece.start + piece.length == end)
        else:
            self._passing.take(data)
            if piece.start + piece.length == min(self._end, end):
                self._passing.finish()
                self._passing = None

    def _take_whole(self, number: int, data: memoryview) -> None:
        owner = self._sink.ranges.owner(number)
        if owner.transforms:
            unpacking = _Unpacking(self._sink, number, owner)
            unpacking.read_ahead(data, last=True)
            unpacking.take(data)
            unpacking.finish()
        elif _is_unframed(owner, bytes(data[:_MAGIC_BYTES]), bytes(data[-1:])):
            self._sink.report_plain(number)
        else:
            self._sink.report(number, check_whole(data, self._sink.form_of(number)))


def _in_turn(
    start: int, stop: int, limit: int, place: int, *, ahead: bool = False
) -> Iterator[Piece]:
    for at in range(start, stop, limit):
        yield _Piece(at, min(limit, stop - at), ahead, first=place)


def _is_unframed(owner: Owner, head: bytes, last: bytes) -> bool:
    """Whether a record is bytes of a planner's own, or in the form of torch before archives."""
    plain = head[:1] == b"\x80" and head[1:2] <= b"\x05" and last == b"."
    return (plain and isinstance(owner.entry, BytesEntry)) or is_before_archives(head)


class _Passing:
    """A long record, or a part of one, whose bytes pass in one thread."""

    def __init__(self, sink: RecordSink, number: int, start: int) -> None:
        self._sink = sink
        self.number = number
        self._start = start
        self._passing: Passing | None = None
        self._tail = b""
        self._error = ""
        self._head = b""

    def read_ahead(self, data: memoryview, *, last: bool) -> None:  # noqa: ARG002 - always
        """Read the directory from the end of the record."""
        self._tail = bytes(data)
        try:
            directory, self._tail = self._sink.directory_of(self.number, self._tail)
            self._passing = Passing(directory, self._start, self._sink.form_of(self.number))
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
            self._sink.join(self.number, directory, part, self._tail)
        elif self._start == 0:  # reported once, by the run that holds its beginning
            owner = self._sink.ranges.owner(self.number)
            if _is_unframed(owner, self._head, self._tail[-1:]):
                self._sink.report_plain(self.number)
            else:
                self._sink.report(self.number, Checked(has_crcs=True, unreadable=self._error))


class _Unpacking:
    """A compressed record: decompressed twice, first to find its directory."""

    def __init__(self, sink: RecordSink, number: int, owner: Owner) -> None:
        self._sink = sink
        self.number = number
        self._owner = owner
        self._limit = _unpacked_limit(owner)
        self._length = 0
        self._tail = b""
        self._error = ""
        self._passing: Passing | None = None
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
        self._passing = Passing(directory, 0, self._sink.form_of(self.number))
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
            form = self._sink.form_of(self.number)
            checked = check_parts(directory, [part], self._tail, form, self._owner)
        elif self._unpacker is None:
            self._sink.report_no_zstd(self.number)
            return
        else:
            checked = Checked(has_crcs=True, unreadable=self._error)
        self._sink.report(self.number, checked)


def _unpacked_limit(owner: Owner) -> int:
    """How many bytes a compressed record may expand to: its chunk and its frame."""
    entry = owner.entry
    if not isinstance(entry, TensorEntry):
        return MAX_ENTRY_BYTES
    return tensor_limit(entry.dtype, entry.chunks.sizes_of(owner.chunk))
