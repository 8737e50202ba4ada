"""Training logs as rows: a loss that falls and wobbles, and a job that dies and resumes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ckptctl.logs.rows import LogPosition, Marker, Number, Row

SAVED = 200
"""The last step that the checkpoint holds."""
DIED = 212
"""The last step that the job logged before it died."""
END = 260

TOKENS = 4096
"""Tokens of one step."""


def printed(value: float, decimals: int = 4) -> Number:
    """A value as a log prints it with so many decimals."""
    return Number(round(value, decimals), 10.0**-decimals)


def loss_at(step: int, seed: int = 1, noise: float = 0.01) -> float:
    """The loss of a step: the same for the same seed, which stands for the data."""
    own = random.Random(seed * 1_000_003 + step)
    return (2.5 + 3 / math.sqrt(step)) * math.exp(own.gauss(0, noise))


def row(step: int, loss: float | None, *, line: int = 0, file: str = "train.log", **more) -> Row:
    """A row as a trainer logs it, with all fields that the counters look at."""
    fields = {
        "loss": None if loss is None else printed(loss),
        "lr": Number(3e-4 * (1 - step / 10_000), 1e-9),
        "grad_norm": printed(1 + 0.1 * math.sin(step)),
        "tokens": Number(step * TOKENS, 1),
        "at": 1_000.0 + (line or step),
    }
    return Row(step, LogPosition(file, line or step), **{**fields, **more})


def rows(
    first: int, last: int, *, seed: int = 1, noise: float = 0.01, attempt: int = 1, **more
) -> list[Row]:
    """Rows of the steps from `first` to `last`, at other times than those of other attempts."""
    made = (row(step, loss_at(step, seed, noise), **more) for step in range(first, last + 1))
    late = 10_000 * (attempt - 1) + 1_000 * (first - 1)
    return [each if each.at is None else replace(each, at=each.at + late) for each in made]


def resumed(
    change: Callable[[Row], Row] = lambda row: row,
    *,
    died: int = DIED,
    first: int = SAVED + 1,
    marker: bool = True,
    noise: float = 0.01,
) -> list[Row | Marker]:
    """A log in which the job dies at `died` and resumes after step 200; `change` is what differs.

    With `died` 200 no step is logged twice.
    """
    said = [Marker(LogPosition("train.log", 1000), "loading the checkpoint", step=SAVED)]
    after = [change(each) for each in rows(first, END, noise=noise)]
    return [*rows(1, died, noise=noise), *(said if marker else []), *after]


def times(factor: float, *, since: int = 0) -> Callable[[Row], Row]:
    """Multiplies the loss from step `since` on."""

    def change(each: Row) -> Row:
        if each.step < since or each.loss is None:
            return each
        return replace(each, loss=printed(each.loss.value * factor))

    return change


def with_decimals(items: Sequence[Row | Marker], decimals: int) -> list[Row | Marker]:
    """The same log with the loss printed in so many decimals."""
    return [
        replace(each, loss=printed(each.loss.value, decimals))
        if isinstance(each, Row) and each.loss is not None
        else each
        for each in items
    ]
