"""Read one TensorBoard event file.

Each file is read by itself. TensorBoard's own merged view drops the rows that an earlier
process logged after the step at which a later one resumed; these are the rows that show
whether the resume was correct.

A file is a sequence of records, each with its length, a CRC-32C of the length, an event
and a CRC-32C of the event. Source: TensorFlow 2.16 `tsl/lib/io/record_writer.cc`,
`core/util/event.proto`, `core/framework/summary.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from ckptctl.loss.formats.fields import RowMaker
from ckptctl.loss.formats.protobuf import (
    NotAMessage,
    double,
    fields,
    packed,
    signed,
    single,
    text,
)
from ckptctl.loss.formats.records import StepMerger
from ckptctl.loss.rows import LogPosition, Marker, Row

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


class EventFile:
    """One event file, fed in pieces of any length.

    Reading stops at the first record with a wrong CRC, since the start of the next record
    is then unknown; `damage` is set.
    """

    format = "tensorboard"
    n_without_step = 0

    def __init__(self, name: str, keys: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._maker = RowMaker(keys)
        self._merger = StepMerger()
        self._buffer = bytearray()
        self._skip = 0
        self._n_records = 0
        self.damage: str | None = None

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """The rows and markers that these bytes complete."""
        self._buffer += data
        while self.damage is None:
            event = self._next()
            if event is None:
                return
            if event:
                try:
                    yield from self._event(event)
                except NotAMessage as error:
                    self.damage = f"record {self._n_records:,} is not an event: {error}"

    def end(self) -> Iterator[Row | Marker]:
        """The last row."""
        yield from self._merger.end()

    def _next(self) -> bytes | None:
        """The next event; empty where it is too large for a scalar, None without enough bytes."""
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

    def _event(self, event: bytes) -> Iterator[Row | Marker]:
        at, step, pairs, session = 0.0, 0, [], False
        for number, value in fields(event):
            if number == 1:
                at = double(value)
            elif number == 2:
                step = signed(value)
            elif number == 5:
                pairs = [*_scalars(packed(value))]
            elif number == 7:
                session = (1, _START) in fields(packed(value))
        position = LogPosition(self._name, self._n_records)
        if session:
            yield from self._merger.end()
            # The log restarts at this step, so the checkpoint holds the step before it.
            held = step - 1 if step > 0 else None
            yield Marker(position, f"SessionLog START at step {step}", held, fresh=held is None)
        if pairs:
            row = self._maker.row(pairs, position, step=step, at=at)
            if row is not None:
                yield from self._merger.add(row)


def _scalars(summary: bytes) -> Iterator[tuple[str, str]]:
    for number, value in fields(summary):
        if number != 1:
            continue
        tag, scalar = "", None
        for inner, part in fields(packed(value)):
            if inner == 1:
                tag = text(part)
            elif inner == 2:
                scalar = _exactly(part)
            elif inner == 8:
                scalar = _of_tensor(packed(part))
        if tag and scalar is not None:
            yield tag, scalar


def _of_tensor(tensor: bytes) -> str | None:
    kind, content, floats, doubles = 0, b"", b"", b""
    for number, value in fields(tensor):
        if number == 1:
            kind = signed(value)
        elif number == 4:
            content = packed(value)
        elif number == 5:
            floats = packed(value)
        elif number == 6:
            doubles = packed(value)
    if kind == _FLOAT and len(floats or content) == 4:
        return _exactly(floats or content)
    if kind == _DOUBLE and len(doubles or content) == 8:
        return repr(double(doubles or content))
    return None


def _exactly(value: int | bytes) -> str:
    # 17 digits: the whole float, with a quantum of 0.
    return f"{single(value):.17e}"
