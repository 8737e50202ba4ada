"""Define the rows and markers that every reader of a log format yields.

The check of a resume uses nothing else of a log.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The file as the caller named it, and the line, counted from 1."""

    file: str
    """The log as the caller named it."""
    line: int
    """The line, counted from 1; the number of the record where the file has no lines."""


@dataclass(frozen=True, slots=True)
class Number:
    """A value as a log printed it."""

    value: float
    """The value."""
    quantum: float
    """One unit of the last digit printed, in the unit of the value; 0 where the log keeps the
    whole float."""


@dataclass(frozen=True, slots=True)
class Row:
    """The values that a log has for one training step; None where it has none."""

    step: int
    """The training step as logged."""
    position: LogPosition
    """Where the row is."""
    loss: Number | None = None
    """The loss; its value may be NaN or infinite."""
    lr: Number | None = None
    """The learning rate."""
    grad_norm: Number | None = None
    """The norm of the gradient."""
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
