"""Read and write the elements of large records, block by block.

To read, the elements of a record are divided into runs, which `byte_pass` reads into an
`ElementSink`. If all of them are read, the checksums of the runs are combined and compared with
the record's own. To write, `record_of` frames the blocks of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from zlib_ng.zlib_ng import crc32, crc32_combine

from ckptctl.formats.archive.writing import tensor_frame
from ckptctl.records.byte_pass import Piece
from ckptctl.records.slices import (
    ByteSlice,
    Dims,
    Strided,
    TensorSlice,
    byte_slices,
    copy_strided,
    is_contiguous,
    row_major,
)
from ckptctl.records.verification import CrcPart, ElementChecksum

RUN_BYTES = 32 << 20
"""Bytes that one thread reads before it takes the next run."""

# A run may have gaps of any length; each piece decides which of them are read.
_ANY_GAP = 1 << 62

_NOTHING = ByteSlice(0, 0, TensorSlice((), ()), contiguous=True)


class ElementSink(Protocol):
    """Receives elements of one record, which has `shape` and row-major order.

    Those in `wanted` are kept; others may be passed as well and are dropped. An element has
    `item_bytes` in the record.
    """

    shape: Dims
    wanted: TensorSlice
    item_bytes: int

    def memory_for(self, piece: ByteSlice) -> memoryview | None:
        """The memory into which a piece can be read directly; None if it must be copied."""
        ...

    def staging(self, n_bytes: int, limit: int) -> memoryview | None:
        """A buffer from which `copy` is fast; None if any buffer will do."""
        ...

    def copy(self, piece: ByteSlice, data: memoryview) -> None:
        """Copy the wanted elements of a piece, of which `data` are the bytes."""
        ...


@dataclass(slots=True)
class StridedSink:
    """Copies the elements in `wanted` of one record to `target`; see `ElementSink`.

    `shape` is that of the record; the strides of `target` are in bytes.
    """

    shape: Dims
    wanted: TensorSlice
    item_bytes: int
    target: Strided

    def memory_for(self, piece: ByteSlice) -> memoryview | None:
        elements = piece.elements
        in_order = is_contiguous(elements.sizes, self.target.strides, self.item_bytes)
        if not piece.contiguous or not in_order or not self.wanted.contains(elements):
            return None
        at = self.target.at(elements.relative_to(self.wanted).offsets).first
        return self.target.buffer[at : at + piece.length]

    def staging(self, n_bytes: int, limit: int) -> None:
        pass

    def copy(self, piece: ByteSlice, data: memoryview) -> None:
        common = piece.elements.overlap(self.wanted)
        if common is None:
            return
        source = Strided(data, 0, row_major(self.shape, self.item_bytes))
        copy_strided(
            self.target.at(common.relative_to(self.wanted).offsets),
            source.at(common.relative_to(piece.elements).offsets),
            common.sizes,
            self.item_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Copied(Piece):
    """A piece whose elements are copied to their destination after they were read."""

    bytes_read: ByteSlice = _NOTHING


@dataclass(slots=True)
class ElementRun:
    """Elements of one record that one thread reads in order; see `byte_pass.Run`.

    The first element of the record is at byte `first_byte` of the file at `path`. With a
    `checksum` the run reads every byte between its first and its last element.
    """

    path: str
    first_byte: int
    elements: TensorSlice
    n_bytes: int
    sink: ElementSink
    skip: int
    checksum: ElementChecksum | None
    _start: int = 0
    _crc: int = 0
    _n_taken: int = 0

    def pieces(self, limit: int) -> Iterator[Piece]:
        for part in self._slices(self.elements, self.n_bytes):
            memory = self.sink.memory_for(part)
            if memory is not None:
                yield Piece(self.first_byte + part.start, part.length, into=(memory,))
                continue
            for piece in self._slices(part.elements, limit):
                staging = self.sink.staging(piece.length, limit)
                into = () if staging is None else (staging,)
                start = self.first_byte + piece.start
                yield _Copied(start, piece.length, into=into, bytes_read=piece)

    def _slices(self, elements: TensorSlice, most: int) -> Iterator[ByteSlice]:
        sink = self.sink
        return byte_slices(sink.shape, elements, sink.item_bytes, most=most, skip=self.skip)

    def take(self, piece: Piece, data: memoryview) -> None:
        if self.checksum is not None:
            if not self._n_taken:
                self._start = piece.start - self.first_byte
            self._crc = crc32(data, self._crc)
            self._n_taken += len(data)
            if self._n_taken == self.n_bytes:
                self.checksum.add(CrcPart(self._start, self._n_taken, self._crc))
        if isinstance(piece, _Copied):
            self.sink.copy(piece.bytes_read, data)


def element_runs(
    path: str, first_byte: int, sink: ElementSink, *, skip: int, checksum: ElementChecksum | None
) -> Iterator[ElementRun]:
    """The runs that read the wanted elements of a record; all elements with a `checksum`.

    `first_byte` is where its first element lies in the file at `path`. Unwanted gaps of at
    most `skip` bytes are read rather than skipped.
    """
    elements = sink.wanted if checksum is None else TensorSlice.whole(sink.shape)
    for run in byte_slices(sink.shape, elements, sink.item_bytes, most=RUN_BYTES, skip=_ANY_GAP):
        yield ElementRun(path, first_byte, run.elements, run.length, sink, skip, checksum)


_JOINED_BYTES = 256 << 10
"""Short pieces are joined up to this length: what was joined is still in the cache."""


class ElementBlock(NamedTuple):
    """Consecutive elements of a tensor in the order of the record, and their CRC-32."""

    data: memoryview
    crc: int


def block_of(data: memoryview) -> ElementBlock:
    """A block of bytes whose checksum is not known yet."""
    return ElementBlock(data, crc32(data))


def record_of(
    dtype: str,
    shape: tuple[int, ...],
    blocks: Iterable[ElementBlock],
    strides: tuple[int, ...] | None = None,
) -> Iterator[memoryview]:
    """The bytes of a tensor's record, in order, as `torch.save` would write them.

    `blocks` are all elements of the tensor, in row-major order or in that of `strides`.
    Each piece is consumed before the next block is requested, so blocks may share one
    buffer. The size of the record is `tensor_frame(dtype, shape, strides).n_bytes`.
    """
    frame = tensor_frame(dtype, shape, strides)
    yield memoryview(frame.between(()))
    crc = 0
    for block in blocks:
        crc = crc32_combine(crc, block.crc, len(block.data))
        yield block.data
    yield memoryview(frame.between((crc,)))


def joined(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes with short pieces put together, in one buffer that is used again."""
    buffer = memoryview(bytearray(_JOINED_BYTES))
    used = 0
    for piece in pieces:
        end = used + len(piece)
        if end <= _JOINED_BYTES:
            buffer[used:end] = piece
            used = end
            continue
        if used:
            yield buffer[:used]
        if len(piece) > _JOINED_BYTES:
            yield piece
            used = 0
        else:
            used = len(piece)
            buffer[:used] = piece
    if used:
        yield buffer[:used]
