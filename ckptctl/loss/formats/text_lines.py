"""Split the bytes of a text log into clean lines, and read those of a known shape at once.

A carriage return (progress bars) ends a line as a newline does. Terminal codes and NUL
bytes are removed. A launcher writes the rank before each line; `split_prefix` removes it.

A trainer prints the same line at every step, with other numbers. The first line of a shape
is parsed by its format. In later ones, step and clock are where they were in the first;
the other values are parsed on first use (`LineShapes`). The precision of a number depends on
the numbers above it in its column. A line that could change the precision of a column is
parsed at once: each shape has a list of the parts that must not change for this to be
impossible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from zlib import crc32

from ckptctl.loss.formats.console import LineReader
from ckptctl.loss.formats.fields import NUMBERS, Precision, clock_in, clock_span, parse_number
from ckptctl.loss.rows import LogPosition, Row, unparsed
from ckptctl.outside_numbers import clamped
from ckptctl.storage.logs import MAX_LINE, MAX_MATCHED

# Marks a line that ended at a carriage return. NUL bytes of the log are removed before.
_BAR = b"\0"

_CODES = re.compile(
    rb"\x00|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?"
    rb"|[()][0-9A-Za-z]|[@-Z\\-_])"
)

# A pod, and srun --label, torchrun --tee, NeMo's launcher, KempnerForge, `mpirun --tag-output`.
_PREFIX_PATTERN = (
    r"(?:\[pod/(?P<pod>[\w.-]{1,300})\] )?"
    r"(?:\s?(?:(?P<number>\d{1,5}): ?"
    r"|\[(?:rank|default|Rank |rank )(?P<named>\d{1,5})\](?::|\s) ?"
    r"|\[(?P<host>[\w.\-]+):(?P<hosted>\d{1,5})\]:? ))?"
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
    """A number for the rank in the prefix of a launcher, and the line without the prefix.

    The ranks of each pod have numbers of their own.
    """
    match = _PREFIX.match(text)
    if match is None or not match.end():
        return None, text
    rank = clamped(match["number"] or match["named"] or match["hosted"] or "0")
    return rank + _first_rank(match["pod"]), text[match.end() :]


def split_pod(text: str) -> tuple[int | None, str]:
    """As `split_prefix`, for a line in which a number in front is not a rank."""
    match = _POD.match(text)
    return (None, text) if match is None else (_first_rank(match["pod"]), text[match.end() :])


def _first_rank(pod: str | None) -> int:
    return 0 if pod is None else (1 + crc32(pod.encode())) * _MAX_RANKS


_POD = re.compile(r"\[pod/(?P<pod>[\w.-]{1,300})\] ")
_MAX_RANKS = 100_000
_STAMP = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d) "
    r"(?:(?:DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL) )?"
)


def split_stamp(text: str) -> tuple[float | None, str]:
    """The time that a log collector wrote before a line, and the line without it."""
    match = _STAMP.match(text)
    return (None, text) if match is None else (clock_in(match[0]), text[match.end() :])


_MASK = bytes.maketrans(b"123456789", b"000000000")
_MAX_SHAPES = 1_000
_FIELDS = frozenset(("step", "step_time_ms", *NUMBERS))
# A longer number may be a whole float, of which the precision is not what is printed.
_MAX_DIGITS = 12
_NUMBER = re.compile(
    r"[-+]?(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?)"
    r"(?:[eE](?P<power>[-+]?\d+)|[%a-zA-Z]{0,3})"
)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where the lines of one shape have their parts.

    `clock` is the part before the seconds, the seconds, and the part after them. `fixed` are
    the parts that may not change, with the texts that each has had.
    """

    rank: int | None
    reader: LineReader
    step: slice
    clock: tuple[slice, slice, slice] | None
    fixed: tuple[tuple[slice, set[bytes]], ...]


