"""Read the history that Weights & Biases keeps of a run on disk.

`run-ID.wandb` is a log of records in blocks of 32 KiB, each part of a record with a
CRC-32, a length and a kind. Only the history is read. The server's view drops steps that
were logged twice; this file keeps them.

Source: wandb 0.16 `sdk/internal/datastore.py`, wandb 0.31 `wandb_internal.proto`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping

from ckptctl.loss.formats.fields import RowMaker
from ckptctl.loss.formats.protobuf import (
    NotAMessage,
    double,
    fields,
    packed,
    signed,
    text,
    zigzag,
)
from ckptctl.loss.formats.records import StepMerger, decode_record, flat_pairs
from ckptctl.loss.rows import LogPosition, Marker, Row

MAGIC = b":W&B"

_BLOCK = 32 << 10
_FILE_HEADER = 7
_PART = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MAX_RECORD = 1 << 20

_HISTORY = 2  # field of Record
_ITEM, _STEP = 1, 2  # fields of HistoryRecord


class WandbFile:
    """The file of one run, fed in pieces of any length; `damage` is why reading stopped."""

    format = "wandb"
    n_without_step = 0

    def __init__(self, name: str, keys: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._maker = RowMaker(keys, trimmed=True)
        self._merger = StepMerger()
        self._buffer = bytearray()
        self._offset = 0
        self._record = bytearray()
        self._whole: bytes | None = None
        self._n_records = 0
        self.damage: str | None = None

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """The rows and markers that these bytes complete."""
        self._buffer += data
        if self._offset == 0:
            if len(self._buffer) < _FILE_HEADER:
                return
            self._take(_FILE_HEADER)
        while self.damage is None and self._part():
            record, self._whole = self._whole, None
            if record is None:
                continue
            try:
                yield from self._history(record)
            except NotAMessage as error:
                self.damage = f"record {self._n_records:,} cannot be read: {error}"

    def end(self) -> Iterator[Row | Marker]:
        """The last row."""
        yield from self._merger.end()

    def _part(self) -> bool:
        """Take the next part of a record; False where bytes are missing or damaged."""
        left = _BLOCK - self._offset % _BLOCK
        if left < _PART.size:
            # Too short for a part: the rest of the block is padding.
            if len(self._buffer) < left:
                return False
            self._take(left)
        if len(self._buffer) < _PART.size:
            return False
        crc, length, kind = _PART.unpack_from(self._buffer)
        if len(self._buffer) < _PART.size + length:
            return False
        part = self._take(_PART.size + length)[_PART.size :]
        if not (crc or length or kind):
            # Zeros: a crash persisted the size of the file, but not its bytes.
            return True
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != crc:
            self.damage = f"a part of record {self._n_records + 1:,} has a wrong CRC-32"
            return False
        if kind in (_FULL, _FIRST):
            self._record.clear()
        if len(self._record) <= _MAX_RECORD:
            self._record += part
        if kind in (_FULL, _LAST):
            self._n_records += 1
            if len(self._record) <= _MAX_RECORD:
                self._whole = bytes(self._record)
        return True

    def _take(self, n_bytes: int) -> bytes:
        taken = bytes(self._buffer[:n_bytes])
        del self._buffer[:n_bytes]
        self._offset += n_bytes
        return taken

    def _history(self, record: bytes) -> Iterator[Row | Marker]:
        for number, value in fields(record):
            if number != _HISTORY:
                continue
            step: int | None = None
            pairs: list[tuple[str, str]] = []
            for inner, part in fields(packed(value)):
                if inner == _ITEM:
                    pairs += _item(packed(part))
                elif inner == _STEP:
                    step = next((signed(v) for n, v in fields(packed(part)) if n == 1), 0)
            row = self._maker.row(pairs, LogPosition(self._name, self._n_records), step=step)
            if row is not None:
                yield from self._merger.add(row)


def _item(item: bytes) -> Iterator[tuple[str, str]]:
    key, nested = "", []
    for number, value in fields(item):
        if number == 1:
            key = text(value)
        elif number == 2:
            nested.append(text(value))
        elif number == 5:
            yield key or "/".join(nested), str(zigzag(value))
        elif number == 6:
            yield key or "/".join(nested), f"{double(value):.17e}"
        elif number in (8, 16):
            # JSON: a number, or a record of them.
            record = decode_record(f'{{"": {text(value)}}}') or {}
            for below, value_text in flat_pairs(record):
                yield (key or "/".join(nested)) + below, value_text
