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

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
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
from ckptctl.formats.archive.directory import read_member
from ckptctl.formats.archive.state_file import FlatEntry, NotPlain, PickledValue, written
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
from ckptctl.inspection.inspecting import Inspection, inspection_failed
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import (
    DTYPE_SIZES,
    SHARDED,
    ByteRange,
    BytesEntry,
    FileInfo,
    Metadata,
    PartFormat,
    TensorEntry,
)
from ckptctl.records.byte_pass import OpenFiles
from ckptctl.records.loading import (
    Caller,
    MemoryTarget,
    RepeatedReads,
    SliceLoads,
    TensorRecord,
    WrongElements,
)
from ckptctl.records.opening import Templates, Unfit, WrongChecksum, open_whole, unpack
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource
from ckptctl.records.slices import (
    ALIGNMENT,
    Dims,
    ElementBlock,
    Strided,
    TensorSlice,
    block_of,
    blocks,
    is_contiguous,
    position,
    row_major,
)
from ckptctl.storage.contract import Closing, ShortRead, Span, Store

MAX_VALUE_BYTES = 64 << 20
"""The longest record of a value that is read; it is held in memory."""

SMALLEST_BLOCK = 64 << 10
"""Bytes that are read at once at least."""

_MOST_TOGETHER = 256
"""Slices that are read together: each takes up memory beside its bytes."""


