"""Define the rows and markers that every reader of a log format yields.

The check of a resume uses nothing else of a log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The file as the caller named it, and the line, counted from 1."""

    file: str
    """The log as the caller named it."""
    line: int
    """The line, counted from 1; the number of the record where the file has no lines."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Number:
    """A value as a log printed it."""

    value: float
    """The value."""
    quantum: float
    """One unit of the last digit printed, in the unit of the value; 0 where the log keeps the
    whole float."""


class _Unparsed:
    """The part of a row that is parsed on first use; most rows of a long log are never used."""

    __slots__ = ("_parse",)

    _parse: Callable[[], Row] | None


@dataclass(frozen=True, slots=True)
class Row(_Unparsed):
    """The values that a log has for one training step; None where it has none."""

    step: int
    """The training step as logged."""
    position: LogPosition
    """Where the row is."""
    loss: Number | None = None
    """The loss; as in the next two, and in these alone, a value may be NaN or infinite."""
    lr: Number | None = None
    """The learning rate."""
    grad_norm: Number | None = None
    """The norm of the gradient."""
    ema_loss: Number | None = None
    """The loss of the averaged weights (EMA) in an evaluation."""
    tokens: Number | None = None
    """Tokens since the start of the run."""
    samples: Number | None = None
    """Samples since the start of the run."""
    throughput: Number | None = None
    """Tokens (or else samples) per second of the whole job."""
    device_throughput: Number | None = None
    """Tokens (or else samples) per second of one device."""
    step_time_s: Number | None = None
    """Seconds of a step."""
    mfu: Number | None = None
    """Model FLOPs utilization, a fraction of 1."""
    at: float | None = None
    """Seconds since the epoch, or in the unit of the log's own clock."""
    interval: int | None = None
    """How many steps the loss is the mean of, where that is known."""
    samples_digest: str | None = None
    """A digest of the samples that the step consumed."""
    attempt: str | None = None
    """The process that wrote the row."""
    counts: str | None = None
    """What `step` counts if not training steps, such as epochs."""

    @property
    def has_loss(self) -> bool:
        """Whether the row has a loss; does not parse a row that is not parsed yet."""
        return self._parse is not None or self.loss is not None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            # Called for a slot that `unparsed` left empty.
            if name == "_parse":
                return None
            if name not in _PARSED_LATER or self._parse is None:
                raise AttributeError(f"a row has no {name}")
            row = self._parse()
            for each in _PARSED_LATER:
                object.__setattr__(self, each, getattr(row, each))
            object.__setattr__(self, "_parse", None)
            return getattr(row, name)


_PARSED_LATER = frozenset(Row.__match_args__) - {"step", "position", "at", "interval"}
_set_step, _set_position, _set_at, _set_interval, _set_parse = (
    # `object.__setattr__` takes twice as long.
    vars(of)[name].__set__
    for of, name in (
        *((Row, "step"), (Row, "position"), (Row, "at"), (Row, "interval")),
        (_Unparsed, "_parse"),
    )
)


def unparsed(step: int, position: LogPosition, at: float | None, parse: Callable[[], Row]) -> Row:
    """A row with a loss, whose other values `parse` finds when one of them is used."""
    row = object.__new__(Row)
    _set_step(row, step)
    _set_position(row, position)
    _set_at(row, at)
    _set_interval(row, None)
    _set_parse(row, parse)
    return row


def set_interval(row: Row, interval: int) -> None:
    """Set of how many steps the loss is the mean, before a reader hands the row out."""
    _set_interval(row, interval)


@dataclass(frozen=True, slots=True)
class Marker:
    """A line that marks the start of a process."""

    position: LogPosition
    """Where the line is."""
    text: str
    """The line."""
    step: int | None = None
    """The last step that the loaded checkpoint holds; null where the line does not name it."""
    fresh: bool = False
    """The process started without a checkpoint."""


class RankReader:
    """Reads the lines of one rank in one format."""

    @property
    def open(self) -> bool:
        """Whether the next line may belong to a row that is not complete."""
        return False

    def read(self, text: str, position: LogPosition) -> Iterator[Row]:
        """The rows that this line completes."""
        raise NotImplementedError

    def end(self) -> Iterator[Row]:
        """The rows that waited for more lines."""
        raise NotImplementedError
