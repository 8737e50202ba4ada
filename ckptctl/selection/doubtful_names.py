"""Decide about numbered files whose names do not show that they are the saves of one run.

Files of two runs in one folder are no series of steps. `model_0.pt` to `model_3.pt` may be four
saves, or the shards of one: what the files count decides. `12.pt` is a step if it counts 12.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckptctl.formats.frameworks.layouts import (
    STEP_SUFFIXES,
    StepName,
    counted_name,
    is_scattered,
    may_be_shards,
    run_of,
)
from ckptctl.inspection.sidecars import counts_inside
from ckptctl.model import FileInfo
from ckptctl.storage.contract import Store

MAX_COUNTED = 8
"""Of so many numbered files the counts are read."""

Files = Mapping[StepName, Sequence[FileInfo]]
"""The files of each step."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Files that are no steps unless they count the numbers in their names.

    `why` is the reason, empty where their names give no reason to take them for steps.
    `pattern` is the `--pattern` that selects the steps of one run, empty where none does.
    """

    files: Files
    why: str = ""
    pattern: str = ""


def doubt_about(steps: Files) -> Doubt | None:
    """What makes it doubtful that `steps` are those of one run; None if nothing does."""
    if not steps:
        return None
    newest = max(steps, key=lambda step: step.number)
    pattern = "" if is_scattered(newest.name) else pattern_of(newest)
    select = "select one by --pattern" if pattern else "give each a folder of its own"
    runs = {
        run_of(step): files[0].path
        for step, files in steps.items()
        if step.lone or step.run or is_scattered(step.name)
    }
    if len(runs) > 1:
        first, second, *_ = runs.values()
        why = f"{first} and {second} are of different runs, or count different things; {select}"
        return Doubt({}, why, pattern)
    paths = [file.path for files in steps.values() for file in files]
    numbers = {step.number for step in steps}
    if all(path.endswith(STEP_SUFFIXES) for path in paths) and may_be_shards(paths, numbers):
        why = "nothing in them shows whether they are saves or the shards of one"
        return Doubt(steps, f"{why}; if they are saves, use --pattern", pattern)
    return None


def doubt_without_steps(files: Iterable[FileInfo]) -> Doubt | None:
    """The files that are steps if they count the number in their names, and nothing else does."""
    named = {step: (file,) for file in files if (step := counted_name(file.path)) is not None}
    return Doubt(named) if len({run_of(step) for step in named}) == 1 else None


def pattern_of(step: StepName) -> str:
    """The `--pattern` that selects a step, and those whose names differ behind its number."""
    at = [one for one in re.finditer("[0-9]+", step.name) if int(one[0]) == step.number][-1]
    return f"{re.escape(step.name[: at.start()])}(?P<step>[0-9]+).*"


def are_saves(store: Store, doubt: Doubt) -> bool:
    """Whether the files count, in the same places, different steps or epochs: they are saves.

    The shards of one save agree. One readable file must count the number in its name, or the
    next, and so must files whose names do not call it one. Cost: as `counts_inside`, for the
    files of the newest `MAX_COUNTED` steps.
    """
    newest = sorted(doubt.files, key=lambda step: step.number)[-MAX_COUNTED:]
    counts = {step: _counts_of(store, doubt.files[step]) for step in newest}
    counts = {step: found for step, found in counts.items() if found}
    names_them = any(
        {step.number, step.number + 1}.intersection(found.values())
        for step, found in counts.items()
    )
    differ = any(
        one[place] != other[place]
        for one, other in pairwise(counts.values())
        for place in one.keys() & other.keys()
    )
    return (differ or len(counts) == 1) and (names_them or bool(differ and doubt.why))


def _counts_of(store: Store, files: Iterable[FileInfo]) -> Mapping[str, int | float]:
    """What the files of one step count, by place: a key in a file, without the numbers there."""
    return {
        f"{re.sub('[0-9]+', '', file.path)} {key}": number
        for file in files
        for key, number in counts_inside(store, file.path, file.size).items()
    }
