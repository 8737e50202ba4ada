"""Read the output of programs that print a training step as text.

`formats` describes the lines. A line that a terminal or a log collector wrapped is joined
again. Blocks are a heading that names the step, then one metric per line. The Hugging
Face trainer prints a dictionary without a step, followed by a progress bar that shows it.

A trainer prints the same line at every step, with other numbers. Once a line is parsed by its
format, a template of it finds the same values in the next ones: all text between the values is
equal, up to its numbers and the width of its blanks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ckptctl.errors import OptionError
from ckptctl.logs.clocks import clock_in, clock_match, minute_in
from ckptctl.logs.fields import FIELDS, NUMBERS, RowMaker, parse_step
from ckptctl.logs.formats import BlockFormat, LineFormat, joined
from ckptctl.logs.log_lines import stamp_end
from ckptctl.logs.rows import LogPosition, Number, RankReader, Row
from ckptctl.outside_numbers import clamped, whole

_MAX_TEMPLATES = 12
"""With how many a line is compared."""
_MAX_COMPILED = 100
"""Of a log whose lines have more forms, the others are parsed by their format: to compile a
template takes as long as to parse twenty lines."""
_NUMBER = r"\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,4})?"
_GROUPED = r"\d[\d,]{0,20}"
_PRINTED = re.compile(rf"([-+]?)({_NUMBER}|{_GROUPED})([a-zA-Z%]{{0,3}})")
_BLANK = r"[ #\u2500-\u259f]+"
"""Blanks, and what a bar is drawn with."""
_BETWEEN = re.compile(rf"(?<![A-Za-z_])\d[\d.,:]*|{_BLANK}")
_RUNS_ON = re.compile(r"\d[.,:]*$")
_CLOCK = ("minute", "second", "fraction")
_SECONDS = {f"{second:02}": second for second in range(61)}


class LineTemplate:
    """A form of line: the fields of its values, and the pattern that finds them.

    A field is a group of the pattern; `minute`, `second` and `fraction` are those of its time.
    """

    __slots__ = ("_clock", "_fields", "_groups", "fullmatch")

    def __init__(self, fields: Sequence[str], pattern: str) -> None:
        places = {field: number for number, field in enumerate(fields, 1)}
        self._clock = tuple(places.pop(part) for part in _CLOCK if part in places)
        self._fields, self._groups = tuple(places), tuple(places.values())
        self.fullmatch = re.compile(pattern).fullmatch

    def found(self, match: re.Match[str]) -> tuple[dict[str, str], float | None] | None:
        """The text of each field of a line that matches, and its time; None without a valid one."""
        texts = dict(zip(self._fields, match.group(*self._groups), strict=True))
        if not self._clock:
            return texts, None
        minute, second, *fraction = match.group(*self._clock)
        minute_s, second_s = minute_in(minute), _SECONDS.get(second)
        if minute_s is None or second_s is None:
            return None
        at_s = minute_s + second_s
        return texts, at_s + float(f"0.{fraction[0]}") if fraction else at_s


class LineTemplates:
    """The templates of one log, the one that matched last first."""

    def __init__(self) -> None:
        self._templates: list[LineTemplate] = []
        self._n_compiled = 0

    def read(self, text: str) -> tuple[dict[str, str], float | None] | None:
        """The text of each field of a line, and its time; None for a line of a new form."""
        for n, template in enumerate(self._templates):
            match = template.fullmatch(text)
            if match is not None:
                if n:
                    self._templates.insert(0, self._templates.pop(n))
                return template.found(match)
        return None

    def learn(self, text: str, spans: Mapping[str, tuple[int, int]], clock_from: int) -> None:
        """Keep the form of a line whose fields are at `spans`.

        Its time is the first one behind `clock_from`.
        """
        if self._n_compiled >= _MAX_COMPILED:
            return
        template = _template(text, dict(spans), clock_from)
        if template is not None:
            self._n_compiled += 1
            self._templates.insert(0, template)
            del self._templates[_MAX_TEMPLATES:]

    def clear(self) -> None:
        """Forget all: the fields of the lines are now others."""
        self._templates.clear()


def _template(text: str, spans: dict[str, tuple[int, int]], clock_from: int) -> LineTemplate | None:
    patterns: dict[str, str] = {}
    for field, (begin, end) in spans.items():
        value = _PRINTED.fullmatch(text, begin, end)
        if value is None or text[end : end + 1].isdigit() or _RUNS_ON.search(text, 0, begin):
            return None
        number = _GROUPED if "," in value[2] else _NUMBER
        patterns[field] = f"({re.escape(value[1])}{number}{re.escape(value[3])})"
    if clock_in(text[clock_from:]) is not None:
        clock = clock_match(text[clock_from:])
        if clock is None:
            return None
        end = clock.end() if clock["z"] is None else clock.start("z")
        begin, second, end = (clock_from + at for at in (clock.start(), clock.start("s"), end))
        minute = re.sub(r"\d", "0", text[begin:second])
        spans["minute"] = begin, second
        patterns["minute"] = f"({re.escape(minute)})".replace("0", r"\d")
        spans["second"], patterns["second"] = (second, second + 2), r"(\d\d)"
        if end > second + 2:
            spans["fraction"], patterns["fraction"] = (second + 3, end), r"(\d{1,9})"
    pattern, at = "", 0
    fields = sorted(spans, key=spans.__getitem__)
    for field in fields:
        begin, end = spans[field]
        if begin < at:
            return None  # the format reads one text as two fields
        pattern += _between(text, at, begin) + patterns[field]
        at = end
    return LineTemplate(fields, pattern + _between(text, at, len(text)))


def _between(text: str, begin: int, end: int) -> str:
    """The pattern of a text between two values."""
    parts, at = [], begin
    for match in _BETWEEN.finditer(text, begin, end):
        run = match[0]
        if run[0].isdecimal():
            run = r"\d[\d.,:]*"
        elif run != " ":
            run = _BLANK if run.strip(" ") else " +"
        parts += [re.escape(text[at : match.start()]), run]
        at = match.end()
    return "".join([*parts, re.escape(text[at:end])])


_MAX_WRAPS = 8

# A throughput whose unit is behind it; that of one device is left out.
_RATES = re.compile(r"(?<![\w.,/])(\d[\d,.]{0,20}[kKM]?) ?tok(?:en)?s?/s(?:ec)?(?![\w/])")

EPOCH_HINT = "poch"
_EPOCH_ABOVE = re.compile(
    r"(?i)^\W{0,40}(?:\d{4}-\d\d-\d\d[^a-z]{1,40})?(?:(?:INFO|DEBUG)\W{1,9}(?:[\w.]{1,80}\W{1,9})?)?"
    r"(?:(?:start(?:ing|ed)?|begin(?:ning)?|train(?:ing)?) )?"
    r"epoch[ :=#\[(]{1,4}(?P<epoch>\d{1,9})(?: ?(?:/|of) ?\d{1,9})?\W{0,99}$"
)
"""A line that names an epoch, and nothing else: its steps follow."""


def pattern_format(pattern: str) -> LineFormat:
    """The format of a `--pattern`: a regular expression whose groups are named as fields.

    Raises `UsageError` where it is not valid, or has no group `step`.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise OptionError("--pattern", f"{pattern!r}: not a regular expression: {error}") from error
    unknown = sorted(set(compiled.groupindex) - set(FIELDS))
    if unknown or "step" not in compiled.groupindex:
        wrong = f"unknown group {unknown[0]!r}" if unknown else "no group named step"
        raise OptionError(
            "--pattern",
            f"{pattern!r}: {wrong}; the groups have the names of fields: {', '.join(FIELDS)}",
        )
    return LineFormat("pattern", "", pattern)


