"""Is every byte of every record what was saved?

Each member of a record carries a CRC-32, which torch writes and never compares.
The bytes of a part are laid out in runs here, `byte_pass` reads them once, and
`record_bytes` looks at each record. What a record says of its tensor is the
question of `structure`; bytes that are right and belong to another step are that
of `sealed`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.checks.byte_pass import Piece
from ckptctl.checks.ranges import Owner, Ranges
from ckptctl.checks.record_bytes import Checked, Part, Passing, check_parts, check_whole
from ckptctl.checks.structure import readable_ranges
from ckptctl.checks.words import at_most_few, counted, inside, some_of
from ckptctl.errors import MissingExtra, RecordUnreadable
from ckptctl.findings import Finding, Proven
from ckptctl.formats.digests import BLOCK_BYTES
from ckptctl.formats.records import TAIL, RecordDirectory, parse_directory, tail_needed
from ckptctl.formats.zstd_streams import Unpacker, require_zstd
from ckptctl.model import DTYPE_SIZES, BytesEntry, FileInfo, TensorEntry
from ckptctl.storage.contract import Span, Store

ZSTD = "stream.zstd/1"
"""The transform that DCP's own extension is registered as."""

_MANY_BYTES = 1 << 30  # what a compressed entry that is no tensor may come to
_FRAME_BYTES = 1 << 20

_NO_CRCS = "saved without checksums"
_PLAIN = "saved as plain pickles, without frame and checksums"
_NO_ZSTD = "compressed, which takes the extra `zstd` to read"

Choose = Callable[[Sequence[int]], Collection[int]]
"""Which of the things whose lengths in bytes are given, in order, are to be read; by place."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the records of a part said to one process, for another to add to its own.

    Records are numbers in the ranges of the part, which are the same in both as long as
    both read the same metadata.
    """

    n_chosen: int
    sound: tuple[int, ...]
    wrong: tuple[tuple[int, str, Checked], ...]
    unverifiable: tuple[tuple[str, tuple[int, ...]], ...]
    folds: tuple[tuple[int, tuple[int, int]], ...]


