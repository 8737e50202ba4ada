"""The job that resumes and saves, and the point from which it continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import StorageError
from ckptctl.inspection.open_step import OpenStep
from ckptctl.options import TrainOptions
from ckptctl.storage.contract import Store
from ckptctl.train.agreement import Rejected, ResumeDecision, Selection
from ckptctl.train.restoring import Inventory, SavedProgress
from ckptctl.train.state import Parts, RankPosition

if TYPE_CHECKING:
    from ckptctl.train.abandoning import Branch

Tell = Callable[[str], None]
"""Prints one line for the operator."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a job continues: after `step`, which is 0 for a fresh run.

    `path` is the loaded step, None for a fresh run. `tokens` and `samples` are the counts
    that the run had consumed, 0 if the step has none. `rejected` are newer steps that were
    not chosen. `report` is the document at `report_path`. In a replay `last` is the last
    step to train, and no report is written.
    """

    step: int
    tokens: int
    samples: int
    path: str | None
    fell_back: bool
    rejected: tuple[Rejected, ...]
    report: Mapping[str, Any]
    report_path: str | None
    last: int | None = None

    @property
    def fresh(self) -> bool:
        """Whether the run starts at step 0."""
        return self.path is None


@dataclass(frozen=True, slots=True)
class Job:
    """The environment of a resume: roots, ranks, their objects, and the caller's options.

    `root` is held and saved to; `stores` are all roots by address, in order of preference.
    `later` opens `root` with a short timeout and no retries, for writes beside training.
    """

    root: str
    store: Store
    group: ProcessGroup
    position: RankPosition
    parts: Parts
    options: TrainOptions
    selection: Selection
    tell: Tell
    later: Store
    stores: Mapping[str, Store]

    def tolerated(self, url: str) -> tuple[type[StorageError], ...]:
        """The errors of a root that do not prevent a resume: all those of an optional root."""
        return (StorageError,) if url in self.selection.roots.optional else ()


@dataclass(frozen=True, slots=True)
class Restored:
    """The chosen step, after it was restored into the objects of the script.

    `opened` is the step as this rank read it, None for a fresh run. `branches` are what the
    resume abandons, on rank 0, at the time of the decision.
    """

    decision: ResumeDecision
    rejected: tuple[Rejected, ...]
    saved: SavedProgress
    inventory: Inventory
    opened: OpenStep | None = None
    branches: tuple[Branch, ...] = ()
