"""How is a large record read, by several threads, and its checksum compared on the way?

The elements of a record are cut into runs for `byte_pass`, which reads them. Where all
bytes of a record pass, the checksums of the runs are put together and compared. Which
records there are, and what becomes of an error, is the question of `record_loads`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptctl.records.byte_pass import Piece
from ckptctl.train.boxes import Box, Cut, Dims
from ckptctl.train.placing import Placing

RUN_BYTES = 32 << 20
"""Bytes that one thread reads before it asks for more to do."""


# Where rows are far apart is decided piece by piece, not run by run.
_ANY_GAP = 1 << 62

_NOTHING = Cut(0, 0, (), (), dense=True)


class Proof:
    """The checksum of a member of `n_bytes`, of which runs report parts as they are read.

    `wrong` is called with the checksum that all parts come to, where it is not `expected`.
    """

    def __init__(self, n_bytes: int, expected: int, wrong: Callable[[int], None]) -> None:
        self._left = n_bytes
        self._expected = expected
        self._wrong = wrong
        self._parts: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def add(self, start: int, n_bytes: int, crc: int) -> None:
        """Take the checksum of `n_bytes` from byte `start` of the member on."""
        from zlib_ng.zlib_ng import crc32_combine

        with self._lock:
            self._parts.append((start, n_bytes, crc))
            self._left -= n_bytes
            if self._left:
                return
        found = 0
        for _, length, part in sorted(self._parts):
            found = crc32_combine(found, part, length)
        if found != self._expected:
            self._wrong(found)


@dataclass(frozen=True, slots=True)
class _LoadPiece(Piece):
    """A piece of a run; `placed`: it is read to where its elements belong."""

    cut: Cut = _NOTHING
    placed: bool = False


@dataclass(slots=True)
class RecordRun:
    """Elements of one record that one thread reads in order; see `byte_pass.Run`.

    `box` are those elements, `first_byte` is where the first element of the record lies in
    the file at `path`. With a `proof` nothing of the record lies between them.
    """

    path: str
    first_byte: int
    box: Box
    n_bytes: int
    placing: Placing
    skip: int
    proof: Proof | None
    _start: int = 0
    _crc: int = 0
    _n_taken: int = 0

    def pieces(self, limit: int) -> Iterator[Piece]:
        """See `byte_pass.Run`."""
        item_bytes = self.placing.dtype.itemsize
        for cut in self.box.cuts(item_bytes, most=limit, skip=self.skip):
            room = self.placing.room(self._at(cut), cut)
            into = self.placing.staging(cut.length, limit) if room is None else room
            yield _LoadPiece(
                self.first_byte + cut.start,
                cut.length,
                into=into,
                cut=cut,
                placed=room is not None,
            )

    def take(self, piece: Piece, data: memoryview) -> None:
        """See `byte_pass.Run`."""
        assert isinstance(piece, _LoadPiece)  # noqa: S101 - it comes from `pieces`
        if self.proof is not None:
            self._prove(piece, data)
        if not piece.placed:
            self.placing.copy(self._at(piece.cut), piece.cut, data)

    def _prove(self, piece: _LoadPiece, data: memoryview) -> None:
        from zlib_ng.zlib_ng import crc32

        if not self._n_taken:
            self._start = piece.cut.start
        self._crc = crc32(data, self._crc)
        self._n_taken += piece.length
        if self.proof is not None and self._n_taken == self.n_bytes:
            self.proof.add(self._start, self._n_taken, self._crc)

    def _at(self, cut: Cut) -> Dims:
        """Where in the record a cut of the box begins."""
        return tuple(map(sum, zip(self.box.offsets, cut.at, strict=True)))


def runs_of(
    path: str, first_byte: int, placing: Placing, *, skip: int, proof: Proof | None
) -> Iterator[RecordRun]:
    """The runs that read what is wanted of a record; all of the record where there is a `proof`.

    `first_byte` is where its first element lies in the file at `path`. Bytes that nobody
    wants are read where there are at most `skip` of them in a row.
    """
    box = placing.wanted if proof is None else placing.whole
    item_bytes = placing.dtype.itemsize
    for cut in box.cuts(item_bytes, most=RUN_BYTES, skip=_ANY_GAP):
        offsets = tuple(map(sum, zip(box.offsets, cut.at, strict=True)))
        part = Box(box.shape, offsets, cut.sizes)
        yield RecordRun(path, first_byte, part, cut.length, placing, skip, proof)
