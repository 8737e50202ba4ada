"""Read lines that differ only in digits from an earlier line of the log.

A trainer prints the same line at every step, with other numbers. The first line of a shape
is parsed by its format. In later ones, step and clock are where they were in the first;
the other values are parsed on first use.

The precision of a number depends on the numbers above it in its column. A line that could
change the precision of a column is parsed at once: each shape has a list of the parts that
must not change for this to be impossible.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial

from ckptctl.data_classes import dataclass
from ckptctl.loss.formats.console import LineReader
from ckptctl.loss.formats.fields import NUMBERS, Precision, clock_in, clock_span, parse_number
from ckptctl.loss.rows import LogPosition, Row, unparsed
from ckptctl.storage.log_lines import MAX_MATCHED

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
            at = None if minute is None else minute + int(line[seconds])
        position = LogPosition(self._name, number)
        parse = partial(_parse, shape.reader.snapshot(), line, end, position)
        return shape.rank, unparsed(int(line[shape.step]), position, at, parse)

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

    None where any number of this form has to be parsed at once. The column knows `text`.
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
