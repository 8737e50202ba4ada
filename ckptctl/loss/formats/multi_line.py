"""Read programs that print a training step over several lines.

`BLOCK_FORMATS` are a heading that names the step, then one metric per line. The Hugging
Face trainer prints a dictionary without a step, followed by a progress bar that shows it.
Keras prints the epoch, then a bar of its batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptctl.loss.formats.fields import RowMaker, clock_in, parse_step
from ckptctl.loss.rows import LogPosition, RankReader, Row
from ckptctl.outside_numbers import clamped


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How one program prints a block: `head` matches the heading, `metric` a name and a value.

    A heading without the group `step` begins a block in which a metric is the step. With
    `gaps`, at most so many other lines lie between the metrics. `fallback`: formats of one
    program are preferred. `aside` matches a line after which blocks are not of the training,
    until one names it or an epoch.
    """

    name: str
    hint: str
    head: re.Pattern[str]
    metric: re.Pattern[str]
    gaps: int = 0
    fallback: bool = False
    aside: re.Pattern[str] | None = None


_CLOCK = r"(?:\d{4}-\d\d-\d\d[ T][\d:.,]{5,20}[^\w]{1,9})?"

BLOCK_FORMATS = (
    BlockFormat(
        "olmo-core",
        "[step=",
        re.compile(r"\[step=(?P<step>[\d,]{1,16})/(?:[\d,]{1,16}|\?{1,9})"),
        re.compile(r"^\s{1,99}((?!eval)[^\s=][^=]{0,199})=(\S{1,99})\s*$"),
    ),
    BlockFormat(
        "composer",
        "]:",
        re.compile(r"\[(?:batch|ba)=(?P<step>\d{1,12})(?:/\d{1,12})?\]:"),
        re.compile(r"^\s{0,99}(?:\d{1,9}:)?\s{0,99}Train ([^:]{1,199}): (\S+)"),
    ),
    BlockFormat(
        "stable-baselines3",
        "-----",
        re.compile(r"^\s{0,9}-{20,200}\s{0,9}$"),
        # The heading of a group, such as `time/`, has no value.
        re.compile(r"^\s{0,9}\|\s{1,9}([a-z][\w/]{0,99})\s{0,99}\|\s{1,9}(\S{0,99})\s{0,99}\|"),
    ),
    BlockFormat(
        "nemo-rl",
        "==== Step ",
        re.compile(r"={5,99} Step (?P<step>\d{1,12})/\d{1,12} ={5,99}"),
        re.compile(r"^\s{0,9}\u2022 ((?:Policy )?Loss|Total step time): (\S{1,99})"),
        gaps=100,
    ),
    BlockFormat(
        "printed-dictionary",
        "{'",
        # EasyLM: `pprint` puts each metric on a line of its own.
        re.compile(r"^\{(?='\w{1,99}': [^{},']{1,99},$)"),
        re.compile(r"^[{ ]?'(\w{1,99})': ([^{},']{1,99})[,}]"),
    ),
    BlockFormat(
        "block",
        "",
        # nnU-Net, Coqui and custom loops: a line of a counter, and a metric on each line below.
        re.compile(
            rf"^[^\w]{{0,99}}{_CLOCK}(?:\[?(?:INFO|DEBUG)\]?[^\w]{{1,9}})?"
            r"(?:TIME: [\d: -]{10,30})?(?:STEP: \d{1,12}/\d{1,12}[^\w]{1,9})?"
            r"(?:(?:global|learning|train|training)[ _])?(?:epoch|step|iteration|iter|round)"
            r"[^\w]{1,9}(?P<step>\d{1,12})(?:\s?(?:/|of)\s?\d{1,12})?[^\w]{0,99}$",
            re.IGNORECASE,
        ),
        re.compile(
            rf"^[^\w]{{0,99}}{_CLOCK}([A-Za-z][\w /.()-]{{0,60}}?)[ :=]{{1,20}}"
            r"([-+]?(?:\d[\d.]{0,40}(?:e[-+]?\d{1,4})?|nan|inf))(?=[\s,;%)]|s\b|$)",
            re.IGNORECASE,
        ),
        gaps=100,
        fallback=True,
        aside=re.compile(
            r"^[^\w]{0,99}(?:eval|valid|test)[a-z]{0,12}\b[^\d]{0,40}$", re.IGNORECASE
        ),
    ),
)


