"""Verify each source record with the checksums of the runs that were copied from it.

The runs of a record, combined in order, must have the checksum that was saved with it.
Records of which parts were gathered from between others are read whole instead, once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptctl.records.byte_pass import Limits, read_runs
from ckptctl.records.byte_pass import Piece as ReadPiece
from ckptctl.records.checksums import CrcPart, combined_crc
from ckptctl.resharding.reading import Damage, Opened, Piece, SourceFiles
from ckptctl.resharding.sources import SourcePart, SourceTensor
from ckptctl.storage.contract import Span


class Record(NamedTuple):
    """The record of chunk `number` of a tensor."""

    tensor: SourceTensor
    number: int


def prove(
    part: SourcePart,
    files: SourceFiles,
    pieces: Iterable[Piece],
    held_limit: int,
    limits: Limits,
    *,
    only: Iterable[str] | None = None,
) -> int:
    """Verify the records of a part's tensors; returns how many bytes were read for it.

    `pieces` are those of all target files; `only` are the FQNs that were copied. Raises
    `Damage`. Records without a checksum are skipped; the caller has decided that before.
    """
    files.check_unchanged()
    by_record: dict[tuple[str, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_record[piece.file, piece.start].append(piece)
    unproven = []
    for record in _records(part, only):
        place = record.tensor.chunks[record.number].record
        opened = files.opened(record.tensor, record.number, held_limit)
        if opened.crc is None or opened.held is not None:
            continue
        runs = by_record.get((place.file, place.offset), ())
        crc = combined_crc((CrcPart(r.at, r.length, r.crc) for r in runs), opened.n_bytes)
        if crc is None:
            unproven.append(_WholeRun(record, opened, files))
        elif crc != opened.crc:
            raise damage(files, record, opened, crc)
    n_read = read_runs(files.store, unproven, limits)
    for run in unproven:
        if run.crc != run.opened.crc:
            raise damage(files, run.record, run.opened, run.crc)
    return n_read


def _records(part: SourcePart, only: Iterable[str] | None) -> Iterator[Record]:
    wanted = None if only is None else set(only)
    for tensor in part.tensors:
        if wanted is None or tensor.entry.fqn in wanted:
            yield from (Record(tensor, number) for number in range(len(tensor.chunks)))


def damage(files: SourceFiles, record: Record, opened: Opened, crc: int) -> Damage:
    """The error for elements that do not match the checksum saved with them."""
    place = record.tensor.chunks[record.number].record
    name = record.tensor.entry.fqn
    if len(record.tensor.chunks) > 1:
        name += f" at {record.tensor.chunks[record.number].elements.offsets}"
    saved = opened.crc or 0
    message = f"{name} has the CRC-32 {crc:08x} in {opened.n_bytes:,} bytes, saved was {saved:08x}"
    return Damage(files.finding("record.crc", place, message))


class _WholeRun:
    """Reads the elements of one record; see `byte_pass.Run`."""

    def __init__(self, record: Record, opened: Opened, files: SourceFiles) -> None:
        self.record = record
        self.opened = opened
        self.crc = 0
        place = record.tensor.chunks[record.number].record
        self._span = Span(files.in_store(place.file), opened.start, opened.n_bytes)

    @property
    def path(self) -> str:
        """See `byte_pass.Run`."""
        return self._span.path

    @property
    def n_bytes(self) -> int:
        """See `byte_pass.Run`."""
        return self._span.length

    def pieces(self, limit: int) -> Iterator[ReadPiece]:
        """See `byte_pass.Run`."""
        start, end = self._span.offset, self._span.offset + self._span.length
        for at in range(start, end, limit):
            yield ReadPiece(at, min(limit, end - at))

    def take(self, piece: ReadPiece, data: memoryview) -> None:  # noqa: ARG002 - in order
        """See `byte_pass.Run`."""
        from zlib_ng.zlib_ng import crc32

        self.crc = crc32(data, self.crc)
