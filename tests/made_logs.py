"""Log files as their writers write them, byte by byte, from the documented formats."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping


def crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: int | float | bytes | str) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def event_record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    crcs = struct.pack("<I", masked(length)), struct.pack("<I", masked(event))
    return length + crcs[0] + event + crcs[1]


def scalar_event(step: int, values: Mapping[str, float], at: float = 1.7e9) -> bytes:
    summary = b"".join(
        field(1, field(1, tag) + varint(2 << 3 | 5) + struct.pack("<f", value))
        for tag, value in values.items()
    )
    return event_record(field(1, at) + field(2, step) + field(5, summary))


def tensor_event(step: int, tag: str, value: float) -> bytes:
    tensor = field(1, 1) + field(5, struct.pack("<f", value))
    return event_record(
        field(1, 1.7e9) + field(2, step) + field(5, field(1, field(1, tag) + field(8, tensor)))
    )


def start_event(step: int) -> bytes:
    return event_record(field(1, 1.7e9) + field(2, step) + field(7, field(1, 1)))


VERSION_EVENT = event_record(field(1, 1.7e9) + field(3, "brain.Event:2"))


def wandb_file(records: Iterable[bytes]) -> bytes:
    out = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for record in records:
        first = True
        while first or record:
            left = 32768 - len(out) % 32768
            if left < 7:
                out += bytes(left)
                left = 32768
            part, record = record[: left - 7], record[left - 7 :]
            kind = (1 if not record else 2) if first else (4 if not record else 3)
            out += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind)
            out += part
            first = False
    return bytes(out)


def wandb_history(step: int, values: Mapping[str, object], *, typed: bool = False) -> bytes:
    items = b""
    for name, value in values.items():
        said = (
            field(6, value) if typed and isinstance(value, float) else field(16, json.dumps(value))
        )
        items += field(1, field(2, name) + said)
    return field(1, step) + field(2, items + field(2, field(1, step)))