_TRAINS = re.compile(r"train|epoch", re.IGNORECASE)


class BlockReader(RankReader):
    """Reads the lines of one rank in a format with one block per step."""

    def __init__(self, form: BlockFormat, keys: Mapping[str, str] | None = None) -> None:
        self.format = form
        self._maker = RowMaker(keys)
        self._step: int | None = None
        self._position: LogPosition | None = None
        """Of the heading of the current block; None outside blocks."""
        self._at: float | None = None
        self._pairs: list[tuple[str, str]] = []
        self._n_others = 0
        self._is_aside = False

    @property
    def open(self) -> bool:
        """Whether the next line may belong to the current block."""
        return self._position is not None

    def read(self, text: str, position: LogPosition) -> Iterator[Row]:
        """The row of the block that this line ends."""
        if self.format.aside is not None and self.format.aside.match(text):
            self._is_aside = True
            yield from self.end()
        if self._is_aside and not _TRAINS.search(text):
            return
        self._is_aside = False
        head = self.format.head.search(text) if self.format.hint in text else None
        is_inside = head is None and self._position is not None
        if is_inside and (self._add(text) or self._n_others < self.format.gaps):
            return
        yield from self.end()
        step = head.groupdict().get("step") if head is not None else None
        self._step = None if step is None else parse_step(step)
        if head is not None and (step is None or self._step is not None):
            self._position, self._at, self._n_others = position, clock_in(text), 0
            self._add(text)

    def _add(self, text: str) -> bool:
        """Take the metric of a line into the block; False for any other line."""
        metric = self.format.metric.match(text)
        if metric is None:
            self._n_others += 1
            return False
        self._pairs.append((metric[1], metric[2]))
        return True

    def end(self) -> Iterator[Row]:
        """The row of the current block."""
        step, pairs, position = self._step, self._pairs, self._position
        self._step, self._position, self._pairs = None, None, []
        if position is None or not any(self._maker.knows(name) for name, _ in pairs):
            return
        row = self._maker.row(pairs, position, step=step, at=self._at)
        if row is not None:
            yield row


_KERAS_EPOCH = re.compile(r"^\s{0,99}Epoch (\d{1,9})/\d{1,9}\s{0,99}$")
_KERAS_BAR = re.compile(r"^\s{0,99}(\d{1,12})/(\d{1,12}) [^/]{1,200}?(\d{1,9}(?:us|ms|s))/step - ")
_KERAS_PAIR = re.compile(r"(?<!\w)([A-Za-z]\w{0,99}): ([^\s\x08]+)")


class KerasReader(RankReader):
    """Reads the bars of `Model.fit`: a heading names the epoch, and a bar its batches.

    The loss is the mean since the epoch began. A bar is drawn repeatedly, and its last
    drawing counts; with `verbose=2` there is one for each epoch.
    """

    name = "keras"
    hint = "/step - "
    epoch_hint = "Epoch "

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self._maker = RowMaker(keys)
        self._epoch: int | None = None
        self._drawn: Row | None = None

    def read(self, text: str, position: LogPosition) -> Iterator[Row]:
        """The row of the batch before the one of this line."""
        heading = _KERAS_EPOCH.match(text)
        if heading is not None:
            yield from self.end()
            self._epoch = clamped(heading[1])
        bar = _KERAS_BAR.match(text)
        if bar is None or self._epoch is None:
            return
        batch, per = clamped(bar[1]), clamped(bar[2])
        pairs = [*_KERAS_PAIR.findall(text, bar.end()), ("step_time_s", bar[3])]
        step = (self._epoch - 1) * per + batch
        row = self._maker.row([*pairs, ("interval", bar[1])], position, step=step)
        if self._drawn is not None and self._drawn.step != step:
            yield self._drawn
        self._drawn = row

    def end(self) -> Iterator[Row]:
        """The last row."""
        drawn, self._drawn = self._drawn, None
        if drawn is not None:
            yield drawn


