"""Format a duration for people.

The command line parses durations; this is the other direction, in one unit.
"""

from __future__ import annotations

_UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def duration(seconds: float, *, digits: int | None = None) -> str:
    """Seconds in one unit: `40 s`, `12 min`, `3 h`, `5 days`; a negative duration is `0 s`.

    As a whole number, or with so many significant `digits`: `31.8 min` for 3.
    """
    seconds = max(0.0, seconds)
    name, size = next((unit for unit in _UNITS if seconds >= 2 * unit[1]), _UNITS[-1])
    value = seconds / size
    whole = digits is None or value >= 10**digits
    return f"{round(value):,} {name}" if whole else f"{value:.{digits}g} {name}"
