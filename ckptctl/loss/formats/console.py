"""Read programs that print a training step as one line of text.

`LINE_FORMATS` has one entry for each program: the beginning of the line, its names and
values, and its end. A line that a terminal or a log collector wrapped is joined again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import copy

from ckptctl.data_classes import dataclass, field
from ckptctl.errors import UsageError
from ckptctl.loss.formats.fields import FIELDS, Precision, RowMaker, clock_in, parse_step
from ckptctl.loss.rows import LogPosition, Number, Row

_MAX_WRAPS = 8

_VALUE = r"(\d{1,3}(?:,\d{3}){1,9}(?![\d.])|[^\s,|\]]{1,64})"
_BARS = r"(?<![A-Za-z])([A-Za-z][^|:]{0,99}):\s{0,20}" + _VALUE
_COLONS = r"(?<![\w/])([A-Za-z][\w/]{0,99}):\s{0,20}" + _VALUE
_EQUALS = r"(?<![\w/])([A-Za-z][\w/]{0,99})=" + _VALUE


@dataclass(frozen=True, slots=True)
class LineFormat:
    """How one program prints a step; `head`, `pairs` and `tail` are regular expressions.

    Every line contains `hint`. `head` matches the beginning of the line with the step, in
    the group `step`, or as `it` of `per` iterations of the epoch `epoch`; other groups are
    fields of the row. `pairs` matches names and values after it. `tail` matches in complete
    lines only.

    `averages`: the loss is the mean since the row before. `trimmed`: trailing zeros are
    left out. `fallback`: other formats are preferred. `rounds`: steps may start again in
    each `epoch`, or after `per` of them. `redrawn`: a step may be printed several times,
    and the last one counts.
    """

    name: str
    hint: str
    head: str
    pairs: str | None = None
    tail: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    averages: bool = False
    trimmed: bool = False
    fallback: bool = False
    rounds: bool = False
    redrawn: bool = False


LINE_FORMATS = (
    LineFormat(
        "nemo",
        "Training epoch",
        # `iteration` starts again in each epoch.
        r"\bTraining epoch \d{1,9}, iteration \d{1,12}/\d{1,12} \|"
        r"(?=.{0,2000}?\bglobal_step: (?P<step>\d{1,12})\b)",
        _BARS,
        trimmed=True,
    ),
    LineFormat(
        "megatron",
        "iteration",
        r"\biteration\s{1,20}(?P<step>\d{1,12})\s{0,20}/\s{0,20}\d{1,12}\s{0,20}\|",
        _BARS + r"\s{0,20}(?=\|)",
        tail=r"number of (?:nan|skipped) iterations:\s{0,20}\d{1,12}\s{0,20}\|",
        averages=True,
    ),
    LineFormat(
        "nanotron",
        "iteration:",
        r"\biteration:\s{0,20}(?P<step>\d{1,12})\s{0,20}/\s{0,20}\d{1,12}\s{0,20}\|",
        _BARS,
        tail=r"grad_norm:\s*\S+",
        trimmed=True,
    ),
    LineFormat(
        "torchtitan",
        "step:",
        r"(?<!validate )\bstep:\s*(?P<step>\d+)\s+(?=loss:)",
        _COLONS,
        tail=r"mfu:\s*\S+",
        keys={"device_throughput": "tps"},
    ),
    LineFormat(
        "nanogpt",
        "iter ",
        r"\biter\s+(?P<step>\d+):\s+(?=loss)",
        r"(?<![a-z])([a-z]{1,40}) ([^\s,]+)",
        tail=r"time \S+ms",
    ),
    LineFormat(
        "verl",
        "step:",
        # Each number with its path; NumPy's since 2.0 with their type.
        r"\bstep:(?P<step>\d{1,12}) - (?=[\w/-]{1,100}(?:\([^)]{0,20}\))?:)",
        r"(?<![\w/])([A-Za-z][\w/-]{0,99})(?:\([^)]{0,20}\))?:(?:np\.float\d\d\()?([^\s,)]{1,64})",
    ),
    LineFormat(
        "modded-nanogpt",
        "train_time:",
        r"\bstep:(?P<step>\d+)/\d+\s+(?=\w+:)",
        _COLONS,
        tail=r"train_time:\S+",
        keys={"step_time_s": "step_avg"},
    ),
    LineFormat(
        "kempnerforge",
        "[step ",
        r"\[step (?P<step>\d+)\]\s+(?=loss=)",
        _EQUALS,
        tail=r"step_time=\S+",
    ),
    LineFormat(
        "maxtext",
        "completed step:",
        r"\bcompleted step: (?P<step>\d+),",
        _COLONS,
        tail=r"\bloss: \S+",
    ),
    LineFormat(
        "levanter",
        "Progress on:train",
        # Above 1,000 steps three digits are printed: the last row of `12.3kit` represents it.
        r"\bProgress on:train\s+(?P<step>\d{1,12}(?:\.\d{1,2})?[kM]?)it/",
        r"(loss)=([^\s,]+)",
        tail=r"postfix:",
        redrawn=True,
    ),
    LineFormat(
        "torchtune",
        "Step ",
        r"\bStep (?P<step>\d+) \|\s*(?=\w+:)",
        _COLONS,
        tail=r"peak_memory\w{0,40}:|tokens_per_second\w{0,40}:.{0,400}\b(?:lr|loss):",
        trimmed=True,
    ),
    LineFormat(
        "torchtune-bar",
        "|Loss: ",
        r"(?:^|(?<=\s))\d{1,9}\|(?P<step>\d{1,12})\|Loss: (?P<loss>[^\s:]{1,64}):",
        redrawn=True,
    ),
    LineFormat(
        "litgpt",
        "loss train:",
        r"\biter \d{1,12} step (?P<step>\d{1,12}) \| loss train: (?P<loss>[^\s,]{1,64})",
        redrawn=True,
    ),
    LineFormat(
        "fairseq",
        "num_updates=",
        r"\bepoch \d{1,9}:\s{0,20}\d{1,12} / \d{1,12} .{0,1000}?\bnum_updates=(?P<step>\d{1,12})",
        _EQUALS,
        tail=r"\bwall=\S+",
        averages=True,
        trimmed=True,
    ),
    LineFormat(
        "detectron2",
        "total_loss:",
        r"\biter:\s*(?P<step>\d+)\s+(?=total_loss:)",
        _COLONS,
        tail=r"\blr:\s*\S+",
    ),
    LineFormat(
        "mmengine",
        "Epoch",
        r"\bEpoch(?:\(train\))?\s*\[(?P<epoch>\d+)\]\[\s*(?P<it>\d+)/(?P<per>\d+)\]",
        _COLONS,
        tail=r"\bloss:\s*\S+",
        averages=True,
    ),
    LineFormat(
        "mmengine-iter",
        "Iter",
        r"\bIter(?:\(train\))?\s*\[\s*(?P<step>\d+)/\d+\]",
        _COLONS,
        tail=r"\bloss:\s*\S+",
        averages=True,
    ),
    LineFormat(
        "pith-train",
        "step ",
        r"\bstep (?P<step>\d+)/\d+ \|",
        r"(?<![a-z-])([a-z][a-z-]{0,60}) ([^\s|]+)",
        tail=r"tokens-per-second \S+",
    ),
    LineFormat(
        "deepspeed-pipe",
        "steps: ",
        r"\bsteps: (?P<step>\d+) (?=loss:)",
        r"(?<![a-z/])([a-z][a-z/]{0,60}(?: time \(s\))?):\s{0,20}(\S+)",
        tail=r"samples/sec:\s*\S+",
    ),
    LineFormat(
        "mindformers",
        "step:[",
        r"\bEpoch:\[ *(?P<epoch>\d{1,9})/ *\d{1,9}\], "
        r"step:\[ *(?P<step>\d{1,12})/ *(?P<per>\d{1,12})\]",
        r"(?<!\w)([A-Za-z]\w{0,99}): ?\[? {0,20}([^\s,\]/]+)",
        keys={"step_time_s": "per_step_time", "grad_norm": "global_norm"},
        rounds=True,
    ),
    LineFormat(
        "wenet",
        "TRAIN Batch ",
        # The epoch, and the batch of it; validation prints `CV`.
        r"\bTRAIN Batch (?P<epoch>\d{1,9})/(?P<step>\d{1,12}) (?=loss )",
        r"(?<!\w)([a-z]\w{0,99}) (\S+)",
        rounds=True,
    ),
    LineFormat(
        "rwkv",
        "-",
        r"^(?P<step>\d+) (?P<loss>\S+) \S+ (?P<lr>\d\S*) \d{4}-\d\d-\d\d \d\d:",
    ),
    LineFormat(
        "mlflow-metric",
        " ",
        r"^(?P<at>\d{13}) (?P<loss>\S+) (?P<step>\d+)$",
    ),
    LineFormat(
        "deepspeed",
        "skipped=",
        r"\bstep=(?P<step>\d+), skipped=\d+, ",
        r"(lr)=\[([^\],]+)",
        fallback=True,
    ),
    LineFormat(
        "progress-bar",
        "oss=",
        # tqdm with a postfix, as in Lightning: a step is printed repeatedly, the last counts.
        r"(?:\bEpoch (?P<epoch>\d{1,9}):[^|]{0,20}\|[^|]{0,400})?"
        r"\| *(?P<step>\d{1,12})/(?P<per>\d{1,12}|\?) \[[\d:]{1,20}<(?=[^\]]{0,2000}?(?:\b|_)loss)",
        r"(?<![\w/])([A-Za-z][\w/]{0,99})=([^\s,\]]+)",
        trimmed=True,
        fallback=True,
        rounds=True,
        redrawn=True,
    ),
    LineFormat(
        "rich-bar",
        "\u2022",
        # Lightning's RichProgressBar, on a terminal.
        r"\bEpoch (?P<epoch>\d{1,9})/-?\d{1,9} +[\u2500-\u257f ]{1,400} "
        r"(?P<step>\d{1,12})/(?P<per>\d{1,12}|--|\?) [-\d:]{1,20} \u2022",
        r"(?<![\w/])([A-Za-z][\w/]{0,99}): (\S+)",
        trimmed=True,
        fallback=True,
        rounds=True,
        redrawn=True,
    ),
    LineFormat(
        "plain",
        "oss",
        # A custom training loop: a step, and after it a loss.
        r"(?i)^(?:(?=.*\btrain\w{0,20}[ _/]loss)|"
        r"(?!.*(?:\b|_)(?:val|valid|validation|eval|evaluation|test)(?:\b|_)))"
        r"(?:.{0,300}?\bepoch\b[ :=#\[(]{0,4}(?P<epoch>\d{1,9}))?"
        r".{0,300}?(?:(?<![\w/])|_)(?:step|iter|iteration|itr?|update|batch)s?\b[ :=#\[(]{1,9}"
        r"(?P<step>\d[\d,]{0,15})(?!\.?\d|\s?%)(?:\s?/\s?(?P<per>\d{1,12}))?"
        r"(?=\D.{0,300}?(?:\b|_)loss)",
        r"(?i)(?<![\w/])((?:(?:train\w{0,20}|val\w{0,20}|eval\w{0,20}|test) )?"
        r"[a-z][\w/]{0,99}(?: norm| rate)?)['\"]?[ :=]{1,3}"
        r"(?:tensor\()?([-+]?(?:[\d.][\w.+,-]{0,60}[\w%]|\d|nan|inf\w{0,9}))",
        rounds=True,
        fallback=True,
    ),
    LineFormat(
        "bracketed",
        "oss",
        # `[5/1000] loss=2.34`, and torchvision's `Epoch: [0][ 10/5005] ... Loss 6.9 (7.0)`.
        r"(?i)^(?!.{0,200}\b(?:val|valid|validation|eval|evaluation|test)\b)"
        r"[^\[]{0,200}(?:\[ *(?P<epoch>\d{1,9})(?: ?/ *\d{1,9})?\] ?)?"
        r"\[ *(?P<step>\d{1,12}) ?/ *(?P<per>\d{1,12})(?: \([^)]{0,20}\))?\]"
        r"(?=.{0,1000}(?:\b|_)loss\b)",
        r"(?<![\w/])([A-Za-z][\w/]{0,99})(?: ?[=:] {0,4}| {1,4}|\t)"
        r"([-+]?(?:[\d.][\w.+-]*|nan|inf\w*))",
        rounds=True,
        fallback=True,
    ),
)


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


class LineReader:
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

    def read(self, text: str, position: LogPosition) -> Iterator[Row]:
        """The rows that this line completes."""
        head = None
        if self.format.hint in text:
            head = self._head.search(text)
        if head is None:
            if self._held is not None:
                yield from self._wrapped(text)
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
        found = self._pairs.finditer(text, head.start())
        best = self._maker.best((match[1], match.span(2)) for match in found)
        return {field: span for field, (_, span, _) in best.items()} | {"step": head.span("step")}

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
        if self._pairs is not None:
            pairs += self._pairs.findall(text, head.start())
        row = self._maker.row(pairs, position, step=step, at=clock_in(text))
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
            if groups["epoch"] and groups["per"] and groups["it"]:
                return (int(groups["epoch"]) - 1) * int(groups["per"]) + int(groups["it"])
            return None
        step = parse_step(groups["step"] or "")
        if step is None or not self.format.rounds:
            return step
        if step == 0 and self.format.redrawn:
            return None  # a bar of which no step is done has the loss of the bar before
        per, epoch = groups.get("per") or "", groups.get("epoch")
        batch = self._rounds.step(
            step, int(per) if per.isdecimal() else None, int(epoch) if epoch else None
        )
        return -(-batch // self._batches)


class Rounds:
    """Numbers the steps of the run where a log starts them again in each round.

    A round is an epoch, or a progress bar from its beginning to its end. Every step must be
    passed in, in the order of the log. The round in which a log begins is unknown, unless a
    line announced the step of the run after which it resumed.
    """

    def __init__(self) -> None:
        self._before: dict[int | None, int] = {}
        self._epoch: int | None = None
        self._last = 0
        self._spacing = 1
        self._per: int | None = None
        self._longest = 0
        self._resumed: int | None = None
        self._stopped: int | None = None

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
