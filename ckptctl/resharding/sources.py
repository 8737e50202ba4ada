"""The source of a reshard, conversion or comparison: its tensors, chunks and sidecars.

The metadata of a part, also where each rank saved its own, becomes one list of entries; files of
`torch.save` and safetensors become the same in `reading`. A step that inspection does not call
complete is refused. `planning` decides how the entries are sharded in the new step.

A record is opened once. Row-major records are read by ranges; transposed and compressed
ones are held in memory while they are read. A non-tensor entry is read whole, and its
pickle is decoded without running it: numbers, strings, bytes, dtypes and containers of them
can be written again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32, crc32_combine

from ckptctl.errors import (
    CkptctlError,
    MetadataUnreadable,
    MetadataUnsafe,
    RecordUnreadable,
    UsageError,
)
from ckptctl.findings import Finding, Report, Verdict
from ckptctl.formats.archive.directory import Member, View, read_member
from ckptctl.formats.archive.state_file import Leaf, NotPlain, Written, written
from ckptctl.formats.archive.writing import WRITABLE
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layouts import (
    METADATA,
    METADATA_TMP,
    is_own,
    rank_local_rank,
    shard_rank,
)
from ckptctl.formats.frameworks.state_keys import StateKind, entry_kinds
from ckptctl.formats.pickles.values import TensorStub, decode_state
from ckptctl.formatting import command_line, inside
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.model import (
    DTYPE_SIZES,
    SHARDED,
    ByteRange,
    BytesEntry,
    Chunks,
    FileInfo,
    Metadata,
    PartFormat,
    RangeColumns,
    TensorEntry,
)
from ckptctl.records.byte_pass import read_run
from ckptctl.records.elements import Block, StridedSink, block_of, element_runs
from ckptctl.records.loading import REACH
from ckptctl.records.opening import (
    Expected,
    Need,
    OpenRecord,
    Templates,
    Unfit,
    WrongChecksum,
    open_whole,
    tensor_limit,
    unpack,
)
from ckptctl.records.reads import open_one_record
from ckptctl.records.slices import (
    Dims,
    Strided,
    TensorSlice,
    aligned,
    blocks,
    copy_strided,
    is_contiguous,
    position,
    row_major,
)
from ckptctl.storage.contract import Closing, OpenFile, Span, Store, read_range

MAX_VALUE_BYTES = 64 << 20
"""The longest record of a value that is read; it is held in memory."""

_MAX_OPEN = 8


class SourceDamaged(CkptctlError, code="step.damaged", exit_code=21):
    """The source does not match what was saved; `finding` names the place and the difference.

    Every process of a group gets it where one of them finds the damage.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message, next_command=finding.next_command)
        self.finding = finding


class Opened(NamedTuple):
    """A tensor's record: its elements begin at `start` of the file and take `n_bytes`.

    `crc` is their checksum, None if they have none. `first` is the byte of the first
    element, `strides` are in bytes; `held` are the elements of a record that cannot be read
    by ranges.
    """

    start: int
    n_bytes: int
    crc: int | None
    first: int
    strides: Dims
    is_row_major: bool
    held: memoryview | None = None


class SourceChunk(NamedTuple):
    """A slice of a tensor, and the byte range of its record.

    `opened` is where its elements lie, of a file whose directory states that for all; None
    if the record itself states it.
    """

    elements: TensorSlice
    record: ByteRange
    opened: Opened | None = None


