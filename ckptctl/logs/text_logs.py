"""Read a text log: detect its format and drop rows that other ranks repeat.

The first format that finds a row is the format of the log; from then on lines without its
hint are skipped. Rows of formats that match many kinds of text wait for a few lines, so
that a more specific format can still be found.

Lines that mark the start of a process become markers. A trainer names the step either as the
last one that the checkpoint holds, or as the first one that will run; a marker holds the former.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from ckptctl.errors import OptionError
from ckptctl.logs.clocks import clock_in
from ckptctl.logs.console import (
    EPOCH_HINT,
    BlockReader,
    HfConsoleReader,
    LineReader,
    LineTemplates,
    pattern_for,
    pattern_format,
)
from ckptctl.logs.formats import TABLE, LineFormat, joined
from ckptctl.logs.log_lines import Deadline, LineSplitter, split_launcher, stamp_end
from ckptctl.logs.records import JsonLinesReader, TableReader, has_values
from ckptctl.logs.rows import Log, LogPosition, Marker, RankReader, Row, set_interval
from ckptctl.outside_numbers import clamped, whole
from ckptctl.storage.logs import MAX_MATCHED

MAX_TEXT = 300
"""Characters of a marker's line that are kept."""


_MARKERS = tuple((re.compile(joined(form.pattern), re.I), form) for form in TABLE.markers)

HINTS = (*(hint.encode() for hint in TABLE.marker_hints), b"accumulate_grad_batches")
"""Every marker's line contains one of these literals; other lines are not matched."""

_ACCUMULATED = re.compile(r"accumulate_grad_batches\W{1,4}(\d{1,5})\b")
"""The setting of Lightning that states how many batches make one step."""


def read_marker(text: str, position: LogPosition) -> Marker | None:
    """The marker in a line; None where there is none."""
    for pattern, form in _MARKERS:
        match = pattern.search(text)
        if match is None:
            continue
        step = whole(match.groupdict().get("step"))
        if step is not None and form.first_step:
            # Trainers count steps from 0 or from 1; both mean a fresh start.
            step = max(0, step - 1)
        fresh = form.fresh or step == 0
        return Marker(position, text.strip()[:MAX_TEXT], None if fresh else step, fresh)
    return None


_LINES_PER_CHECK = 64
"""How often the deadline is checked."""

# Rows of fallback formats that wait for a better format.
_UNDECIDED_ROWS = 8
# Ranks and formats whose readers are kept; the prefix of a line may only look like a rank.
_MAX_READERS = 4096
_SILENT_STEPS = 3
_MAX_HELD = 64
_MAX_TWICE = 512
_MAX_MENTION = 160
_LINES_FOR_PATTERNS = 2_000
_BYTES_FOR_PATTERNS = 1 << 16

Keys = Mapping[str, str] | None
Rank = tuple[str | None, int | None]
"""The pod or host and the rank that a launcher names before a line, or a record in its fields."""


@dataclass(frozen=True, slots=True)
class TextFormat:
    """A text format: how the reader of one rank is made, and how reliable its rows are.

    Each line of the format contains one of the `hints`. With `needs_loss`, a row without a
    loss does not identify the format; with `fallback`, any other format is preferred. A line
    is matched up to `MAX_MATCHED` characters, unless its `records` are parsed whole.
    `averages` and `first_alone`: see `Averages`.
    """

    name: str
    hints: tuple[str, ...]
    reader: Callable[[Keys], RankReader]
    needs_loss: bool = False
    fallback: bool = False
    averages: bool = False
    first_alone: bool = False
    records: bool = False


def _line_format(form: LineFormat) -> TextFormat:
    return TextFormat(
        form.name,
        (form.hint, EPOCH_HINT) if form.epochs_above else (form.hint,),
        partial(LineReader, form),
        fallback=form.fallback,
        averages=form.averages,
        first_alone=form.name == "megatron",
    )


TEXT_FORMATS: tuple[TextFormat, ...] = (
    TextFormat("csv", ("",), TableReader, needs_loss=True, records=True),
    TextFormat("jsonl", ("{",), JsonLinesReader, needs_loss=True, records=True),
    TextFormat(
        "hf-console",
        (HfConsoleReader.hint, HfConsoleReader.bar_hint),
        HfConsoleReader,
        averages=True,
    ),
    *(TextFormat(form.name, (form.hint,), partial(BlockReader, form)) for form in TABLE.blocks),
    *map(_line_format, TABLE.lines),
)


