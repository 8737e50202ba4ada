"""Verify every byte of records against their checksums and frames, as the bytes are read.

Adjacent records form a run, which one thread reads: short ones whole, several at once; a
long one in pieces, its end first, where its directory is. Runs end at block boundaries, so
that a seal's digests use the same reads; a record that spans two runs is verified in parts,
whose checksums are combined. Bytes of large members only pass through the checksum, and through
the scan for non-finite values if requested; everything around them is kept and compared.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32, crc32_combine

from ckptctl.errors import MissingExtra, RecordUnreadable
from ckptctl.formats.archive.directory import (
    TAIL,
    KeptBytes,
    Member,
    RecordDirectory,
    check_headers,
    check_texts,
    is_before_archives,
    read_directory,
    read_member,
)
from ckptctl.formats.archive.writing import check_frame, fold_of, saved_fold
from ckptctl.formats.digests import BLOCK_BYTES
from ckptctl.formatting import inside
from ckptctl.model import BytesEntry, TensorEntry
from ckptctl.records.byte_pass import Piece
from ckptctl.records.not_finite import FiniteScan, Form, Values, joined
from ckptctl.records.opening import (
    FRAME_BYTES,
    Expected,
    Unfit,
    Unpacker,
    check_tensor,
    is_plain_pickle,
    require_zstd,
    tensor_in,
    unpacked_limit,
)
from ckptctl.records.ranges import Owner
from ckptctl.records.reads import RecordSource
from ckptctl.storage.contract import read_range

_KEPT = 4096
"""Members up to this size in bytes are kept, among them those that torch reads as text."""

_MAGIC_BYTES = 32

NO_CRCS = "saved without checksums"
PLAIN = "saved as plain pickles, without frame and checksums"
NO_ZSTD = "compressed, which needs the extra `zstd`"
"""Why a record's bytes are not proven: the values of `Checked.unproven`."""