class ChunkOverlap(NamedTuple):
    """The elements that chunk number `number` and a slice share."""

    number: int
    elements: TensorSlice


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and its chunks in the order of their first offsets, without empty ones.

    A tensor without elements has one chunk. `kind` is the kind of train state; `rank`
    is set if the entry exists once per rank. `n_cut` is how many chunks the writer made of
    it, empty ones included; `longest` is the length of the longest chunk along
    dimension 0.
    """

    entry: TensorEntry
    chunks: tuple[SourceChunk, ...]
    kind: str
    rank: str | None
    n_cut: int
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        lengths = (c.elements.sizes[0] for c in self.chunks if c.elements.sizes)
        object.__setattr__(self, "longest", max(lengths, default=0))

    @property
    def fqn(self) -> str:
        """The FQN of the tensor."""
        return self.entry.fqn

    @property
    def item_bytes(self) -> int:
        """The size of an element in bytes."""
        return DTYPE_SIZES[self.entry.dtype]

    @property
    def n_bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return prod(self.entry.shape) * self.item_bytes

    def overlaps(self, wanted: TensorSlice) -> Iterator[ChunkOverlap]:
        """The parts of a slice of this tensor, by the chunks that hold them, in their order."""
        if not wanted.offsets:
            yield ChunkOverlap(0, wanted)
            return
        first, end = wanted.offsets[0], wanted.ends[0]
        # Chunks are in the order of their first offsets: none after `end` can overlap, and
        # one that begins before the slice does so by less than the longest chunk has.
        low = bisect_left(
            self.chunks, first - self.longest + 1, key=lambda chunk: chunk.elements.offsets[0]
        )
        for number in range(low, len(self.chunks)):
            chunk = self.chunks[number].elements
            if chunk.offsets[0] >= end:
                return
            common = chunk.overlap(wanted)
            if common is not None:
                yield ChunkOverlap(number, common)


@dataclass(frozen=True, slots=True)
class SourceBytes:
    """An entry that is no tensor, and its record; `kind` and `rank` as for tensors.

    `held` are the bytes of a record that was made of a value in a file of `torch.save`.
    """

    fqn: str
    record: ByteRange
    kind: str
    rank: str | None
    held: bytes | None = None


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The entries of one folder of DCP or of files, and the records in `files`.

    `digests` are the SHA-256 of each metadata file, or of what stands for one. `several` are FQNs
    that more than one rank saved on its own: the first of them counts.
    """

    path: str
    tensors: tuple[SourceTensor, ...]
    bytes_entries: tuple[SourceBytes, ...]
    paths: Mapping[str, tuple[str | int, ...]]
    digests: tuple[str, ...]
    files: SourceFiles
    several: tuple[str, ...] = ()

    @property
    def entries(self) -> tuple[SourceTensor | SourceBytes, ...]:
        """Tensors and others."""
        return (*self.tensors, *self.bytes_entries)


@dataclass(frozen=True, slots=True)
class RankFile:
    """A sidecar that is copied; `kind` and `rank` if it exists once per rank."""

    file: FileInfo
    kind: str | None
    rank: str | None


@dataclass(frozen=True, slots=True)
class Source:
    """The step or file to reshard or convert.

    `opened` is the step that holds the sidecars; None for a file. `changes` yields a
    `step.changed` if its files are not as they were inspected.
    """

    url: str
    report: Report
    parts: tuple[SourcePart, ...]
    files: tuple[RankFile, ...]
    changes: Callable[[], Iterator[Finding]]
    opened: OpenStep | None = None

    @property
    def tensors(self) -> Iterator[SourceTensor]:
        """The tensors of all parts."""
        return (tensor for part in self.parts for tensor in part.tensors)

    def check_unchanged(self) -> None:
        """Raise `SourceDamaged` if files were written since: what was read may be of two saves.

        Each record of either save matches its own checksum. Cost: one listing.
        """
        for finding in self.changes():
            raise SourceDamaged(finding)

    def with_damage(self, damage: Finding) -> Report:
        """The report with the damage that was found, or `step.changed` if files were written since.

        What was read of two saves does not prove that either of them is damaged. Cost: one listing.
        """
        return self.report.with_findings(next(self.changes(), damage))


def source_in(
    inspected: Inspection, parts: Sequence[SourcePart], files: Sequence[RankFile] = ()
) -> Source:
    """The source that `parts` of an inspected step make, with sidecars to copy."""
    url, opened = inspected.step.url, inspected.opened
    return Source(url, inspected.report, tuple(parts), tuple(files), opened.changes, opened)


def source_of(inspected: Inspection) -> Source:
    """The source in an inspected step; raises `UsageError` if a tensor cannot be resharded.

    Call `check_format` and `refusal` before: the step must be complete, sharded DCP.
    """
    parts = [_part(part) for part in inspected.parts if part.part.format in SHARDED]
    return source_in(inspected, parts, [*_sidecars(inspected)])


def check_format(inspected: Inspection) -> None:
    """Raise `UsageError` if the step holds tensors, but none in sharded DCP."""
    formats = [part.format for part in inspected.step.parts]
    if formats and not SHARDED.intersection(formats):
        url = inspected.step.url
        words = ["show", url]
        if PartFormat.SAFETENSORS in formats:
            words = ["convert", url, f"{url}-dcp", "--accept-unverifiable"]
        raise UsageError(
            f"{url} holds {formats[0].value}, not sharded DCP", next_command=command_line(*words)
        )


