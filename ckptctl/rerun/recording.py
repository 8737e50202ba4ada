"""Read what a run logged around a suspicious step, and compare it with another run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptctl.errors import LogWithoutLoss, UsageError
from ckptctl.formatting import command_line
from ckptctl.logs.reading import DamageLog, read_logs
from ckptctl.logs.rows import Number, Row
from ckptctl.logs.sources import expanded
from ckptctl.options import StorageOptions

Rows = Mapping[int, Row]
"""The rows of one log by their steps."""
Record = Mapping[str, Rows]
"""What one run logged, by log: one log, or one for each rank."""

_MOST_ROWS = 20_000
"""Rows that are kept of one log; a replay trains far fewer steps."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first value in which two runs differ."""

    step: int
    """The training step."""
    log: str
    """The log that holds it, where a run has several; else empty."""
    name: str
    """`loss` or `grad_norm`."""
    relative: float | None
    """How large the difference is, relative; null where one of both is not finite."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the values of two runs compare, up to and with the suspicious step."""

    n_values: int
    """How many values both runs logged."""
    first: FirstDifference | None
    """The first difference; null where all values are equal."""
    largest_before: float | None
    """The largest relative difference of losses before the suspicious step; null where one of
    two losses is not finite."""
    largest_at: float | None
    """That of its loss; null where one of both is not finite."""
    starts_equal: bool
    """The values of the first common step are equal."""
    other_samples: int | None
    """The first step that consumed other samples; null where none did, or it was not logged."""

    @property
    def before(self) -> float:
        """`largest_before`, as a number."""
        return math.inf if self.largest_before is None else self.largest_before

    @property
    def at(self) -> float:
        """`largest_at`, as a number."""
        return math.inf if self.largest_at is None else self.largest_at

    @property
    def is_equal(self) -> bool:
        """Whether no value differs."""
        return self.first is None


def read_record(logs: Sequence[str], step: int, storage: StorageOptions) -> Record:
    """What a run logged up to `step` and a little beyond, by log; empty without a loss.

    Where an attempt logged the step again, the first one counts. Logs that lack the step are
    left out, unless all do. Raises `PathNotFound` where a log or a folder of logs is missing.
    """
    passes = {path: _first_pass(path, step, storage) for path in expanded(logs, storage)}
    found = {path: rows for path, rows in passes.items() if rows}
    found = {path: rows for path, rows in found.items() if step in rows} or found
    return dict(zip(_short_names([*found]), found.values(), strict=True))


def _first_pass(path: str, step: int, storage: StorageOptions) -> Rows:
    """The rows of the first attempt that logged `step`; else of the one that came nearest."""
    best: dict[int, Row] = {}
    rows: dict[int, Row] = {}
    last = -1
    try:
        for row in read_logs([path], storage=storage, damage=DamageLog()):
            if not isinstance(row, Row) or not row.has_loss or row.step == last:
                continue  # the second of two rows of one step is another rank's
            if row.step < last:
                if step in rows:
                    return rows
                best, rows = max(best, rows, key=lambda each: max(each, default=-1)), {}
            last = row.step
            rows[row.step] = row
            if len(rows) > _MOST_ROWS:
                if step in rows:
                    return rows
                del rows[next(iter(rows))]
    except LogWithoutLoss:
        pass
    if step in rows:
        return rows
    return max(best, rows, key=lambda each: max(each, default=-1))


def _short_names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that differ: `0/stdout.log`, `1/stdout.log`."""
    parts = [path.split("/") for path in paths]
    for n in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-n:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def first_record(logs: Sequence[str], step: int, storage: StorageOptions) -> Record:
    """The record of the suspicious run, which has a row for `step`.

    Raises `UsageError` where it has none, and did not end right before it.
    """
    record = read_record(logs, step, storage)
    names = " ".join(map(shlex.quote, logs))
    if not record:
        raise UsageError(f"{names}: no loss was found", next_command=command_line("loss", *logs))
    rows = main_rows(record)
    if step not in rows:
        if not ended_at(rows, step):
            near = min(rows, key=lambda each: abs(each - step))
            raise UsageError(f"{names}: step {step} has no row; the nearest step logged is {near}")
        record = with_failure(record, step)
    return record


def ended_at(rows: Rows, step: int, before: int | None = None) -> bool:
    """Whether the log ends right before `step`: at `before`, or one interval of logging ago."""
    last = max(rows)
    if before is not None:
        return last == before
    earlier = max((each for each in rows if each < last), default=last - 1)
    return 0 < step - last <= last - earlier


def with_failure(record: Record, step: int) -> Record:
    """The record of a run that failed at `step` where it logs none: no number is its loss."""
    failed: dict[str, Rows] = {}
    for name, rows in record.items():
        position = rows[max(rows)].position
        failed[name] = {step: Row(step, position, loss=Number(math.nan, 0.0)), **rows}
    return failed


def main_rows(record: Record) -> Rows:
    """The rows of the first log."""
    return next(iter(record.values()))


def compare(a: Record, b: Record, step: int) -> Comparison:
    """Compare two runs over the steps that both logged, up to and with `step`."""
    values: list[tuple[int, str, str, float]] = []
    other_samples: list[int] = []
    for log, old, new in aligned(a, b):
        for number in sorted(n for n in old.keys() & new.keys() if n <= step):
            x, y = old[number], new[number]
            for name, one, other in (
                ("loss", x.loss, y.loss),
                ("grad_norm", x.grad_norm, y.grad_norm),
            ):
                if one is not None and other is not None:
                    values.append((number, log, name, _difference(one, other)))
            if None not in (x.samples_digest, y.samples_digest):
                other_samples += [number] if x.samples_digest != y.samples_digest else []
    different = sorted(each for each in values if each[3])
    first = different[0] if different else None
    losses = [(number, size) for number, _, name, size in values if name == "loss"]
    return Comparison(
        len(values),
        first and FirstDifference(*first[:3], _finite(first[3])),
        _finite(max((size for number, size in losses if number < step), default=0.0)),
        _finite(max((size for number, size in losses if number == step), default=math.inf)),
        bool(values) and (first is None or min(values)[0] < first[0]),
        min(other_samples, default=None),
    )


def _finite(size: float) -> float | None:
    return size if math.isfinite(size) else None


def aligned(a: Record, b: Record) -> list[tuple[str, Rows, Rows]]:
    """The logs of two runs that belong together, by name where both have several."""
    shared = [name for name in a if name in b]
    if len(a) > 1 and len(b) > 1 and shared:
        return [(name, a[name], b[name]) for name in shared]
    names = shared * 2 or [*list(a)[:1], *list(b)[:1]]
    return [("", a[names[0]], b[names[1]])] if a and b else []


def _difference(x: Number, y: Number) -> float:
    """The relative difference; 0 for two numbers that may be one, as they were printed."""
    if not (math.isfinite(x.value) and math.isfinite(y.value)):
        both = not (math.isfinite(x.value) or math.isfinite(y.value))
        return 0.0 if both else math.inf
    off = abs(x.value - y.value)
    if off <= 0.501 * max(x.quantum, y.quantum):
        return 0.0
    return off / max(abs(x.value), abs(y.value))
