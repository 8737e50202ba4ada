"""Read programs that print a training step as one line of text.

`line_formats` describes the lines. A line that a terminal or a log collector wrapped is
joined again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import copy
from decimal import Decimal

from ckptctl.errors import UsageError
from ckptctl.loss.formats.fields import FIELDS, Precision, RowMaker, clock_in, parse_step
from ckptctl.loss.formats.line_formats import LineFormat
from ckptctl.loss.rows import LogPosition, Number, RankReader, Row
from ckptctl.outside_numbers import whole

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
        raise UsageError(f"--pattern {pattern!r}: not a regular expression: {error}") from error
    unknown = sorted(set(compiled.groupindex) - set(FIELDS))
    if unknown or "step" not in compiled.groupindex:
        wrong = f"unknown group {unknown[0]!r}" if unknown else "no group named step"
        raise UsageError(
            f"--pattern {pattern!r}: {wrong}; the groups have the names of fields: "
            + ", ".join(FIELDS)
        )
    return LineFormat("pattern", "", pattern)


class LineReader(RankReader):
    """Reads the lines of one rank in one format of one line a step."""

    def __init__(self, form: LineFormat, keys: Mapping[str, str] | None = None) -> None:
        self.format = form
        self._head = re.compile(form.head)
        self._pairs = re.compile(form.pairs) if form.pairs else None
        self._tail = re.compile(form.tail) if form.tail else None
        self._maker = RowMaker({**form.keys, **(keys or {})}, trimmed=form.trimmed)
        self._held: tuple[str, LogPosition] | None = None
        self._joined = ""
        self._n_wraps = 0
        self._rounds = Rounds()
        self._epoch_above: int | None = None
        self._has_rows = False
        self._model = FirstModel()
        self._drawn: Row | None = None
        self._n_drawn = 0
        self._last_loss: Number | None = None
        self._snapshot: LineReader | None = None
        self.accumulated = 1
        """How many batches of a progress bar make one step."""

    @property
    def open(self) -> bool:
        """Whether the next line may belong to a row that is not complete."""
        return self._held is not None

    def begins(self, text: str) -> bool:
        """Whether a line is the first of a row."""
        return self.format.hint in text and self._head.search(text) is not None

    def read(self, text: str, position: LogPosition) -> Iterator[Row]:
        """The rows that this line completes."""
        head = None
        if self.format.hint in text:
            head = self._head.search(text)
        if head is None:
            if self._held is not None:
                yield from self._wrapped(text)
            if self.format.has_epochs_above:
                self._take_epoch(text)
            return
        if self._held is not None:
            yield from self.end()
        if self._tail is None or self._tail.search(text, head.start()):
            yield from self._row(text, position, head)
            return
        self._held, self._joined, self._n_wraps = (text, position), text, 0

    def end(self) -> Iterator[Row]:
        """The row that waited for the end of its line."""
        held, self._held = self._held, None
        if held is not None:
            yield from self._row(*held)
        drawn, self._drawn = self._drawn, None
        # A bar is drawn first with the loss of the step before, where a process may have ended.
        is_stale = self._n_drawn == 1 and drawn is not None and drawn.loss == self._last_loss
        if drawn is not None and not is_stale:
            yield drawn

    def resume(self, step: int | None) -> None:
        """Take note that the log announced a resume after `step`."""
        self._rounds.resume(None if step is None else step * self._batches)

    def stop(self, step: int | None) -> None:
        """Take note that the log announced the end of the training at `step`."""
        self._rounds.stop(None if step is None else step * self._batches)

    def follow(self, earlier: LineReader) -> None:
        """Take note that the log continues the one that `earlier` read."""
        self._rounds.follow(earlier._rounds)

    @property
    def _batches(self) -> int:
        """How many of the steps that are printed make one step of the run."""
        return self.accumulated if self.format.redrawn and self.format.rounds else 1

    def spans(self, text: str) -> Mapping[str, tuple[int, int]] | None:
        """Where `text` has its step and the fields of its row; None unless it is a whole row.

        None as well for formats whose rows depend on the lines before them.
        """
        head = self._head.search(text)
        if head is None or self.format.rounds or self.format.redrawn or self._pairs is None:
            return None
        if [*head.groupdict()] != ["step"] or not head["step"].isdigit():
            return None
        if self._tail is not None and not self._tail.search(text, head.start()):
            return None
        best = self._maker.best(self._named(text, head.start()))
        return {field: span for field, (_, span, _) in best.items()} | {"step": head.span("step")}

    def _named(self, text: str, start: int) -> Iterator[tuple[str, tuple[int, int]]]:
        """The names in a line, and where their values are."""
        if self._pairs is None:
            return
        for match in self._pairs.finditer(text, start):
            yield match[1], match.span(2)
        if "tok" in text:
            for match in _RATES.finditer(text, start):
                yield "tok/s", match.span(1)

    def precision(self, field: str) -> Precision:
        """The precision of a field so far."""
        return self._maker.precision[field]

    def snapshot(self) -> LineReader:
        """A reader whose rows have the precision that is known now."""
        if self._snapshot is None:
            self._snapshot = copy(self)
            self._snapshot._maker = self._maker.snapshot()
        return self._snapshot

    def whole_row(self, text: str, position: LogPosition) -> Row:
        """The row of a text that has `spans`."""
        return next(self._row(text, position))

    def _take_epoch(self, text: str) -> None:
        """Keep the epoch that a line above the rows names.

        Where rows are above the first of these lines, an epoch may be named at its end.
        """
        named = _EPOCH_ABOVE.match(text) if EPOCH_HINT in text else None
        if named is not None and (self._epoch_above is not None or not self._has_rows):
            self._epoch_above = whole(named["epoch"])

    def _wrapped(self, text: str) -> Iterator[Row]:
        if self._held is None or self._tail is None:
            return
        # A terminal breaks a line anywhere; a formatter breaks at a space and indents the rest.
        self._joined += " " + text.lstrip() if text[:1].isspace() else text
        self._n_wraps += 1
        if self._tail.search(self._joined):
            position, self._held = self._held[1], None
            yield from self._row(self._joined, position)
        elif self._n_wraps >= _MAX_WRAPS:
            yield from self.end()

    def _row(
        self, text: str, position: LogPosition, head: re.Match[str] | None = None
    ) -> Iterator[Row]:
        head = head or self._head.search(text)
        if head is None:
            return
        groups = head.groupdict()
        step = self._step(groups)
        if step is None:
            return
        self._snapshot = None
        pairs = [(name, value) for name, value in groups.items() if value and name in FIELDS]
        if gain := groups.get("gain"):
            pairs.append(("loss", str(1 - Decimal(gain))))
        if self._pairs is not None:
            pairs += [(name, text[slice(*at)]) for name, at in self._named(text, head.start())]
        counts = self.format.counts
        row = self._maker.row(pairs, position, step=step, at=clock_in(text), counts=counts)
        if row is None:
            return
        if not self.format.redrawn:
            yield row
            return
        drawn, self._drawn = self._drawn, row
        self._n_drawn += 1
        if drawn is not None and drawn.step != row.step:
            self._n_drawn, self._last_loss = 1, drawn.loss
            yield drawn

    def _step(self, groups: Mapping[str, str | None]) -> int | None:
        if "step" not in groups:
            epoch, per, it = (whole(groups[name]) for name in ("epoch", "per", "it"))
            return None if epoch is None or per is None or it is None else (epoch - 1) * per + it
        step = parse_step(groups["step"] or "")
        if step is None or (self.format.models and not self._model.has(step)):
            return None
        if not self.format.rounds:
            return step
        if step == 0 and self.format.redrawn:
            return None  # a bar of which no step is done has the loss of the bar before
        named = groups.get("epoch")
        epoch = whole(named) if named else self._epoch_above
        self._has_rows = True
        batch = self._rounds.step(step, whole(groups.get("per")), epoch)
        return -(-batch // self._batches)


class FirstModel:
    """Tells the steps of the first model from those of others that the process trains after it.

    A counter that starts again is that of another model, such as the next fold of a
    cross-validation. A resume from the beginning in the same log looks alike, so nothing
    follows from it.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._last = 0
        self._is_over = False

    def has(self, step: int) -> bool:
        """Whether the next step of the log is one of the first model."""
        if self._first is None:
            self._first = self._last = step
        self._is_over = self._is_over or step <= self._first < self._last
        self._last = step
        return not self._is_over


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
        self._stopped: int | None = None

    def follow(self, earlier: Rounds) -> None:
        """Take note that `earlier` counted the rounds of the log before this one."""
        self._earlier = earlier

    def resume(self, step: int | None) -> None:
        """Take note that the next step follows `step` of the run."""
        self._resumed, self._stopped = step, None

    def stop(self, step: int | None) -> None:
        """Take note that the run ended at `step`: a bar that is drawn once more is at it.

        Off a terminal, rich draws each bar of a process only then.
        """
        self._stopped = step

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
        stopped, self._stopped = self._stopped, None
        if stopped is not None and per is not None and per <= step <= stopped:
            return stopped
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
