"""Measure how often a run saves, how long a save takes and how large it is, by file times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ckptctl.formats.frameworks.layouts import compile_pattern, is_own
from ckptctl.inspection.open_step import list_step
from ckptctl.options import StorageOptions
from ckptctl.selection.empty_roots import check_has_steps
from ckptctl.selection.roots import list_root
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store

MOST_STEPS = 11


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of the newest `n_steps` steps of a run; None where nothing can be measured.

    `interval_s` is from save to save, `steps_apart` how many training steps that is,
    `save_s` the time from a save's first file to its last: at least that long it took.
    `n_bytes` is the size of a step. Steps less than a second apart carry the times
    of a copy, which measure nothing.
    """

    n_steps: int
    interval_s: float | None = None
    steps_apart: int | None = None
    save_s: float | None = None
    n_bytes: int | None = None

    @property
    def step_s(self) -> float | None:
        """Seconds from one training step to the next, saves included."""
        if not self.interval_s or not self.steps_apart:
            return None
        return self.interval_s / self.steps_apart

    @property
    def why_unknown(self) -> str:
        """Why there is no interval."""
        if self.n_steps < 2:
            return "fewer than two saves: how often this run saves cannot be measured yet"
        return (
            "how often this run saves is unknown: its steps are less than a second apart, perhaps "
            "the times of a copy"
        )


@dataclass(frozen=True, slots=True)
class _Saved:
    number: int
    first_s: float
    last_s: float
    n_bytes: int


def measured(
    root: str, storage: StorageOptions = StorageOptions(), *, pattern: str | None = None
) -> Measured:
    """Measurements of the steps under a root.

    Raises `StorageError`, and `UsageError` for a path that is no root.
    Cost: two listings, and one for each of at most `MOST_STEPS` steps.
    """
    with open_store(root, storage) as store:
        compiled = compile_pattern(pattern)
        check_has_steps(store, list_root(store, compiled))
        return measured_in(store, pattern)


def measured_in(store: Store, pattern: str | None = None) -> Measured:
    """See `measured`."""
    saved = sorted(_saved(store, pattern), key=lambda one: one.number)
    if not saved:
        return Measured(0)
    pairs = [pair for pair in pairwise(saved) if pair[1].last_s > pair[0].last_s]
    interval_s = _median(later.last_s - sooner.last_s for sooner, later in pairs)
    n_bytes = _whole(_median(one.n_bytes for one in saved))
    if len(saved) > 1 and (interval_s is None or interval_s < 1):
        return Measured(len(saved), n_bytes=n_bytes)
    return Measured(
        n_steps=len(saved),
        interval_s=interval_s,
        steps_apart=_whole(_median(later.number - sooner.number for sooner, later in pairs)),
        save_s=_median(one.last_s - one.first_s for one in saved),
        n_bytes=n_bytes,
    )


def _saved(store: Store, pattern: str | None) -> Iterator[_Saved]:
    for step in list_root(store, compile_pattern(pattern)).steps[:MOST_STEPS]:
        # Files that ckptctl writes into a step later are not part of the save.
        files = [file for file in list_step(store, step.name) if not is_own(file.path)]
        times = [one.mtime_s for one in files if one.mtime_s is not None]
        if times:
            yield _Saved(step.number, min(times), max(times), sum(one.size for one in files))


def _median(values: Iterator[float] | Iterator[int]) -> float | None:
    known = sorted(map(float, values))
    middle = len(known) // 2
    return (known[middle] + known[~middle]) / 2 if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
