"""Turn the times that logs print into seconds since 1970.

A time without a zone is taken as UTC: only differences between times of one log are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache

from ckptctl.outside_numbers import clamped, finite, moment_of, whole

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
MONTH = f"(?P<month>{'|'.join(_MONTHS)})"
CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?"
ZONE = r"(?P<z>Z| ?UTC|[+-]\d\d:?\d\d(?!\d))?"
_LINE_CLOCK = re.compile(
    r"(?:(?:(?P<y>\d{4})[-/](?P<mo>\d\d)[-/](?P<d>\d\d)"
    r"|(?P<mo_us>\d\d)/(?P<d_us>\d\d)/(?P<y_us>\d{4}))[ T]"
    # At the beginning of a line, a time of the day.
    rf"|^[\[(]?){CLOCK}{ZONE}"
)
_EARLIEST_S, _LATEST_S = 6e8, 4.2e9
"""1989 and 2103: a larger number is in milliseconds, microseconds or nanoseconds."""
_AHEAD_S = 2 * 86_400.0
"""How far a time without a year may be ahead of now, by another clock or zone."""


def seconds_of(parts: Mapping[str, str | None]) -> float | None:
    """The time whose parts a pattern has matched; None for one that does not exist.

    The parts are `y`, `mo` or `month`, `d`, `h`, `m`, `s`, `f` (the digits of the fraction) and
    `z`. A time without a year is the latest such day; one without a day counts from midnight.
    """
    hour, minute, second = (clamped(parts.get(part) or "0") for part in "hms")
    if hour > 23 or minute > 59 or second > 60:
        return None
    digits = parts.get("f")
    fraction = (finite(f"0.{digits}") or 0.0) if digits else 0.0
    time_s = hour * 3600 + minute * 60 + second
    day, year, name = parts.get("d"), whole(parts.get("y")), parts.get("month")
    if day is None:
        return time_s + fraction
    month = _MONTHS.index(name) + 1 if name else clamped(parts.get("mo") or "0")
    now = datetime.now(UTC) if year is None else None
    for candidate in (now.year, now.year - 1) if now is not None else (year or 0,):
        midnight = _midnight(candidate, month, clamped(day))
        if midnight is None:
            continue
        at_s = midnight + time_s + fraction - _offset_s(parts.get("z"))
        if now is None or at_s <= now.timestamp() + _AHEAD_S:
            return at_s
    return None


@lru_cache(maxsize=64)
def _midnight(year: int, month: int, day: int) -> int | None:
    moment = moment_of(year, month, day, (0, 0, 0))
    return None if moment is None else round(moment.timestamp())


def _offset_s(zone: str | None) -> int:
    if not zone or zone.strip() in ("Z", "UTC"):
        return 0
    digits = zone[1:].replace(":", "")
    seconds = clamped(digits[:2]) * 3600 + clamped(digits[2:]) * 60
    return -seconds if zone[0] == "-" else seconds


def clock_in(text: str) -> float | None:
    """The first date with a time in a text; also a time of the day at its beginning."""
    match = _LINE_CLOCK.search(text)
    return None if match is None else _seconds_in(match)


def _seconds_in(match: re.Match[str]) -> float | None:
    parts = match.groupdict()
    if parts["y_us"] is not None:
        parts |= {"y": parts["y_us"], "mo": parts["mo_us"], "d": parts["d_us"]}
    return seconds_of(parts)


def clock_match(text: str) -> re.Match[str] | None:
    """The match of the time of `clock_in`; None without one, and for a zone other than UTC."""
    match = _LINE_CLOCK.search(text)
    if match is None or _seconds_in(match) is None or _offset_s(match["z"]):
        return None
    return match


@lru_cache(maxsize=64)
def minute_in(text: str) -> float | None:
    """The time of a text that ends before the seconds, as `2026-11-20 03:12:`."""
    return clock_in(f"{text}00")


def in_seconds(number: float) -> float | None:
    """A time that a program gives as seconds, milli-, micro- or nanoseconds since 1970."""
    for scale in (1, 1e3, 1e6, 1e9):
        if _EARLIEST_S * scale <= number <= _LATEST_S * scale:
            return number / scale
    return None


def time_of(value: object) -> float | None:
    """The time in a field of a record: a number since 1970, or a date with a time."""
    if isinstance(value, str):
        number = finite(value)
        return clock_in(value) if number is None else in_seconds(number)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return in_seconds(value)
    return None
