"""Define the rows and markers that every reader of a log format yields.

The check of a resume uses nothing else of a log.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The file as the caller named it, and the line, counted from 1.

    `line` is the number of the record where the file has no lines.
    """

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Number:
    """A value as a log printed it.

    `quantum` is one unit of the last digit printed, in the unit of the value: 1e-4 for
    `2.3410`, 1e-3 for `1.234E+00`, 0 where the log keeps the whole float.
    """

    value: float
    quantum: float


@dataclass(frozen=True, slots=True)
class Row:
    """The values that a log has for one training step; None where it has none.

    `step` is the training step as logged. `loss` may be NaN or infinite. `lr` is the
    learning rate. `tokens` and `samples` count from the start of the run. `throughput`
    is in tokens (or else samples) per second of the whole job, `device_throughput` of one
    device, `step_time_s` in seconds, `mfu` is a fraction of 1. `at` is in seconds since the
    epoch, or in the unit of the log's own clock. `interval` is how many steps the loss is
    the mean of, where that is known.
    `samples_digest` identifies the samples that the step consumed, `attempt` the process
    that wrote the row.
    """

    step: int
    position: LogPosition
    loss: Number | None = None
    lr: Number | None = None
    grad_norm: Number | None = None
    tokens: Number | None = None
    samples: Number | None = None
    throughput: Number | None = None
    device_throughput: Number | None = None
    step_time_s: Number | None = None
    mfu: Number | None = None
    at: float | None = None
    interval: int | None = None
    samples_digest: str | None = None
    attempt: str | None = None


@dataclass(frozen=True, slots=True)
class Marker:
    """A line that marks the start of a process.

    `step` is the last step that the loaded checkpoint holds; None where the line does not
    name it. `fresh` means that the process started without a checkpoint.
    """

    position: LogPosition
    text: str
    step: int | None = None
    fresh: bool = False