def refusal(report: Report, *, accept_unverifiable: bool) -> bool:
    """Whether a step must be refused because it is not complete."""
    if report.verdict is Verdict.UNVERIFIABLE:
        return not accept_unverifiable
    return report.verdict is not Verdict.COMPLETE


def _part(opened: OpenPart) -> SourcePart:
    """The part that the metadata of a folder makes; each rank may have metadata of its own."""
    part = opened.part
    entries: dict[str, TensorEntry] = {}
    chunks: dict[str, list[SourceChunk]] = {}
    n_cut: dict[str, int] = {}
    values: dict[str, SourceBytes] = {}
    kinds: dict[str, StateKind] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    several: dict[str, None] = {}
    for metadata in opened.metadata:
        kinds |= entry_kinds(metadata, part.path)
        paths |= metadata.planner_paths
        for fqn, entry in metadata.tensors.items():
            _check_can_be_written(entries.setdefault(fqn, entry))
            n_cut[fqn] = n_cut.get(fqn, 0) + len(entry.chunks)
            chunks.setdefault(fqn, []).extend(
                SourceChunk(TensorSlice(chunk.offsets, chunk.sizes), chunk.byte_range)
                for chunk in entry.chunks
                if chunk.byte_range is not None
            )
        for fqn, value in metadata.bytes_entries.items():
            if value.byte_range is not None and fqn not in values:
                values[fqn] = SourceBytes(
                    fqn, value.byte_range, kinds[fqn].names[0], kinds[fqn].rank
                )
            elif value.byte_range is not None:
                several[fqn] = None
    return SourcePart(
        part.path,
        tuple(_tensor(entries[fqn], held, kinds[fqn], n_cut[fqn]) for fqn, held in chunks.items()),
        tuple(values.values()),
        paths,
        tuple(metadata.digest for metadata in opened.metadata),
        SourceFiles(opened.store, opened.folder, opened.url, part.path),
        tuple(several),
    )


def _check_can_be_written(entry: TensorEntry) -> None:
    if entry.dtype not in WRITABLE:
        raise UsageError(f"{entry.fqn} is of dtype {entry.dtype}, which cannot be resharded")
    if entry.layout != "strided":
        raise UsageError(f"{entry.fqn} has the layout {entry.layout}, which cannot be resharded")


def _tensor(
    entry: TensorEntry, chunks: Sequence[SourceChunk], kind: StateKind, n_cut: int
) -> SourceTensor:
    is_empty = 0 in entry.shape
    by_place: dict[Dims, SourceChunk] = {}
    for chunk in chunks:
        if is_empty or 0 not in chunk.elements.sizes:
            # Ranks that saved their own metadata each list the replicated entries.
            by_place.setdefault(chunk.elements.offsets, chunk)
    in_order = sorted(by_place.values(), key=lambda chunk: chunk.elements.offsets)
    kept = tuple(in_order[:1] if is_empty else in_order)
    return SourceTensor(entry, kept, kind.names[0], kind.rank, n_cut)


def tensor_entry(
    fqn: str, dtype: str, shape: Dims, path: tuple[str | int, ...] = ()
) -> TensorEntry:
    """A tensor whose chunks are not those of DCP, but stated beside it."""
    chunks = Chunks(len(shape), array("q"), array("q"), RangeColumns.missing(0))
    return TensorEntry(fqn, dtype, shape, chunks, path)


def part_of(
    path: str,
    tensors: Sequence[tuple[TensorEntry, Sequence[SourceChunk]]],
    digest: str,
    files: SourceFiles,
    values: Sequence[tuple[BytesEntry, bytes]] = (),
    *,
    folder: str = "",
) -> SourcePart:
    """The part that tensors, each with where its bytes lie, and records of other values make.

    The name of the `folder` counts for the kinds of the entries.
    """
    entries = {entry.fqn: entry for entry, _ in tensors}
    others = {entry.fqn: entry for entry, _ in values}
    kinds = entry_kinds(Metadata(entries, others, ()), folder)
    return SourcePart(
        path,
        tuple(_tensor(entry, held, kinds[entry.fqn], len(held)) for entry, held in tensors),
        tuple(
            SourceBytes(
                fqn := entry.fqn,
                ByteRange("", 0, len(record)),
                kinds[fqn].names[0],
                kinds[fqn].rank,
                record,
            )
            for entry, record in values
        ),
        {fqn: entry.path for fqn, entry in (entries | others).items()},
        (digest,),
        files,
    )


def check_is_copied(url: str, file: FileInfo) -> None:
    """Raise `UsageError` for a file of the step at `url` that is a link or not a regular file."""
    if file.kind != "file":
        raise UsageError(f"{url}: {file.path} is a link or not a regular file, and is not copied")