class SourceDamaged(CkptctlError, code="step.damaged", exit_code=21):
    """The source does not match what was saved; `finding` names the place and the difference.

    Every process of a group gets it where one of them finds the damage.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message, next_command=finding.next_command)
        self.finding = finding


class SourceChunk(NamedTuple):
    """A slice of a tensor, and the number of the range of its record."""

    elements: TensorSlice
    number: int


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

    def overlaps(self, wanted: TensorSlice) -> Iterator[tuple[SourceChunk, TensorSlice]]:
        """The chunks that hold a part of a slice of this tensor, in their order, and the part."""
        if not wanted.offsets:
            yield self.chunks[0], wanted
            return
        first, end = wanted.offsets[0], wanted.ends[0]
        # Chunks are in the order of their first offsets: none after `end` can overlap, and
        # one that begins before the slice does so by less than the longest chunk has.
        low = bisect_left(
            self.chunks, first - self.longest + 1, key=lambda chunk: chunk.elements.offsets[0]
        )
        for chunk in islice(self.chunks, low, None):
            if chunk.elements.offsets[0] >= end:
                return
            common = chunk.elements.overlap(wanted)
            if common is not None:
                yield chunk, common


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

    def check_unchanged(self) -> None:
        """Raise `SourceDamaged` if files were written since: what was read may be of two saves.

        Each record of either save matches its own checksum. Cost: one listing.
        """
        for finding in self.changes():
            raise SourceDamaged(finding)

    def report_after(self, error: SourceDamaged | ShortRead) -> Report:
        """The report with the damage that was found, or `step.changed` if files were written since.

        What was read of two saves does not prove that either of them is damaged. Cost: one listing.
        """
        if isinstance(error, SourceDamaged):
            damage = error.finding
        elif self.opened is None:
            raise error
        else:
            damage = inspection_failed(self.opened, error)
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
    parts = []
    for part in inspected.parts:
        if part.part.format not in SHARDED:
            continue
        for metadata in part.metadata:
            for entry in metadata.tensors.values():
                if entry.dtype not in WRITABLE:
                    what = f"is of dtype {entry.dtype}"
                elif entry.layout != "strided":
                    what = f"has the layout {entry.layout}"
                else:
                    continue
                raise UsageError(f"{entry.fqn} {what}, which cannot be resharded")
        files = SourceFiles(part.store, part.folder, part.url, part.ranges, part.path)
        parts.append(part_of(part.path, part.metadata, files))
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


def part_of(
    path: str,
    metadatas: Sequence[Metadata],
    files: SourceFiles,
    *,
    folder: str | None = None,
    held: Mapping[str, bytes] = {},
) -> SourcePart:
    """The part that the metadata of a folder makes; each rank may have metadata of its own.

    The ranges of `files` are those of the metadata. The name of the `folder`, without it that of
    the part, counts for the kinds of the entries. `held` are records of values, by FQN.
    """
    entries: dict[str, TensorEntry] = {}
    chunks: dict[str, list[SourceChunk]] = {}
    n_cut: dict[str, int] = {}
    values: dict[str, SourceBytes] = {}
    kinds: dict[str, StateKind] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    several: dict[str, None] = {}
    first = 0
    for metadata in metadatas:
        kinds |= entry_kinds(metadata, path if folder is None else folder)
        paths |= metadata.planner_paths
        for fqn, entry in metadata.tensors.items():
            entries.setdefault(fqn, entry)
            n_cut[fqn] = n_cut.get(fqn, 0) + len(entry.chunks)
            chunks.setdefault(fqn, []).extend(
                SourceChunk(TensorSlice(chunk.offsets, chunk.sizes), first + number)
                for number, chunk in enumerate(entry.chunks)
                if chunk.byte_range is not None
            )
            first += len(entry.chunks)
        for fqn, value in metadata.bytes_entries.items():
            if value.byte_range is not None and fqn not in values:
                kind, rank = kinds[fqn].names[0], kinds[fqn].rank
                values[fqn] = SourceBytes(fqn, value.byte_range, kind, rank, held.get(fqn))
            elif value.byte_range is not None:
                several[fqn] = None
            first += 1
    return SourcePart(
        path,
        tuple(_tensor(entries[fqn], held, kinds[fqn], n_cut[fqn]) for fqn, held in chunks.items()),
        tuple(values.values()),
        paths,
        tuple(metadata.digest for metadata in metadatas),
        files,
        tuple(several),
    )


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


def listed_metadata(
    tensors: Sequence[TensorEntry], digest: str, values: Sequence[BytesEntry] = ()
) -> Metadata:
    """The metadata that tensors and other values make which are not those of DCP."""
    return Metadata(
        {entry.fqn: entry for entry in tensors},
        {entry.fqn: entry for entry in values},
        (),
        planner_paths={one.fqn: one.path for one in tensors}
        | {one.fqn: one.path for one in values},
        digest=digest,
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
class ThreadLimits:
    """How many threads work, and the bytes that each may hold.

    Those are of a `block`, twice, and of a record that is read whole.
    """

    jobs: int
    block: int
    held: int


class CopiedBytes(NamedTuple):
    """Bytes of a record that were copied unchanged, and their CRC-32.

    `start` is where the record begins in its file, `at` and `length` are bytes of its
    elements.
    """

    file: str
    start: int
    at: int
    length: int
    crc: int


class SourceFiles(Caller):
    """The records of one folder of the source, opened by several threads; see `Caller`.

    `folder` is where it is in the store, and `part_path` in the step at `url`. `records` are the
    tensors whose place is known, by the number of their range.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        url: str,
        ranges: Ranges,
        part_path: str = "",
        records: Mapping[int, TensorRecord] = {},
    ) -> None:
        self.store = store
        self.url = url
        self.ranges = ranges
        self.source = RecordSource(store, folder, ranges)
        self.records = dict(records)
        self.templates = Templates()
        self._part_path = part_path

    def in_store(self, name: str) -> str:
        """The path of a file in the store."""
        return inside(self.source.folder, name)

    def place(self, number: int) -> ByteRange:
        """Where the record of a range lies."""
        ranges = self.ranges
        name = ranges.file_names[ranges.files[number]]
        return ByteRange(name, ranges.starts[number], ranges.lengths[number])

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

    def item_bytes(self, stub: TensorStub) -> int:
        """See `Caller.item_bytes`."""
        if stub.signs:
            raise Unfit("format.unsupported", f"its elements are stored as {stub.signs[0]}")
        return DTYPE_SIZES[stub.dtype]

    def damage(self, number: int, error: RecordUnreadable | Unfit) -> SourceDamaged:
        """See `Caller.damage`."""
        message, name = error.message, self.ranges.owner(number).name
        if isinstance(error, WrongElements):
            message = (
                f"{name} has the CRC-32 {error.found:08x} in {error.n_bytes:,} bytes, saved was "
                f"{error.saved:08x}"
            )
        elif isinstance(error, WrongChecksum):
            message = f"{name}: {error.names} does not match the checksum saved with it"
        return SourceDamaged(self.finding(error.code, self.place(number), message))

    def check_held(self, limit: int, number: int, n_bytes: int) -> None:
        """Raise `UsageError` for a record of more bytes than may be held."""
        if n_bytes > limit:
            raise UsageError(
                f"a record of {self.ranges.owner(number).entry.fqn} is transposed or compressed, "
                f"and must be held in memory as a whole: {n_bytes:,} bytes, of which {limit:,} are "
                "available; give more --memory, or use --jobs 1"
            )


