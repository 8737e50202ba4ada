"""Format counts, sizes, times, lists of names and text of others for people.

Text of others stays text: on a terminal, in Markdown and in SVG.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ckptctl.redaction import shell_command

_EXAMPLES = 3
_LAST_S = 253_402_300_799.0
"""The end of the year 9999, the last that RFC 3339 has."""
_SIZES = ("KiB", "MiB", "GiB", "TiB", "PiB")
DAY_S = 86_400.0
_TIMES = (("days", DAY_S), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 chunk`, `12,000 chunks`, `2 entries`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def verb(number: int, one: str, many: str) -> str:
    """The form of a verb that goes with a number of things."""
    return one if number == 1 else many


def some_of(names: Sequence[object], most: int = _EXAMPLES) -> str:
    """The first few names or numbers, and how many more there are."""
    shown = ", ".join(map(str, names[:most]))
    more = len(names) - most
    return f"{shown} and {more:,} more" if more > 0 else shown


def and_more(things: Sequence[object]) -> str:
    """How many things there are behind the first: ` (and 2 more)`; empty for one."""
    return f" (and {len(things) - 1:,} more)" if len(things) > 1 else ""


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def command_line(*words: str | int) -> str:
    """The command `ckptctl` with these words, to be printed: see `shell_command`."""
    return shell_command(("ckptctl", *map(str, words)))


def path_word(path: str) -> str:
    """A path as a word that no command takes for an option: `./-run` for `-run`."""
    return f"./{path}" if path.startswith("-") and path != "-" else path


def inside(part_path: str, name: str) -> str:
    """`name` of a part, relative to the step."""
    return f"{part_path}/{name}" if part_path else name


def size(n_bytes: int) -> str:
    """Bytes in three digits and a unit: `980 B`, `1.2 GiB`."""
    if n_bytes < 1024:
        return f"{n_bytes} B"
    value = float(n_bytes)
    for unit in _SIZES:
        value /= 1024
        if value < 999.5 or unit == _SIZES[-1]:
            break
    return f"{value:.{1 if value < 99.95 else 0}f} {unit}"


def exact_size(n_bytes: int) -> str:
    """Bytes readable and exact: `1.2 GiB (1,288,490,188 bytes)`."""
    if n_bytes < 1024:
        return counted(n_bytes, "byte")
    return f"{size(n_bytes)} ({n_bytes:,} bytes)"


def percent(share: float, digits: int = 1) -> str:
    """A share of one in percent: `36.6 %`."""
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float, *, digits: int | None = None) -> str:
    """Seconds in one unit: `40 s`, `12 min`, `3 h`, `5 days`; a negative duration is `0 s`.

    As a whole number, or with so many significant `digits`: `31.8 min` for 3.
    """
    seconds = max(0.0, seconds)
    name, unit = next((each for each in _TIMES if seconds >= 2 * each[1]), _TIMES[-1])
    value = seconds / unit
    whole = digits is None or value >= 10**digits
    return f"{round(value):,} {name}" if whole else f"{value:.{digits}g} {name}"


def age(written_s: float | None, now_s: float) -> str:
    """How long ago something was written: `12 min`; `-` where the storage keeps no times.

    A clock of the storage that runs ahead of ours gives `0 s`.
    """
    return "-" if written_s is None else duration(now_s - written_s)


def when(written_s: float, now_s: float) -> str:
    """When something was written: `12 min ago`, or `in 3 days (do the clocks differ?)`.

    A clock of the storage that runs ahead by less than two minutes gives `0 s ago`.
    """
    ahead_s = written_s - now_s
    if ahead_s >= 2 * 60:
        return f"in {duration(ahead_s)} (do the clocks differ?)"
    return f"{age(written_s, now_s)} ago"


def rfc3339(seconds: float, precision: str = "milliseconds") -> str:
    """Seconds since 1970 as `2026-11-20T03:12:44.120Z`; a time out of bounds as the nearest."""
    import datetime

    moment = datetime.datetime.fromtimestamp(min(max(0.0, seconds), _LAST_S), datetime.UTC)
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


def seconds_of(time: str) -> float | None:
    """A time in the form of RFC 3339, in seconds since 1970; None for any other text."""
    import datetime

    try:
        moment = datetime.datetime.fromisoformat(time)
        return None if moment.tzinfo is None else moment.timestamp()
    except (ValueError, OverflowError):
        return None


def utc(seconds: float) -> str:
    """Seconds since 1970 as `2026-11-20 03:12:44 UTC`."""
    import datetime

    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def safe(text: str) -> str:
    r"""The text with everything that a terminal would obey spelled out.

    Control characters, ANSI sequences, line breaks, bidirectional overrides and
    undecodable bytes become `\x1b`, `\n`, `\u202e`; all else stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def markdown_code(text: str) -> str:
    """A piece of code in a line of Markdown; `–` for nothing."""
    text = safe(text)
    if not text.strip():
        return "–"
    fence = "`" * (_longest_run(text) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def markdown_row(*cells: str) -> str:
    """A row of a table of Markdown; also in code a `|` would end its cell."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def markdown_block(kind: str, lines: Iterable[str]) -> Iterator[str]:
    """Lines as a block of code of Markdown, whatever they contain."""
    text = "\n".join(map(safe, lines))
    fence = "`" * max(3, _longest_run(text) + 1)
    yield from (f"{fence}{kind}", text, fence)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def svg_text(text: str) -> str:
    """Text of somebody else in SVG: no markup, no control characters, no other direction."""
    from html import escape

    return escape(safe(text))