class ContentCheck:
    """The bytes of the records of one part: what to read of them, and what they said.

    `folder` is where the part is in the store, `part_path` where it is in the step.
    Records that `files`, the part's listing, has no room for are the finding of
    `presence`, and passed over. `choose` leaves records out.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        ranges: Ranges,
        files: Sequence[FileInfo],
        part_path: str = "",
        *,
        choose: Choose | None = None,
    ) -> None:
        self._store = store
        self._folder = folder
        self.ranges = ranges
        self._part_path = part_path
        self._lock = threading.Lock()
        self._joints: dict[int, list[Part]] = defaultdict(list)
        self._sound: list[int] = []
        self._wrong: dict[tuple[int, str], dict[int, Checked]] = defaultdict(dict)
        self._unverifiable: dict[str, list[int]] = defaultdict(list)
        self._folds: dict[int, tuple[int, int]] = {}
        self._zstd: str | None = None
        by_file = [
            sorted(filter(self._can_read, numbers), key=ranges.starts.__getitem__)
            for numbers in readable_ranges(ranges, files)
        ]
        self.n_asked = sum(ranges.lengths[number] for numbers in by_file for number in numbers)
        if choose is not None:
            by_file = _chosen(ranges, by_file, choose)
        self._n_chosen = sum(map(len, by_file))
        self.runs = tuple(run for numbers in by_file for run in self._runs_of(numbers))

    @property
    def whole(self) -> bool:
        """Every record that was chosen has been read."""
        n_wrong = sum(map(len, self._wrong.values()))
        n_unproven = sum(map(len, self._unverifiable.values()))
        return len(self._sound) + n_wrong + n_unproven == self._n_chosen

    @property
    def proven(self) -> Proven:
        """How much has been proven so far."""
        n_bytes = sum(self.ranges.lengths[number] for number in self._sound)
        return Proven(self.n_asked, n_bytes, len(self._sound))

    @property
    def outcome(self) -> Outcome:
        """What the records have said so far."""
        wrong = tuple(
            (number, code, checked)
            for (_, code), alike in self._wrong.items()
            for number, checked in alike.items()
        )
        unverifiable = tuple((why, tuple(numbers)) for why, numbers in self._unverifiable.items())
        sound, folds = tuple(self._sound), tuple(self._folds.items())
        return Outcome(self._n_chosen, sound, wrong, unverifiable, folds)

    def add(self, other: Outcome) -> None:
        """Take what other records of the part said to another process."""
        self._n_chosen += other.n_chosen
        self._sound += other.sound
        self._folds |= dict(other.folds)
        for number, code, checked in other.wrong:
            self._note(number, code, checked)
        for why, numbers in other.unverifiable:
            self._unverifiable[why] += numbers

    def findings(self, sealed: Collection[str] = ()) -> Iterator[Finding]:
        """What the bytes that were read say against the part.

        Yields `record.crc` and `record.framing`, one for each file; one
        `record.unverifiable` for the records that nothing can prove. The files in
        `sealed` are proven by their seal; their paths are those in the step.
        """
        self._compare_folds()
        yield from at_most_few(
            self._finding(file, code, self._wrong[file, code]) for file, code in sorted(self._wrong)
        )
        yield from self._without_proof(sealed)

    def _can_read(self, number: int) -> bool:
        # Of those that went through something else, `structure` says so.
        return self.ranges.owner(number).transforms in ((), (ZSTD,))

    def _runs_of(self, numbers: Sequence[int]) -> Iterator[_Run]:
        """Records side by side, cut where the blocks of the file end: a seal digests the same."""
        run: list[int] = []
        start = end = 0
        for number in numbers:
            transforms = self.ranges.owner(number).transforms
            begin = self.ranges.starts[number]
            stop = begin + self.ranges.lengths[number]
            if run and begin != end:
                yield _Run(self, run, start, end)
                run = []
            if not run:
                start = begin
            run.append(number)
            end = stop
            cut = (start // BLOCK_BYTES + 1) * BLOCK_BYTES
            if end >= cut and transforms:
                yield _Run(self, run, start, end)  # they cannot be read from their middle on
                run = []
            while run and end >= cut:
                yield _Run(self, run, start, cut)
                run = [number] if end > cut else []
                start, cut = cut, cut + BLOCK_BYTES
        if run:
            yield _Run(self, run, start, end)

    def path_of(self, number: int) -> str:
        """Where in the store the file of a record is."""
        return inside(self._folder, self.ranges.file_names[self.ranges.files[number]])

    def directory_of(self, number: int, tail: bytes) -> tuple[RecordDirectory, bytes]:
        """The directory of a record from its tail, of which more is read where it takes that."""
        length = self.ranges.lengths[number]
        needed = tail_needed(tail, length)
        if needed > len(tail):
            start = self.ranges.starts[number] + length - needed
            ((_, tail),) = self._store.read_spans([Span(self.path_of(number), start, needed)])
        return parse_directory(tail, length), tail

    # What the runs report, from several threads

    def report(self, number: int, checked: Checked) -> None:
        """Take what a record's bytes said."""
        with self._lock:
            if checked.wrong is not None:
                self._note(number, "record.crc", checked)
            elif checked.unreadable is not None:
                self._note(number, "record.framing", checked)
            elif not checked.has_crcs:
                self._unverifiable[_NO_CRCS].append(number)
            else:
                self._sound.append(number)
                if checked.folds is not None:
                    self._folds[number] = checked.folds

    def report_plain(self, number: int) -> None:
        """Take that a record is a pickle without a frame."""
        with self._lock:
            self._unverifiable[_PLAIN].append(number)

    def report_no_zstd(self, number: int) -> None:
        """Take that a record is compressed, and that nothing here reads it."""
        with self._lock:
            self._unverifiable[_NO_ZSTD].append(number)

    def join(self, number: int, directory: RecordDirectory, part: Part, tail: bytes) -> None:
        """Take a part of a record; with the last of them it is looked at."""
        with self._lock:
            parts = self._joints[number]
            parts.append(part)
            if sum(one.end - one.start for one in parts) < directory.length:
                return
            del self._joints[number]
        self.report(number, check_parts(directory, parts, tail))

    def _note(self, number: int, code: str, checked: Checked) -> None:
        self._wrong[self.ranges.files[number], code][number] = checked

    def _compare_folds(self) -> None:
        """Checksums against `serialization_id`, which torch makes of them.

        How it does so is no promise: where no record of the part bears it out, a torch
        that does it in another way wrote them, and nothing is said.
        """
        folds, self._folds = self._folds, {}
        differing = [number for number, (saved, found) in folds.items() if saved != found]
        if len(differing) == len(folds):
            return
        for number in differing:
            self._sound.remove(number)
            reason = "its checksums are not those that its serialization_id was made from"
            self._note(number, "record.crc", Checked(has_crcs=True, unreadable=reason))

    # Words

    def _finding(self, file: int, code: str, alike: Mapping[int, Checked]) -> Finding:
        ranges = self.ranges
        numbers = sorted(alike, key=ranges.starts.__getitem__)
        first = numbers[0]
        start = ranges.starts[first]
        path = ranges.file_names[file]
        n_bytes = sum(ranges.lengths[number] for number in numbers)
        one, many = _SAYS[code]
        what = f"a record {one}" if len(numbers) == 1 else f"{len(numbers):,} records {many}"
        names = some_of(list(dict.fromkeys(ranges.owner(n).entry.fqn for n in numbers)))
        expected = found = None
        why = alike[first].unreadable
        wrong = alike[first].wrong
        if wrong is not None:
            why = (
                f"{some_of(wrong.names)} (bytes {start + wrong.start:,} to {start + wrong.end:,} "
                "of the file)"
            )
            expected, found = f"CRC-32 {wrong.saved:08x}", f"CRC-32 {wrong.found:08x}"
        of = "" if len(numbers) == 1 else f" ({n_bytes:,} bytes: {names})"
        message = (
            f"{what}{of}, {'' if len(numbers) == 1 else 'the first being '}that of "
            f"{ranges.owner(first).name} at bytes {start:,} to {start + ranges.lengths[first]:,}: "
            f"{why}"
        )
        return Finding(code, inside(self._part_path, path), message, expected, found)

    def _without_proof(self, sealed: Collection[str]) -> Iterator[Finding]:
        said = []
        files: set[str] = set()
        for why, numbers in self._unverifiable.items():
            open_ = {
                number: path
                for number in numbers
                if (path := self._path_in_step(number)) not in sealed
            }
            files.update(open_.values())
            if open_:
                said.append(f"{counted(len(open_), 'record')} {why}")
        if said:
            yield unverifiable(
                self._part_path, f"{'; '.join(said)} ({some_of(sorted(files))})", self._hint
            )

    @property
    def _hint(self) -> str | None:
        return "pip install 'ckptctl[zstd]'" if _NO_ZSTD in self._unverifiable else None

    def _path_in_step(self, number: int) -> str:
        return inside(self._part_path, self.ranges.file_names[self.ranges.files[number]])


