"""Which clean lines are in the bytes of a log?

Bytes come in pieces of any length and leave as lines: carriage returns of progress
bars end a line as newlines do, terminal codes and NUL bytes are gone, and so is what
a launcher puts before a line to name the rank. What a line says is the question of
the formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_LINE = 1 << 20
"""A longer line, in bytes, is no line of a log and is left out."""

_CODES = re.compile(
    rb"\x00|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?"
    rb"|[()][0-9A-Za-z]|[@-Z\\-_])"
)

# srun --label, torchrun --tee, torch.distributed's `--local-ranks-filter`, NeMo's launcher.
_PREFIX = re.compile(
    r"\s?(?:(?P<number>\d{1,5}): ?"
    r"|\[(?:rank|default|Rank |rank )(?P<named>\d{1,5})\](?::|\s) ?"
    r"|\[(?P<host>[\w.\-]+):(?P<hosted>\d{1,5})\]:? )"
)


class LineCutter:
    """Cuts a stream into lines and counts them; `n_lines` is the number of newlines so far."""

    __slots__ = ("_dropping", "_rest", "n_lines")

    def __init__(self) -> None:
        self._rest = b""
        self._dropping = False
        self.n_lines = 0

    def take(self, data: bytes) -> bytes:
        """The lines that are complete now, cleaned; to be given to `lines` or `skip`, once."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut:
            self._keep(self._rest + data)
            return b""
        whole = self._clean(self._rest + data[:cut])
        self._keep(data[cut:])
        return whole

    def end(self) -> bytes:
        """The last line, where no newline ends it."""
        rest, self._rest = self._rest, b""
        return self._clean(rest)

    def skip(self, whole: bytes) -> None:
        """Count lines that nobody looks at."""
        self.n_lines += whole.count(b"\n")

    def lines(self, whole: bytes) -> Iterator[tuple[int, bytes]]:
        """Each line with its number, counted from 1; empty ones are left out."""
        bars = b"\r" in whole
        number = self.n_lines
        self.skip(whole)
        for line in whole.split(b"\n"):
            number += 1
            if not bars:
                if line and len(line) <= MAX_LINE:
                    yield number, line
                continue
            for part in line.split(b"\r"):
                if part and len(part) <= MAX_LINE:
                    yield number, part

    def _keep(self, rest: bytes) -> None:
        self._rest = rest
        if len(rest) > MAX_LINE:
            self._rest, self._dropping = b"", True

    def _clean(self, whole: bytes) -> bytes:
        if self._dropping:
            # What remains of a line whose beginning was too long to keep.
            ends = [at for at in (whole.find(b"\n"), whole.find(b"\r")) if at >= 0]
            if not ends:
                return b""
            self._dropping = False
            whole = whole[min(ends) :]
        if b"\x1b" in whole or b"\x00" in whole:
            whole = _CODES.sub(b"", whole)
        return whole


def split_prefix(text: str) -> tuple[int | None, str]:
    """The rank that the launcher wrote before a line, and the line without it."""
    match = _PREFIX.match(text)
    if match is None:
        return None, text
    rank = match["number"] or match["named"] or match["hosted"]
    return int(rank), text[match.end() :]