_LOSS_NAME = r"(?P<loss>\b[\w/]{0,40}loss[\w/]{0,40}['\"]?[ :=]{1,4})[-+]?\d{1,9}\.\d"

# A number, and a loss behind it or before it.
_STEP_AND_LOSS = re.compile(
    r"(?P<step>[A-Za-z_]{1,30}[ :=#\[(]{1,4})\d{1,12}\b(?!\.\d).{0,300}?" + _LOSS_NAME,
    re.IGNORECASE,
)
_LOSS_AND_STEP = re.compile(
    _LOSS_NAME
    + r".{0,300}?\b(?P<step>(?:[a-z]{1,20}[ _])?(?:step|iter(?:ation)?|update|batch|epoch)s?"
    r"[ :=#\[(]{1,4})\d{1,12}\b",
    re.IGNORECASE,
)


def pattern_for(line: str) -> str | None:
    """A `--pattern` for the lines of a program whose format is not known."""
    named = _STEP_AND_LOSS.search(line) or _LOSS_AND_STEP.search(line)
    if named is None:
        return None
    values = {"step": r"(?P<step>\d+)", "loss": r"(?P<loss>[^\s,;|)\]]+)"}
    return ".*?".join(
        re.escape(named[name]).replace("\\ ", " ") + values[name]
        for name in sorted(values, key=named.start)
    )


