"""What do earlier attempts say against a step, and which steps are of an abandoned branch?

A step after which two attempts failed in the same way, soon after they had resumed from
it, is marked rejected: it is passed over, and stays where it is. Evidence names the digests
of the metadata that was loaded, as marks do: what followed an older save of the same number
says nothing against the one that lies there now. A failure that followed another step too,
of whatever save, is the script's and no step's. Signals, preemption and ends that nobody
knows anything of never count.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptctl.errors import CkptctlError, StorageError
from ckptctl.findings import Verdict
from ckptctl.formats.marks import MARKS_FOLDER, Word
from ckptctl.judge.arguments import conditions
from ckptctl.judge.looking import look
from ckptctl.judge.marking import mark
from ckptctl.judge.roots import list_root
from ckptctl.model import Level
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name, join_url
from ckptctl.train.ledger import ATTEMPTS_FOLDER, Event, read_attempts

WITHIN_STEPS = 20
"""A failure so soon after a resume may be the fault of the step that was loaded."""

NOT_FINITE = "non-finite loss"

Attempts = tuple[tuple[str, tuple[Event, ...]], ...]
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
        resumed: Event = next((e for e in events if e.get("event") == "resumed"), {})
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


def reject_proven(store: Store, options: Mapping[str, Any], by: str) -> tuple[int, ...]:
    """Mark the steps rejected that the ledgers prove bad; their numbers.

    A step that bears a word of a person already keeps it. Cost: the ledgers of the newest
    attempts; two looks at `listing` and a write for each step that is marked.
    """
    against = proven(read_attempts(store))
    if not against:
        return ()
    done = []
    for named in list_root(store).steps:
        if named.number not in against or _spoken(store, named.name):
            continue
        looked = look(store, named, conditions((), None, None, 0.0), level=Level.LISTING)
        there = dict(looked.report.digests)
        failures = next((one for one in against[named.number] if one[0].metadata == there), None)
        if failures is None:
            continue
        mark(
            join_url(store.url, named.name),
            Word.REJECTED,
            reason=f"{len(failures)} attempts that resumed from it failed alike within "
            f"{WITHIN_STEPS} steps: {failures[0].evidence}",
            evidence=[
                join_url(store.url, f"{ATTEMPTS_FOLDER}/{one.attempt}.jsonl")
                for one in failures[:8]
            ],
            by=by,
            **options,
        )
        done.append(named.number)
    return tuple(done)


def _spoken(store: Store, name: str) -> bool:
    """Whether anybody has accepted or rejected the step before: then it is not for us to say."""
    try:
        entries = store.list_dir(f"{name}/{MARKS_FOLDER}")
    except StorageError:
        return False
    words = (Word.REJECTED.value, Word.ACCEPTED.value)
    return any(f"-{word}-" in base_name(entry.path) for entry in entries for word in words)


def supersede_newer(
    store: Store, step: int, options: Mapping[str, Any], by: str
) -> tuple[int, ...]:
    """Mark every step newer than the one resumed from; their numbers, oldest first.

    What never became a step (no metadata) needs no mark: it cannot be taken.
    """
    done = []
    for named in reversed(list_root(store).steps):
        if named.number <= step:
            continue
        looked = look(store, named, conditions((), None, None, 0.0), level=Level.LISTING)
        said = looked.notes.marks if looked.notes else ()
        if any(one.word is Word.SUPERSEDED for one in said):
            continue
        # One that could not be looked at is no reason to go on: `mark` says so.
        if not looked.report.digests and looked.report.verdict is not Verdict.UNKNOWN:
            continue
        mark(
            looked.report.url,
            Word.SUPERSEDED,
            reason=f"the run went on from step {step}",
            by=by,
            **options,
        )
        done.append(named.number)
    return tuple(done)
