"""Read what a run logged around a suspicious step, as a record that can be compared."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from ckptctl.errors import LogWithoutLoss, UsageError
from ckptctl.loss.reading import read_logs
from ckptctl.loss.rows import Number, Row
from ckptctl.loss.sources import expanded
from ckptctl.options import StorageOptions
from ckptctl.rerun.deciding import Record, Rows

_MOST_ROWS = 20_000
"""Rows that are kept of one log; a replay trains far fewer steps."""


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
        for row in read_logs([path], storage=storage, on_damage=lambda _message: None):
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
        raise UsageError(f"{names}: no loss was found", next_command=f"ckptctl loss {names}")
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
