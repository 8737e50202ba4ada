"""When was a line written, by its own words?

Seconds since the epoch. A time without a zone is taken as UTC: only differences
between lines of one log are ever used.
"""

from __future__ import annotations

import calendar
import re
from functools import lru_cache

_CLOCK = re.compile(
    r"(?:(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)"
    r"|(?P<month_us>\d\d)/(?P<day_us>\d\d)/(?P<year_us>\d{4}))"
    r"[ T](?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[-+]\d\d:?\d\d(?!\d))?"
)

# Of these the clocks of logs are: seconds and milliseconds from 1990 to 2100.
_SECONDS = (6e8, 4.2e9)


def clock_in(text: str) -> float | None:
    """The first date with a time in a line; None where it has none."""
    match = _CLOCK.search(text)
    if match is None:
        return None
    midnight = _midnight(
        int(match["year"] or match["year_us"]),
        int(match["month"] or match["month_us"]),
        int(match["day"] or match["day_us"]),
    )
    if midnight is None:
        return None
    fraction = float(f"0.{match['fraction']}") if match["fraction"] else 0.0
    time = int(match["hour"]) * 3600 + int(match["minute"]) * 60 + int(match["second"])
    return midnight + time + fraction - _offset_s(match["zone"])


def parse_clock(text: str) -> float | None:
    """A clock that a record keeps in a field of its own: a number, or a date with a time."""
    try:
        value = float(text)
    except ValueError:
        return clock_in(text)
    if _SECONDS[0] <= value / 1000 <= _SECONDS[1]:
        return value / 1000
    return value


def _offset_s(zone: str | None) -> int:
    if not zone or zone == "Z":
        return 0
    digits = zone[1:].replace(":", "")
    seconds = int(digits[:2]) * 3600 + int(digits[2:]) * 60
    return -seconds if zone[0] == "-" else seconds


@lru_cache(maxsize=64)
def _midnight(year: int, month: int, day: int) -> int | None:
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    return calendar.timegm((year, month, day, 0, 0, 0))
