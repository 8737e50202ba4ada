"""Decode the wire format of protobuf messages.

The records of a log need few fields, so no compiled schema is used; the meaning of a field
is known to its reader.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | bytes

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class NotAMessage(ValueError):
    """The bytes do not follow the wire format."""


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the number and the value of each field: an integer, or bytes.

    Doubles, floats and nested messages are bytes; `double`, `single` and `fields` decode
    them. Raises `NotAMessage`.
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


def double(value: Value) -> float:
    """A field that is a double."""
    return _float(value, "<d", 8)


def single(value: Value) -> float:
    """A field that is a float of 4 bytes."""
    return _float(value, "<f", 4)


def signed(value: Value) -> int:
    """A field that is an int64; negative values are encoded in two's complement."""
    if not isinstance(value, int):
        raise NotAMessage("bytes where an integer is expected")
    return value - (1 << 64) if value >= 1 << 63 else value


def zigzag(value: Value) -> int:
    """A field that is a sint64."""
    if not isinstance(value, int):
        raise NotAMessage("bytes where an integer is expected")
    return (value >> 1) ^ -(value & 1)


def packed(value: Value) -> bytes:
    """A field that is a string, bytes or a message."""
    if not isinstance(value, bytes):
        raise NotAMessage("an integer where bytes are expected")
    return value


def text(value: Value) -> str:
    """A field that is a string."""
    return packed(value).decode("utf-8", "replace")


def _float(value: Value, form: str, size: int) -> float:
    if not isinstance(value, bytes) or len(value) != size:
        raise NotAMessage(f"not a float of {size} bytes")
    (number,) = struct.unpack(form, value)
    return float(number)


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