class LineShapes:
    """The shapes of the lines of one log; `name` is the file of the positions."""

    def __init__(self, name: str) -> None:
        self._name = name
        # For each line without its digits: where its prefix ends, and the shape for each prefix.
        self._shapes: dict[bytes, tuple[int, dict[bytes, _Shape]]] = {}
        self._n_shapes = 0

    def read(self, line: bytes, number: int) -> tuple[int | None, Row] | None:
        """The rank and the row of a line; None where its format has to parse it."""
        found = self._shapes.get(line.translate(_MASK))
        if found is None:
            return None
        end, shapes = found
        shape = shapes.get(line[:end])
        if shape is None:
            return None
        for part, texts in shape.fixed:
            if line[part] not in texts:
                return None
        at = None
        if shape.clock is not None:
            before, seconds, after = shape.clock
            minute = _minute(line[before], line[after])
            at = None if minute is None else minute + clamped(line[seconds])
        position = LogPosition(self._name, number)
        parse = partial(_parse, shape.reader.snapshot(), line, end, position)
        return shape.rank, unparsed(clamped(line[shape.step]), position, at, parse)

    def learn(self, line: bytes, rank: int | None, end: int, reader: LineReader) -> None:
        """Keep the shape of a line that `reader` has parsed; its prefix ends at `end`."""
        if len(line) > MAX_MATCHED or not line.isascii():
            return
        text = line.decode()
        spans = reader.spans(text[end:])
        if spans is None or "loss" not in spans or not spans.keys() <= _FIELDS:
            return
        if parse_number(text[end:][slice(*spans["loss"])]) is None:
            return
        fixed: list[slice] = []
        for field in NUMBERS:
            begin, stop = (end + at for at in spans.get(field, (0, 0)))
            parts = _fixed_parts(text[begin:stop], reader.precision(field))
            if parts is None:
                return
            fixed += [slice(begin + first, begin + last) for first, last in parts]
        if self._n_shapes >= _MAX_SHAPES:
            self._shapes.clear()
            self._n_shapes = 0
        _, shapes = self._shapes.setdefault(line.translate(_MASK), (end, {}))
        before = shapes.get(line[:end])
        self._n_shapes += before is None
        kept = {} if before is None else {part.start: texts for part, texts in before.fixed}
        shapes[line[:end]] = _Shape(
            rank,
            reader,
            slice(*(end + at for at in spans["step"])),
            _clock_parts(text, end),
            tuple((part, kept.get(part.start, set()) | {line[part]}) for part in fixed),
        )


def _parse(reader: LineReader, line: bytes, end: int, position: LogPosition) -> Row:
    return reader.whole_row(line[end:].decode(), position)


def _fixed_parts(text: str, column: Precision) -> list[tuple[int, int]] | None:
    """The parts of a number that decide what it does to the precision of its column.

    None where any number of this form has to be parsed at once. `text` is already
    part of the column.
    """
    number = parse_number(text)
    if number is None or column.whole or number.value != number.value:
        return []  # these have no effect, whatever their digits are
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    parts = [] if match["power"] is None else [match.span("power")]
    places = [at for at in range(*match.span("digits")) if text[at].isdigit()]
    if len(places) > _MAX_DIGITS:
        return None
    n_zeros = len(places) - column.digits
    if n_zeros > 0:
        # Leading zeros: with another digit there, the number has more digits than any before.
        parts.append((places[0], places[n_zeros - 1] + 1))
    return parts


def _clock_parts(text: str, end: int) -> tuple[slice, slice, slice] | None:
    found = clock_span(text[end:])
    if found is None:
        return None
    (begin, stop), (second, after) = found
    return (
        slice(end + begin, end + second),
        slice(end + second, end + after),
        slice(end + after, end + stop),
    )


@lru_cache(maxsize=64)
def _minute(before: bytes, after: bytes) -> float | None:
    """The time of the first second of the minute of a clock, with the fraction of `after`."""
    return clock_in((before + b"00" + after).decode())
