"""Slices of tensors in elements, the bytes of a record that hold them, and strided copies.

A copy takes strides in bytes, so a row-major record, a transposed one and a range of rows are all
handled alike. To read, the elements of a record are divided into runs, which `byte_pass` reads
into an `ElementSink`. If all of them are read, the checksums of the runs are combined and compared
with the record's own. To write, `record_of` frames the blocks of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Literal, NamedTuple, Protocol

from zlib_ng.zlib_ng import crc32, crc32_combine

from ckptctl.formats.archive.writing import tensor_frame
from ckptctl.formats.pickles.values import strides_of
from ckptctl.records.byte_pass import Piece
from ckptctl.records.verification import CrcPart, ElementChecksum

Dims = tuple[int, ...]


class TensorSlice(NamedTuple):
    """A slice of a tensor: where it begins and its size, in elements, one per dimension."""

    offsets: Dims
    sizes: Dims

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorSlice:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def n_elements(self) -> int:
        """How many elements the slice has; 1 for a 0-d tensor."""
        return prod(self.sizes)

    @property
    def ends(self) -> Dims:
        """The first index after the slice, per dimension."""
        return tuple(at + size for at, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: TensorSlice) -> TensorSlice | None:
        """The elements that two slices of one tensor share; None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(end, other_end) - start
            for end, other_end, start in zip(self.ends, other.ends, starts, strict=True)
        )
        return None if min(sizes, default=1) <= 0 else TensorSlice(starts, sizes)

    def contains(self, other: TensorSlice) -> bool:
        starts = zip(self.offsets, other.offsets, strict=True)
        ends = zip(other.ends, self.ends, strict=True)
        return all(start <= first for start, first in starts) and all(
            end <= last for end, last in ends
        )

    def relative_to(self, outer: TensorSlice) -> TensorSlice:
        """The same elements, with offsets that count from the beginning of `outer`."""
        offsets = tuple(at - base for at, base in zip(self.offsets, outer.offsets, strict=True))
        return TensorSlice(offsets, self.sizes)

    def moved(self, by: Dims) -> TensorSlice:
        """A slice of the same size that begins `by` elements further."""
        return TensorSlice(tuple(map(sum, zip(self.offsets, by, strict=True))), self.sizes)

    def permuted(self, order: Sequence[int]) -> TensorSlice:
        return TensorSlice(*(tuple(dims[dim] for dim in order) for dims in self))


class ByteSlice(NamedTuple):
    """`length` bytes from byte `start` of the elements on, which hold `elements`.

    `contiguous`: the bytes hold nothing else. Otherwise they also hold elements
    between the rows of the slice.
    """

    start: int
    length: int
    elements: TensorSlice
    contiguous: bool


def row_major(sizes: Sequence[int], item_bytes: int = 1) -> Dims:
    """The strides of a row-major tensor, in elements, or in bytes with `item_bytes`."""
    return tuple(item_bytes * step for step in strides_of(sizes))


def position(index: Sequence[int], strides: Sequence[int]) -> int:
    """Where the element with this index lies, in the unit of the strides."""
    return sum(at * stride for at, stride in zip(index, strides, strict=True))


def is_contiguous(sizes: Dims, strides: Dims, item_bytes: int) -> bool:
    """Whether elements with these strides, in bytes, are one run in row-major order."""
    expected = item_bytes
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=4096)
def dense_order(shape: Dims, strides: Dims) -> tuple[int, ...] | None:
    """The dimensions from the slowest to the fastest; None where there are gaps or repeats."""
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] > 1, -strides[dim], dim))
    in_order = row_major([shape[dim] for dim in order])
    if any(
        shape[dim] > 1 and strides[dim] != step for dim, step in zip(order, in_order, strict=True)
    ):
        return None
    return tuple(order)


def flattened(shape: Dims, wanted: TensorSlice) -> tuple[Dims, TensorSlice]:
    """The same elements in the same order, with as few dimensions as possible.

    A whole tensor, and a slice along its first dimension, become one row.
    """
    dims: list[tuple[int, int, int]] = []
    for size, offset, length in zip(*map(reversed, (shape, *wanted)), strict=True):
        if dims and dims[-1][0] == dims[-1][2]:
            inner = dims.pop()[0]
            dims.append((size * inner, offset * inner, length * inner))
        else:
            dims.append((size, offset, length))
    if not dims:
        return (), TensorSlice((), ())
    new_shape, offsets, sizes = zip(*reversed(dims), strict=True)
    return new_shape, TensorSlice(offsets, sizes)


def byte_slices(
    shape: Dims, wanted: TensorSlice, item_bytes: int, *, most: int, skip: int
) -> Iterator[ByteSlice]:
    """The bytes of a slice of a row-major tensor, in order, in pieces of bounded size.

    No piece has more than `most` bytes, which is at least one element. Bytes between
    two rows of the slice are included where they are at most `skip`.
    """
    if 0 not in wanted.sizes:
        strides = row_major(shape, item_bytes)
        first = position(wanted.offsets, strides)
        yield from _byte_slices(first, wanted, strides, item_bytes, (most, skip))


