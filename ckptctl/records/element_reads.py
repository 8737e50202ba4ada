"""Read the elements of large records with several threads, and verify them on the way.

The elements of a record are divided into runs, which `byte_pass` reads into an
`ElementSink`. If all bytes of a record are read, the checksums of the runs are combined and
compared with the record's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ckptctl.data_classes import dataclass
from ckptctl.records.byte_pass import Piece
from ckptctl.records.slices import ByteSlice, Dims, TensorSlice, byte_slices
from ckptctl.records.verification import CrcPart, ElementChecksum

RUN_BYTES = 32 << 20
"""Bytes that one thread reads before it takes the next run."""

# A run may have gaps of any length; each piece decides which of them are read.
_ANY_GAP = 1 << 62

_NOTHING = ByteSlice(0, 0, TensorSlice((), ()), contiguous=True)


class ElementSink(Protocol):
    """Receives elements of one record, which has `shape` and row-major order.

    Those in `wanted` are kept; others may be passed as well and are dropped.
    """

    @property
    def shape(self) -> Dims:
        """The shape of the record."""
        ...

    @property
    def wanted(self) -> TensorSlice:
        """The elements of the record that are kept."""
        ...

    @property
    def item_bytes(self) -> int:
        """The size of an element in the record, in bytes."""
        ...

    def memory_for(self, piece: ByteSlice) -> memoryview | None:
        """The memory into which a piece can be read directly; None if it must be copied."""
        ...

    def staging(self, n_bytes: int, limit: int) -> memoryview | None:
        """A buffer from which `copy` is fast; None if any buffer will do."""
        ...

    def copy(self, piece: ByteSlice, data: memoryview) -> None:
        """Copy the wanted elements of a piece, of which `data` are the bytes."""
        ...


@dataclass(frozen=True, slots=True)
class _ElementPiece(Piece):
    """A piece of a run; `in_place`: it is read directly to its destination."""

    bytes_read: ByteSlice = _NOTHING
    in_place: bool = False


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
        """See `byte_pass.Run`."""
        sink = self.sink
        for piece in byte_slices(
            sink.shape, self.elements, sink.item_bytes, most=limit, skip=self.skip
        ):
            memory = sink.memory_for(piece)
            into = sink.staging(piece.length, limit) if memory is None else memory
            yield _ElementPiece(
                self.first_byte + piece.start,
                piece.length,
                into=into,
                bytes_read=piece,
                in_place=memory is not None,
            )

    def take(self, piece: Piece, data: memoryview) -> None:
        """See `byte_pass.Run`."""
        assert isinstance(piece, _ElementPiece)  # noqa: S101 - it comes from `pieces`
        if self.checksum is not None:
            self._add_checksum(self.checksum, piece, data)
        if not piece.in_place:
            self.sink.copy(piece.bytes_read, data)

    def _add_checksum(
        self, checksum: ElementChecksum, piece: _ElementPiece, data: memoryview
    ) -> None:
        from zlib_ng.zlib_ng import crc32

        if not self._n_taken:
            self._start = piece.bytes_read.start
        self._crc = crc32(data, self._crc)
        self._n_taken += piece.length
        if self._n_taken == self.n_bytes:
            checksum.add(CrcPart(self._start, self._n_taken, self._crc))


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
