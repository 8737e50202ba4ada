"""How are sizes, times and names written for people?

Nothing here prints or colours. Names that come out of a checkpoint may hold
anything, so `safe` stands between them and a terminal.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def safe(text: str) -> str:
    r"""The text with everything that a terminal would obey spelled out.

    Control characters, ANSI sequences, line breaks, bidirectional overrides and
    undecodable bytes become `\x1b`, `\n`, `\u202e`; all else stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cell_width(text: str) -> int:
    """How many terminal cells the text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def size(n_bytes: int) -> str:
    """Bytes in three digits and a unit: `980 B`, `1.2 GiB`."""
    if n_bytes < 1024:
        return f"{n_bytes} B"
    value = float(n_bytes)
    for unit in _UNITS:
        value /= 1024
        if value < 999.5 or unit == _UNITS[-1]:
            break
    return f"{value:.{1 if value < 99.95 else 0}f} {unit}"


def exact_size(n_bytes: int) -> str:
    """Bytes readable and exact: `1.2 GiB (1,288,490,188 bytes)`."""
    if n_bytes < 1024:
        return count(n_bytes, "byte")
    return f"{size(n_bytes)} ({n_bytes:,} bytes)"


def count(number: int, noun: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Seconds in one unit that a person would choose: `40 s`, `12 min`, `3 h`, `5 days`."""
    if seconds < 2 * _MINUTE:
        return f"{max(0, round(seconds))} s"
    if seconds < 2 * _HOUR:
        return f"{round(seconds / _MINUTE)} min"
    if seconds < 2 * _DAY:
        return f"{round(seconds / _HOUR)} h"
    return f"{round(seconds / _DAY)} days"


def age(written_s: float | None, now_s: float) -> str:
    """How long ago something was written: `12 min`; `-` where the storage keeps no times.

    A clock of the storage that runs ahead of ours gives `0 s`.
    """
    return "-" if written_s is None else duration(now_s - written_s)


def utc(seconds: float) -> str:
    """Seconds since 1970 as `2026-11-20 03:12:44 UTC`."""
    import datetime

    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