class Averages:
    """Determines of how many steps each loss is the mean, for a format that prints means.

    With `first_alone`, the first row of a process is one step alone, and the mean of the
    second row includes that step again, as in Megatron (Megatron-LM 0.15, `training.py`,
    `should_reset`).
    """

    def __init__(self, *, first_alone: bool) -> None:
        self._first_alone = first_alone
        self._last: int | None = None
        self._n_rows = 0

    def restart(self) -> None:
        """Start again: another process begins."""
        self._last, self._n_rows = None, 0

    def count(self, row: Row) -> None:
        """Set the number of steps that the loss of the next row is the mean of."""
        if self._last is not None and row.step <= self._last:
            self.restart()
        self._n_rows += 1
        last, self._last = self._last, row.step
        if last is None:
            if self._first_alone:
                set_interval(row, 1)
            return
        kept = 1 if self._first_alone and self._n_rows == 2 else 0
        set_interval(row, row.step - last + kept)


@dataclass(slots=True)
class OtherRank:
    """The losses of a rank that are not among the rows of the log.

    `not_finite` are the rows at which its loss became NaN or infinite, `twice` the rows of steps
    that it logged twice; `differs`: it logged another loss than the kept rank for one step.
    """

    not_finite: list[Row] = field(default_factory=list)
    twice: deque[tuple[Row, Row]] = field(default_factory=lambda: deque(maxlen=_MAX_TWICE))
    differs: bool = False
    recent: dict[int, Row] = field(default_factory=dict)
    last: Row | None = None

    def add(self, row: Row, *, is_one: bool) -> None:
        """Take the next row; rows of several ranks without names are not compared (`is_one`)."""
        if row.loss is None:
            return
        last, self.last = self.last, row
        if not math.isfinite(row.loss.value) and len(self.not_finite) < _MAX_HELD:
            was = last is not None and last.loss is not None and not math.isfinite(last.loss.value)
            if not (was and last is not None and last.step < row.step):
                self.not_finite.append(row)
        if not is_one:
            return
        earlier = self.recent.pop(row.step, None)
        if earlier is not None and earlier is not last:
            self.twice.append((earlier, row))
        self.recent[row.step] = row
        if len(self.recent) > _MAX_TWICE:
            del self.recent[next(iter(self.recent))]


class OtherRanks:
    """What the ranks logged whose rows are dropped, in all logs that follow one another."""

    def __init__(self) -> None:
        self.kept: Rank | None = None
        """The rank whose rows are kept."""
        self._ranks: dict[Rank, OtherRank] = {}
        self._kept_losses: dict[int, float] = {}

    def others(self) -> dict[Rank, OtherRank]:
        """The ranks besides the kept one."""
        return {
            rank: other
            for rank, other in self._ranks.items()
            if rank in (_NO_RANK, _MORE_RANKS) or rank != self.kept
        }

    def keep(self, row: Row) -> None:
        """Take a row that is kept."""
        if row.loss is not None:
            self._kept_losses.pop(row.step, None)
            self._kept_losses[row.step] = row.loss.value
            if len(self._kept_losses) > _MAX_HELD:
                del self._kept_losses[next(iter(self._kept_losses))]

    def drop(self, rank: Rank, row: Row) -> None:
        """Take a row of a rank that is not kept."""
        if rank not in self._ranks and len(self._ranks) >= _MAX_RANKS:
            rank = _MORE_RANKS
        other = self._ranks.setdefault(rank, OtherRank())
        other.add(row, is_one=rank not in (_NO_RANK, _MORE_RANKS))
        kept = self._kept_losses.get(row.step)
        if kept is not None and row.loss is not None and row.loss.value != kept:
            other.differs = True


