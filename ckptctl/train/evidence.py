"""Evidence of earlier attempts against a step, and steps of an abandoned branch.

A step after which two attempts failed in the same way, soon after they had resumed from
it, is marked rejected: it is passed over, and stays where it is. Evidence names the digests
of the metadata that was loaded, as marks do: what followed an older save of the same number
says nothing against the one that lies there now. A failure that followed another step too,
of whatever save, is the script's and no step's. Signals, preemption and ends that nobody
knows anything of never count.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.errors import CkptctlError, StorageError
from ckptctl.findings import Report
from ckptctl.formats.frameworks.layouts import StepName, step_name
from ckptctl.formats.own.marks import MARKS_FOLDER, MarkKind
from ckptctl.inspection.inspecting import Inspection, inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Level
from ckptctl.options import Requirements
from ckptctl.selection.fencing import Token, check_token
from ckptctl.selection.history import ATTEMPTS_FOLDER
from ckptctl.selection.marking import check_inspected, new_mark, put_mark
from ckptctl.selection.retention import ASIDE_FOLDER
from ckptctl.selection.roots import list_root
from ckptctl.storage.contract import Folders, Kind, Store
from ckptctl.storage.opening import base_name, join_url
from ckptctl.train.ledger import Row

WITHIN_STEPS = 20
"""A failure so soon after a resume may be the fault of the step that was loaded."""

NOT_FINITE = "non-finite loss"

Attempts = tuple[tuple[str, tuple[Row, ...]], ...]
"""What `read_attempts` gives: oldest attempt first."""

_OF_OTHERS = ("DistBackendError", "DistNetworkError", "DistStoreError", "OutOfMemoryError")
_WORDS_OF_OTHERS = ("connection closed", "connection reset", "timed out", "gloo", "nccl")


def signature_of(error: BaseException) -> str | None:
    """What two failures have in common that are the same; None for one that says nothing.

    The end of another rank, of the storage or of the memory speaks against no step.
    """
    if not isinstance(error, Exception) or isinstance(error, (CkptctlError, OSError, MemoryError)):
        return None
    said = str(error).lower()
    if type(error).__name__ in _OF_OTHERS or any(word in said for word in _WORDS_OF_OTHERS):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name}" if frames else ""
    return f"{type(error).__module__}.{type(error).__qualname__}{where}".removeprefix("builtins.")


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed soon after it had resumed from `step`.

    `metadata` are the SHA-256 of the metadata files that it loaded, by path.
    """

    attempt: str
    step: int
    metadata: Mapping[str, str]
    evidence: str


def failures_in(attempts: Attempts) -> Iterator[Failure]:
    """Yield at most one failure for each attempt: the first that says something."""
    for attempt, events in attempts:
        resumed: Row = next((e for e in events if e.get("event") == "resumed"), {})
        step, metadata = resumed.get("step"), resumed.get("metadata")
        if not isinstance(step, int) or not isinstance(metadata, dict):
            continue
        for event in events:
            evidence, at = event.get("evidence"), event.get("step")
            failed = event.get("event") == "failed" and isinstance(evidence, str)
            if failed and isinstance(at, int) and 0 <= at - step <= WITHIN_STEPS:
                yield Failure(attempt, step, metadata, str(evidence))
                break


def proven(attempts: Attempts) -> Mapping[int, tuple[tuple[Failure, ...], ...]]:
    """For a step: failures of two attempts or more, with one evidence, after one save of it.

    Evidence that another step has, too, is left out.
    """
    steps_of: dict[str, set[int]] = {}
    held: dict[tuple[int, str, str], list[Failure]] = {}
    for failure in failures_in(attempts):
        steps_of.setdefault(failure.evidence, set()).add(failure.step)
        save = repr(sorted(failure.metadata.items()))
        held.setdefault((failure.step, save, failure.evidence), []).append(failure)
    found: dict[int, list[tuple[Failure, ...]]] = {}
    for (step, _, evidence), against in held.items():
        if len(against) >= 2 and len(steps_of[evidence]) == 1:
            found.setdefault(step, []).append(tuple(against))
    return {step: tuple(each) for step, each in found.items()}


def reject_proven(held: Held, store: Store, attempts: Attempts) -> tuple[tuple[Report, bool], ...]:
    """Mark the steps of a root rejected that the ledgers prove bad; each, and whether it was.

    A step that bears a word of a person already keeps it. No mark is written where the root
    is another than the held one and cannot be written to. Raises `Fenced`, `StorageError`.
    Cost: a look at `listing` and a write for each step that is marked.
    """
    against = proven(attempts)
    if not against:
        return ()
    done = []
    for named in list_root(store).steps:
        if named.number not in against or _spoken(store, named.name):
            continue
        report = _inspect(store, named).report
        there = dict(report.digests)
        failures = next((one for one in against[named.number] if one[0].metadata == there), None)
        if failures is None:
            continue
        try:
            mark_held(
                held,
                store,
                named.name,
                report,
                MarkKind.REJECTED,
                reason=f"{len(failures)} attempts that resumed from it failed alike within "
                f"{WITHIN_STEPS} steps: {failures[0].evidence}",
                evidence=[
                    join_url(held.store.url, f"{ATTEMPTS_FOLDER}/{one.attempt}.jsonl")
                    for one in failures[:8]
                ],
            )
        except StorageError:
            if store is held.store:
                raise
            done.append((report, False))
        else:
            done.append((report, True))
    return tuple(done)


