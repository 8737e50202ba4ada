"""Split the bytes of a text log into clean lines.

A carriage return (progress bars) ends a line as a newline does. Terminal codes and NUL
bytes are removed. A launcher writes the rank before each line; `split_prefix` removes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckptctl.storage.log_lines import MAX_LINE

# Marks a line that ended at a carriage return. NUL bytes of the log are removed before.
_BAR = b"\0"

_CODES = re.compile(
    rb"\x00|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?"
    rb"|[()][0-9A-Za-z]|[@-Z\\-_])"
)

# srun --label, torchrun --tee, NeMo's launcher, KempnerForge, `mpirun --tag-output`.
_PREFIX_PATTERN = (
    r"\s?(?:(?P<number>\d{1,5}): ?"
    r"|\[(?:rank|default|Rank |rank )(?P<named>\d{1,5})\](?::|\s) ?"
    r"|\[(?P<host>[\w.\-]+):(?P<hosted>\d{1,5})\]:? )"
)
_PREFIX = re.compile(_PREFIX_PATTERN)
_RAW_PREFIX = re.compile(_PREFIX_PATTERN.encode())


class LineSplitter:
    """Splits a stream into lines and counts them; `n_lines` is the number of newlines so far."""

    __slots__ = ("_dropping", "_prefix", "_rest", "n_lines")

    def __init__(self) -> None:
        self._rest = b""
        self._prefix: bytes | None = None
        self._dropping = False
        self.n_lines = 0

    def take(self, data: bytes) -> bytes:
        """The lines that are complete now, cleaned; pass them to `lines` or `skip`, once."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut:
            self._keep(self._rest + data)
            return b""
        whole = self._clean(b"".join((self._rest, memoryview(data)[:cut])))
        self._keep(data[cut:])
        return whole

    def end(self) -> bytes:
        """The last line, if no newline ended it."""
        rest, self._rest = self._rest, b""
        return self._clean(rest)

    def skip(self, whole: bytes) -> None:
        """Count lines without scanning them."""
        n_lines = whole.count(b"\n")
        self.n_lines += n_lines
        if n_lines:
            self._prefix = None
        begun = whole[whole.rfind(b"\n") + 1 :].lstrip(b"\r")
        if begun and self._prefix is None:
            self._prefix = _prefix_of(begun)

    def lines(self, whole: bytes) -> LineScanner:
        """A scanner of the lines; they are numbered from 1."""
        number, prefix = self.n_lines, self._prefix
        self.skip(whole)
        return LineScanner(whole, number, prefix)

    def _keep(self, rest: bytes) -> None:
        self._rest = rest
        if len(rest) > MAX_LINE:
            self._rest, self._dropping = b"", True

    def _clean(self, whole: bytes) -> bytes:
        if self._dropping:
            # Drop the rest of a line that was too long to keep.
            ends = [at for at in (whole.find(b"\n"), whole.find(b"\r")) if at >= 0]
            if not ends:
                return b""
            self._dropping = False
            whole = whole[min(ends) :]
        if b"\x1b" in whole or b"\x00" in whole:
            whole = _CODES.sub(b"", whole)
        return whole


class LineScanner:
    """Scans lines for those that contain one of several literals.

    Empty lines are skipped, and those longer than `MAX_LINE`.
    """

    def __init__(self, whole: bytes, number: int, prefix: bytes | None) -> None:
        # A launcher writes its prefix once per line, before the first progress bar.
        if b"\r" in whole:
            whole = _bars_apart(whole, prefix)
        elif prefix and not whole.startswith(b"\n"):
            whole = prefix + whole
        self._whole = whole
        self._has_bars = _BAR in whole
        self._at = 0
        self._number = number
        self._found: dict[bytes, int] = {}

    def scan(self, literals: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        """Each line with one of the literals, and its number; every line without literals.

        A later call continues behind the line that was yielded last.
        """
        whole, at, has_bars = self._whole, self._at, self._has_bars
        only = literals[0] if len(literals) == 1 else None
        while at < len(whole):
            if only is not None:
                start = whole.find(only, at)
            else:
                start = self._nearest(literals, at) if literals else at
            if start < 0:
                return
            if start > at:
                begin = whole.rfind(b"\n", at, start) + 1 or at
                self._number += whole.count(b"\n", at, begin)
                if has_bars:
                    self._number -= whole.count(_BAR + b"\n", at, begin)
                at = begin
            end = whole.find(b"\n", at)
            line = whole[at : end if end >= 0 else len(whole)]
            self._at = at = at + len(line) + 1
            number = self._number + 1
            if has_bars and line.endswith(_BAR):
                line = line[:-1]
            else:
                self._number = number
            if line and len(line) <= MAX_LINE:
                yield number, line

    def _nearest(self, literals: Sequence[bytes], begin: int) -> int:
        """Where the first of the literals is; -1 where there is none."""
        nearest = len(self._whole)
        for literal in literals:
            at = self._found.get(literal, -1)
            if at < begin:
                at = self._whole.find(literal, begin)
                at = self._found[literal] = len(self._whole) if at < 0 else at
            nearest = min(nearest, at)
        return nearest if nearest < len(self._whole) else -1


def _bars_apart(whole: bytes, prefix: bytes | None) -> bytes:
    """Put every progress bar on a line of its own, marked so that it is not counted."""
    lines = []
    for line in whole.split(b"\n"):
        parts = line.split(b"\r")
        for n, part in enumerate(parts):
            if not part:
                continue
            if prefix is None:
                prefix = _prefix_of(part)
            elif not part.startswith(prefix):
                parts[n] = prefix + part
        lines.append((_BAR + b"\n").join(parts))
        prefix = None
    return b"\n".join(lines)


def _prefix_of(line: bytes) -> bytes:
    found = _RAW_PREFIX.match(line)
    return found[0] if found else b""


def split_prefix(text: str) -> tuple[int | None, str]:
    """The rank in the prefix of a launcher, and the line without the prefix."""
    match = _PREFIX.match(text)
    if match is None:
        return None, text
    rank = match["number"] or match["named"] or match["hosted"]
    return int(rank), text[match.end() :]
