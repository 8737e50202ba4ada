"""Turn digits in text that somebody else wrote into bounded numbers.

The one place where text from outside becomes a number, an index, a size or a time. Python's own
conversions fail on it in several ways: `int` raises `ValueError` above 4,300 digits, `float`
returns infinity for `1e999`, `int(inf)` and `datetime` raise `OverflowError`, and an integer of a
thousand digits fails later, where it meets a float, a `range` or an allocation. Here what is out
of bounds is None, or the nearest bound.
"""

from __future__ import annotations

import math
from datetime import UTC
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

MOST = (1 << 63) - 1
"""The largest whole number that is read, where the caller names no other."""
_MAX_CHARS = 400
"""A longer text is no number: the largest float has 309 digits before its point."""
LAST_S = 253_402_300_799.0
"""The end of the year 9999 in seconds since 1970, the last time that `datetime` holds."""


def whole(text: str | bytes | None, most: int = MOST, *, least: int = 0) -> int | None:
    """The whole number that a text is; None for any other text, and out of bounds."""
    if text is None or len(text) > _MAX_CHARS:
        return None
    try:
        value = int(text)
    except ValueError:
        return None
    return value if least <= value <= most else None


def clamped(digits: str | bytes, most: int = MOST) -> int:
    """The number of digits that a pattern has matched, at most `most`.

    For what only compares or prints the number, where `most` means as much as any larger one.
    """
    value = whole(digits, most)
    return most if value is None else value


def finite(text: str | bytes | None) -> float | None:
    """The finite number that a text is; None for any other text, NaN and infinity."""
    if text is None or len(text) > _MAX_CHARS:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def whole_of(value: float, most: int = MOST) -> int | None:
    """The integer that a number is; None for a fraction, NaN, and out of bounds."""
    return int(value) if -most <= value <= most and value == math.floor(value) else None


def moment(seconds: float) -> datetime | None:
    """A time in seconds since 1970, as UTC; None before 1970 and after the year 9999."""
    from datetime import datetime

    if not 0 <= seconds <= LAST_S:
        return None
    return datetime.fromtimestamp(seconds, UTC)


def moment_of(
    year: int, month: int, day: int, clock: tuple[int, int, int], offset_s: int = 0
) -> datetime | None:
    """A date with a time, as UTC; None for a day or a time that does not exist.

    `clock` are hour, minute and second; `offset_s` is how far it is ahead of UTC.
    """
    from datetime import datetime, timedelta

    try:
        local = datetime(year, month, day, *clock, tzinfo=UTC)
        return local - timedelta(seconds=offset_s)
    except (ValueError, OverflowError):
        return None