@dataclass(frozen=True, slots=True)
class WrongBytes:
    """Members of a record that do not match their checksums; both checksums of the first one."""

    names: tuple[str, ...]
    start: int
    end: int
    saved: int
    found: int


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of verifying every byte of a record; without fields, its bytes are proven.

    `unproven` is the reason why nothing proves them. `unreadable` is the reason why its
    frame differs from torch's, or with the code `unfit`, why its content differs from the
    metadata. `folds` are the combined checksum in `serialization_id` and the computed one;
    None if the record has none. `values` are set for a sound record that was scanned.
    """

    unproven: str | None = None
    unreadable: str | None = None
    unfit: str | None = None
    wrong: WrongBytes | None = None
    folds: tuple[int, int] | None = None
    values: Values | None = None


def check_whole(data: memoryview, form: Form | None = None) -> Checked:
    """Verify a record that is wholly in memory.

    With `form`, the values of its tensor are scanned.
    """
    try:
        directory, tail = read_directory(lambda n: bytes(data[len(data) - n :]), len(data))
    except RecordUnreadable as error:
        return Checked(unreadable=error.message)
    passing = RecordPass(directory, 0, form)
    passing.take(data)
    return check_parts(directory, [passing.part], tail, form)


def _element_members(directory: RecordDirectory) -> list[int]:
    """The members that hold the elements of a tensor: one, as DCP writes them."""
    return [n for n, member in enumerate(directory.members) if member.name.startswith("data/")]


@dataclass(slots=True)
class RecordPart:
    """Bytes of a record that passed through one thread, from `start` to `end`.

    `kept` are the bytes around the large members; `crcs` those of the large members, as
    member, offset, length and CRC-32; `scans` those that were scanned, by member.
    """

    start: int
    end: int
    kept: list[tuple[int, bytes]] = field(default_factory=list)
    crcs: list[tuple[int, int, int, int]] = field(default_factory=list)
    scans: dict[int, FiniteScan] = field(default_factory=dict)


class RecordPass:
    """Takes the bytes of a record from `start` on, in order.

    With `form`, the values of its tensor are scanned.
    """

    def __init__(self, directory: RecordDirectory, start: int, form: Form | None = None) -> None:
        self.directory = directory
        self._form = form
        self._elements = frozenset(_element_members(directory))
        large = [(n, m) for n, m in enumerate(directory.members) if m.size > _KEPT]
        # Ranges of kept and of passing bytes alternate.
        self._edges = [0, *(edge for _, m in large for edge in (m.start, m.end)), directory.length]
        self._large = [n for n, _ in large]
        self.part = RecordPart(start, start)
        """The bytes that have passed so far."""

    def take(self, data: memoryview) -> None:
        part = self.part
        while data:
            at = bisect_right(self._edges, part.end, hi=len(self._edges) - 1) - 1
            n = min(len(data), self._edges[at + 1] - part.end)
            piece, data = data[:n], data[n:]
            if at % 2 == 0:
                part.kept.append((part.end, bytes(piece)))
            else:
                number = self._large[at // 2]
                self._scan(number, piece)
                if part.crcs and part.crcs[-1][0] == number:
                    _, start, length, crc = part.crcs.pop()
                    part.crcs.append((number, start, length + n, crc32(piece, crc)))
                else:
                    part.crcs.append((number, part.end, n, crc32(piece)))
            part.end += n

    def _scan(self, number: int, piece: memoryview) -> None:
        if self._form is None or number not in self._elements:
            return
        part = self.part
        if number not in part.scans:
            at = part.end - self.directory.members[number].start
            part.scans[number] = FiniteScan(self._form, at)
        part.scans[number].take(piece)


def check_parts(
    directory: RecordDirectory,
    parts: Iterable[RecordPart],
    tail: bytes,
    form: Form | None = None,
    owner: Owner | None = None,
) -> Checked:
    """Verify a record whose bytes have all passed, in parts; scanned if there is a `form`.

    `tail` is the end of the record at the time its directory was read. With an `owner`, the
    tensor is compared with the metadata, for a record that `structure` cannot read. The order of
    the checks is that of `opening`, so that both report the same damage alike.
    """
    in_order = sorted(parts, key=lambda part: part.start)
    kept = KeptBytes([piece for part in in_order for piece in part.kept])
    if kept.get(directory.length - len(tail), directory.length) not in (tail, None):
        return Checked(unreadable="its end changed while it was read")
    unproven = None if directory.has_crcs else NO_CRCS
    try:
        check_headers(directory, kept)
        if unproven is None:
            crcs = _member_crcs(directory, in_order, kept)
            wrong = [n for n, member in enumerate(directory.members) if crcs[n] != member.crc]
            if wrong:
                return Checked(wrong=_wrong(directory.members, wrong, crcs))
        check_texts(directory, kept)
        check_frame(directory, kept)
    except RecordUnreadable as error:
        return Checked(unproven, unreadable=error.message)
    saved = saved_fold(directory, kept)
    checked = Checked(unproven, folds=None if saved is None else (saved, fold_of(directory)))
    if owner is not None and isinstance(owner.entry, TensorEntry):
        try:
            expected = Expected.chunk(owner.entry, owner.chunk)
            check_tensor(tensor_in(directory, kept), directory, expected)
        except Unfit as error:
            return replace(checked, unreadable=error.message, unfit=error.code)
    # Nothing is scanned in the record of a big-endian machine.
    if form is None or read_member(directory, "byteorder", kept) not in (None, b"little"):
        return checked
    scans = [scan for part in in_order for scan in part.scans.values()]
    for number in _element_members(directory):
        member = directory.members[number]
        if member.size <= _KEPT:
            scans.append(FiniteScan(form))
            scans[-1].take(kept.get(member.start, member.end) or b"")
    return replace(checked, values=joined(form, scans))


def _wrong(members: Sequence[Member], wrong: Sequence[int], crcs: Sequence[int]) -> WrongBytes:
    first = members[wrong[0]]
    names = tuple(members[n].name for n in wrong)
    return WrongBytes(names, first.start, first.end, first.crc, crcs[wrong[0]])


def _member_crcs(
    directory: RecordDirectory, parts: Sequence[RecordPart], kept: KeptBytes
) -> list[int]:
    """The CRC-32 of each member; -1 if not all of it has passed."""
    of_member: dict[int, list[CrcPart]] = defaultdict(list)
    for part in parts:
        for number, start, length, crc in part.crcs:
            of_member[number].append(CrcPart(start - directory.members[number].start, length, crc))
    crcs = []
    for number, member in enumerate(directory.members):
        if member.size <= _KEPT:
            crcs.append(crc32(kept.get(member.start, member.end) or b""))
        else:
            combined = combined_crc(of_member[number], member.size)
            crcs.append(-1 if combined is None else combined)
    return crcs


class CrcPart(NamedTuple):
    """The CRC-32 of `n_bytes` bytes from byte `start` on."""

    start: int
    n_bytes: int
    crc: int


def combined_crc(parts: Iterable[CrcPart], n_bytes: int) -> int | None:
    """The CRC-32 of `n_bytes` bytes; None if the parts do not cover each of them once."""
    crc = at = 0
    for part in sorted(parts):
        if part.start != at:
            return None
        crc = crc32_combine(crc, part.crc, part.n_bytes)
        at += part.n_bytes
    return crc if at == n_bytes else None


class ElementChecksum:
    """The checksum of `n_bytes` of elements, of which several threads report parts.

    `mismatch` is called with the checksum of all parts if that is not `expected`.
    """

    def __init__(self, n_bytes: int, expected: int, mismatch: Callable[[int], None]) -> None:
        self._n_bytes = n_bytes
        self._left = n_bytes
        self._expected = expected
        self._mismatch = mismatch
        self._parts: list[CrcPart] = []
        self._lock = threading.Lock()

    def add(self, part: CrcPart) -> None:
        """Add the checksum of a part; the last one is compared."""
        with self._lock:
            self._parts.append(part)
            self._left -= part.n_bytes
            if self._left:
                return
        found = combined_crc(self._parts, self._n_bytes)
        # Parts with gaps or overlaps prove nothing and count as a mismatch.
        if found != self._expected:
            self._mismatch(-1 if found is None else found)


# Runs of records, verified as their bytes are read


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
        self.store, self._folder, self.ranges = source
        self._report = report
        self._form_of = form_of
        self._lock = threading.Lock()
        self._parts: dict[int, list[RecordPart]] = defaultdict(list)

    def path_of(self, number: int) -> str:
        return inside(self._folder, self.ranges.file_names[self.ranges.files[number]])

    def form_of(self, number: int) -> Form | None:
        """The form of a record's values if they are to be scanned."""
        entry = self.ranges.owner(number).entry
        if self._form_of is None or not isinstance(entry, TensorEntry):
            return None
        return self._form_of(entry)

    def report(self, number: int, checked: Checked) -> None:
        with self._lock:
            self._report(number, checked)

    def join(self, number: int, directory: RecordDirectory, part: RecordPart, tail: bytes) -> None:
        """Take a part of a record; the last part completes its verification."""
        with self._lock:
            parts = self._parts[number]
            parts.append(part)
            if sum(held.end - held.start for held in parts) < directory.length:
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
        self.path = results.path_of(numbers[0])
        self.start = start
        self.n_bytes = end - start
        self._results = results
        self._numbers = tuple(numbers)
        self._end = end
        self._passing: _LongRecord | _Unpacking | None = None

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
            if owner.transforms:
                self._passing = _Unpacking(self._results, number, owner)
            else:
                self._passing = _LongRecord(self._results, number, max(0, self.start - begin))
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