def unverifiable(part_path: str, what: str, next_command: str | None = None) -> Finding:
    """The finding for bytes that nothing in the step can prove."""
    return Finding(
        "record.unverifiable",
        part_path,
        f"{what}: nothing in the step can prove their bytes, and no seal covers them",
        expected="a checksum for every byte, or a seal",
        found="neither",
        next_command=next_command or "ckptctl explain record.unverifiable",
    )


_SAYS = {
    "record.crc": (
        "does not match the checksum saved with it",
        "do not match the checksums saved with them",
    ),
    "record.framing": ("is not as torch.save writes it", "are not as torch.save writes them"),
}


def _chosen(ranges: Ranges, by_file: Iterable[Sequence[int]], choose: Choose) -> list[list[int]]:
    files = list(by_file)
    in_order = [number for numbers in files for number in numbers]
    taken = choose([ranges.lengths[number] for number in in_order])
    chosen = {in_order[place] for place in taken}
    return [[number for number in numbers if number in chosen] for numbers in files]


@dataclass(frozen=True, slots=True)
class _Piece(Piece):
    """A piece of a run: whole records from place `first` to `last`, or bytes of one."""

    first: int = 0
    last: int = 0


class _Run:
    """Records that lie side by side in one file; the first and the last may be cut."""

    def __init__(self, check: ContentCheck, numbers: Sequence[int], start: int, end: int) -> None:
        self._check = check
        self._numbers = tuple(numbers)
        self.start = start
        self._end = end
        self._passing: _Passing | _Unpacking | None = None

    @property
    def path(self) -> str:
        """See `byte_pass.Run`."""
        return self._check.path_of(self._numbers[0])

    @property
    def n_bytes(self) -> int:
        """See `byte_pass.Run`."""
        return self._end - self.start

    def pieces(self, limit: int) -> Iterator[Piece]:
        """As many whole records at once as the limit allows; a long one by itself."""
        ranges = self._check.ranges
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
        ranges = self._check.ranges
        if ranges.owner(number).transforms:
            # Its end is known when all of it was unpacked once.
            yield from _in_turn(start, stop, limit, place, ahead=True)
        else:
            end = ranges.starts[number] + ranges.lengths[number]
            tail = min(TAIL, ranges.lengths[number])
            yield _Piece(end - tail, tail, ahead=True, first=place)
        yield from _in_turn(start, stop, limit, place)

    def take(self, piece: Piece, data: memoryview) -> None:
        """See `byte_pass.Run`."""
        assert isinstance(piece, _Piece)  # noqa: S101 - it comes from `pieces`
        ranges = self._check.ranges
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
                _Unpacking(self._check, number, owner)
                if owner.transforms
                else _Passing(self._check, number, max(0, self.start - begin))
            )
        if piece.ahead:
            self._passing.look_ahead(data, last=piece.start + piece.length == end)
        else:
            self._passing.take(data)
            if piece.start + piece.length == min(self._end, end):
                self._passing.finish()
                self._passing = None

    def _take_whole(self, number: int, data: memoryview) -> None:
        owner = self._check.ranges.owner(number)
        if owner.transforms:
            unpacking = _Unpacking(self._check, number, owner)
            unpacking.look_ahead(data, last=True)
            unpacking.take(data)
            unpacking.finish()
        elif isinstance(owner.entry, BytesEntry) and _is_plain(data[:2], data[-1:]):
            self._check.report_plain(number)
        else:
            self._check.report(number, check_whole(data))


