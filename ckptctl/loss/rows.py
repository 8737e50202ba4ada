"""What is one line of a training log, once it is read?

Every reader of a log format gives these rows, and the judgement reads nothing
else. How a format is read is the question of the readers; where one leg ends
and the next begins is `legs`'.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands: the file as the caller named it, and its line, counted from 1.

    `line` is the record's number where the file has no lines.
    """

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Number:
    """A value as a log printed it.

    `quantum` is one unit of the last digit printed, in the value's own unit: 1e-4
    for `2.3410`, 1e-3 for `1.234E+00`, 0 where the log keeps the whole float.
    """

    value: float
    quantum: float


@dataclass(frozen=True, slots=True)
class Row:
    """What a log says of one training step; None where it does not say.

    `step` is the training step as logged. `loss` may be NaN or infinite. `lr` is the
    learning rate. `tokens` and `samples` count from the start of the run. `throughput`
    is in tokens (or else samples) per second, `step_time_s` in seconds, `mfu` is a
    fraction of 1. `at` is in seconds since the epoch, or in whatever clock the log
    keeps. `interval` is how many steps the loss is the mean of, where the log says so.
    `samples_digest` names the samples that the step consumed.
    """

    step: int
    place: Place
    loss: Number | None = None
    lr: Number | None = None
    grad_norm: Number | None = None
    tokens: Number | None = None
    samples: Number | None = None
    throughput: Number | None = None
    step_time_s: Number | None = None
    mfu: Number | None = None
    at: float | None = None
    interval: int | None = None
    samples_digest: str | None = None


@dataclass(frozen=True, slots=True)
class Marker:
    """A line that says where a process began: resumed after `step`, or from nothing.

    `step` is the last step that the loaded checkpoint holds; None where the line does
    not name it. `fresh` says that the process began from the first step on purpose or
    by mistake.
    """

    place: Place
    text: str
    step: int | None = None
    fresh: bool = False
