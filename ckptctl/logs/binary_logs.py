"""Read logs of framed protobuf messages: TensorBoard event files, Weights & Biases histories.

Each event file is read by itself. TensorBoard's own merged view drops the rows that an
earlier process logged after the step at which a later one resumed; these are the rows that
show whether the resume was correct. The server of Weights & Biases drops steps that were
logged twice; `run-ID.wandb` keeps them, and only its history is read.

An event file is a sequence of records, each with its length, a CRC-32C of the length, an
event and a CRC-32C of the event. A `.wandb` file is a log of records in blocks of 32 KiB, each
part of a record with a CRC-32, a length and a kind. The records of a log need few fields of
protobuf, so no compiled schema is used.

Source: TensorFlow 2.16 `tsl/lib/io/record_writer.cc`, `core/util/event.proto`,
`core/framework/summary.proto`; wandb 0.16 `sdk/internal/datastore.py`, wandb 0.31
`wandb_internal.proto`; https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping

from ckptctl.logs.fields import parse_step
from ckptctl.logs.records import RecordFile, RecordRows, decode_record, flat_pairs
from ckptctl.logs.rows import LogPosition, Marker, Row

Value = int | bytes

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class NotAMessage(ValueError):
    """The bytes do not follow the wire format."""


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the number and the value of each field: an integer, or bytes.

    Doubles, floats and nested messages are bytes. Raises `NotAMessage`.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _varint(message, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            length = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise NotAMessage(f"unknown wire type {kind}")
        if at + length > end or not number:
            raise NotAMessage(f"field {number} ends after the message")
        yield number, message[at : at + length]
        at += length


def _float(value: Value) -> float:
    """A field that is a float or a double."""
    if not isinstance(value, bytes) or len(value) not in (4, 8):
        raise NotAMessage("not a float of 4 or 8 bytes")
    (number,) = struct.unpack("<f" if len(value) == 4 else "<d", value)
    return float(number)


def _signed(value: int) -> int:
    """A field that is an int64; negative values are encoded in two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for n in range(_MAX_VARINT_BYTES):
        if at + n >= len(message):
            raise NotAMessage("an integer ends after the message")
        byte = message[at + n]
        value |= (byte & 0x7F) << (7 * n)
        if byte < 0x80:
            return value & ((1 << 64) - 1), at + n + 1
    raise NotAMessage("an integer has more than 10 bytes")


_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78

# Images and graphs are larger than this, scalars are not; larger events are skipped.
_MAX_EVENT = 1 << 16

_FLOAT, _DOUBLE = 1, 2  # DataType of a tensor
_START = 1  # SessionLog.SessionStatus