def _in_turn(
    start: int, stop: int, limit: int, place: int, *, ahead: bool = False
) -> Iterator[Piece]:
    for at in range(start, stop, limit):
        yield _Piece(at, min(limit, stop - at), ahead, first=place)


def _is_plain(head: memoryview, tail: memoryview) -> bool:
    """A planner of its own may hand over bytes, which are then not framed by torch."""
    return bytes(head[:1]) == b"\x80" and bytes(head[1:]) <= b"\x05" and bytes(tail) == b"."


class _Passing:
    """A long record, or a part of one, whose bytes pass in one thread."""

    def __init__(self, check: ContentCheck, number: int, start: int) -> None:
        self._check = check
        self.number = number
        self._start = start
        self._passing: Passing | None = None
        self._tail = b""
        self._error = ""
        self._head = b""

    def look_ahead(self, data: memoryview, *, last: bool) -> None:  # noqa: ARG002 - always
        """Take the end of the record, where its directory is."""
        self._tail = bytes(data)
        try:
            directory, self._tail = self._check.directory_of(self.number, self._tail)
            self._passing = Passing(directory, self._start)
        except RecordUnreadable as error:
            self._error = error.message

    def take(self, data: memoryview) -> None:
        """Take the next bytes."""
        self._head = self._head or bytes(data[:2])
        if self._passing is not None:
            self._passing.take(data)

    def finish(self) -> None:
        """All bytes of the record that lie in the run have passed."""
        if self._passing is not None:
            directory, part = self._passing.directory, self._passing.part
            self._check.join(self.number, directory, part, self._tail)
        elif self._start == 0:  # said once, by the run that holds its beginning
            owner = self._check.ranges.owner(self.number)
            plain = _is_plain(memoryview(self._head), memoryview(self._tail)[-1:])
            if isinstance(owner.entry, BytesEntry) and plain:
                self._check.report_plain(self.number)
            else:
                self._check.report(self.number, Checked(has_crcs=True, unreadable=self._error))


class _Unpacking:
    """A compressed record: unpacked twice, first to find its directory."""

    def __init__(self, check: ContentCheck, number: int, owner: Owner) -> None:
        self._check = check
        self.number = number
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

    def look_ahead(self, data: memoryview, *, last: bool) -> None:
        """Unpack the next bytes for the first time."""
        if self._unpacker is None or self._error:
            return
        try:
            for out in self._unpacker.feed(data):
                self._tail = (self._tail + out)[-_FRAME_BYTES:]
            if last:
                self._begin_again(self._unpacker)
        except RecordUnreadable as error:
            self._error = error.message

    def _begin_again(self, unpacker: Unpacker) -> None:
        if not unpacker.ended:
            raise RecordUnreadable("its compressed bytes end too early")
        needed = tail_needed(self._tail, unpacker.n_bytes)
        self._tail = self._tail[-needed:]
        self._passing = Passing(parse_directory(self._tail, unpacker.n_bytes), 0)
        self._unpacker = Unpacker(self._limit)

    def take(self, data: memoryview) -> None:
        """Unpack the next bytes for the second time."""
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
            checked = check_parts(directory, [part], self._tail)
        elif self._unpacker is None:
            self._check.report_no_zstd(self.number)
            return
        else:
            checked = Checked(has_crcs=True, unreadable=self._error)
        self._check.report(self.number, checked)


def _unpacked_limit(owner: Owner) -> int:
    """How many bytes a compressed record may come to: what its chunk holds, and its frame."""
    entry = owner.entry
    if not isinstance(entry, TensorEntry):
        return _MANY_BYTES
    n_bytes = DTYPE_SIZES.get(entry.dtype, 16)
    for size in entry.chunks.sizes_of(owner.chunk):
        n_bytes *= size
    return n_bytes + _FRAME_BYTES