_DICTIONARY = re.compile(r"\{[^{}]{0,2000}'loss': [^{}]{0,2000}\}")
_PAIR = re.compile(r"'([\w/]{1,99})': '?([^,'}]+)'?")
# Bars of downloads and of tokenizers have a text before them.
_BAR = re.compile(
    r"^\s{0,99}\d{1,3}%\|.{0,400}?\|\s{0,99}(?P<step>\d{1,12})/(?P<total>\d{1,12}) \["
)
_BLANKS = " " * 16


class HfConsoleReader(RankReader):
    """Reads the dictionaries and progress bars of one rank.

    The bar is drawn again directly after a dictionary, with the step of the dictionary. A
    dictionary in the line of a bar has the step of that bar; if the trainer repeats it, the bar
    was drawn late, and the bar behind the repetition counts.
    Without bars the rows have no step; `n_without_step` counts these, which are left out.
    """

    name = "hf-console"
    hint = "'loss': "
    bar_hint = "%|"

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self._maker = RowMaker(keys, trimmed=True)
        self._bar: tuple[int, int] | None = None
        self._latest: tuple[int, int] | None = None
        self._total: int | None = None
        self._held: tuple[str, LogPosition] | None = None
        self._taken: tuple[int, int] | None = None
        self._is_beside = False
        self.n_without_step = 0

    @property
    def open(self) -> bool:
        """Whether a dictionary waits for its progress bar."""
        return self._held is not None

    def read(self, text: str, position: LogPosition) -> Iterator[Row]:
        """The row of the dictionary before this progress bar."""
        bar = _BAR.match(text) if self.bar_hint in text else None
        if bar is not None:
            yield from self._drawn((clamped(bar["step"]), clamped(bar["total"])))
        if self.hint not in text:
            return
        found = _DICTIONARY.search(text)
        if found is not None:
            is_repeated = self._is_beside and self._held is not None and found[0] == self._held[0]
            if not is_repeated:
                yield from self.end()
            self._held = (found[0], position)
            # A logger writes behind the bar of the step; tqdm blanks the bar before it writes.
            is_beside = bar is not None and _BLANKS not in text[bar.end() : found.start()]
            self._is_beside = is_beside and self._bar == self._latest

    def end(self) -> Iterator[Row]:
        """The row of a dictionary that no bar followed; its step is that of the bar before.

        Where that bar belongs to an earlier dictionary, the row has no step: the job died
        before it drew the next bar.
        """
        held, self._held, self._is_beside = self._held, None, False
        if held is None:
            return
        text, position = held
        pairs = _PAIR.findall(text)
        named = any(self._maker.field(name) == "step" for name, _ in pairs)
        step = None if named or self._bar is None or self._bar == self._taken else self._bar[0]
        self._taken = self._bar
        row = self._maker.row(pairs, position, step=step)
        if row is None:
            self.n_without_step += 1
        else:
            yield row

    def _drawn(self, bar: tuple[int, int]) -> Iterator[Row]:
        # An evaluation draws its own bar, with another total and without a dictionary between
        # two drawings.
        if self._is_beside:
            yield from self.end()
        if self._held is None:
            if self._total in (None, bar[1]):
                self._bar = bar
            self._latest = bar
            return
        if self._bar is not None and bar[1] == self._bar[1] and bar[0] < self._bar[0]:
            # Another process begins; the one before died between its loss and the next bar.
            self._held, self._taken = None, None
            self._bar, self._latest = bar, bar
            self.n_without_step += 1
            return
        if self._latest is not None and self._latest[1] == bar[1]:
            self._total = bar[1]
        self._latest = bar
        if self._total in (None, bar[1]):
            self._total, self._bar = bar[1], bar
            yield from self.end()
