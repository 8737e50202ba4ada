"""Digest bytes in the pass that reads them.

A `DigestRun` reads bytes that nothing else reads, or wraps a run that reads them for
another reason, so that they are read once. `checks.sealed` compares the digests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptctl.formats.digests import Algorithm, Checksumming, Digester, Digests
from ckptctl.records.byte_pass import Piece, Run


@dataclass(frozen=True, slots=True)
class Stretch:
    """`length` bytes of a file, from `start` on: what has one digest. `path` is in the store."""

    path: str
    start: int
    length: int


class DigestRun:
    """Digests a stretch; see `byte_pass.Run`. `around` is the run that reads it anyway.

    `beside` takes the same bytes, for a checksum of another kind.
    """

    def __init__(
        self,
        stretch: Stretch,
        algorithm: Algorithm,
        around: Run | None = None,
        *,
        beside: Checksumming | None = None,
    ) -> None:
        self.stretch = stretch
        self.beside = beside
        self._around = around
        self._digester = Digester(algorithm)
        self._n_taken = 0

    @property
    def path(self) -> str:
        """See `byte_pass.Run`."""
        return self.stretch.path

    @property
    def n_bytes(self) -> int:
        """See `byte_pass.Run`."""
        return self.stretch.length

    @property
    def digests(self) -> Digests | None:
        """What the bytes came to; None where the pass ended before all of them were read."""
        return self._digester.digests() if self._n_taken == self.stretch.length else None

    def pieces(self, limit: int) -> Iterator[Piece]:
        """See `byte_pass.Run`."""
        if self._around is not None:
            yield from self._around.pieces(limit)
            return
        start, end = self.stretch.start, self.stretch.start + self.stretch.length
        for at in range(start, end, limit):
            yield Piece(at, min(limit, end - at))

    def take(self, piece: Piece, data: memoryview) -> None:
        """See `byte_pass.Run`."""
        if self._around is not None:
            self._around.take(piece, data)
        if not piece.ahead:
            self._digester.update(data)
            if self.beside is not None:
                self.beside.update(data)
            self._n_taken += len(data)