class RankDeduplicator:
    """Keeps the rows of one rank where several ranks write to one log.

    The first rank that prints a row is kept; the others repeat it. Where another rank
    prints three steps while the kept one prints none, the kept rank is silent, and the
    other one is kept from then on, with all the rows it printed meanwhile. So it is after a
    restart, and in the next log: ranks may print losses of their own, and only those of one
    rank are compared. The launcher's prefix identifies ranks. In a log
    without prefixes, if its first step occurs several times, only the first
    row of each step is kept.
    """

    def __init__(self, earlier: RankDeduplicator | None = None) -> None:
        self._rank: Rank | None = None if earlier is None else earlier._rank
        self.others: OtherRanks = OtherRanks() if earlier is None else earlier.others
        self._last_step: int | None = None
        self._n_steps = 0
        self._repeats_steps = False
        self._held: dict[Rank, list[Row]] = {}
        self._closest = 0
        self._marker: Marker | None = None
        self._marked_by: set[Rank] = set()

    def row(self, rank: Rank, row: Row) -> Sequence[Row]:
        """The rows to keep, now that `rank` has printed this one."""
        if self._rank is None:
            self._rank = self.others.kept = rank
        if rank == self._rank:
            if self._held:
                self._clear()
            if self._is_new(row):
                self.others.keep(row)
                return (row,)
            if rank == _NO_RANK:
                self.others.drop(rank, row)
            return ()
        self.others.drop(rank, row)
        held = self._held.setdefault(rank, [])
        if len(held) < _MAX_HELD:
            held.append(row)
        closeness = self._closeness(rank)
        self._closest = max(self._closest, closeness)
        n_steps = len({waiting.step for waiting in held})
        # A rank that is closer to the kept one may only print later.
        if n_steps < (_SILENT_STEPS if closeness == self._closest else 2 * _SILENT_STEPS):
            return ()
        self._clear()
        self._rank = self.others.kept = rank
        return [waiting for waiting in held if self._is_new(waiting)]

    def _clear(self) -> None:
        self._held.clear()
        self._closest = 0

    def _closeness(self, rank: Rank) -> int:
        """How sure it is that another process took the place of the kept one."""
        (host, number), (kept_host, kept_number) = rank, self._rank or _NO_RANK
        if number is not None and number == kept_number:
            return 2
        return 1 if host is not None and host == kept_host else 0

    def marker(self, rank: Rank, marker: Marker) -> Marker | None:
        """The marker; None where another rank already printed the same one."""
        same = (
            self._marker is not None
            and (self._marker.step, self._marker.fresh) == (marker.step, marker.fresh)
            and rank not in self._marked_by
        )
        if same:
            self._marked_by.add(rank)
            return None
        self._marker, self._marked_by = marker, {rank}
        self._last_step, self._n_steps, self._repeats_steps = None, 0, False
        self._clear()
        return marker

    def end(self) -> Iterator[Row]:
        """The rows that another rank printed after the last row of the kept one."""
        for rows in self._held.values():
            newer = [row for row in rows if self._last_step is None or row.step > self._last_step]
            if newer:
                self._clear()
                yield from newer
                return

    def _is_new(self, row: Row) -> bool:
        if row.step != self._last_step:
            self._n_steps += 1
        else:
            # Ranks without prefixes repeat the first step already; a later step that occurs
            # twice is a resume.
            if self._n_steps == 1:
                self._repeats_steps = True
            if self._repeats_steps:
                return False
        self._last_step = row.step
        return True


