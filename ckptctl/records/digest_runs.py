"""Digest bytes, or compute their CRC-32, in the pass that reads them.

A `DigestRun` reads bytes that nothing else reads, or wraps a run that reads them for
another reason, so that they are read once. `checks.sealed_bytes` compares the digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ckptctl.data_classes import dataclass
from ckptctl.formats.digests import BLOCK_BYTES, Algorithm, Checksumming, Digester, Digests
from ckptctl.records.byte_pass import Piece, Run


@dataclass(frozen=True, slots=True)
class Stretch:
    """`length` bytes of a file from `start`, with one digest. `path` is in the store."""

    path: str
    start: int
    length: int


class DigestRun:
    """Digests a stretch; see `byte_pass.Run`. `around` is the run that already reads it.

    `beside` receives the same bytes, for a checksum of another kind.
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
        """The digest of the bytes; None if the pass ended before all were read."""
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


class RecordRun(Run, Protocol):
    """A run that reads records, starting at `start` of its file."""

    @property
    def start(self) -> int:
        """Offset of its first byte."""
        ...


class BlockDigests:
    """Digests whole files block by block, in the pass that reads their records.

    `sizes` maps files to their sizes; `folder` is their location in the store.
    """

    def __init__(self, folder: str, sizes: Mapping[str, int], algorithm: Algorithm) -> None:
        self._prefix = f"{folder}/" if folder else ""
        self._sizes = sizes
        self._algorithm = algorithm
        self._runs: dict[str, list[DigestRun]] = {}

    def runs(self, others: Sequence[RecordRun] = ()) -> list[Run]:
        """The runs to read: `others`, wrapped to digest the blocks they cover, and the rest."""
        by_stretch = {Stretch(run.path, run.start, run.n_bytes): run for run in others}
        for path, size in self._sizes.items():
            self._runs[path] = [
                DigestRun(block, self._algorithm, by_stretch.pop(block, None))
                for block in _blocks(self._prefix + path, size)
            ]
        own: list[Run] = [run for runs in self._runs.values() for run in runs]
        return [*own, *by_stretch.values()]

    @property
    def whole(self) -> bool:
        """Whether everything was read."""
        return all(digest is not None for found in self.found.values() for digest in found)

    @property
    def found(self) -> Mapping[str, Sequence[str | None]]:
        """The digest of each block by file; None for a block that was not read whole."""
        read = {path: [run.digests for run in runs] for path, runs in self._runs.items()}
        return {
            path: [None if digests is None else digests.whole for digests in blocks]
            for path, blocks in read.items()
        }


def _blocks(path: str, size: int) -> Iterator[Stretch]:
    for start in range(0, max(1, size), BLOCK_BYTES):
        yield Stretch(path, start, min(BLOCK_BYTES, size - start))


class CrcRun:
    """Computes the `crc` of `n_bytes` bytes of a file; see `byte_pass.Run`."""

    def __init__(self, path: str, start: int, n_bytes: int) -> None:
        self.path = path
        self.n_bytes = n_bytes
        self.crc = 0
        self._start = start

    def pieces(self, limit: int) -> Iterator[Piece]:
        """See `byte_pass.Run`."""
        end = self._start + self.n_bytes
        for at in range(self._start, end, limit):
            yield Piece(at, min(limit, end - at))

    def take(self, piece: Piece, data: memoryview) -> None:  # noqa: ARG002 - in order
        """See `byte_pass.Run`."""
        from zlib_ng.zlib_ng import crc32

        self.crc = crc32(data, self.crc)
