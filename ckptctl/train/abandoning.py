"""Mark the steps that a resume abandons, and the one that it loads.

Resuming from step N abandons the branch of newer steps: they are superseded in every root
of the run, so that no later resume uses them. Step N is confirmed where training goes well from
there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptctl.errors import StorageError
from ckptctl.findings import Report
from ckptctl.formats.frameworks.layouts import StepName, step_name
from ckptctl.formats.own.marks import MarkKind
from ckptctl.inspection.inspecting import Inspection, inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Level
from ckptctl.options import Requirements
from ckptctl.selection.branches import put_resume
from ckptctl.selection.history import Token, check_token
from ckptctl.selection.marking import Save, check_inspected, new_mark, put_mark
from ckptctl.selection.roots import ASIDE_FOLDER, list_root
from ckptctl.storage.contract import Store, StoreKind
from ckptctl.storage.local import LocalStore
from ckptctl.storage.opening import base_name, join_url
from ckptctl.train.restoring import Job


def abandoned_branches(job: Job, chosen: Report | None) -> tuple[Branch, ...]:
    """The steps that `pick` prefers to the chosen one, in each root; on rank 0 only."""
    found = []
    preferred = True
    for url, store in job.stores.items():
        preferred = preferred and (chosen is None or not _lies_in(store, chosen))
        try:
            if url in job.selection.roots.optional and not list_root(store).exists:
                found.append(Branch(store, (), f"{url} does not exist"))
            else:
                newer = newer_steps(store, chosen, preferred=preferred)
                found.append(Branch(store, newer))
        except job.tolerated(url) as error:
            found.append(Branch(store, (), error.message))
    return tuple(found)


def _lies_in(store: Store, chosen: Report) -> bool:
    return chosen.url == join_url(store.url, base_name(chosen.url))


def supersede_all(
    job: Job, held: HeldRoot, chosen: Report | None, branches: Sequence[Branch]
) -> tuple[list[int], list[str]]:
    """Record the resume and supersede the abandoned steps of each root; numbers and warnings.

    The record comes first: it excludes the steps in roots where a mark cannot be written,
    and those not yet marked when this process is killed.
    """
    step = None if chosen is None else chosen.number
    if len(job.stores) > 1:
        others = (branch for branch in branches if branch.store is not job.store)
        left = [newer.report for branch in others for newer in branch.steps]
        digests = () if chosen is None else chosen.digests
        put_resume(job.store, held.token.attempt, step, digests, left)
    numbers: set[int] = set()
    warnings = []
    for branch in branches:
        why = branch.warning
        try:
            numbers.update(tuple(supersede(held, branch, step)))
        except StorageError as error:
            if branch.store is job.store:
                raise
            why = error.message
        if why is not None:
            warnings.append(
                f"{branch.store.url}: steps that this resume abandons were not marked there "
                f"({why}); {job.root} records them, and pick over these roots skips them"
            )
    return sorted(numbers), warnings


@dataclass(frozen=True, slots=True)
class HeldRoot:
    """The root that an attempt holds by its token: it writes there, and marks in others."""

    store: Store
    token: Token

    def mark(
        self,
        store: Store,
        name: str,
        save: Save,
        word: MarkKind,
        *,
        reason: str,
        evidence: Sequence[str] = (),
    ) -> None:
        """Mark a save, in any root; raises `Fenced`.

        The mark names the metadata, so it does not apply to a save that replaces this one
        meanwhile.
        """
        by = f"attempt {self.token.attempt}"
        made = new_mark(save, word, reason=reason, by=by, evidence=evidence)
        check_token(self.store, self.token)
        put_mark(OpenStep(store, name), made)


def confirm(job: Job, token: Token, resumed: Report, reason: str) -> None:
    """Mark the step that an attempt resumed from as confirmed; raises `StorageError`, `Fenced`.

    Nothing is written where the step is gone, was saved again, or is confirmed already. Cost: an
    inspection at `listing`, a read and a write.
    """
    for store in job.stores.values():
        if not _lies_in(store, resumed):
            continue
        name = base_name(resumed.url)
        for named in list_root(store).steps:
            if named.name != name:
                continue
            report = inspect_listed(store, named).report
            if resumed.is_same_save(report) and not report.has_finding("step.confirmed"):
                HeldRoot(job.store, token).mark(
                    store, name, report, MarkKind.CONFIRMED, reason=reason
                )


@dataclass(frozen=True, slots=True)
class NewerStep:
    """A step that `pick` would prefer to the resumed one, as it was when that was decided.

    `marks` are the ids of the marks that apply; `superseded`: one of them already excludes
    the step.
    """

    name: str
    report: Report
    marks: tuple[str, ...]
    superseded: bool


@dataclass(frozen=True, slots=True)
class Branch:
    """The steps of one root that a resume abandons.

    `warning` is why they are unknown, for an optional root only.
    """

    store: Store
    steps: tuple[NewerStep, ...]
    warning: str | None = None

    @property
    def states(self) -> tuple[object, ...]:
        """Values that change when a step is saved, completed or marked."""
        return tuple((newer.report.url, newer.report.digests, newer.marks) for newer in self.steps)


def newer_steps(
    store: Store, chosen: Report | None, *, preferred: bool = False
) -> tuple[NewerStep, ...]:
    """The steps of a root that `pick` prefers to the chosen one, newest first; all for a fresh run.

    Of equal numbers, the later attempt is preferred, and so is a save in a root that is
    `preferred` to that of the chosen step. Raises `StorageError` for a step that cannot be
    inspected. Cost: one listing, and an inspection at `listing` per step.
    """
    own = chosen is not None and _lies_in(store, chosen)
    newer = []
    last_attempt = -1.0 if preferred else math.inf
    if chosen is not None and own:
        named = step_name(base_name(chosen.url))
        last_attempt = named.attempt if named else last_attempt
    number = None if chosen is None else chosen.number
    for named in list_root(store).steps:
        if number is not None and (named.number, named.attempt) <= (number, last_attempt):
            continue
        inspection = inspect_listed(store, named)
        check_inspected(inspection.report)
        is_copy = chosen is not None and inspection.report.digests == chosen.digests
        if is_copy and named.number == number and not own:
            continue
        marks = inspection.notes.marks
        superseded = any(one.word is MarkKind.SUPERSEDED for one in marks)
        ids = tuple(one.id for one in marks)
        newer.append(NewerStep(named.name, inspection.report, ids, superseded))
    return tuple(newer)


def supersede(held: HeldRoot, branch: Branch, step: int | None) -> Iterator[int]:
    """Supersede the abandoned steps of one root; yields their numbers, oldest first.

    `branch` was read when the resumed step was decided, so it excludes saves of a later
    attempt. A step with metadata is marked, and so is an interrupted save on an object
    store, whose metadata may still arrive. On a file system an interrupted save is moved
    aside, so that a process that wakes up cannot publish it.

    Raises `Fenced` before marking a step of another attempt.
    """
    where = "started again from step 0" if step is None else f"continued from step {step}"
    store = branch.store
    for newer in reversed(branch.steps):
        report = newer.report
        if newer.superseded or report.number is None:
            continue
        if report.digests or (store.kind is StoreKind.OBJECT and report.interrupted):
            reason = f"the run {where}"
            held.mark(store, newer.name, report, MarkKind.SUPERSEDED, reason=reason)
        elif report.interrupted and not newer.marks and store.folders is not None:
            check_token(held.store, held.token)
            move_aside(store.folders, held.token, newer.name)
        else:
            continue
        yield report.number


def move_aside(folders: LocalStore, token: Token, name: str) -> str:
    """Move a folder of the root into `.ckptctl/aside/`, durably; its new path."""
    target = f"{ASIDE_FOLDER}/{name}.{token.number:06}.{os.urandom(2).hex()}"
    folders.move(name, target)
    return target


def inspect_listed(store: Store, named: StepName) -> Inspection:
    """An inspection at `listing` that counts no unfinished save as running."""
    return inspect_step(OpenStep(store, named), Requirements(grace_s=0.0), level=Level.LISTING)