def _sidecars(inspected: Inspection) -> Iterator[RankFile]:
    """All files but shards, metadata and ckptctl's own."""
    step = inspected.step
    dcp = {part.path for part in step.parts if part.format in SHARDED}
    for file in step.files:
        folder, _, name = file.path.rpartition("/")
        if is_own(file.path):
            continue
        is_metadata = name in (METADATA, METADATA_TMP) or rank_local_rank(name) is not None
        if folder in dcp and (
            is_metadata or shard_rank(name) is not None or name.endswith(".distcp")
        ):
            continue
        check_is_copied(step.url, file)
        kind = kind_of_file(step.layout, file.path)
        yield RankFile(file, kind.names[0] if kind else None, kind.rank if kind else None)


# Records


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes that each thread may hold: of the target, of the source, of a whole record."""

    block: int
    band: int
    held: int


class Piece(NamedTuple):
    """Bytes of a record that were copied unchanged, and their CRC-32.

    `start` is where the record begins in its file, `at` and `length` are bytes of its
    elements.
    """

    file: str
    start: int
    at: int
    length: int
    crc: int


class SourceFiles:
    """The records of one folder of the source, opened by several threads.

    `folder` is where it is in the store, and `part_path` in the step at `url`.
    """

    def __init__(self, store: Store, folder: str, url: str, part_path: str = "") -> None:
        self.store = store
        self.url = url
        self._folder = folder
        self._part_path = part_path
        self._opened: dict[tuple[str, int], Opened] = {}
        self._templates = Templates()
        self.skip = REACH[store.kind].skip

    def in_store(self, name: str) -> str:
        """The path of a file in the store."""
        return inside(self._folder, name)

    def finding(self, code: str, record: ByteRange, message: str) -> Finding:
        """A finding about a record."""
        where = inside(self._part_path, record.file)
        return Finding(
            code,
            where,
            f"{where}: the record at byte {record.offset:,}: {message}",
            expected="the record as it was saved",
            found=message,
            next_command=command_line("verify", self.url, "--level", "content"),
        )

    def opened(self, tensor: SourceTensor, number: int, held_limit: int) -> Opened:
        """The record of a chunk of a tensor; raises `SourceDamaged`.

        One that is held is verified. Cost: two reads when it is opened first, none after that
        unless it must be held.
        """
        chunk = tensor.chunks[number]
        if chunk.opened is not None:
            return self._in_memory(tensor, chunk.record, chunk.opened, held_limit)
        key = (chunk.record.file, chunk.record.offset)
        known = self._opened.get(key)
        if known is None:
            known = self._open(tensor, number, held_limit)
            if known.held is None:
                self._opened[key] = known
        return known

    def _in_memory(
        self, tensor: SourceTensor, record: ByteRange, opened: Opened, held_limit: int
    ) -> Opened:
        """Elements of which the place is known; they are read if they are not row-major."""
        if opened.is_row_major:
            return opened
        _check_held(tensor, opened.n_bytes, held_limit)
        elements = read_range(self.store, self.in_store(record.file), opened.start, opened.n_bytes)
        if opened.crc is not None and crc32(elements) != opened.crc:
            saved = f"saved was {opened.crc:08x}"
            message = f"its elements have the CRC-32 {crc32(elements):08x}, {saved}"
            raise SourceDamaged(self.finding("record.crc", record, message))
        return opened._replace(start=0, held=aligned(elements))

    def _open(self, tensor: SourceTensor, number: int, held_limit: int) -> Opened:
        chunk = tensor.chunks[number]
        record, dtype, sizes = chunk.record, tensor.entry.dtype, chunk.elements.sizes
        limit = tensor_limit(dtype, sizes)
        if record.transforms:
            _check_held(tensor, limit, held_limit)

        def open_one(view: View) -> tuple[View, Opened] | Need:
            stored = self._templates.open_stored(
                view, Expected(dtype, sizes), record.transforms, limit
            )
            if isinstance(stored, Need):
                return stored
            opened = _described(stored[1])
            if not opened.is_row_major and not record.transforms:
                _check_held(tensor, record.length, held_limit)
                if len(view.head) < record.length:
                    return Need(head=record.length)
            return stored[0], opened

        try:
            view, opened = open_one_record(
                lambda start, n: read_range(
                    self.store, self.in_store(record.file), record.offset + start, n
                ),
                record.length,
                open_one,
            )
        except (RecordUnreadable, Unfit) as error:
            raise self.damage(record, error) from error
        if opened.is_row_major and not record.transforms:
            return opened._replace(start=opened.start + record.offset)
        elements = view.get(opened.start, opened.start + opened.n_bytes) or b""
        return opened._replace(start=0, held=aligned(elements))

    def damage(self, record: ByteRange, error: RecordUnreadable | Unfit) -> SourceDamaged:
        """The error for a record that cannot be opened."""
        message = error.message
        if isinstance(error, WrongChecksum):
            message = f"{error.names} does not match the checksum saved with it"
        return SourceDamaged(self.finding(error.code, record, message))


def _described(found: OpenRecord) -> Opened:
    """Where the elements of an open record lie; raises `Unfit` if they cannot be copied."""
    stub, elements = found.stub, found.elements
    assert stub is not None and elements is not None  # noqa: S101, PT018 - a tensor was expected
    if stub.signs:
        raise Unfit("format.unsupported", f"its elements are stored as {stub.signs[0]}")
    return opened_at(stub, elements, found.crc if elements.size else None)


def opened_at(stub: TensorStub, elements: Member, crc: int | None) -> Opened:
    """The tensor that `stub` describes, whose elements lie in a member of an archive."""
    item_bytes = DTYPE_SIZES[stub.dtype]
    usual = zip(stub.shape, stub.strides, row_major(stub.shape), strict=True)
    is_row_major = all(size == 1 or stride == step for size, stride, step in usual)
    return Opened(
        elements.start,
        elements.size,
        crc,
        stub.storage_offset * item_bytes,
        tuple(stride * item_bytes for stride in stub.strides),
        is_row_major or not prod(stub.shape),
    )


def _check_held(tensor: SourceTensor, n_bytes: int, limit: int) -> None:
    """Raise `UsageError` if a record is larger than what may be held."""
    if n_bytes > limit:
        raise UsageError(
            f"a record of {tensor.entry.fqn} is transposed or compressed, and must be held in "
            f"memory as a whole: {n_bytes:,} bytes, of which {limit:,} are available; "
            "give more --memory, or use --jobs 1"
        )


class SliceReader(Closing):
    """Reads slices of tensors from one source folder, in one thread.

    A context manager: it keeps a few shard files open until it is closed. `proof` holds the runs
    that `elements` has copied as they lie in the source; `count` gets the bytes that it yields.
    """

    def __init__(
        self, files: SourceFiles, buffers: Buffers, count: Callable[[int], None] = lambda _: None
    ) -> None:
        self.proof: list[Piece] = []
        self._files = files
        self._count = count
        self._buffers = buffers
        self._band = memoryview(bytearray(buffers.band))
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        self._held: tuple[tuple[str, int], Opened] | None = None

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from a shard file."""
        self._file(name).read_into(offset, buffer)

    def _file(self, name: str) -> OpenFile:
        file = self._open.get(name)
        if file is None:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            file = self._open[name] = self._files.store.open_file(self._files.in_store(name))
        else:
            self._open.move_to_end(name)
        return file

    def elements(
        self, tensor: SourceTensor, wanted: TensorSlice, block: memoryview
    ) -> Iterator[Block]:
        """The elements of a slice in row-major order, read into `block` again and again."""
        for part in blocks(wanted.sizes, tensor.item_bytes, len(block)):
            n_bytes = part.n_elements * tensor.item_bytes
            if not n_bytes:
                return
            runs = self.fill_block(tensor, part.moved(wanted.offsets), block)
            for run in runs:
                last = self.proof[-1] if self.proof else None
                if last and last[:2] == run[:2] and last.at + last.length == run.at:
                    joined = crc32_combine(last.crc, run.crc, run.length)
                    self.proof[-1] = last._replace(length=last.length + run.length, crc=joined)
                else:
                    self.proof.append(run)
            data = block[:n_bytes]
            self._count(n_bytes)
            if sum(run.length for run in runs) < n_bytes:
                yield block_of(data)
                continue
            # The checksums that verify the source are also those of the new record.
            crc = 0
            for run in runs:
                crc = crc32_combine(crc, run.crc, run.length)
            yield Block(data, crc)

    def fill_block(
        self, tensor: SourceTensor, wanted: TensorSlice, block: memoryview
    ) -> list[Piece]:
        """Put a slice of a tensor into `block`, in row-major order.

        Returns the runs that were copied as they lie in the source, in the order in
        which they lie in the block. Raises `SourceDamaged`.
        """
        target = Strided(block, 0, row_major(wanted.sizes, tensor.item_bytes))
        runs: list[tuple[int, Piece]] = []
        for overlap in tensor.overlaps(wanted):
            chunk = tensor.chunks[overlap.number]
            into = target.at(overlap.elements.relative_to(wanted).offsets)
            within = overlap.elements.relative_to(chunk.elements)
            run = self._fill(tensor, overlap.number, within, into)
            if run is not None:
                runs.append((into.first, run))
        return [run for _, run in sorted(runs)]

    def _fill(
        self, tensor: SourceTensor, number: int, within: TensorSlice, target: Strided
    ) -> Piece | None:
        """Put a slice of chunk `number` into `target`; `within` counts from the chunk's start.

        Returns the run with its checksum if the slice is one run on both sides.
        """
        chunk = tensor.chunks[number]
        record, item_bytes = chunk.record, tensor.item_bytes
        opened = self._opened(tensor, number)
        if opened.held is not None:
            source = Strided(opened.held, opened.first, opened.strides).at(within.offsets)
            copy_strided(target, source, within.sizes, item_bytes)
            return None
        shape, first_byte = chunk.elements.sizes, opened.start + opened.first
        strides = row_major(shape, item_bytes)
        sizes, n_bytes = within.sizes, within.n_elements * item_bytes
        if is_contiguous(sizes, strides, item_bytes) and is_contiguous(
            sizes, target.strides, item_bytes
        ):
            at = position(within.offsets, strides)
            into = target.buffer[target.first : target.first + n_bytes]
            self.read(record.file, first_byte + at, into)
            return Piece(record.file, record.offset, opened.first + at, n_bytes, crc32(into))
        sink = StridedSink(shape, within, item_bytes, target)
        file, skip = self._file(record.file), self._files.skip
        for run in element_runs(record.file, first_byte, sink, skip=skip, checksum=None):
            for _ in read_run(file, run, self._band):
                pass  # its pieces are where they belong
        return None

    def _opened(self, tensor: SourceTensor, number: int) -> Opened:
        key = (tensor.fqn, number)
        if self._held is not None and self._held[0] == key:
            return self._held[1]
        self._held = None
        opened = self._files.opened(tensor, number, self._buffers.held)
        if opened.held is not None:
            self._held = key, opened
        return opened

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()


