"""What a job resumes and saves with, and where it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import StorageError
from ckptctl.storage.contract import Store
from ckptctl.train.agreement import Decision, Rejected, Selection
from ckptctl.train.restoring import Inventory, Policies, Progress
from ckptctl.train.state import Parts, RankPosition

Tell = Callable[[str], None]
"""Prints one line for the person who started the job."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a job goes on: after `step`, which is 0 for a fresh run.

    `path` is the step that was loaded, None for a fresh run. `tokens` and `samples` are
    what the run had consumed, 0 where the step holds no count. `rejected` are the newer
    steps that were not taken. `report` is the document at `report_path`. In a replay `last`
    is the last step to train, and the report is written nowhere.
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
        """Whether the run begins here."""
        return self.path is None


@dataclass(frozen=True, slots=True)
class Job:
    """What a resume works with: the roots, the ranks, what they hold, and the caller's policies.

    `root` is the one that is held and saved to, `stores` are all roots by address, in
    order of preference. `later` opens `root` with one short try, for what is written beside
    training.
    """

    root: str
    store: Store
    group: ProcessGroup
    position: RankPosition
    parts: Parts
    policies: Policies
    selection: Selection
    tell: Tell
    later: Store
    stores: Mapping[str, Store]

    def tolerated(self, url: str) -> tuple[type[StorageError], ...]:
        """The errors of a root that do not stop a resume: all of an optional one."""
        return (StorageError,) if url in self.selection.roots.optional else ()


@dataclass(frozen=True, slots=True)
class Restored:
    """The step that was decided on, and is now in the objects of the script."""

    decision: Decision
    rejected: tuple[Rejected, ...]
    saved: Progress
    inventory: Inventory
