"""Reject a step after which two attempts failed in the same way.

The step is marked rejected if both failures came soon after resuming from it; it is skipped
from then on, but not removed. Evidence names the digests of the loaded metadata, as marks
do: a failure after an older save of the same number does not count against the present one.
A failure that also followed another step is the script's. Signals, preemption and ends
without a known cause do not count.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptctl.errors import CkptctlError, StorageError
from ckptctl.findings import Report
from ckptctl.formats.own.marks import MARKS_FOLDER, MarkKind
from ckptctl.selection.history import ATTEMPTS_FOLDER
from ckptctl.selection.roots import list_root
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name, join_url
from ckptctl.train.abandoning import Held, inspect_listed
from ckptctl.train.ledger import Row

WITHIN_STEPS = 20
"""A failure within this many steps of a resume may be caused by the loaded step."""

NOT_FINITE = "non-finite loss"

Attempts = tuple[tuple[str, tuple[Row, ...]], ...]
"""The attempts as `read_attempts` returns them, oldest first."""

_OF_OTHERS = ("DistBackendError", "DistNetworkError", "DistStoreError", "OutOfMemoryError")
_MESSAGES_OF_OTHERS = ("connection closed", "connection reset", "timed out", "gloo", "nccl")


def signature_of(error: BaseException) -> str | None:
    """A description that is equal for equal failures; None if it proves nothing.

    A lost rank, a failing storage and a lack of memory are no evidence against a step.
    """
    if not isinstance(error, Exception) or isinstance(error, (CkptctlError, OSError, MemoryError)):
        return None
    message = str(error).lower()
    if type(error).__name__ in _OF_OTHERS or any(one in message for one in _MESSAGES_OF_OTHERS):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name}" if frames else ""
    return f"{type(error).__module__}.{type(error).__qualname__}{where}".removeprefix("builtins.")


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed soon after resuming from `step`.

    `metadata` are the SHA-256 of the metadata files that it loaded, by path.
    """

    attempt: str
    step: int
    metadata: Mapping[str, str]
    evidence: str


def failures_in(attempts: Attempts) -> Iterator[Failure]:
    """Yield at most one failure per attempt: the first that has evidence."""
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
    """By step: the failures of at least two attempts with equal evidence after one save of it.

    Evidence that also applies to another step is left out.
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
    """Reject the steps of a root that the ledgers prove bad; each with whether it was marked.

    An accepted or rejected step keeps its mark. A root other than the held one may be
    read-only; then nothing is marked. Raises `Fenced`, `StorageError`. Cost: an inspection
    at `listing` and a write per marked step.
    """
    against = proven(attempts)
    if not against:
        return ()
    done = []
    for named in list_root(store).steps:
        if named.number not in against or _is_marked(store, named.name):
            continue
        report = inspect_listed(store, named).report
        there = dict(report.digests)
        failures = next((one for one in against[named.number] if one[0].metadata == there), None)
        if failures is None:
            continue
        try:
            held.mark(
                store,
                named.name,
                report,
                MarkKind.REJECTED,
                reason=f"{len(failures)} attempts that resumed from it failed in the same way "
                "within "
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


def _is_marked(store: Store, name: str) -> bool:
    """Whether the step is already accepted or rejected; that mark takes precedence."""
    try:
        entries = store.list_dir(f"{name}/{MARKS_FOLDER}")
    except StorageError:
        return False
    words = (MarkKind.REJECTED.value, MarkKind.ACCEPTED.value)
    return any(f"-{word}-" in base_name(entry.path) for entry in entries for word in words)
