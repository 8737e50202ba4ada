"""Read which folders of a Ray Train job are steps, and in which order they were reported.

The folders have a time as name, or any name that the job chose. `checkpoint_manager_snapshot.json`
lists those that are whole: Ray writes it after every worker has stored its files. Its list is in
the order of a score where the job configured one, so that its order proves nothing.

Source: Ray 2.60 `train/v2/_internal/execution/checkpoint/checkpoint_manager.py`
(`_CheckpointManagerState`, `register_checkpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ckptctl.formats.bounded_json import NotJson, decode_json
from ckptctl.formats.frameworks.layouts import MAX_STEP, StepName
from ckptctl.formats.frameworks.state_keys import counts_steps
from ckptctl.outside_numbers import whole_of

SNAPSHOT = "checkpoint_manager_snapshot.json"
MAX_SNAPSHOT_BYTES = 16 * 2**20

_TIME_NAME = re.compile(
    r"(?:checkpoint|ckpt)[-_][0-9]{4}-[0-9]{2}-[0-9]{2}[-_T][0-9]{2}[-:][0-9]{2}[-:][0-9]{2}"
    r"(?:\.[0-9]+)?"
)


class _Result(msgspec.Struct, frozen=True):
    checkpoint_dir_name: str
    metrics: dict[str, Any]


class _Snapshot(msgspec.Struct, frozen=True):
    checkpoint_results: list[_Result]
    latest_checkpoint_result: _Result | None = None
    checkpoint_report_indices: list[int] = []


def is_named_by_time(name: str) -> bool:
    """Whether a folder is named as Ray names a checkpoint, whose digits are no step number."""
    return _TIME_NAME.fullmatch(name) is not None


def reported_steps(data: bytes) -> tuple[StepName, ...]:
    """The steps that a snapshot names, oldest first; none where it states no order.

    Their numbers are the training steps in their metrics, where these grow from report to
    report; else the numbers of their reports.
    """
    try:
        document = decode_json(data, max_bytes=MAX_SNAPSHOT_BYTES)
        snapshot = msgspec.convert(document, _Snapshot)
    except (NotJson, msgspec.ValidationError):
        return ()
    metrics = {one.checkpoint_dir_name: one.metrics for one in snapshot.checkpoint_results}
    if not metrics or any(name in ("", ".", "..") or "/" in name for name in metrics):
        return ()
    last = snapshot.latest_checkpoint_result
    latest = last.checkpoint_dir_name if last is not None else ""
    indices = snapshot.checkpoint_report_indices
    reports = {name: index + 1 for name, index in zip(metrics, indices, strict=False)}
    by_report = _numbered(reports, "ray-train", latest) if len(reports) == len(metrics) else ()
    every = [*metrics.values()]
    keys = [key for key in every[0] if all(type(held.get(key)) in (int, float) for held in every)]
    for key in filter(counts_steps, keys):
        numbers = {name: held[key] for name, held in metrics.items()}
        steps = _numbered(numbers, "dcp", latest)
        if steps and [one.name for one in by_report or steps] == [one.name for one in steps]:
            return steps
    return by_report


def _numbered(numbers: Mapping[str, float], layout: str, latest: str) -> tuple[StepName, ...]:
    """The steps by number; none where two have the same, or the latest not the highest."""
    names = sorted(numbers, key=numbers.__getitem__)
    whole = [whole_of(numbers[name], MAX_STEP) for name in names]
    found = zip(names, whole, strict=True)
    steps = [StepName(name, number, layout) for name, number in found if number is not None]
    is_ordered = len(steps) == len(names) == len({step.number for step in steps})
    return tuple(steps) if is_ordered and latest in ("", names[-1]) else ()