def _table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        entries.append(byte)
    return tuple(entries)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The CRC-32C of `data`; an event with scalars has about a hundred bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """The CRC-32C as the file stores it: rotated, since data may contain CRCs itself."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def is_event_file(head: bytes) -> bool:
    """Whether a file that begins with these bytes is an event file: the first CRC matches."""
    if len(head) < _HEADER.size:
        return False
    _, crc = _HEADER.unpack_from(head)
    return masked_crc32c(head[:8]) == int(crc)


class _FramedFile(RecordFile):
    """A file of framed messages.

    Reading stops at the first record with a wrong CRC, since the start of the next record
    is then unknown; `damage` is set.
    """

    def __init__(
        self, name: str, keys: Mapping[str, str] | None = None, *, trimmed: bool = False
    ) -> None:
        super().__init__(name, RecordRows(keys, trimmed=trimmed))
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """The rows and markers that these bytes complete."""
        self._buffer += data
        while self.damage is None and (message := self._next()) is not None:
            try:
                yield from self._read(message) if message else ()
            except NotAMessage as error:
                self.damage = f"record {self._n_records:,} cannot be read: {error}"

    def _next(self) -> bytes | None:
        """The next message; empty where it holds no rows, None without enough bytes."""
        raise NotImplementedError

    def _read(self, message: bytes) -> Iterator[Row | Marker]:
        raise NotImplementedError


class EventFile(_FramedFile):
    """One event file."""

    format = "tensorboard"

    def __init__(self, name: str, keys: Mapping[str, str] | None = None) -> None:
        super().__init__(name, keys)
        self._skip = 0

    def _next(self) -> bytes | None:
        if self._skip:
            n_bytes = min(self._skip, len(self._buffer))
            del self._buffer[:n_bytes]
            self._skip -= n_bytes
            if self._skip:
                return None
        if len(self._buffer) < _HEADER.size:
            return None
        length, crc = _HEADER.unpack_from(self._buffer)
        if not length and not crc:
            # Zeros: a crash persisted the size of the file, but not its bytes.
            self._buffer.clear()
            return None
        if masked_crc32c(bytes(self._buffer[:8])) != crc:
            self.damage = f"the length of record {self._n_records + 1:,} has a wrong CRC-32C"
            return None
        if length > _MAX_EVENT:
            self._n_records += 1
            self._skip = _HEADER.size + length + _CRC.size
            return b""
        end = _HEADER.size + length
        if len(self._buffer) < end + _CRC.size:
            return None
        self._n_records += 1
        event = bytes(self._buffer[_HEADER.size : end])
        (crc,) = _CRC.unpack_from(self._buffer, end)
        del self._buffer[: end + _CRC.size]
        if masked_crc32c(event) != crc:
            self.damage = f"record {self._n_records:,} has a wrong CRC-32C"
            return None
        return event

    def _read(self, event: bytes) -> Iterator[Row | Marker]:
        at, step, pairs, session = 0.0, 0, [], False
        for field in fields(event):
            match field:
                case 1, value:
                    at = _float(value)
                case 2, int(value):
                    step = _signed(value)
                case 5, bytes(value):
                    pairs = [*_scalars(value)]
                case 7, bytes(value):
                    session = (1, _START) in fields(value)
        position = LogPosition(self._name, self._n_records)
        if session:
            yield from self._rows.end()
            # The log restarts at this step, so the checkpoint holds the step before it.
            held = step - 1 if step > 0 else None
            yield Marker(position, f"SessionLog START at step {step}", held, fresh=held is None)
        if pairs:
            yield from self._rows.add(pairs, position, step=step, at=at)


def _scalars(summary: bytes) -> Iterator[tuple[str, str]]:
    for number, scalar in fields(summary):
        if number != 1 or not isinstance(scalar, bytes):
            continue
        tag, value = "", None
        for field in fields(scalar):
            match field:
                case 1, bytes(part):
                    tag = _text(part)
                case 2, part:
                    value = _exactly(_float(part))
                case 8, bytes(part):
                    value = _tensor_scalar(part)
        if tag and value is not None:
            yield tag, value


def _tensor_scalar(tensor: bytes) -> str | None:
    """The scalar in a tensor: its elements packed in a field of their own, or raw bytes."""
    kind, content = 0, b""
    for field in fields(tensor):
        match field:
            case 1, int(value):
                kind = value
            case ((4 | 5 | 6), bytes(value)) if value:
                content = value
    if len(content) != {_FLOAT: 4, _DOUBLE: 8}.get(kind):
        return None
    return _exactly(_float(content))


def _exactly(value: float) -> str:
    # 17 digits: the whole float, with a quantum of 0.
    return f"{value:.17e}"


WANDB_MAGIC = b":W&B"

_BLOCK = 32 << 10
_FILE_HEADER = 7
_PART = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MAX_RECORD = 1 << 20

# W&B counts its own step from 0 in each process.
_RUN_STEPS = ("train/global_step", "trainer/global_step")

_HISTORY = 2  # field of Record


class WandbFile(_FramedFile):
    """The file of one run."""

    format = "wandb"

    def __init__(self, name: str, keys: Mapping[str, str] | None = None) -> None:
        super().__init__(name, keys, trimmed=True)
        self._offset = 0
        self._record = bytearray()
        self._has_steps_of_run = False

    def _next(self) -> bytes | None:
        left = _FILE_HEADER if self._offset == 0 else _BLOCK - self._offset % _BLOCK
        if left < _PART.size or self._offset == 0:
            # The header of the file, or the rest of a block that is too short for a part.
            if len(self._buffer) < left:
                return None
            self._take(left)
        if len(self._buffer) < _PART.size:
            return None
        crc, length, kind = _PART.unpack_from(self._buffer)
        if len(self._buffer) < _PART.size + length:
            return None
        part = self._take(_PART.size + length)[_PART.size :]
        if not (crc or length or kind):
            # Zeros: a crash persisted the size of the file, but not its bytes.
            return b""
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != crc:
            self.damage = f"a part of record {self._n_records + 1:,} has a wrong CRC-32"
            return None
        if kind in (_FULL, _FIRST):
            self._record.clear()
        if len(self._record) <= _MAX_RECORD:
            self._record += part
        if kind not in (_FULL, _LAST):
            return b""
        self._n_records += 1
        return bytes(self._record) if len(self._record) <= _MAX_RECORD else b""

    def _take(self, n_bytes: int) -> bytes:
        taken = bytes(self._buffer[:n_bytes])
        del self._buffer[:n_bytes]
        self._offset += n_bytes
        return taken

    def _read(self, record: bytes) -> Iterator[Row | Marker]:
        for number, history in fields(record):
            if number != _HISTORY or not isinstance(history, bytes):
                continue
            step: int | None = None
            pairs: list[tuple[str, str]] = []
            for field in fields(history):
                match field:
                    case 1, bytes(item):
                        pairs += _item(item)
                    case 2, bytes(counter):
                        values = [v for n, v in fields(counter) if n == 1 and isinstance(v, int)]
                        step = _signed(values[0]) if values else 0
            of_run = next((text for name, text in pairs if name in _RUN_STEPS), None)
            self._has_steps_of_run = self._has_steps_of_run or of_run is not None
            if self._has_steps_of_run:
                step = None if of_run is None else parse_step(of_run)
            if step is not None:
                position = LogPosition(self._name, self._n_records)
                yield from self._rows.add(pairs, position, step=step)


def _item(item: bytes) -> Iterator[tuple[str, str]]:
    key, nested = "", list[str]()
    for field in fields(item):
        name = key or "/".join(nested)
        match field:
            case 1, bytes(value):
                key = _text(value)
            case 2, bytes(value):
                nested.append(_text(value))
            case 5, int(value):
                yield name, str((value >> 1) ^ -(value & 1))  # a sint64
            case 6, value:
                yield name, _exactly(_float(value))
            case ((8 | 16), bytes(value)):
                # JSON: a number, or a record of them.
                record = decode_record(f'{{"": {_text(value)}}}') or {}
                for below, text in flat_pairs(record):
                    if text is not None:
                        yield name + below, text