class TextLog(Log):
    """One text log, fed in pieces of any length; `name` is the file of its positions.

    `earlier` is the log before it, which shows at which step an epoch began, and which format is
    to be expected.
    """

    _ranks: RankDeduplicator

    def __init__(
        self,
        name: str,
        *,
        form: str | None = None,
        pattern: str | None = None,
        keys: Keys = None,
        earlier: TextLog | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self._deadline = deadline
        self._name = name
        self._earlier = earlier
        self._keys = keys
        self._splitter = LineSplitter()
        self._ranks = RankDeduplicator(None if earlier is None else earlier._ranks)
        self.other_ranks = self._ranks.others
        self._averages: Averages | None = None
        self._candidates = _candidates(form, pattern)
        self._chosen: TextFormat | None = None
        self._templates: dict[str, LineTemplates] = {}
        self._readers: dict[tuple[str, Rank], RankReader] = {}
        # Rows of fallback formats, and the markers between them, in the order they were read.
        self._undecided: list[tuple[TextFormat | None, Rank, Row | Marker]] = []
        self._resumed: int | None = None
        self._accumulated = 1
        self._incomplete: set[tuple[str, Rank]] = set()
        self._used: frozenset[str] = frozenset()
        self._n_read = 0
        self._is_named = form is not None
        if len(self._candidates) == 1:
            self._choose(self._candidates[0])

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """See `Log.feed`."""
        return self._whole(self._splitter.take(data))

    def end(self) -> Iterator[Row | Marker]:
        """See `Log.end`."""
        yield from self._whole(self._splitter.end())
        yield from self._ended()
        if self._chosen is None:
            yield from self._settle_fallback()
        yield from map(self._averaged, self._ranks.end())
        readers = self._readers.values()
        self.n_without_step = sum(
            reader.n_without_step for reader in readers if isinstance(reader, HfConsoleReader)
        )

    @property
    def used(self) -> frozenset[str]:
        """See `Log.used`."""
        return self._used.union(*(reader.maker.used for reader in self._readers.values()))

    def _whole(self, data: bytes) -> Iterator[Row | Marker]:
        if not data or self.damage is not None:
            return
        if self._is_named:
            # Lines that the named format does not read may need a pattern.
            self._is_named = False
            lines = data[:_BYTES_FOR_PATTERNS].decode(errors="replace").splitlines()
            patterns = (pattern_for(line[:MAX_MATCHED]) for line in lines[:_LINES_FOR_PATTERNS])
            self.pattern = next(filter(None, patterns), None)
        marks = [hint.decode() for hint in HINTS if hint in data]
        for number, text in self._splitter.lines(data):
            if marks and any(mark in text for mark in marks):
                yield from self._marker_or_rows(text, number)
            elif text and self._may_have_row(text):
                yield from self._rows(text, number)
            else:
                continue
            self._n_read += 1
            is_checked = self._n_read % _LINES_PER_CHECK == 0
            if is_checked and self._deadline is not None and self._deadline.passed():
                self.damage = (
                    f"reading stopped at line {number:,}, because it took longer than any log of "
                    "this size"
                )
                return

    def _may_have_row(self, text: str) -> bool:
        if self._chosen is None or self._incomplete:
            return True
        hints = self._chosen.hints
        return hints[0] in text or hints[-1] in text

    def _marker_or_rows(self, text: str, number: int) -> Iterator[Row | Marker]:
        launched = split_launcher(text)
        rest = text[launched.begin :][:MAX_MATCHED]
        if (match := _ACCUMULATED.search(rest)) is not None:
            self._accumulated = max(1, clamped(match[1]))
            for reader in self._line_readers():
                reader.accumulated = self._accumulated
        marker = read_marker(rest, LogPosition(self._name, number))
        if marker is None:
            yield from self._rows(text, number)
            return
        yield from self._ended()
        self._resumed = marker.step
        for reader in self._line_readers():
            reader.resume(marker.step)
        rank = launched.source
        if self._undecided:
            self._undecided.append((None, rank, marker))
        else:
            yield from self._marked(rank, marker)

    def _line_readers(self) -> Iterator[LineReader]:
        return (reader for reader in self._readers.values() if isinstance(reader, LineReader))

    def _marked(self, rank: Rank, marker: Marker) -> Iterator[Marker]:
        first = self._ranks.marker(rank, marker)
        if first is not None:
            if self._averages is not None:
                self._averages.restart()
            yield first

    def _ended(self) -> Iterator[Row | Marker]:
        for (name, rank), reader in list(self._readers.items()):
            form = self._chosen or next(
                candidate for candidate in self._candidates if candidate.name == name
            )
            for row in reader.end():
                yield from self._found(form, rank, row)
        self._incomplete.clear()

    def _rows(self, text: str, number: int) -> Iterable[Row | Marker]:
        launched = split_launcher(text)
        if launched.begin:
            text = text[launched.begin :]
        if self._chosen is None:
            if self.mention is None and "loss" in text.lower():
                self.mention = f"line {number:,}: {text.strip()[:_MAX_MENTION]}"
            if self.pattern is None and self._n_read < _LINES_FOR_PATTERNS:
                self.pattern = pattern_for(text[:MAX_MATCHED])
        rank = launched.source
        if self._incomplete and rank == _NO_RANK:
            # The continuation of a line that a terminal wrapped has no prefix.
            ranks = {rank for _, rank in self._incomplete}
            rank = ranks.pop() if len(ranks) == 1 else _NO_RANK
        position = LogPosition(self._name, number)
        if self._chosen is None:
            return self._rows_of_any(text, rank, position)
        rows = self._read(self._chosen, text, rank, position)
        if len(rows) == 1:
            rows = self._ranks.row(rank, rows[0])
            return rows if self._averages is None else map(self._averaged, rows)
        return [item for row in rows for item in self._found(self._chosen, rank, row)]

    def _rows_of_any(self, text: str, rank: Rank, position: LogPosition) -> Iterator[Row | Marker]:
        """The rows of a line in the first format that has any."""
        for form in self._candidates:
            is_hinted = any(map(text.__contains__, form.hints))
            if not is_hinted and (form.name, rank) not in self._incomplete:
                continue
            for row in self._read(form, text, rank, position):
                yield from self._found(form, rank, row)
            if self._chosen is form:
                break

    def _read(
        self, form: TextFormat, text: str, rank: Rank, position: LogPosition
    ) -> Sequence[Row]:
        key = form.name, rank
        reader = self._readers.get(key)
        if reader is None:
            if len(self._readers) >= _MAX_READERS:
                self._used = self.used
                self._readers.clear()
                self._incomplete.clear()
            reader = self._readers[key] = self._new_reader(form, rank)
        if not form.records:
            text = text[:MAX_MATCHED]
        begin = 0 if isinstance(reader, LineReader) else stamp_end(text)
        rows = reader.read(text[begin:], position)
        if any(row.loss is None for row in rows):
            # The line of an evaluation has the step of a row, and none of its values.
            rows = [row for row in rows if row.loss is not None or has_values(row)]
        if begin:
            at = clock_in(text[:begin])
            rows = [row if row.at is not None else replace(row, at=at) for row in rows]
        if reader.open:
            self._incomplete.add(key)
        elif self._incomplete:
            self._incomplete.discard(key)
        return rows

    def _new_reader(self, form: TextFormat, rank: Rank) -> RankReader:
        reader = form.reader(self._keys)
        if isinstance(reader, LineReader):
            reader.templates = self._templates.setdefault(form.name, reader.templates)
            before = {} if self._earlier is None else self._earlier._readers
            if isinstance(followed := before.get((form.name, rank)), LineReader):
                reader.follow(followed)
            reader.accumulated = self._accumulated
            reader.resume(self._resumed)
        return reader

    def _found(self, form: TextFormat, rank: Rank, row: Row) -> Iterator[Row | Marker]:
        if self._chosen is None:
            if form.fallback:
                self._undecided.append((form, rank, row))
                is_as_before = self._earlier is not None and self._earlier._chosen is form
                if is_as_before or len(self._undecided) >= _UNDECIDED_ROWS:
                    yield from self._settle_fallback()
                return
            if form.needs_loss and row.loss is None:
                return
            waited = self._undecided
            self._choose(form)
            for _, marked_by, item in waited:
                if isinstance(item, Marker):
                    yield from self._marked(marked_by, item)
        if self._chosen is form:
            yield from map(self._averaged, self._ranks.row(rank, row))

    def _settle_fallback(self) -> Iterator[Row | Marker]:
        waited, self._undecided = self._undecided, []
        with_loss = [
            form for form, _, item in waited if form and isinstance(item, Row) and item.loss
        ]
        if with_loss:
            self._choose(with_loss[0])
        for form, rank, item in waited:
            if isinstance(item, Marker):
                yield from self._marked(rank, item)
            elif form is not None and with_loss:
                yield from self._found(form, rank, item)

    def _choose(self, form: TextFormat) -> None:
        self._chosen, self.format = form, form.name
        self._candidates = (form,)
        self._undecided = []
        self._used = self.used
        self._readers = {
            key: reader for key, reader in self._readers.items() if key[0] == form.name
        }
        self._incomplete = {key for key in self._incomplete if key[0] == form.name}
        if form.averages:
            self._averages = Averages(first_alone=form.first_alone)

    def _averaged(self, row: Row) -> Row:
        if self._averages is not None:
            self._averages.count(row)
        return row


_NO_RANK: Rank = (None, None)
_MORE_RANKS: Rank = (None, -1)
"""All ranks behind the first `_MAX_RANKS`."""
_MAX_RANKS = 64


def _candidates(form: str | None, pattern: str | None) -> tuple[TextFormat, ...]:
    if pattern is not None:
        return (_line_format(pattern_format(pattern)),)
    if form is None:
        return TEXT_FORMATS
    named = tuple(candidate for candidate in TEXT_FORMATS if candidate.name == form)
    if not named:
        raise OptionError("--format", f"{form}: unknown format")
    return named
