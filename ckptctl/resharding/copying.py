"""Produce the shard files of a new step, and verify the source records on the way.

The bytes of a file are produced in order, a block at a time, so that memory does not grow
with tensor size. Where elements are copied as they lie, one checksum serves both records: the
new one, and the old one of which they are a part. Combined in order over all files, these must
give the checksum that was saved with the record. Records whose parts were not copied in runs
are read whole instead, once.

The runs of each written file are recorded in a journal: a later call with the same plan
continues from there, and another plan uses another work folder. Nothing else reads these files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptctl.errors import PathNotFound, RecordUnreadable
from ckptctl.formats.archive.directory import RecordDirectory, read_directory
from ckptctl.formats.bounded_json import read_json
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.records.byte_pass import CrcRun, Limits, read_runs
from ckptctl.records.elements import Block, block_of, record_of
from ckptctl.records.slices import TensorSlice, blocks
from ckptctl.records.verification import CrcPart, Passing, check_parts, combined_crc
from ckptctl.resharding.planning import TargetFile
from ckptctl.resharding.reading import Buffers, Damage, Opened, Piece, SliceReader, SourceFiles
from ckptctl.resharding.sources import SourceBytes, SourcePart, SourceTensor
from ckptctl.storage.contract import Store


class FileCopy:
    """Produces one shard file; `pieces` may be taken again from the beginning.

    `proof` holds the runs of source elements that were copied unchanged.
    """

    def __init__(
        self,
        file: TargetFile,
        files: SourceFiles,
        buffers: Buffers,
        count: Callable[[int], None],
    ) -> None:
        self.file = file
        self.proof: list[Piece] = []
        self.files = files
        self.buffers = buffers
        self._count = count

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file in order; each piece is overwritten by the next.

        Raises `Damage` if the source does not match what was saved.
        """
        self.proof.clear()
        block = memoryview(bytearray(self.buffers.block))
        with SliceReader(self.files, self.buffers) as reader:
            for item in self.file.items:
                if isinstance(item.entry, SourceBytes):
                    yield from self._as_it_is(item.entry, reader, block)
                elif item.elements is not None:
                    yield from self._record(item.entry, item.elements, reader, block)

    def _as_it_is(
        self, entry: SourceBytes, reader: SliceReader, block: memoryview
    ) -> Iterator[memoryview]:
        """A non-tensor record: copied whole, and verified on the way."""
        record = entry.record
        passing = None
        tail = b""
        if not record.transforms:
            try:
                directory, tail = self._directory(entry, reader)
                passing = Passing(directory, 0)
            except RecordUnreadable as error:
                finding = self.files.finding("record.framing", record, error.message)
                raise Damage(finding) from error
        for at in range(0, record.length, len(block)):
            piece = block[: min(len(block), record.length - at)]
            reader.read(record.file, record.offset + at, piece)
            if passing is not None:
                passing.take(piece)
            self._count(len(piece))
            yield piece
        if passing is None:
            return
        checked = check_parts(passing.directory, [passing.part], tail)
        if checked.unreadable is not None:
            raise Damage(self.files.finding("record.framing", record, checked.unreadable))
        if checked.wrong is not None:
            names = ", ".join(checked.wrong.names)
            message = f"{names} does not match the checksum saved with it"
            raise Damage(self.files.finding("record.crc", record, message))

    def _directory(self, entry: SourceBytes, reader: SliceReader) -> tuple[RecordDirectory, bytes]:
        record = entry.record

        def read_tail(n_bytes: int) -> bytes:
            tail = bytearray(n_bytes)
            end = record.offset + record.length
            reader.read(record.file, end - n_bytes, memoryview(tail))
            return bytes(tail)

        return read_directory(read_tail, record.length)

    def _record(
        self, tensor: SourceTensor, wanted: TensorSlice, reader: SliceReader, block: memoryview
    ) -> Iterator[memoryview]:
        """The record of a slice, made of the records of the chunks that it overlaps."""
        elements = self.elements(tensor, wanted, reader, block)
        yield from record_of(tensor.entry.dtype, wanted.sizes, elements)

    def elements(
        self,
        tensor: SourceTensor,
        wanted: TensorSlice,
        reader: SliceReader,
        block: memoryview,
    ) -> Iterator[Block]:
        """The elements of a slice in row-major order, read into `block` again and again."""
        from zlib_ng.zlib_ng import crc32_combine

        for part in blocks(wanted.sizes, tensor.item_bytes, len(block)):
            n_bytes = part.n_elements * tensor.item_bytes
            if not n_bytes:
                return
            runs = reader.fill_block(tensor, part.moved(wanted.offsets), block)
            for run in runs:
                self._prove(run)
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

    def _prove(self, run: Piece) -> None:
        from zlib_ng.zlib_ng import crc32_combine

        last = self.proof[-1] if self.proof else None
        if last is not None and last[:2] == run[:2] and last.at + last.length == run.at:
            joined = crc32_combine(last.crc, run.crc, run.length)
            self.proof[-1] = last._replace(length=last.length + run.length, crc=joined)
        else:
            self.proof.append(run)


SCHEMA = "ckptctl.reshard-journal/1"
MAX_BYTES = 64 << 20


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
    """Verify the records of a part's tensors; returns how many bytes this read.

    `pieces` are those of all target files; `only` are the FQNs that were copied. Raises
    `Damage`. Records without a checksum are skipped; the caller has allowed that.
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
            run = CrcRun(files.in_store(place.file), opened.start, opened.n_bytes)
            unproven.append((record, opened, run))
        elif crc != opened.crc:
            raise damage(files, record, opened, crc)
    n_read = read_runs(files.store, [run for *_, run in unproven], limits)
    for record, opened, run in unproven:
        if run.crc != opened.crc:
            raise damage(files, record, opened, run.crc)
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


# What an interrupted call has written: one JSON file for each complete shard file


def work_folder(identity: str) -> str:
    """The work folder of a plan, below the root that holds the new step."""
    return f"{OWN_FOLDER}/resharding/{identity}"


def note(
    store: Store, identity: str, name: str, path: str, size: int, proof: Sequence[Piece]
) -> None:
    """Record that a file of the new step `name` is written, and the runs that went into it."""
    document = {"schema": SCHEMA, "path": path, "size": size, "proof": [list(p) for p in proof]}
    data = json.dumps(document, separators=(",", ":")).encode()
    store.put(entry_path(identity, name, path), data, replace=True)


def noted(store: Store, identity: str, name: str, path: str, size: int) -> list[Piece] | None:
    """The runs in a written file; None if it is not recorded."""
    try:
        document = read_json(store, entry_path(identity, name, path), max_bytes=MAX_BYTES)
        if not isinstance(document, dict):
            return None
        if (document["schema"], document["path"], document["size"]) != (SCHEMA, path, size):
            return None
        return [
            Piece(str(f), int(s), int(a), int(n), int(c)) for f, s, a, n, c in document["proof"]
        ]
    except (PathNotFound, ValueError, TypeError, KeyError):
        return None


def entry_path(identity: str, name: str, path: str) -> str:
    """The path of the journal entry for a file of the new step `name`."""
    return f"{work_folder(identity)}/{name}.written/{path.replace('/', '+')}.json"