# Entries that are no tensors


def read_values(
    files: SourceFiles, entries: Sequence[SourceBytes]
) -> Iterator[tuple[SourceBytes, Written | NotPlain]]:
    """Each entry with its value, ready to be written again, or with why it cannot be.

    Raises `SourceDamaged`. Cost: one read for each, several in flight where that is faster.
    """
    for entry in entries:
        if entry.held is not None:
            yield entry, _value(files, entry, entry.held)
    stored = [entry for entry in entries if entry.held is None]
    small = [entry for entry in stored if entry.record.length <= MAX_VALUE_BYTES]
    spans = [
        Span(files.in_store(entry.record.file), entry.record.offset, entry.record.length)
        for entry in small
    ]
    for entry, (_, data) in zip(small, files.store.read_spans(spans), strict=True):
        yield entry, _value(files, entry, data)
    for entry in stored:
        if (n_bytes := entry.record.length) > MAX_VALUE_BYTES:
            why = f"{entry.fqn} takes {n_bytes:,} bytes, of which {MAX_VALUE_BYTES:,} are read"
            yield entry, NotPlain(why)


def _value(files: SourceFiles, entry: SourceBytes, data: bytes) -> Written | NotPlain:
    record = entry.record
    try:
        return written(Leaf((entry.fqn,), decode_state(_pickle(entry, data))))
    except NotPlain as error:
        return error
    except (RecordUnreadable, Unfit) as error:
        raise files.damage(record, error) from error
    except MetadataUnsafe as error:
        raise SourceDamaged(files.finding("record.unsafe", record, error.message)) from error
    except MetadataUnreadable as error:
        return NotPlain(f"{entry.fqn}: {error.message}")


def _pickle(entry: SourceBytes, data: bytes) -> bytes:
    data = unpack(data, entry.record.transforms, MAX_VALUE_BYTES)
    if not data.startswith(b"PK"):
        # A plain pickle has neither frame nor checksums; inspection reports that.
        return data
    view, found = open_whole(data, None)
    pickle = read_member(found.directory, "data.pkl", view)
    if pickle is None:
        raise RecordUnreadable("it holds no pickle")
    return pickle
