"""Load slices of the tensors in records into the memory of a caller.

One record of each dtype, shape and length is parsed. The others are expected to be like it: one
call reads many that lie side by side, their elements straight to where they belong, and what is
around the elements, a kilobyte a record, into a buffer where it is compared. A record that differs
is parsed, as is one whose elements need more than that: very long ones, slices that are not rows,
memory of another device or dtype. Of these the frame is read first, and then several threads read
the elements. `elements` maps slices to bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import NamedTuple, Protocol

from zlib_ng.zlib_ng import crc32

from ckptctl.errors import RecordUnreadable
from ckptctl.formats.archive.directory import View
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.formatting import inside
from ckptctl.model import BytesEntry, TensorEntry
from ckptctl.records.byte_pass import Limits, OpenFiles, Piece, Run, read_runs
from ckptctl.records.opening import (
    Expected,
    Need,
    OpenRecord,
    Template,
    Templates,
    Unfit,
    unpacked_limit,
)
from ckptctl.records.reads import ReadCost, RecordSource, open_records
from ckptctl.records.slices import (
    RUN_BYTES,
    Dims,
    ElementSink,
    Strided,
    StridedSink,
    TensorSlice,
    copy_strided,
    dense_order,
    element_runs,
    is_contiguous,
    row_major,
)
from ckptctl.records.verification import ElementChecksum
from ckptctl.storage.contract import MAX_BUFFERS, StoreKind, read_range

QUANTIZED = "quantized"
"""The sign of a tensor whose record holds scales beside its elements."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What to read at once, in bytes.

    Records up to `short` are read whole, in reads of up to `longest`. A gap of up to `skip`
    between two rows of a slice is read rather than skipped.
    """

    short: int
    longest: int
    skip: int


REACH = {
    StoreKind.LOCAL: Reach(short=256 << 10, longest=1 << 20, skip=32 << 10),
    StoreKind.NETWORK: Reach(short=1 << 20, longest=4 << 20, skip=128 << 10),
    # A request takes as long as the transfer of a megabyte or two.
    StoreKind.OBJECT: Reach(short=4 << 20, longest=8 << 20, skip=1 << 20),
}


@dataclass(slots=True)
class LoadCounts:
    """The bytes that one load read: `n_needed` are those of the requested elements.

    `n_read` counts all bytes read, including the frames of records; `n_proven` those of
    elements that were compared with the checksum of their record.
    """

    n_records: int = 0
    n_needed: int = 0
    n_read: int = 0
    n_proven: int = 0


class TensorRecord(NamedTuple):
    """The tensor in the record of range `number`.

    Its elements are `n_bytes` from byte `start` of the record on, with the checksum `crc`, None
    without one. `view` is what was read of the record, None if nothing of it is held. `is_whole`
    if also a slice takes all of it: it is compressed, or not in row-major order.
    """

    number: int
    stub: TensorStub
    start: int
    n_bytes: int
    crc: int | None
    view: View | None = None
    is_whole: bool = False

    @property
    def order(self) -> tuple[int, ...] | None:
        """The dimensions from the slowest to the fastest; None where there are gaps or repeats."""
        return dense_order(self.stub.shape, self.stub.strides)

    @property
    def elements(self) -> memoryview | None:
        """The bytes of the elements, if all of the record was read."""
        if self.view is None or len(self.view.head) < self.view.length:
            return None
        return memoryview(self.view.head)[self.start : self.start + self.n_bytes]


def is_row_major(stub: TensorStub) -> bool:
    """Whether the elements of a tensor follow one another in row-major order."""
    usual = zip(stub.shape, stub.strides, row_major(stub.shape), strict=True)
    in_order = all(size == 1 or stride == step for size, stride, step in usual)
    return in_order or not prod(stub.shape)


class WrongElements(Unfit):
    """The elements of a record have the CRC-32 `found`, and not the one that was saved."""

    def __init__(self, record: TensorRecord, found: int) -> None:
        self.n_bytes, self.saved, self.found = record.n_bytes, record.crc or 0, found
        name = f"data/{record.stub.storage_key}"
        super().__init__(
            "record.crc", f"{name} has CRC-32 {found:08x}, but {self.saved:08x} was saved"
        )


def fills_storage(stub: TensorStub) -> bool:
    """Whether the elements of a tensor are all that is in its storage, each once."""
    return not stub.storage_offset and prod(stub.shape) == stub.n_elements_in_storage


class Target(Protocol):
    """Where a slice of a tensor goes: `elements`, in the dimensions of the one in the record."""

    elements: TensorSlice

    def memory_for(self, stub: TensorStub) -> memoryview | None:
        """Memory for the elements as a row-major record of this tensor holds them, or None."""
        ...

    def copy(self, record: TensorRecord) -> None:
        """Copy the slice from a record that was read whole."""
        ...

    def sink(self, record: TensorRecord) -> ElementSink:
        """What receives the elements of a record, in its order."""
        ...

    def finish(self) -> None:
        """Take note that all elements have arrived."""
        ...


@dataclass(slots=True)
class MemoryTarget:
    """A slice of a tensor that goes to `there`; see `Target`.

    The signs of a record (a conjugated view) are not applied.
    """

    elements: TensorSlice
    item_bytes: int
    there: Strided

    @property
    def run(self) -> memoryview | None:
        (sizes, (buffer, first, strides)) = self.elements.sizes, self.there
        if not is_contiguous(sizes, strides, self.item_bytes):
            return None
        return buffer[first : first + prod(sizes) * self.item_bytes]

    def memory_for(self, stub: TensorStub) -> memoryview | None:  # noqa: ARG002
        return self.run

    def copy(self, record: TensorRecord) -> None:
        stub, item_bytes = record.stub, self.item_bytes
        strides = tuple(stride * item_bytes for stride in stub.strides)
        source = Strided(record.elements or _NO_BYTES, stub.storage_offset * item_bytes, strides)
        there = source.at(self.elements.offsets)
        copy_strided(self.there, there, self.elements.sizes, item_bytes)

    def sink(self, record: TensorRecord) -> StridedSink:
        order, there = record.order or (), self.there
        return StridedSink(
            tuple(record.stub.shape[dim] for dim in order),
            self.elements.permuted(order),
            self.item_bytes,
            there._replace(strides=tuple(there.strides[dim] for dim in order)),
        )

    def finish(self) -> None:
        pass


_NO_BYTES = memoryview(b"")


class Caller:
    """Decides what the engine does not know about the one for whom it loads."""

    def item_bytes(self, stub: TensorStub) -> int:
        """The bytes of an element; raises `Unfit` for a tensor that the caller does not take."""
        raise NotImplementedError

    def damage(self, number: int, error: RecordUnreadable | Unfit) -> Exception:
        """The error for a damaged record; `error.code` is that of the finding."""
        raise NotImplementedError

    def take_value(self, number: int, data: bytes) -> None:
        """Take the whole record of a range that holds no tensor, if the caller asks for such."""

    def before_reading(self) -> None:
        """Called when the memory of targets is about to be read into, by other threads."""


_Kind = tuple[int, Expected]
"""Length in bytes, dtype and shape: of records of one kind, most have one frame."""


@dataclass(frozen=True, slots=True)
class RepeatedReads:
    """What loads that follow one another have in common: slices of a record, one after the other.

    `records` are those that are open, without their bytes, and `templates` what they are like;
    threads share both. `files` reads in the thread of the caller. A record that is compressed or
    not in row-major order is held from one load to the next, if `check_held` does not raise for
    its number and its bytes.
    """

    records: dict[int, TensorRecord]
    templates: Templates
    files: OpenFiles
    check_held: Callable[[int, int], None]


class SliceLoads:
    """Loads slices of the records of one part.

    With `prove_slices` a record is read whole also for a slice, and compared with its checksum.
    Targets of at most `most_waiting` bytes are held at once; None for any number. Without
    `repeated` reads, `jobs` threads read, and nothing is held from one load to the next. `counts`
    are those of all loads.
    """

    def __init__(
        self,
        source: RecordSource,
        caller: Caller,
        *,
        prove_slices: bool = False,
        jobs: int | None = None,
        most_waiting: int | None = None,
        repeated: RepeatedReads | None = None,
    ) -> None:
        self.counts = LoadCounts()
        self._source = source
        self._ranges = source.ranges
        self._caller = caller
        self._prove_slices = prove_slices
        self._jobs = jobs
        self._most_waiting = most_waiting
        self._repeated = repeated
        self._templates = Templates() if repeated is None else repeated.templates
        self._reach = reach = REACH[source.store.kind]
        if repeated is not None:
            n_bytes = repeated.files.n_bytes
            short, longest = min(reach.short, n_bytes), min(reach.longest, n_bytes)
            self._reach = replace(reach, short=short, longest=longest)
        self._held: TensorRecord | None = None
        self._waiting: list[Target] = []
        self._n_waiting = 0
        self._runs: list[Run] = []
        self._alike: dict[int, tuple[_Neighbour, Target]] = {}
        self._crcs: dict[int, int | None] = {}

    def load(self, wanted: Mapping[int, Sequence[Target]]) -> None:
        """Fill the targets of each record, by the number of its range.

        Raises what `Caller.damage` returns for a damaged record, and storage errors. After an
        error the content of the targets is undefined.
        """
        files, starts = self._ranges.files, self._ranges.starts
        in_order = sorted(wanted, key=lambda number: (files[number], starts[number]))
        if self._repeated is not None:
            in_order = [n for n in in_order if not self._load_open(n, wanted[n])]
        parsed, likely = self._divided(in_order, wanted)
        self._load_parsed(parsed, wanted)
        templates = {kind: self._templates.get(*kind) for kind in set(likely.values())}
        others = []
        for number, kind in likely.items():
            template = templates[kind]
            if template is None or not self._queue_alike(number, template, wanted[number]):
                others.append(number)
            self._read_if_full()
        self._load_parsed(others, wanted)
        self._read_waiting()
        unlike, self._crcs = [n for n, crc in self._crcs.items() if crc is None], {}
        self._load_parsed(unlike, wanted)
        self._read_waiting()

    # Records that an earlier load has opened

    def open(self, numbers: Iterable[int]) -> Mapping[int, TensorRecord]:
        """The records of these ranges of tensors, without their bytes; with `repeated` only.

        Raises as `load` does. Cost: that of their frames; all of those that are compressed.
        """
        assert self._repeated is not None  # noqa: S101 - only then they are kept
        wanted, records = [*numbers], self._repeated.records
        others = [number for number in wanted if number not in records]
        for record in self._parsed(others, {}):
            self._keep(record)
        return {number: records[number] for number in wanted}

    def _load_open(self, number: int, targets: Sequence[Target]) -> bool:
        """Load or queue the targets of a record that is open; False for one that is not."""
        record = self._open_record(number)
        if record is not None:
            self._fill(record, targets)
        return record is not None

    def _open_record(self, number: int) -> TensorRecord | None:
        """A record that was opened before, with its bytes if it must be held."""
        assert self._repeated is not None  # noqa: S101 - the caller has asked
        if self._held is not None and self._held.number == number:
            return self._held
        record = self._repeated.records.get(number)
        if record is None or not record.is_whole:
            return record
        # The range of a record without a frame is that of its elements.
        is_framed = record.n_bytes < self._ranges.lengths[number]
        if is_framed or self._ranges.owner(number).transforms:
            return None
        self._repeated.check_held(number, record.n_bytes)
        path = inside(self._source.folder, self._ranges.file_names[self._ranges.files[number]])
        data = read_range(self._source.store, path, self._ranges.starts[number], record.n_bytes)
        if record.crc is not None and (found := crc32(data)) != record.crc:
            raise self._caller.damage(number, WrongElements(record, found))
        self._held = record._replace(view=View(len(data), data, data))
        return self._held

    def _keep(self, record: TensorRecord) -> None:
        """Keep an open record for the loads to come."""
        if self._repeated is not None:
            self._repeated.records[record.number] = record._replace(view=None)
            if record.elements is not None and record.is_whole:
                self._held = record

    # Records that are like one before

    def _divided(
        self, numbers: Sequence[int], wanted: Mapping[int, Sequence[Target]]
    ) -> tuple[list[int], dict[int, _Kind]]:
        """The records to be parsed, and those that may be like one of them, with their kind."""
        lengths = self._ranges.lengths
        parsed: list[int] = []
        likely: dict[int, _Kind] = {}
        kinds: set[_Kind] = set()
        for number in numbers:
            owner = self._ranges.owner(number)
            if isinstance(owner.entry, TensorEntry) and not owner.transforms:
                kind = lengths[number], Expected.chunk(owner.entry, owner.chunk)
                if kind in kinds and self._is_one_run(number, kind[1].sizes, wanted[number]):
                    likely[number] = kind
                    continue
                kinds.add(kind)
            parsed.append(number)
        return parsed, likely

    def _is_one_run(self, number: int, sizes: Dims, targets: Sequence[Target]) -> bool:
        """Whether what is read of a record are consecutive elements, for one target."""
        if len(targets) > 1 or self._ranges.lengths[number] > RUN_BYTES:
            return False
        lengths = targets[0].elements.sizes
        return lengths == sizes or (lengths[1:] == sizes[1:] and not self._prove_slices)

    def _queue_alike(self, number: int, template: Template, targets: Sequence[Target]) -> bool:
        """Queue a record to be read into its target as the template states, if that is possible."""
        stub, (target,) = template.opened.stub, targets
        if stub is None or stub.signs or max(template.start, template.n_rest) > _MAX_FRAME:
            return False
        if not is_row_major(stub) or not fills_storage(stub):
            return False
        memory, first, wanted = target.memory_for(stub), template.start, target.elements
        if memory and wanted.sizes:
            first += wanted.offsets[0] * len(memory) // wanted.sizes[0]  # the rows before
        if not memory or first + len(memory) > template.end:
            return False
        record = _Neighbour(number, self._ranges.starts[number], template, first, memory)
        self._alike[number] = record, target
        self._n_waiting += len(memory)
        return True

    # Frames and short records

    def _load_parsed(self, numbers: Sequence[int], wanted: Mapping[int, Sequence[Target]]) -> None:
        """Parse the frame of each record, decompressed if necessary, and load or queue it."""
        for record in self._parsed(numbers, wanted):
            self._keep(record)
            self._fill(record, wanted[record.number])
            self._read_if_full()

    def _parsed(
        self, numbers: Sequence[int], wanted: Mapping[int, Sequence[Target]]
    ) -> Iterator[TensorRecord]:
        """Each record that holds a tensor, with as much of it as its targets need.

        The values in others are given to the caller.
        """
        by_file: list[list[int]] = [[] for _ in self._ranges.file_names]
        for number in numbers:
            by_file[self._ranges.files[number]].append(number)
        needs = {n: need for n in numbers if (need := self._need(n, wanted.get(n, ()))) is not None}
        reading = ReadCost()
        for number, (view, record) in open_records(
            self._source,
            by_file,
            partial(self._open, wanted),
            reading,
            needs=needs,
            longest=self._reach.longest,
        ):
            self.counts.n_records += 1
            if record.stub is None:
                self._caller.take_value(number, view.head)
            else:
                yield self._tensor(number, view, record, record.stub)
        self.counts.n_read += reading.n_bytes

    def _need(self, number: int, targets: Sequence[Target]) -> Need | None:
        """How much of a record to read at first; None for its frame."""
        owner = self._ranges.owner(number)
        length = self._ranges.lengths[number]
        if owner.transforms and self._repeated is not None:
            self._repeated.check_held(number, unpacked_limit(owner))
        if isinstance(owner.entry, BytesEntry) or owner.transforms:
            return Need(head=length)
        sizes = owner.entry.chunks.sizes_of(owner.chunk)
        whole = self._prove_slices or any(target.elements.sizes == sizes for target in targets)
        return Need(head=length) if whole and length <= self._reach.short else None

    def _open(
        self, wanted: Mapping[int, Sequence[Target]], number: int, view: View
    ) -> tuple[View, OpenRecord] | Need:
        owner = self._ranges.owner(number)
        entry = owner.entry if isinstance(owner.entry, TensorEntry) else None
        try:
            expected = None if entry is None else Expected.chunk(entry, owner.chunk)
            found = self._templates.open_stored(
                view, expected, owner.transforms, unpacked_limit(owner)
            )
        except (RecordUnreadable, Unfit) as error:
            raise self._caller.damage(number, error) from error
        if isinstance(found, Need):
            return found
        view, record = found
        if record.stub is None or len(view.head) == view.length or number not in wanted:
            return found
        tensor = self._tensor(number, view, record, record.stub)
        if self._repeated is not None:
            is_whole = tensor.is_whole
            if is_whole:
                self._repeated.check_held(number, view.length)
        else:
            has_order = tensor.order is not None and fills_storage(tensor.stub)
            is_whole = not has_order or QUANTIZED in tensor.stub.signs
        return Need(head=view.length) if is_whole else found

    def _tensor(
        self, number: int, view: View, record: OpenRecord, stub: TensorStub
    ) -> TensorRecord:
        try:
            n_bytes = stub.n_elements_in_storage * self._caller.item_bytes(stub)
            member = record.elements
            # `open_record` cannot compare this for dtypes whose size only the caller knows.
            if member is None or member.size != n_bytes:
                has = 0 if member is None else member.size
                raise Unfit(
                    "record.mismatch", f"it holds {has:,} bytes of elements instead of {n_bytes:,}"
                )
        except Unfit as error:
            raise self._caller.damage(number, error) from error
        crc = member.crc if record.directory.has_crcs else None
        is_whole = bool(self._ranges.owner(number).transforms) or not is_row_major(stub)
        return TensorRecord(number, stub, member.start, member.size, crc, view, is_whole)

    # The elements of one record

    def _fill(self, record: TensorRecord, targets: Sequence[Target]) -> None:
        item_bytes = self._caller.item_bytes(record.stub)
        for place, target in enumerate(targets):
            n_bytes = target.elements.n_elements * item_bytes
            self.counts.n_needed += n_bytes
            if record.elements is not None:
                target.copy(record)
                self.counts.n_proven += 0 if record.crc is None else record.n_bytes
                target.finish()
                continue
            self._waiting.append(target)
            self._n_waiting += n_bytes
            if n_bytes:
                self._queue(record, target, prove=self._prove_slices and place == 0)

    def _queue(self, record: TensorRecord, target: Target, *, prove: bool) -> None:
        """Queue the elements to be read with those of other records."""
        ranges, stub, saved = self._ranges, record.stub, record.crc
        checksum = None
        is_whole = target.elements.sizes == stub.shape and fills_storage(stub)
        if saved is not None and (prove or is_whole):

            def wrong(found: int) -> None:
                raise self._caller.damage(record.number, WrongElements(record, found))

            checksum = ElementChecksum(record.n_bytes, saved, wrong)
            self.counts.n_proven += record.n_bytes
        path = inside(self._source.folder, ranges.file_names[ranges.files[record.number]])
        first = stub.storage_offset * self._caller.item_bytes(stub)
        at = ranges.starts[record.number] + record.start + first
        sink = target.sink(record)
        self._runs += element_runs(path, at, sink, skip=self._reach.skip, checksum=checksum)

    def _read_if_full(self) -> None:
        if self._most_waiting is not None and self._n_waiting > self._most_waiting:
            self._read_waiting()

    def _read_waiting(self) -> None:
        """Read the queued elements, and finish their targets."""
        files, skip = self._ranges.files, self._reach.skip
        alike, self._alike = self._alike, {}
        for file, records in groupby(
            (record for record, _ in alike.values()), lambda record: files[record.number]
        ):
            path = inside(self._source.folder, self._ranges.file_names[file])
            self._runs += _neighbour_runs(path, records, skip, self._crcs.__setitem__)
        self._caller.before_reading()
        if self._repeated is not None:
            self.counts.n_read += self._repeated.files.read(self._runs)
        else:
            # The caller may give up, and use the memory otherwise: no thread may still write to it.
            limits = Limits(jobs=self._jobs)
            self.counts.n_read += read_runs(self._source.store, self._runs, limits)
        for target in self._waiting:
            target.finish()
        for number, (record, target) in alike.items():
            if (crc := self._crcs[number]) is None:
                continue
            template = record.template
            stub, start, end = template.opened.stub, template.start, template.end
            if stub is not None:
                self._keep(TensorRecord(number, stub, start, end - start, crc))
            self.counts.n_records += 1
            self.counts.n_needed += len(record.memory)
            self.counts.n_proven += record.n_proven
            target.finish()
        self._runs, self._waiting, self._n_waiting = [], [], 0


# Records that are like a template: many with one call


_MAX_FRAME = 64 << 10
"""The longest head or end of a record, in bytes, that is read in this way."""

_PROVEN = 34 << 10
"""Of records up to this length in bytes all elements are read and compared, even for a slice."""


class _Neighbour(NamedTuple):
    """A record: that of range `number`, from byte `start` of its file on.

    The bytes from its `first` one on, which are elements, go to `memory`.
    """

    number: int
    start: int
    template: Template
    first: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.start + self.template.end + self.template.n_rest

    @property
    def n_proven(self) -> int:
        """The bytes of elements that are compared with their checksum: all, or 0."""
        n_bytes = self.template.end - self.template.start
        whole = len(self.memory) == n_bytes or self.end - self.start <= _PROVEN
        return n_bytes if whole else 0


_Check = Callable[[_Neighbour, memoryview], None]
_Done = Callable[[int, int | None], object]


@dataclass(frozen=True, slots=True)
class _CheckedPiece(Piece):
    """One call, with what is to be checked after it."""

    checks: Sequence[tuple[_Check, _Neighbour, memoryview]] = ()


class _ReadCall:
    """A call of at most `limit` bytes that is put together, from `start` on.

    What belongs to no memory of the caller goes into `buffer`.
    Memory that is longer than a call is alone in it: `Piece.reads` divides it.
    """

    def __init__(self, start: int, buffer: memoryview, limit: int) -> None:
        self.checks: list[tuple[_Check, _Neighbour, memoryview]] = []
        self._start = self._end = start
        self._buffer = buffer
        self._limit = limit
        self._into: list[memoryview] = []
        self._n_used = self._n_given = 0  # of the buffer: in all, and in `_into`

    def room(self, start: int, skip: int) -> int:
        """How many bytes from `start` on can be added; a gap of up to `skip` is read."""
        near = 0 <= start - self._end <= skip and len(self._into) < MAX_BUFFERS - 2
        return self._limit - (start - self._start) if near else 0

    def add_aside(self, start: int, n_bytes: int) -> memoryview:
        """Read bytes into the buffer; returns their place."""
        at = self._n_used + start - self._end
        self._n_used = at + n_bytes
        self._end = start + n_bytes
        return self._buffer[at : at + n_bytes]

    def add(self, start: int, memory: memoryview) -> memoryview:
        """Read bytes into memory of the caller, which is returned."""
        self.add_aside(start, 0)
        self._give()
        self._into.append(memory)
        self._end += len(memory)
        return memory

    def pieces(self) -> Iterator[_CheckedPiece]:
        """The call, complete; none if nothing was added to it."""
        self._give()
        if self._into:
            yield _CheckedPiece(
                self._start, self._end - self._start, into=self._into, checks=self.checks
            )

    def _give(self) -> None:
        if self._n_used > self._n_given:
            self._into.append(self._buffer[self._n_given : self._n_used])
            self._n_given = self._n_used


class _NeighbourRun:
    """Records of one file, in its order, that do not overlap; see `byte_pass.Run`.

    Gaps of up to `skip` bytes are read. `done` is called, in the thread that reads, with the
    number of each record and the checksum that was saved with its elements; with None for one
    that is unlike its template or does not match its checksum.
    """

    def __init__(self, path: str, records: Sequence[_Neighbour], skip: int, done: _Done) -> None:
        self.path = path
        self.n_bytes = records[-1].end - records[0].start
        self._records = records
        self._skip = skip
        self._done = done
        # Of the record that is being read, whose parts may be in several pieces:
        self._has_head = False
        self._crc = 0

    def pieces(self, limit: int) -> Iterator[Piece]:
        n_aside = sum(self._n_aside(record) + self._skip for record in self._records)
        buffer = memoryview(bytearray(min(limit, n_aside)))
        call = _ReadCall(self._records[0].start, buffer, limit)
        for record in self._records:
            for check, at, n_bytes, memory in self._parts(record):
                if call.room(at, self._skip) < n_bytes:
                    yield from call.pieces()
                    call = _ReadCall(at, buffer, limit)
                part = call.add_aside(at, n_bytes) if memory is None else call.add(at, memory)
                call.checks.append((check, record, part))
        yield from call.pieces()

    def take(self, piece: Piece, data: memoryview) -> None:
        assert isinstance(piece, _CheckedPiece)  # noqa: S101 - it comes from `pieces`
        for check, record, part in piece.checks:
            # Elements that take several reads have a piece to themselves.
            check(record, part if len(piece.checks) > 1 else data)

    def _n_aside(self, record: _Neighbour) -> int:
        """The most bytes of a record that are read, and not into its memory."""
        others = record.end - record.start - len(record.memory)
        if record.n_proven:
            return others
        return min(others, record.template.start + record.template.n_rest + 2 * self._skip)

    def _parts(self, record: _Neighbour) -> Iterator[tuple[_Check, int, int, memoryview | None]]:
        """The check, the first byte in the file, the length and the memory of each part to read."""
        _, start, template, first, memory = record
        after = first + len(memory)
        yield self._check_head, start, template.start, None
        if record.n_proven and first > template.start:
            yield self._check_elements, start + template.start, first - template.start, None
        yield self._check_elements, start + first, len(memory), memory
        if record.n_proven and after < template.end:
            yield self._check_elements, start + after, template.end - after, None
        yield self._check_rest, start + template.end, template.n_rest, None

    def _check_head(self, record: _Neighbour, part: memoryview) -> None:
        self._has_head = bytes(part) == record.template.head
        self._crc = 0

    def _check_elements(self, record: _Neighbour, part: memoryview) -> None:
        if record.n_proven:  # else the other elements of a long record are not read
            self._crc = crc32(part, self._crc)

    def _check_rest(self, record: _Neighbour, part: memoryview) -> None:
        checksums = record.template.checksums(part, 0)
        saved = None if checksums is None or not self._has_head else checksums[0]
        if record.n_proven and self._crc != saved:
            saved = None
        self._done(record.number, saved)


def _neighbour_runs(
    path: str, records: Iterable[_Neighbour], skip: int, done: _Done
) -> Iterator[_NeighbourRun]:
    """The runs that read records of one file, which are given in its order; see `_NeighbourRun`."""
    together: list[_Neighbour] = []
    for record in records:
        if together and (
            record.start < together[-1].end or record.end - together[0].start > RUN_BYTES
        ):
            yield _NeighbourRun(path, together, skip, done)
            together = []
        together.append(record)
    if together:
        yield _NeighbourRun(path, together, skip, done)
