"""Format sizes, times and names for people.

Nothing here prints or colours. Names that come out of a checkpoint may hold
anything, so `safe` stands between them and a terminal.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from ckptctl.goodput.durations import duration

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def safe(text: str) -> str:
    r"""The text with everything that a terminal would obey spelled out.

    Control characters, ANSI sequences, line breaks, bidirectional overrides and
    undecodable bytes become `\x1b`, `\n`, `\u202e`; all else stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def in_shell(command: str) -> str:
    r"""The command with each word that a terminal cannot show written as bash and zsh read it.

    A name that is not UTF-8, or has a line break in it: `$'step_1\xff'`.
    """
    if command.isprintable():
        return command
    import os
    import shlex

    return " ".join(
        shlex.quote(word) if word.isprintable() else _in_bytes(os.fsencode(word))
        for word in shlex.split(command)
    )


def _in_bytes(word: bytes) -> str:
    shown = (chr(b) if 32 <= b < 127 and b not in b"'\\\\" else f"\\x{b:02x}" for b in word)
    return f"$'{''.join(shown)}'"


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
