"""Which programs print a training step as a block of lines, and how?

A heading that names the step, then one metric a line. The first line that is no
metric ends the block, so the row comes when the block is over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptctl.loss.formats.clocks import clock_in
from ckptctl.loss.formats.keys import RowMaker, parse_step
from ckptctl.loss.rows import Place, Row


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`head` finds the heading and its step, `metric` a name and a value."""

    name: str
    hint: str
    head: re.Pattern[str]
    metric: re.Pattern[str]
    weak: bool = False
    averages: bool = False


BLOCK_FORMATS = (
    BlockFormat(
        "olmo-core",
        "[step=",
        re.compile(r"\[step=(?P<step>[\d,]+)/(?:[\d,]+|\?+)"),
        re.compile(r"^\s+((?!eval)[^\s=][^=]*)=(\S+)\s*$"),
    ),
    BlockFormat(
        "composer",
        "]:",
        re.compile(r"\[(?:batch|ba)=(?P<step>\d+)(?:/\d+)?\]:"),
        re.compile(r"^\s*(?:\d+:)?\s*Train ([^:]+): (\S+)"),
    ),
)


class BlockReader:
    """Reads the lines of one rank in one format of several lines a step."""

    def __init__(self, form: BlockFormat, keys: Mapping[str, str] | None = None) -> None:
        self.format = form
        self._maker = RowMaker(keys)
        self._step: int | None = None
        self._place: Place | None = None
        self._at: float | None = None
        self._pairs: list[tuple[str, str]] = []

    @property
    def open(self) -> bool:
        """Whether the next line may belong to a block that is not over yet."""
        return self._step is not None

    def read(self, text: str, place: Place) -> Iterator[Row]:
        """The row of the block that this line ends."""
        if self._step is not None:
            metric = self.format.metric.match(text)
            if metric is not None:
                self._pairs.append((metric[1], metric[2]))
                return
        head = self.format.head.search(text) if self.format.hint in text else None
        yield from self.end()
        if head is not None:
            self._step, self._place = parse_step(head["step"]), place
            self._at = clock_in(text)

    def end(self) -> Iterator[Row]:
        """The row of the block that was open."""
        step, pairs, place = self._step, self._pairs, self._place
        self._step, self._pairs = None, []
        if step is None or place is None or not any(self._maker.knows(name) for name, _ in pairs):
            return
        row = self._maker.row(pairs, place, step=step, at=self._at)
        if row is not None:
            yield row
