"""Count the NaN and infinite values of a tensor, and see whether it is zero or negative.

Works without torch and numpy, at nearly the speed of reading: sign and most of the exponent
of a value are in its highest byte, and only those bytes are searched. A value is decoded
only if its highest byte can be that of a NaN or an infinity.

Source of the float8 forms: OCP 8-bit floating point, and torch 2.13 `c10/util/Float8_*.h`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

MAX_COUNTED = 10_000
"""The most non-finite values that are counted in one stretch of bytes."""


@dataclass(frozen=True, slots=True)
class Form:
    """The encoding of non-finite values of `size` bytes.

    `high` are the highest bytes that such a value can have. `exponent` is the mask of its
    exponent, all ones in such a value, and `mantissa` that of its mantissa: zero for an
    infinity. Without `exponent`, each of `high` is a NaN. With `signs` values below zero are
    counted too. `negative_zero` is the highest byte of -0.0, empty in a form without one.
    """

    size: int
    high: bytes
    exponent: int = 0
    mantissa: int = 0
    signs: bool = False
    negative_zero: bytes = b"\x80"


def _ieee(size: int, exponent_bits: int) -> Form:
    mantissa_bits = 8 * size - 1 - exponent_bits
    exponent = ((1 << exponent_bits) - 1) << mantissa_bits
    top = exponent >> (8 * size - 8)
    high = bytes(byte for byte in range(256) if byte & top == top)
    return Form(size, high, exponent, (1 << mantissa_bits) - 1)


FORMS: Mapping[str, Form] = {
    "float16": _ieee(2, 5),
    "bfloat16": _ieee(2, 8),
    "float32": _ieee(4, 8),
    "float64": _ieee(8, 11),
    "complex32": _ieee(2, 5),
    "complex64": _ieee(4, 8),
    "complex128": _ieee(8, 11),
    "float8_e5m2": _ieee(1, 5),
    "float8_e4m3fn": Form(1, b"\x7f\xff"),
    "float8_e4m3fnuz": Form(1, b"\x80", negative_zero=b""),
    "float8_e5m2fnuz": Form(1, b"\x80", negative_zero=b""),
    "float8_e8m0fnu": Form(1, b"\xff", negative_zero=b""),
}
"""By torch's dtype name; a complex number is two values. Other dtypes are always finite."""


@dataclass(frozen=True, slots=True)
class Values:
    """How many values were scanned, and how many of them are NaN, infinite or below zero.

    `more`: there are more than were counted. `is_zero`: all of them are zero, or -0.0.
    """

    n_values: int = 0
    n_nan: int = 0
    n_infinite: int = 0
    more: bool = False
    n_negative: int = 0
    is_zero: bool = True

    def __add__(self, other: Values) -> Values:
        return Values(
            self.n_values + other.n_values,
            self.n_nan + other.n_nan,
            self.n_infinite + other.n_infinite,
            self.more or other.more,
            self.n_negative + other.n_negative,
            self.is_zero and other.is_zero,
        )

    @property
    def finite(self) -> bool:
        return not (self.n_nan or self.n_infinite)


class FiniteScan:
    """Scans bytes of one tensor's values in order, little-endian, in pieces of any length.

    The first of them is byte `at` of the tensor. Bytes before the first whole value and
    after the last one are left over, for the caller that has the adjacent bytes.
    """

    def __init__(self, form: Form, at: int = 0) -> None:
        self._form = form
        self._n_lead = -at % form.size
        self.lead = b""
        """The bytes before the first whole value."""
        self.rest = b""
        """Those after the last."""
        self._n_values = self._n_nan = self._n_infinite = self._n_negative = 0
        self._is_zero = True

    @property
    def values(self) -> Values:
        """The result for the whole values so far."""
        n_nan, n_infinite = self._n_nan, self._n_infinite
        more = n_nan + n_infinite >= MAX_COUNTED
        return Values(self._n_values, n_nan, n_infinite, more, self._n_negative, self._is_zero)

    def take(self, data: bytes | memoryview) -> None:
        if len(self.lead) < self._n_lead:
            n = self._n_lead - len(self.lead)
            self.lead += bytes(data[:n])
            data = data[n:]
        # Slicing with a step is ten times as fast on bytes as on a view.
        piece = b"".join((self.rest, data))
        size = self._form.size
        n_whole = len(piece) // size * size
        self.rest = piece[n_whole:]
        self._n_values += n_whole // size
        high = piece[size - 1 : n_whole : size]
        form = self._form
        if any(high.find(byte) >= 0 for byte in form.high):
            self._count(piece, high)
        if self._is_zero:
            n_zero = piece.count(0, 0, n_whole)
            if n_zero != n_whole and form.negative_zero:
                n_zero += high.count(form.negative_zero)
            self._is_zero = n_zero == n_whole
        if form.signs:
            self._count_negative(piece, high)

    def _those_of(self, high: bytes, pattern: bytes, piece: bytes) -> Iterator[int]:
        """The values in a piece whose highest byte, one of `high`, matches a pattern."""
        size = self._form.size
        for match in re.finditer(pattern, high):
            at = match.start() * size
            yield int.from_bytes(piece[at : at + size], "little")

    def _count_negative(self, piece: bytes, high: bytes) -> None:
        form = self._form
        sign = 0x80 << (8 * form.size - 8)
        for value in self._those_of(high, b"[\x80-\xff]", piece):
            if self._n_negative >= MAX_COUNTED:
                return
            if form.exponent:
                is_nan = value & form.exponent == form.exponent and value & form.mantissa
            else:
                is_nan = value in form.high
            self._n_negative += value != sign and not is_nan

    def _count(self, piece: bytes, high: bytes) -> None:
        form = self._form
        for value in self._those_of(high, b"[" + re.escape(form.high) + b"]", piece):
            if self._n_nan + self._n_infinite >= MAX_COUNTED:
                return
            if value & form.exponent != form.exponent:
                continue
            if form.exponent and not value & form.mantissa:
                self._n_infinite += 1
            else:
                self._n_nan += 1


def joined(form: Form, scans: Iterable[FiniteScan]) -> Values:
    """The result for one tensor whose bytes passed through several scans, in order."""
    total = Values()
    # Everything between the leftovers is whole values.
    between = FiniteScan(form)
    for scan in scans:
        total += scan.values
        for piece in (scan.lead, scan.rest):
            between.take(piece)
    return total + between.values