_STEP_GROUPS = ("step", "epoch", "per", "it")
_IN_TEMPLATES = frozenset((*_STEP_GROUPS, *NUMBERS, "step_time_ms", "interval"))

Span = tuple[int, int]


class LineReader(RankReader):
    """Reads the lines of one rank in one format of one line a step."""

    def __init__(self, form: LineFormat, keys: Mapping[str, str] | None = None) -> None:
        self.format = form
        self._head = re.compile(joined(form.head))
        self._pairs = re.compile(joined(form.pairs)) if form.pairs else None
        self._tail = re.compile(form.tail) if form.tail else None
        self.maker = RowMaker({**form.keys, **(keys or {})}, trimmed=form.trimmed)
        self.templates = LineTemplates()
        """Those of all ranks of the log."""
        self._held: tuple[str, str, LogPosition] | None = None
        self._joined = ""
        self._n_wraps = 0
        self._rounds = Rounds()
        self._epoch_above: int | None = None
        self._has_rows = False
        self._drawn: Row | None = None
        self._n_drawn = 0
        self._last_loss: Number | None = None
        self._order = LineOrder()
        self.accumulated = 1
        """How many batches of a progress bar make one step."""

    @property
    def open(self) -> bool:
        """Whether the next line may belong to a row that is not complete."""
        return self._held is not None

    def read(self, text: str, position: LogPosition) -> Sequence[Row]:
        """The rows that this line completes."""
        if self._held is None and (found := self.templates.read(text)) is not None:
            return self._without_older(self._row(*found, position), text)
        stamp, head = "", self._head.search(text) if self.format.hint in text else None
        if head is None and self.format.hint in text and (begin := stamp_end(text)):
            stamp, text = text[:begin], text[begin:]
            head = self._head.search(text)
        if head is None:
            done = self._wrapped(text) if self._held is not None else ()
            is_heading = self.format.epochs_above and self._take_epoch(text)
            return [*done, *self.end()] if is_heading else done
        done = self._finished()
        if self._tail is None or self._tail.search(text, head.start()):
            return [*done, *self._parsed(stamp, text, head, position)]
        self._held, self._joined, self._n_wraps = (stamp, text, position), text, 0
        return done

    def end(self) -> Sequence[Row]:
        """The row that waited for the end of its line."""
        rows = self._finished()
        drawn, self._drawn = self._drawn, None
        # A bar is drawn first with the loss of the step before, where a process may have ended.
        if drawn is None or (self._n_drawn == 1 and drawn.loss == self._last_loss):
            return rows
        return [*rows, drawn]

    def _finished(self) -> Sequence[Row]:
        """The rows that the line completes whose end is missing."""
        if self._held is None:
            return ()
        (stamp, text, position), self._held = self._held, None
        head = self._head.search(text)
        return () if head is None else self._parsed(stamp, text, head, position)

    def resume(self, step: int | None) -> None:
        """Take note that the log announced a resume after `step`."""
        self._rounds.resume(None if step is None else step * self._batches)
        self._order = LineOrder()

    def follow(self, earlier: LineReader) -> None:
        """Take note that the log continues the one that `earlier` read."""
        self._rounds.follow(earlier._rounds)

    @property
    def _batches(self) -> int:
        """How many of the steps that are printed make one step of the run."""
        return self.accumulated if self.format.redrawn and self.format.rounds else 1

    def _take_epoch(self, text: str) -> bool:
        """Keep the epoch that a line above the rows names; False for any other line.

        Where rows are above the first of these lines, an epoch may be named at its end.
        """
        if EPOCH_HINT not in text:
            return False
        named = _EPOCH_ABOVE.match(text[stamp_end(text) :])
        if named is None or (self._epoch_above is None and self._has_rows):
            return False
        self._epoch_above = whole(named["epoch"])
        return True

    def _wrapped(self, text: str) -> Sequence[Row]:
        if self._held is None or self._tail is None:
            return ()
        # A terminal breaks a line anywhere; a formatter breaks at a space and indents the rest.
        self._joined += " " + text.lstrip() if text[:1].isspace() else text
        self._n_wraps += 1
        if self._tail.search(self._joined):
            stamp, _, position = self._held
            self._held = (stamp, self._joined, position)
            return self._finished()
        return self._finished() if self._n_wraps >= _MAX_WRAPS else ()

    def _parsed(
        self, stamp: str, text: str, head: re.Match[str], position: LogPosition
    ) -> Sequence[Row]:
        spans = {name: head.span(name) for name, value in head.groupdict().items() if value}
        named = [*((name, span) for name, span in spans.items() if name in FIELDS)]
        named += self._named(text, head.start())
        best = self.maker.best(named)
        if "loss" in best:
            n_kinds = len(self.maker.seen_losses)
            if self.maker.is_repeated(best["loss"][2]):
                del best["loss"]
            if len(self.maker.seen_losses) > n_kinds:
                self.templates.clear()  # another name may be that of the loss from here on
        step_groups = {name: span for name, span in spans.items() if name in _STEP_GROUPS}
        places = {**{field: span for field, (_, span, _) in best.items()}, **step_groups}
        texts = {field: text[slice(*span)] for field, span in places.items()}
        at_s = clock_in(text)
        row = self._row(texts, clock_in(stamp) if at_s is None else at_s, position)
        if row and "loss" in best and places.keys() <= _IN_TEMPLATES:
            n = len(stamp)
            moved = {field: (n + begin, n + end) for field, (begin, end) in places.items()}
            self.templates.learn(stamp + text, moved, 0 if at_s is None else n)
        return self._without_older(row, stamp + text)

    def _without_older(self, rows: Sequence[Row], line: str) -> Sequence[Row]:
        # A bar yields the row of an earlier line.
        if self.format.redrawn or not rows or rows[0].loss is None:
            return rows
        return self._order.rows(rows[0], line)

    def _named(self, text: str, start: int) -> Iterator[tuple[str, Span]]:
        """The names in a line, and where their values are."""
        if self._pairs is None:
            return
        for match in self._pairs.finditer(text, start):
            yield match[1], match.span(2)
        if "tok" in text:
            for match in _RATES.finditer(text, start):
                yield "tok/s", match.span(1)

    def _row(self, texts: dict[str, str], at: float | None, position: LogPosition) -> Sequence[Row]:
        step = self._step(texts)
        if step is None:
            return ()
        row = self.maker.row_of(step, position, texts, at=at)
        if not self.format.redrawn:
            return (row,)
        drawn, self._drawn = self._drawn, row
        self._n_drawn += 1
        if drawn is None or drawn.step == row.step:
            return ()
        self._n_drawn, self._last_loss = 1, drawn.loss
        return (drawn,)

    def _step(self, texts: Mapping[str, str]) -> int | None:
        step = parse_step(texts["step"]) if "step" in texts else None
        if step is not None and not self.format.rounds:
            return step
        if step == 0 and self.format.redrawn:
            return None  # a bar of which no step is done has the loss of the bar before
        per = whole(texts["per"]) if "per" in texts else None
        epoch = whole(texts["epoch"]) if "epoch" in texts else self._epoch_above
        if step is None:
            it = whole(texts.get("it"))
            return None if epoch is None or per is None or it is None else (epoch - 1) * per + it
        self._has_rows = True
        batch = self._rounds.step(step, per, epoch)
        return -(-batch // self._batches)


class LineOrder:
    """Drops lines that mention the loss of an older step, such as that of a saved checkpoint.

    A program that resumes prints its lines in the form they had before. A line of another form
    whose step does not advance is held. If the next line has that form too, and a later step,
    both are rows of a process that prints another form. So is a held line that the next row
    of the known form continues: the first line of a process may be special.
    """

    def __init__(self) -> None:
        self._last: Row | None = None
        self._line = ""
        self._step_before = 0
        self._held: tuple[Row, str] | None = None

    def rows(self, row: Row, line: str) -> Sequence[Row]:
        """The rows to keep, now that this line has been read."""
        last = self._last
        if last is not None and (self._held is not None or row.step <= last.step):
            return self._compared(row, line, last)
        self._step_before = row.step if last is None else last.step
        self._last, self._line = row, line
        return (row,)

    def _compared(self, row: Row, line: str, last: Row) -> Sequence[Row]:
        held, self._held = self._held, None
        is_later = row.step > last.step
        is_known = is_later or _same_form(line, self._line)
        kept: Sequence[Row] = (row,)
        if held is not None and row.step > held[0].step:
            is_next = not is_later and row.step - held[0].step <= last.step - self._step_before
            if _same_form(line, held[1]) or (is_known and is_next):
                kept, last = (held[0], row), held[0]
        if not is_known and len(kept) == 1:
            self._held = row, line
            return ()
        self._step_before = min(last.step, row.step)
        self._last, self._line = row, line
        return kept


_VALUE_CHARACTERS = {ord(char): None for char in "0123456789+-.,:#=> \t"}
_VALUE = re.compile(
    r"(?<![A-Za-z])(?:nan|inf|infinity)(?![A-Za-z])|\d[\d.,:]*(?:e[-+]?\d+)?[a-z%]{0,3}",
    re.IGNORECASE,
)


def _same_form(line: str, other: str) -> bool:
    """Whether two lines differ only in their values, the units of these, and blanks."""
    if line == other or line.translate(_VALUE_CHARACTERS) == other.translate(_VALUE_CHARACTERS):
        return True
    return _form(line) == _form(other)


def _form(line: str) -> str:
    return _VALUE.sub("", line[stamp_end(line) :]).translate(_VALUE_CHARACTERS)


class Rounds:
    """Numbers the steps of the run where a log starts them again in each round.

    A round is an epoch, or a progress bar from its beginning to its end. Every step must be
    passed in, in the order of the log. The round in which a log begins is unknown, unless a
    line announced the step of the run after which it resumed, or the log before it shows at
    which step an epoch began.
    """

    def __init__(self) -> None:
        self._earlier: Rounds | None = None
        self._before: dict[int | None, int] = {}
        self._epoch: int | None = None
        self._last = 0
        self._spacing = 1
        self._per: int | None = None
        self._longest = 0
        self._resumed: int | None = None

    def follow(self, earlier: Rounds) -> None:
        """Take note that `earlier` counted the rounds of the log before this one."""
        self._earlier = earlier

    def resume(self, step: int | None) -> None:
        """Take note that the next step follows `step` of the run."""
        self._resumed = step

    def step(self, step: int, per: int | None, epoch: int | None) -> int:
        """The step of the run; `per` is the number of steps in a round, where it is known.

        Steps that continue over the end of an epoch are already those of the run. Without
        `epoch`, a round ends with its last step; a process that restarted continues the
        round in which it ended.
        """
        earlier, self._earlier = self._earlier, None
        if earlier is not None and epoch is not None and earlier._epoch is not None:
            self._before = dict(earlier._before)  # the log before may grow, too
            self._epoch, self._last = earlier._epoch, earlier._last
            self._per, self._longest = earlier._per, earlier._longest
            self._spacing = earlier._spacing
        resumed, self._resumed = self._resumed, None
        # The last round of a run can be cut short.
        self._longest = max(self._longest, per or 0)
        if resumed is not None and (before := self._steps_before(resumed, step)) is not None:
            self._before = {known: n for known, n in self._before.items() if known is not None}
            self._before[epoch] = before
        elif self._begins(step, per, epoch):
            # Where rounds begin at 0, the last row of one is not its end.
            ended = self._last + (self._spacing if step == 0 else 0)
            self._before[epoch] = self._before[self._epoch] + (self._per or ended)
        elif epoch == self._epoch and step > self._last:
            self._spacing = step - self._last
        before = self._before.setdefault(epoch, self._before.get(self._epoch, 0))
        self._epoch, self._last, self._per = epoch, step, per
        return before + step

    def _steps_before(self, resumed: int, step: int) -> int | None:
        """The steps of the run before the round in which a process resumes after `resumed`.

        None where the steps are not those that the checkpoint counts: a batch, where
        several make one update of the weights.
        """
        before = resumed - resumed % self._longest if self._longest else resumed + 1 - step
        return before if before >= 0 and before + step > resumed else None

    def _begins(self, step: int, per: int | None, epoch: int | None) -> bool:
        if step > self._last or self._epoch not in self._before:
            return False
        if epoch is not None and self._epoch is None:
            # The bar of the first epoch after a resume does not name it.
            return self._per is None and epoch not in self._before
        if epoch is None or self._epoch is None:
            return epoch is None and self._last == per and step < self._last
        return epoch > self._epoch and epoch not in self._before


class BlockReader(RankReader):
    """Reads the lines of one rank in a format with one block per step."""

    def __init__(self, form: BlockFormat, keys: Mapping[str, str] | None = None) -> None:
        self.format = form
        self._head, self._metric = re.compile(form.head), re.compile(form.metric)
        self.maker = RowMaker(keys)
        self._step: int | None = None
        self._position: LogPosition | None = None
        """Of the heading of the current block; None outside blocks."""
        self._at: float | None = None
        self._pairs: list[tuple[str, str]] = []
        self._n_others = 0

    @property
    def open(self) -> bool:
        """Whether the next line may belong to the current block."""
        return self._position is not None

    def read(self, text: str, position: LogPosition) -> Sequence[Row]:
        """The row of the block that this line ends."""
        head = self._head.search(text) if self.format.hint in text else None
        is_inside = head is None and self._position is not None
        if is_inside:
            metric = self._metric.match(text)
            if metric is not None:
                self._pairs.append((metric[1], metric[2]))
                return ()
            self._n_others += 1
            if self._n_others < self.format.gaps:
                return ()
        done = self.end()
        self._step = None if head is None else parse_step(head["step"])
        if self._step is not None:
            self._position, self._at, self._n_others = position, clock_in(text), 0
        return done

    def end(self) -> Sequence[Row]:
        """The row of the current block."""
        step, pairs, position = self._step, self._pairs, self._position
        self._step, self._position, self._pairs = None, None, []
        if position is None or not any(self.maker.field(name) for name, _ in pairs):
            return ()
        row = self.maker.row(pairs, position, step=step, at=self._at)
        return () if row is None else (row,)


# Ray prints a report of any rank, `TrainingReport(checkpoint=…, metrics={…}`, and leaves out most.
_DICTIONARY = re.compile(r"(?<!, metrics=)\{[^{}]{0,2000}'loss': [^{}]{0,2000}\}")
_PAIR = re.compile(r"'([\w/]{1,99})': '?([^,'}]+)'?")
# Bars of downloads and of tokenizers have a text before them.
_BAR = re.compile(
    r"^\s{0,99}\d{1,3}%\|.{0,400}?\|\s{0,99}(?P<step>\d{1,12})/(?P<total>\d{1,12}) \["
)
_BLANKS = " " * 16
_BUFFERED = 3
"""Dictionaries without a bar between them: a custom callback may print a second one of a step."""


class HfConsoleReader(RankReader):
    """Reads the dictionaries and progress bars of one rank.

    The bar is drawn again directly after a dictionary, with the step of the dictionary. A
    dictionary in the line of a bar has the step of that bar; if the trainer repeats it, the bar
    was drawn late, and the bar behind the repetition counts.
    Without bars the rows have no step; `n_without_step` counts these, which are left out. So they
    are where several dictionaries follow each other without a bar: standard output was buffered,
    and the bars on standard error are those of other steps.
    """

    name = "hf-console"
    hint = "'loss': "
    bar_hint = "%|"

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self.maker = RowMaker(keys, trimmed=True)
        self._bar: tuple[int, int] | None = None
        self._latest: tuple[int, int] | None = None
        self._total: int | None = None
        self._held: tuple[str, LogPosition] | None = None
        self._taken: tuple[int, int] | None = None
        self._is_beside = False
        self._n_since_bar = 0
        self._unsure: list[Row] = []
        self._is_buffered = False
        self.n_without_step = 0

    @property
    def open(self) -> bool:
        """Whether a dictionary waits for its progress bar."""
        return self._held is not None or bool(self._unsure)

    def read(self, text: str, position: LogPosition) -> Sequence[Row]:
        """The row of the dictionary before this progress bar."""
        bar = _BAR.match(text) if self.bar_hint in text else None
        rows: Sequence[Row] = ()
        if bar is not None:
            self._n_since_bar = 0
            rows = [*self._sure(), *self._drawn((clamped(bar["step"]), clamped(bar["total"])))]
        found = _DICTIONARY.search(text) if self.hint in text else None
        if found is not None:
            is_repeated = self._is_beside and self._held is not None and found[0] == self._held[0]
            if not is_repeated:
                self._n_since_bar += 1
                rows = [*rows, *self._ended()]
            self._held = (found[0], position)
            # A logger writes behind the bar of the step; tqdm blanks the bar before it writes.
            is_beside = bar is not None and _BLANKS not in text[bar.end() : found.start()]
            self._is_beside = is_beside and self._bar == self._latest
        return rows

    def end(self) -> Sequence[Row]:
        """The row of a dictionary that no bar followed; its step is that of the bar before.

        Where that bar belongs to an earlier dictionary, the row has no step: the job died
        before it drew the next bar.
        """
        return [*self._sure(), *self._ended()]

    def _sure(self) -> Sequence[Row]:
        unsure, self._unsure = self._unsure, []
        return unsure

    def _ended(self) -> Sequence[Row]:
        held, self._held, self._is_beside = self._held, None, False
        if held is None:
            return ()
        text, position = held
        pairs = _PAIR.findall(text)
        named = any(self.maker.field(name) == "step" for name, _ in pairs)
        step = None if named or self._bar is None or self._bar == self._taken else self._bar[0]
        self._taken = self._bar
        row = self.maker.row(pairs, position, step=step)
        if row is not None and named:
            return (row,)
        if self._bar is not None and self._n_since_bar >= _BUFFERED:
            self._is_buffered = True
        if row is not None and not self._is_buffered:
            self._unsure.append(row)
        else:
            self.n_without_step += 1
        if self._is_buffered:
            self.n_without_step += len(self._sure())
        return () if self._n_since_bar > 1 else self._sure()

    def _drawn(self, bar: tuple[int, int]) -> Sequence[Row]:
        # An evaluation draws its own bar, with another total and without a dictionary between
        # two drawings.
        done = self._ended() if self._is_beside else ()
        if self._held is None:
            if self._total in (None, bar[1]):
                self._bar = bar
            self._latest = bar
            return done
        if self._bar is not None and bar[1] == self._bar[1] and bar[0] < self._bar[0]:
            # Another process begins; the one before died between its loss and the next bar.
            self._held, self._taken = None, None
            self._bar, self._latest = bar, bar
            self.n_without_step += 1
            return done
        if self._latest is not None and self._latest[1] == bar[1]:
            self._total = bar[1]
        self._latest = bar
        if self._total in (None, bar[1]):
            self._total, self._bar = bar[1], bar
            return [*done, *self._ended()]
        return done