@dataclass(slots=True)
class _LongRecord:
    """A long record, or a part of one, whose bytes pass through one thread."""

    _results: _Results
    number: int
    _start: int
    _passing: RecordPass | None = None
    _tail: bytes = b""
    _error: str = ""
    _head: bytes = b""

    def read_ahead(self, data: memoryview, *, last: bool) -> None:  # noqa: ARG002 - always
        """Read the directory from the end of the record."""
        self._tail = bytes(data)
        results, ranges = self._results, self._results.ranges
        path, length = results.path_of(self.number), ranges.lengths[self.number]
        end = ranges.starts[self.number] + length
        try:
            directory, self._tail = read_directory(
                lambda n: read_range(results.store, path, end - n, n), length, self._tail
            )
            self._passing = RecordPass(directory, self._start, results.form_of(self.number))
        except RecordUnreadable as error:
            self._error = error.message

    def take(self, data: memoryview) -> None:
        self._head = self._head or bytes(data[:_MAGIC_BYTES])
        if self._passing is not None:
            self._passing.take(data)

    def finish(self) -> None:
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
        if self._unpacker is None or self._error:
            return
        try:
            for out in self._unpacker.feed(data):
                self._tail = (self._tail + out)[-FRAME_BYTES:]
            if last:
                self._unpacker.check_ended()
                held, n_bytes = self._tail, self._unpacker.n_bytes
                directory, self._tail = read_directory(
                    lambda n: held[max(0, len(held) - n) :], n_bytes
                )
                self._passing = RecordPass(directory, 0, self._results.form_of(self.number))
                self._unpacker = Unpacker(self._limit)
        except RecordUnreadable as error:
            self._error = error.message

    def take(self, data: memoryview) -> None:
        if self._passing is None or self._unpacker is None:
            return
        try:
            for out in self._unpacker.feed(data):
                self._passing.take(memoryview(out))
        except RecordUnreadable as error:
            self._error, self._passing = error.message, None

    def finish(self) -> None:
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