def _byte_slices(
    start: int, wanted: TensorSlice, strides: Dims, item_bytes: int, limits: tuple[int, int]
) -> Iterator[ByteSlice]:
    """See `byte_slices`; `start` and `strides` are in bytes."""
    offsets, sizes = wanted
    most, skip = limits
    # Bytes from the first element to the last, by the dimension from which on they vary.
    spans = [item_bytes]
    gaps = [0]
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        gaps.append(stride - spans[-1] if size > 1 else 0)
        spans.append(spans[-1] + (size - 1) * stride)
    if spans[-1] <= most and max(gaps) <= skip:
        contiguous = spans[-1] == prod(sizes) * item_bytes
        yield ByteSlice(start, spans[-1], wanted, contiguous)
        return
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    row, gap = spans[len(sizes) - dim - 1], gaps[len(sizes) - dim]
    n_rows = 1 if gap > skip or row > most else (most - row) // strides[dim] + 1
    for first in range(0, sizes[dim], n_rows):
        rows = TensorSlice(
            (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]),
            (*sizes[:dim], min(n_rows, sizes[dim] - first), *sizes[dim + 1 :]),
        )
        yield from _byte_slices(start + first * strides[dim], rows, strides, item_bytes, limits)


def blocks(sizes: Dims, item_bytes: int, limit: int) -> Iterator[TensorSlice]:
    """Slices of at most `limit` bytes that follow each other in row-major order.

    `limit` is at least one element.
    """
    inner = item_bytes
    at = len(sizes)
    while at > 0 and inner * sizes[at - 1] <= limit:
        at -= 1
        inner *= sizes[at]
    if at == 0:
        yield TensorSlice.whole(sizes)
        return
    step = max(1, limit // inner)
    for index in product(*(range(n) for n in sizes[: at - 1])):
        for start in range(0, sizes[at - 1], step):
            n = min(step, sizes[at - 1] - start)
            offsets = (*index, start, *(0 for _ in sizes[at:]))
            yield TensorSlice(offsets, (*(1 for _ in index), n, *sizes[at:]))


# Strided copies: `memoryview` copies runs and evenly spaced elements at the speed of C


_Format = Literal["B", "H", "I", "Q"]
_FORMATS: dict[int, _Format] = {1: "B", 2: "H", 4: "I", 8: "Q"}

ALIGNMENT = 16
"""Buffers have a multiple of this many bytes, so that they can be cast to integers."""


class Strided(NamedTuple):
    """Elements in a buffer: the first begins at byte `first`; `strides` are in bytes."""

    buffer: memoryview
    first: int
    strides: Dims

    def at(self, index: Dims) -> Strided:
        """The same arrangement, beginning at another element."""
        return self._replace(first=self.first + position(index, self.strides))


class _Dim(NamedTuple):
    """One dimension of a copy: elements, and the stride in bytes on either side."""

    size: int
    target: int
    source: int


def aligned(data: bytes) -> memoryview:
    """A buffer of the bytes, padded as `copy_strided` requires."""
    return memoryview(data + bytes(-len(data) % ALIGNMENT))


def copy_strided(target: Strided, source: Strided, sizes: Dims, item_bytes: int) -> None:
    """Copy `sizes` elements of `item_bytes` each from `source` to `target`.

    Strides and first bytes are multiples of `item_bytes`; both buffers have a multiple of
    `ALIGNMENT` bytes.
    """
    target_strides, source_strides = target.strides, source.strides
    if item_bytes == 16:  # no integer is that wide: each element is copied as two
        sizes, item_bytes = (*sizes, 2), 8
        target_strides, source_strides = (*target_strides, 8), (*source_strides, 8)
    dims = _merged(sizes, target_strides, source_strides)
    run = 1
    if dims and dims[-1].target == dims[-1].source == item_bytes:
        run = dims.pop().size
    rows = dims.pop() if dims else _Dim(1, item_bytes, item_bytes)
    for index in product(*(range(dim.size) for dim in dims)):
        t = target.first + sum(at * dim.target for at, dim in zip(index, dims, strict=True))
        s = source.first + sum(at * dim.source for at, dim in zip(index, dims, strict=True))
        into, out = target._replace(first=t), source._replace(first=s)
        if rows.size > run:
            _copy_columns(into, out, rows, run, item_bytes)
        else:
            _copy_rows(into, out, rows, run * item_bytes)


def _merged(sizes: Dims, target: Dims, source: Dims) -> list[_Dim]:
    """The dimensions of a copy; neighbors that are contiguous on both sides become one."""
    dims: list[_Dim] = []
    for size, t, s in zip(sizes, target, source, strict=True):
        if size == 1:
            continue
        if dims and dims[-1].target == size * t and dims[-1].source == size * s:
            dims[-1] = _Dim(dims[-1].size * size, t, s)
        else:
            dims.append(_Dim(size, t, s))
    return dims


def _copy_rows(target: Strided, source: Strided, rows: _Dim, n_bytes: int) -> None:
    """Copy few long rows: each is one run of `n_bytes` on both sides."""
    into, out = target.buffer, source.buffer
    for row in range(rows.size):
        t, s = target.first + row * rows.target, source.first + row * rows.source
        into[t : t + n_bytes] = out[s : s + n_bytes]


def _copy_columns(target: Strided, source: Strided, rows: _Dim, run: int, item_bytes: int) -> None:
    """Copy many short rows, column by column: each column is one slice with a step."""
    into = target.buffer.cast(_FORMATS[item_bytes])
    out = source.buffer.cast(_FORMATS[item_bytes])
    t, s = target.first // item_bytes, source.first // item_bytes
    by, of = rows.target // item_bytes, rows.source // item_bytes
    for column in range(run):
        a, b = t + column, s + column
        into[a : a + (rows.size - 1) * by + 1 : by] = out[b : b + (rows.size - 1) * of + 1 : of]


# The elements of large records, read and written block by block


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
