"""Open the source's records, and read slices of their tensors.

A record is opened once. Row-major records are read by ranges; transposed and compressed
ones are held in memory while they are read. A non-tensor entry is read whole, and its
pickle is decoded without running it: numbers, strings, bytes, dtypes and containers of them
can be written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe, RecordUnreadable, UsageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.directory import Member, View, read_member
from ckptctl.formats.archive.state_file import Leaf, NotPlain, Written, written
from ckptctl.formats.pickles.values import TensorStub, decode_state
from ckptctl.formatting import command_line
from ckptctl.model import DTYPE_SIZES, ByteRange
from ckptctl.records.byte_pass import read_run
from ckptctl.records.elements import StridedSink, element_runs
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
    copy_strided,
    is_contiguous,
    position,
    row_major,
)
from ckptctl.resharding.sources import (
    SourceBytes,
    SourceDamaged,
    SourcePart,
    SourceTensor,
)
from ckptctl.selection.verifying import OpenTarget
from ckptctl.storage.contract import Closing, OpenFile, Span, Store, read_range

_MAX_OPEN = 8


MAX_VALUE_BYTES = 64 << 20
"""The longest record of a value that is read; it is held in memory."""


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


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes that each thread may hold: of the target, of the source, of a whole record."""

    block: int
    band: int
    held: int


class SourceFiles:
    """The records of one folder of the source, opened by several threads."""

    def __init__(self, store: Store, folder: str, url: str, part_path: str) -> None:
        self.store = store
        self.url = url
        self._folder = folder
        self._part_path = part_path
        self._opened: dict[tuple[str, int], Opened] = {}
        self._templates = Templates()
        self.skip = REACH[store.kind].skip

    def in_store(self, name: str) -> str:
        """The path of a shard file in the store."""
        return f"{self._folder}/{name}"

    def where(self, name: str) -> str:
        """The path of a shard file in the step, for findings."""
        return f"{self._part_path}/{name}" if self._part_path else name

    def finding(self, code: str, record: ByteRange, message: str) -> Finding:
        """A finding about a record."""
        where = self.where(record.file)
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

        Cost: two reads when it is opened first, none after that unless it must be held.
        """
        record = tensor.chunks[number].record
        key = (record.file, record.offset)
        known = self._opened.get(key)
        if known is None:
            known = self._open(tensor, number, held_limit)
            if known.held is None:
                self._opened[key] = known
        return known

    def _open(self, tensor: SourceTensor, number: int, held_limit: int) -> Opened:
        chunk = tensor.chunks[number]
        record, dtype, sizes = chunk.record, tensor.entry.dtype, chunk.elements.sizes
        limit = tensor_limit(dtype, sizes)
        if record.transforms:
            check_held(tensor, limit, held_limit)

        def open_one(view: View) -> tuple[View, Opened] | Need:
            found = self._templates.open_stored(
                view, Expected(dtype, sizes), record.transforms, limit
            )
            if isinstance(found, Need):
                return found
            opened = _described(found[1])
            if not opened.is_row_major and not record.transforms:
                check_held(tensor, record.length, held_limit)
                if len(view.head) < record.length:
                    return Need(head=record.length)
            return found[0], opened

        try:
            view, opened = open_one_record(
                lambda start, n: self._read(record, start, n), record.length, open_one
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

    def _read(self, record: ByteRange, start: int, n_bytes: int) -> bytes:
        return read_range(self.store, self.in_store(record.file), record.offset + start, n_bytes)


def source_files(found: OpenTarget, parts: Iterable[SourcePart]) -> dict[str, SourceFiles]:
    """The records of each part of a step, by its path."""
    return {
        part.path: SourceFiles(
            found.store,
            f"{found.name}/{part.path}" if part.path else found.name,
            found.url,
            part.path,
        )
        for part in parts
    }


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


def check_held(tensor: SourceTensor, n_bytes: int, limit: int) -> None:
    """Raise `UsageError` if a record is larger than what may be held."""
    if n_bytes > limit:
        raise UsageError(
            f"a record of {tensor.entry.fqn} is transposed or compressed, and must be held in "
            f"memory as a whole: {n_bytes:,} bytes, of which {limit:,} are available; "
            "give more --memory, or use --jobs 1"
        )


class SliceReader(Closing):
    """Reads slices of tensors from one source folder, in one thread.

    A context manager: it keeps a few shard files open until it is closed.
    """

    def __init__(self, files: SourceFiles, buffers: Buffers) -> None:
        self._files = files
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
        record = tensor.chunks[number].record
        key = (record.file, record.offset)
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
    small = [entry for entry in entries if entry.record.length <= MAX_VALUE_BYTES]
    spans = [
        Span(files.in_store(entry.record.file), entry.record.offset, entry.record.length)
        for entry in small
    ]
    for entry, (_, data) in zip(small, files.store.read_spans(spans), strict=True):
        yield entry, _value(files, entry, data)
    for entry in entries:
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
