"""Produce one shard file of the new step, and verify the source records on the way.

The bytes are produced in order, a block at a time, so that memory does not grow with
tensor size. Where elements are copied as they lie, one checksum serves both records:
the new one, and the old one of which they are a part. `proving` combines these
checksums over all files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptctl.errors import RecordUnreadable
from ckptctl.formats.archive.directory import RecordDirectory, read_directory
from ckptctl.records.slices import TensorSlice, blocks
from ckptctl.records.verification import Passing, check_parts
from ckptctl.records.writing import Block, block_of, record_of
from ckptctl.resharding.planning import TargetFile
from ckptctl.resharding.reading import Buffers, Damage, Piece, SliceReader, SourceFiles
from ckptctl.resharding.sources import SourceBytes, SourceTensor


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