class SliceReader(Closing):
    """Reads slices of tensors from one source folder, in one thread.

    A context manager: it keeps a few shard files open until it is closed. `proof` holds the runs
    that were copied as they lie in the source; `count` gets the bytes that it returns.
    """

    def __init__(
        self, files: SourceFiles, room: ThreadLimits, count: Callable[[int], None] = lambda _: None
    ) -> None:
        self.proof: list[CopiedBytes] = []
        self._files = files
        self._count = count
        self._reads = OpenFiles(files.store, max(room.block, SMALLEST_BLOCK))
        check_held = partial(files.check_held, room.held)
        repeated = RepeatedReads(files.records, files.templates, self._reads, check_held)
        self._loads = SliceLoads(files.source, files, repeated=repeated)

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from a shard file."""
        self._reads.file(self._files.in_store(name)).read_into(offset, buffer)

    def open(self, numbers: Iterable[int]) -> Mapping[int, TensorRecord]:
        """See `SliceLoads.open`."""
        return self._loads.open(numbers)

    def each(
        self, slices: Iterable[tuple[SourceTensor, TensorSlice]], block: memoryview
    ) -> Iterator[Iterable[ElementBlock]]:
        """The elements of each slice in row-major order, read into `block` again and again.

        Those of slices that fit into it are read together. Take them before the next slice.
        """
        for together in _together(slices, len(block)):
            if len(together) > 1:
                yield from ((filled,) for filled in self.fill(together, block))
            else:
                yield self._elements(*together[0], block)

    def _elements(
        self, tensor: SourceTensor, wanted: TensorSlice, block: memoryview
    ) -> Iterator[ElementBlock]:
        for part in blocks(wanted.sizes, tensor.item_bytes, len(block)):
            if not part.n_elements:
                return
            yield from self.fill([(tensor, part.moved(wanted.offsets))], block)

    def fill(
        self, slices: Sequence[tuple[SourceTensor, TensorSlice]], block: memoryview
    ) -> list[ElementBlock]:
        """Put slices of tensors into `block`, each in row-major order.

        Each begins at a multiple of `ALIGNMENT` bytes. Raises `SourceDamaged`.
        """
        wanted: dict[int, list[MemoryTarget]] = defaultdict(list)
        filled: list[tuple[memoryview, list[tuple[int, MemoryTarget]]]] = []
        at = 0
        for tensor, elements in slices:
            item_bytes, strides = tensor.item_bytes, row_major(elements.sizes, tensor.item_bytes)
            targets = []
            for chunk, common in tensor.overlaps(elements):
                first = at + position(common.relative_to(elements).offsets, strides)
                within = common.relative_to(chunk.elements)
                target = MemoryTarget(within, item_bytes, Strided(block, first, strides))
                wanted[chunk.number].append(target)
                targets.append((chunk.number, target))
            n_bytes = elements.n_elements * item_bytes
            filled.append((block[at : at + n_bytes], targets))
            at = _padded(at + n_bytes)
        self._loads.load(wanted)
        return [self._block(data, targets) for data, targets in filled]

    def _block(self, data: memoryview, targets: Sequence[tuple[int, MemoryTarget]]) -> ElementBlock:
        """A slice that was read, with its checksum; adds its runs to the proof."""
        in_order = sorted(targets, key=lambda each: each[1].there.first)
        runs = [run for each in in_order if (run := self._run(*each)) is not None]
        for run in runs:
            last = self.proof[-1] if self.proof else None
            if last and last[:2] == run[:2] and last.at + last.length == run.at:
                joined = crc32_combine(last.crc, run.crc, run.length)
                self.proof[-1] = last._replace(length=last.length + run.length, crc=joined)
            else:
                self.proof.append(run)
        self._count(len(data))
        if sum(run.length for run in runs) < len(data):
            return block_of(data)
        # The checksums that verify the source are also those of the new record.
        crc = 0
        for run in runs:
            crc = crc32_combine(crc, run.crc, run.length)
        return ElementBlock(data, crc)

    def _run(self, number: int, target: MemoryTarget) -> CopiedBytes | None:
        """The bytes of a target, if they are one run of the record as well, and not held."""
        record, data = self._files.records[number], target.run
        stub, item_bytes, wanted = record.stub, target.item_bytes, target.elements
        strides = row_major(stub.shape, item_bytes)
        is_run = is_contiguous(wanted.sizes, strides, item_bytes)
        if data is None or not is_run or record.is_whole:
            return None
        at = stub.storage_offset * item_bytes + position(wanted.offsets, strides)
        # The checksum of a whole record was compared as it was read.
        is_compared = record.crc is not None and len(data) == record.n_bytes
        crc = record.crc if is_compared and record.crc is not None else crc32(data)
        place = self._files.place(number)
        return CopiedBytes(place.file, place.offset, at, len(data), crc)

    def close(self) -> None:
        """Close the files."""
        self._reads.close()


def _together(
    slices: Iterable[tuple[SourceTensor, TensorSlice]], limit: int
) -> Iterator[list[tuple[SourceTensor, TensorSlice]]]:
    """The slices in order: several of at most `limit` bytes, or one."""
    together: list[tuple[SourceTensor, TensorSlice]] = []
    n_together = 0
    for tensor, elements in slices:
        n_bytes = _padded(elements.n_elements * tensor.item_bytes) or limit
        if together and (n_together + n_bytes > limit or len(together) == _MOST_TOGETHER):
            yield together
            together, n_together = [], 0
        together.append((tensor, elements))
        n_together += n_bytes
    if together:
        yield together


def _padded(n_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


# Entries that are no tensors


def read_values(
    files: SourceFiles, entries: Sequence[SourceBytes]
) -> Iterator[tuple[SourceBytes, PickledValue | NotPlain]]:
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


def _value(files: SourceFiles, entry: SourceBytes, data: bytes) -> PickledValue | NotPlain:
    record = entry.record
    try:
        return written(FlatEntry((entry.fqn,), decode_state(_pickle(entry, data))))
    except NotPlain as error:
        return error
    except (RecordUnreadable, Unfit) as error:
        message = error.message
        if isinstance(error, WrongChecksum):
            message = f"{error.names} does not match the checksum saved with it"
        raise SourceDamaged(files.finding(error.code, record, message)) from error
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
