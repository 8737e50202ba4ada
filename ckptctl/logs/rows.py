"""Define the rows and markers that every reader of a log yields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import force_setattr

if TYPE_CHECKING:
    from ckptctl.logs.fields import RowMaker
    from ckptctl.logs.text_logs import OtherRanks


class LogPosition(msgspec.Struct, frozen=True, gc=False):
    """The file as the caller named it, and the line, counted from 1."""

    file: str
    """The log as the caller named it."""
    line: int
    """The line, counted from 1; the number of the record where the file has no lines."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Number(msgspec.Struct, frozen=True, gc=False):
    """A value as a log printed it."""

    value: float
    """The value."""
    quantum: float
    """One unit of the last digit printed, in the unit of the value; 0 where the log keeps the
    whole float."""


class Row(msgspec.Struct, frozen=True, gc=False):
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
    lacks_loss: bool = False
    """The log has a loss for this step, and nothing in it: null, an empty cell, `None`."""

    @property
    def has_loss(self) -> bool:
        """Whether the row has a loss."""
        return self.loss is not None


def set_interval(row: Row, interval: int) -> None:
    """Set of how many steps the loss is the mean, before a reader hands the row out."""
    force_setattr(row, "interval", interval)


class Marker(msgspec.Struct, frozen=True, gc=False):
    """A line that marks the start of a process."""

    position: LogPosition
    """Where the line is."""
    text: str
    """The line."""
    step: int | None = None
    """The last step that the loaded checkpoint holds; null where the line does not name it."""
    fresh: bool = False
    """The process started without a checkpoint."""


class Log:
    """One log in one format, whose bytes are fed in pieces of any length."""

    format: str | None = None
    """Its name; None until it is detected."""
    damage: str | None = None
    """Why reading stopped before the end; None where it did not."""
    n_without_step = 0
    """Losses that were left out because the log does not show their step."""
    mention: str | None = None
    """The first line that mentions a loss, while no format is found."""
    pattern: str | None = None
    """A `--pattern` that may read the log, while no format is found."""
    other_ranks: OtherRanks | None = None
    """What the ranks logged whose rows are dropped; None where ranks are not distinguished."""

    @property
    def used(self) -> frozenset[str]:
        """The plain names of the key map that the log has had so far."""
        return frozenset()

    def feed(self, data: bytes) -> Iterable[Row | Marker]:
        """The rows and markers that these bytes complete; exhaust before the next call."""
        raise NotImplementedError

    def end(self) -> Iterable[Row | Marker]:
        """The rows and markers that waited for more bytes."""
        return ()


class RankReader:
    """Reads the lines of one rank in one format."""

    maker: RowMaker

    @property
    def open(self) -> bool:
        """Whether the next line may belong to a row that is not complete."""
        return False

    def read(self, text: str, position: LogPosition) -> Sequence[Row]:
        """The rows that this line completes."""
        raise NotImplementedError

    def end(self) -> Sequence[Row]:
        """The rows that waited for more lines."""
        raise NotImplementedError