def _spoken(store: Store, name: str) -> bool:
    """Whether anybody has accepted or rejected the step before: then it is not for us to say."""
    try:
        entries = store.list_dir(f"{name}/{MARKS_FOLDER}")
    except StorageError:
        return False
    words = (MarkKind.REJECTED.value, MarkKind.ACCEPTED.value)
    return any(f"-{word}-" in base_name(entry.path) for entry in entries for word in words)


@dataclass(frozen=True, slots=True)
class Held:
    """The root that an attempt holds, by its token: it may write there, and mark elsewhere."""

    store: Store
    token: Token

    def check(self) -> None:
        """Raise `Fenced` where another attempt holds the root."""
        check_token(self.store, self.token)


@dataclass(frozen=True, slots=True)
class NewerStep:
    """A step that `pick` would take before the one resumed from, as it was when that was decided.

    `marks` are the ids of the marks that stand, `superseded` says that one of them rules
    the step out already.
    """

    name: str
    report: Report
    marks: tuple[str, ...]
    superseded: bool

    @property
    def state(self) -> tuple[object, ...]:
        """What differs where somebody has saved, completed or marked the step since."""
        return self.report.url, self.report.digests, self.marks


@dataclass(frozen=True, slots=True)
class Branch:
    """What one root holds of the branch that a resume abandons.

    `warning` is why that is not known, of an optional root alone.
    """

    store: Store
    steps: tuple[NewerStep, ...]
    warning: str | None = None

    @property
    def states(self) -> tuple[object, ...]:
        """What differs where the branch has changed since."""
        return tuple(one.state for one in self.steps)


def newer_steps(
    store: Store,
    step: int | None,
    path: str | None,
    digests: tuple[tuple[str, str], ...] = (),
    *,
    preferred: bool = False,
) -> tuple[NewerStep, ...]:
    """The steps of a root that come before `step`, newest first; all where the run begins.

    Of one number the later attempt comes first, and so does another save of it in a root
    that is `preferred` to that of `path`; `digests` are those of the save that lies there.
    Raises `StorageError` for a step that cannot be inspected. Cost: one listing, and a look
    at `listing` for each of them.
    """
    own = path is not None and path == join_url(store.url, base_name(path))
    chosen = step_name(base_name(path)) if path is not None and own else None
    last_attempt = -1.0 if preferred else math.inf
    last_attempt = chosen.attempt if chosen else last_attempt
    newer = []
    for named in list_root(store).steps:
        if step is not None and (named.number, named.attempt) <= (step, last_attempt):
            continue
        looked = _inspect(store, named)
        check_inspected(looked.report)
        if named.number == step and not own and looked.report.digests == digests:
            continue
        marks = looked.notes.marks if looked.notes else ()
        superseded = any(one.word is MarkKind.SUPERSEDED for one in marks)
        ids = tuple(one.id for one in marks)
        newer.append(NewerStep(named.name, looked.report, ids, superseded))
    return tuple(newer)


def supersede(held: Held, branch: Branch, step: int | None) -> tuple[int, ...]:
    """Rule out the steps of the abandoned branch in one root; their numbers, oldest first.

    `branch` is what was found when the step to resume from was decided: what an
    attempt that took the root over since has saved is not in it. A step with metadata is
    marked, and so is an interrupted save on an object store, where its metadata may still
    be on the way. On a file system an interrupted save is moved aside: a process that
    wakes up finds no folder to publish it in.

    Raises `Fenced` before the first mark that another attempt would have to bear.
    """
    why = "the run began anew" if step is None else f"the run went on from step {step}"
    done = []
    for one in reversed(branch.steps):
        number = one.report.number
        if one.superseded or number is None:
            continue
        store = branch.store
        if one.report.digests or (store.kind is Kind.OBJECT and one.report.interrupted):
            mark_held(held, store, one.name, one.report, MarkKind.SUPERSEDED, reason=why)
        elif one.report.interrupted and not one.marks and store.folders is not None:
            held.check()
            move_aside(store.folders, held.token, one.name)
        else:
            continue
        done.append(number)
    return tuple(done)


def mark_held(
    held: Held,
    store: Store,
    name: str,
    report: Report,
    word: MarkKind,
    *,
    reason: str,
    evidence: Sequence[str] = (),
) -> None:
    """Mark the save that `report` is about, in whichever root; raises `Fenced`.

    A save that took its place meanwhile has other metadata, and the mark lapses.
    """
    by = f"attempt {held.token.attempt}"
    made = new_mark(report, word, reason=reason, by=by, evidence=evidence)
    held.check()
    put_mark(store, name, made)


def move_aside(folders: Folders, token: Token, name: str) -> str:
    """Rename a folder of the root into `.ckptctl/aside/`, durably; its path there."""
    target = f"{ASIDE_FOLDER}/{name}.{token.number:06}.{os.urandom(2).hex()}"
    folders.move(name, target)
    return target


def _inspect(store: Store, named: StepName) -> Inspection:
    return inspect_step(OpenStep(store, named), Requirements(grace_s=0.0), level=Level.LISTING)
