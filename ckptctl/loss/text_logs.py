"""Read a text log: detect its format and drop rows that other ranks repeat.

The first format that finds a row is the format of the log; from then on lines without its
hint are skipped. Rows of formats that match many kinds of text wait for a few lines, so
that a more specific format can still be found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckptctl.deadlines import Deadline
from ckptctl.errors import UsageError
from ckptctl.loss.formats import markers
from ckptctl.loss.formats.console import EPOCH_HINT, LineReader, pattern_format
from ckptctl.loss.formats.line_formats import LINE_FORMATS
from ckptctl.loss.formats.multi_line import BLOCK_FORMATS, BlockReader, HfConsoleReader, KerasReader
from ckptctl.loss.formats.records import JsonLinesReader, PrintedTableReader, TableReader
from ckptctl.loss.formats.text_lines import (
    LineShapes,
    LineSplitter,
    split_pod,
    split_prefix,
    split_stamp,
)
from ckptctl.loss.rows import LogPosition, Marker, RankReader, Row, set_interval
from ckptctl.storage.logs import MAX_MATCHED

_LINES_PER_CHECK = 64
"""How often the deadline is checked."""

# Rows of fallback formats that wait for a better format.
_UNDECIDED_ROWS = 8
# Ranks and formats whose readers are kept; the prefix of a line may only look like a rank.
_MAX_READERS = 4096
_SILENT_STEPS = 3
_MAX_HELD = 64
_MAX_MENTION = 160

Keys = Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class TextFormat:
    """A text format: how the reader of one rank is made, and how reliable its rows are.

    Each line of the format contains one of the `hints`. With `needs_loss`, a row without a
    loss does not identify the format; with `fallback`, any other format is preferred. A line
    is matched up to `MAX_MATCHED` characters, unless its `records` are parsed whole.
    `averages` and `first_alone`: see `Averages`. `numbered` matches a line with its step where
    others have the prefix of a launcher.
    """

    name: str
    hints: tuple[str, ...]
    reader: Callable[[Keys], RankReader]
    needs_loss: bool = False
    fallback: bool = False
    averages: bool = False
    first_alone: bool = False
    records: bool = False
    numbered: re.Pattern[str] | None = None


TEXT_FORMATS: tuple[TextFormat, ...] = (
    TextFormat("csv", ("",), TableReader, needs_loss=True, records=True),
    TextFormat(PrintedTableReader.name, ("",), PrintedTableReader, needs_loss=True, fallback=True),
    TextFormat("jsonl", (JsonLinesReader.hint,), JsonLinesReader, needs_loss=True, records=True),
    TextFormat(
        "hf-console",
        (HfConsoleReader.hint, HfConsoleReader.bar_hint),
        HfConsoleReader,
        averages=True,
    ),
    TextFormat(KerasReader.name, (KerasReader.hint, KerasReader.epoch_hint), KerasReader),
    *(
        TextFormat(form.name, (form.hint,), partial(BlockReader, form), fallback=form.fallback)
        for form in BLOCK_FORMATS
    ),
    *(
        TextFormat(
            form.name,
            (form.hint, EPOCH_HINT) if form.has_epochs_above else (form.hint,),
            partial(LineReader, form),
            fallback=form.fallback,
            averages=form.averages,
            first_alone=form.name == "megatron",
            numbered=re.compile(form.head) if form.numbered else None,
        )
        for form in LINE_FORMATS
    ),
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


class TextLog:
    """One text log, fed in pieces of any length; `name` is the file of its positions.

    `earlier` is the log before it, which shows at which step an epoch began.
    """

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
        self.damage: str | None = None
        """Lines that cannot be parsed are skipped; this states where the deadline passed."""
        self._deadline = deadline
        self._name = name
        self._earlier = {} if earlier is None else earlier._readers
        self._keys = keys
        self._splitter = LineSplitter()
        self._markers = markers.HintFinder()
        self._ranks: RankDeduplicator = RankDeduplicator(
            None if earlier is None else earlier._ranks
        )
        self._averages: Averages | None = None
        self._candidates = _candidates(form, pattern)
        # Most lines of a log without rows have none of the literals: few formats read them.
        self._unhinted = tuple(form for form in self._candidates if "" in form.hints)
        self._hinted = re.compile(
            "|".join(re.escape(hint) for form in self._candidates for hint in form.hints if hint)
            or "(?!)"
        )
        self._chosen: TextFormat | None = None
        self._readers: dict[tuple[str, int | None], RankReader] = {}
        # Rows of fallback formats, and the markers between them, in the order they were read.
        self._undecided: list[tuple[TextFormat | None, int | None, Row | Marker]] = []
        self._resumed: int | None = None
        self._stopped: int | None = None
        self._accumulated = 1
        self._hints: tuple[bytes, ...] = ()
        self._shapes: LineShapes | None = None
        self._incomplete: set[tuple[str, int | None]] = set()
        self.mention: str | None = None
        """The first line that mentions a loss, while no format is found."""
        if len(self._candidates) == 1:
            self._choose(self._candidates[0])

    @property
    def format(self) -> str | None:
        """The name of the format; None until a row is found."""
        return None if self._chosen is None else self._chosen.name

    @property
    def n_without_step(self) -> int:
        """Losses that were left out because the log does not show their step."""
        return sum(
            reader.n_without_step
            for reader in self._readers.values()
            if isinstance(reader, HfConsoleReader)
        )

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """The rows and markers that these bytes complete; exhaust before the next call."""
        return self._whole(self._splitter.take(data))

    def end(self) -> Iterator[Row | Marker]:
        """The rows and markers that waited for more bytes."""
        yield from self._whole(self._splitter.end())
        yield from self._ended()
        if self._chosen is None:
            yield from self._settle_fallback()
        for row in self._ranks.end():
            yield self._averaged(row)

    def _whole(self, whole: bytes) -> Iterator[Row | Marker]:
        if not whole:
            return
        marks = self._markers.find(whole)
        scanner = self._splitter.lines(whole)
        searched: Sequence[bytes] | None = None
        hints: Sequence[bytes] = ()
        while True:
            if searched is not self._hints:
                searched, hints = self._hints, tuple(h for h in self._hints if h in whole)
            literals = self._literals(hints, marks)
            if literals is None:
                return
            chosen, is_open = self._chosen, bool(self._incomplete)
            shapes = None if is_open else self._shapes
            for n_read, (number, line) in enumerate(scanner.scan(literals), 1):
                if n_read % _LINES_PER_CHECK == 0 and self._is_late(number):
                    return
                known = None if shapes is None else shapes.read(line, number)
                if known is not None:
                    for row in self._ranks.row(*known):
                        yield self._averaged(row)
                    continue
                text = line.decode("utf-8", "replace")
                if marks and any(mark in line for mark in marks):
                    yield from self._marker_or_rows(text, number)
                else:
                    yield from self._rows(text, number)
                    if self._shapes is not None and not self._incomplete:
                        self._learn(line, text)
                if self._chosen is not chosen or bool(self._incomplete) is not is_open:
                    break  # other literals are searched from here on
            else:
                return

    def _is_late(self, number: int) -> bool:
        """Whether reading has to stop at this line."""
        if self._deadline is None or not self._deadline.passed():
            return False
        self.damage = (
            f"reading stopped at line {number:,}, because it took longer than any log of this size"
        )
        return True

    def _literals(self, hints: Sequence[bytes], marks: Sequence[bytes]) -> Sequence[bytes] | None:
        """What the lines to read contain; nothing for every line, None for no line.

        `hints` are those of the format that the block contains.
        """
        if self._chosen is None or self._incomplete or b"" in hints:
            return ()
        return (*hints, *marks) or None

    def _learn(self, line: bytes, text: str) -> None:
        rank, rest = split_prefix(text)
        reader = None if self._chosen is None else self._readers.get((self._chosen.name, rank))
        if self._shapes is not None and isinstance(reader, LineReader):
            self._shapes.learn(line, rank, len(text) - len(rest), reader)

    def _marker_or_rows(self, text: str, number: int) -> Iterator[Row | Marker]:
        rank, rest = split_prefix(text)
        accumulated = markers.accumulated_in(rest[:MAX_MATCHED])
        if accumulated is not None:
            self._accumulated = accumulated
            for reader in self._line_readers():
                reader.accumulated = accumulated
        marker = markers.read_marker(rest[:MAX_MATCHED], LogPosition(self._name, number))
        if marker is None:
            yield from self._rows(text, number)
            self._stopped = markers.stopped_in(rest[:MAX_MATCHED])
            for reader in self._line_readers():
                reader.stop(self._stopped)
            return
        yield from self._ended()
        self._resumed, self._stopped = marker.step, None
        for reader in self._line_readers():
            reader.resume(marker.step)
        if self._undecided:
            self._undecided.append((None, rank, marker))
        else:
            yield from self._marked(rank, marker)

    def _line_readers(self) -> Iterator[LineReader]:
        return (reader for reader in self._readers.values() if isinstance(reader, LineReader))

    def _marked(self, rank: int | None, marker: Marker) -> Iterator[Marker]:
        first = self._ranks.marker(rank, marker)
        if first is not None:
            if self._averages is not None:
                self._averages.restart()
            yield first

    def _ended(self) -> Iterator[Row | Marker]:
        for (name, rank), reader in list(self._readers.items()):
            form = self._chosen or next(each for each in self._candidates if each.name == name)
            for row in reader.end():
                yield from self._found(form, rank, row)
        self._incomplete.clear()

    def _rows(self, text: str, number: int) -> Iterator[Row | Marker]:
        if self._chosen is None and self.mention is None and "loss" in text.lower():
            self.mention = f"line {number:,}: {text.strip()[:_MAX_MENTION]}"
        pod, whole = split_pod(text)
        its_rank, rest = split_prefix(text)
        position = LogPosition(self._name, number)
        if self._incomplete and its_rank is None:
            its_rank = self._rank_of_open()
        may_be_any = self._incomplete or self._hinted.search(text) is not None
        for form in self._candidates if may_be_any else self._unhinted:
            rank, text = its_rank, rest
            if form.numbered is not None and form.numbered.match(split_stamp(whole)[1]):
                rank, text = pod, whole
            key = (form.name, rank)
            reader = self._readers.get(key)
            if not any(hint in text for hint in form.hints) and not (reader and reader.open):
                continue
            if reader is None:
                if len(self._readers) >= _MAX_READERS:
                    yield from self._ended()
                    self._readers.clear()
                reader = self._readers[key] = form.reader(self._keys)
                if isinstance(reader, LineReader):
                    if isinstance(before := self._earlier.get(key), LineReader):
                        reader.follow(before)
                    reader.accumulated = self._accumulated
                    reader.resume(self._resumed)
                    reader.stop(self._stopped)
            at, body = split_stamp(text)
            if at is not None and isinstance(reader, LineReader) and reader.begins(text):
                body = text  # the places of its numbers are learned for the whole line
            for row in reader.read(body if form.records else body[:MAX_MATCHED], position):
                timed = row if at is None or row.at is not None else replace(row, at=at)
                yield from self._found(form, rank, timed)
            if reader.open:
                self._incomplete.add(key)
            else:
                self._incomplete.discard(key)
            if self._chosen is form:
                break

    def _rank_of_open(self) -> int | None:
        # The continuation of a line that a terminal wrapped has no prefix.
        ranks = {rank for _, rank in self._incomplete}
        return ranks.pop() if len(ranks) == 1 else None

    def _found(self, form: TextFormat, rank: int | None, row: Row) -> Iterator[Row | Marker]:
        if self._chosen is None:
            if form.fallback:
                self._undecided.append((form, rank, row))
                if len(self._undecided) >= _UNDECIDED_ROWS:
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
            for taken in self._ranks.row(rank, row):
                yield self._averaged(taken)

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
        self._chosen = form
        self._candidates = self._unhinted = (form,)
        self._undecided = []
        self._hints = tuple(hint.encode() for hint in form.hints)
        self._readers = {key: each for key, each in self._readers.items() if key[0] == form.name}
        self._incomplete = {key for key in self._incomplete if key[0] == form.name}
        self._shapes = LineShapes(self._name)
        if form.averages:
            self._averages = Averages(first_alone=form.first_alone)

    def _averaged(self, row: Row) -> Row:
        if self._averages is not None:
            self._averages.count(row)
        return row


def _candidates(form: str | None, pattern: str | None) -> tuple[TextFormat, ...]:
    if pattern is not None:
        own = pattern_format(pattern)
        return (TextFormat(own.name, (own.hint,), partial(LineReader, own)),)
    if form is None:
        return TEXT_FORMATS
    named = tuple(each for each in TEXT_FORMATS if each.name == form)
    if not named:
        raise UsageError(f"--format {form}: unknown format")
    return named


class RankDeduplicator:
    """Keeps the rows of one rank where several ranks write to one log.

    The first rank that prints a row is kept; the others repeat it. Where another rank
    prints three steps while the kept one prints none, the kept rank is silent, and the
    other one is kept from then on, with all the rows it printed meanwhile. So it is after a
    restart, and in the next log: ranks may print losses of their own, and only those of one
    rank are compared. The launcher's prefix identifies ranks; it is None where lines
    have no prefix. In such a log, if its first step occurs several times, only the first
    row of each step is kept.
    """

    def __init__(self, earlier: RankDeduplicator | None = None) -> None:
        self._rank: int | None = None if earlier is None else earlier._rank
        self._has_rank: bool = earlier is not None and earlier._has_rank
        self._last_step: int | None = None
        self._n_steps = 0
        self._repeats_steps = False
        self._held: dict[int | None, list[Row]] = {}
        self._marker: Marker | None = None
        self._marked_by: set[int | None] = set()

    def row(self, rank: int | None, row: Row) -> Sequence[Row]:
        """The rows to keep, now that `rank` has printed this one."""
        if not self._has_rank:
            self._rank, self._has_rank = rank, True
        if rank == self._rank:
            if self._held:
                self._held.clear()
            return (row,) if self._is_new(row) else ()
        held = self._held.setdefault(rank, [])
        if len(held) < _MAX_HELD:
            held.append(row)
        if len({each.step for each in held}) < _SILENT_STEPS:
            return ()
        self._held.clear()
        self._rank = rank
        return [each for each in held if self._is_new(each)]

    def marker(self, rank: int | None, marker: Marker) -> Marker | None:
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
        self._held.clear()
        return marker

    def end(self) -> Iterator[Row]:
        """The rows that another rank printed after the last row of the kept one."""
        for rows in self._held.values():
            newer = [row for row in rows if self._last_step is None or row.step > self._last_step]
            if newer:
                self._held.clear()
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
