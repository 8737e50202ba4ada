"""The JSON documents that ckptctl keeps in roots and steps, as typed dictionaries.

Those of seals and marks, of the lines of a ledger and of the events of a runbook are data
classes in `seals`, `marks`, `ledger` and `run_events`.

They are read strictly: `files.read_back` accepts these fields and no others, with these
types. `ckptctl explain ckptctl.seal/1` prints the JSON Schema of one. Each has a field `schema`
more, and all but the resume report a `digest`: the SHA-256 of the document without it.
"""

# Annotations stay objects, so that reading a document evaluates no string as code.
from typing import NotRequired, TypedDict

from ckptctl.distributed.launcher import Cluster
from ckptctl.model import Count, Id, Positive, Sha256, StepNumber, Time


class ProofDocument(TypedDict):
    """A note that all bytes of a step have been compared."""

    tool: str
    """The program that made it, with its version."""
    at: Time
    """When the bytes had been compared."""
    number: StepNumber
    metadata: Sha256 | None
    """A SHA-256 over the metadata files by path, each with its SHA-256."""
    files: Sha256
    """A SHA-256 over the files by path, each with its size and write time."""


class WatchedStep(TypedDict):
    """One step as a watch saw it."""

    name: str
    """Its folder or file under the root."""
    files: Sha256
    """A SHA-256 over the files by path, each with its size and write time."""
    seen: Time
    """When these files were first listed."""
    verdict: str | None
    """What became of the step; null until it is inspected."""


class WatchDocument(TypedDict):
    """What `ckptctl watch` saw of the steps of a root."""

    tool: str
    """The program that made it, with its version."""
    steps: list[WatchedStep]
    """The steps, newest first."""


class RootDocument(TypedDict):
    """The sentinel of a root."""

    run: NotRequired[Id]
    """The id of the run, which its seals name; roots of one run have the same. Absent where a
    seal has not needed it."""
    began_empty: NotRequired[bool]
    """The root held no step when ckptctl first wrote to it."""
    usable_step: NotRequired[Count | None]
    """The first step that ckptctl found usable there; absent before that."""
    tool: str
    """The program that made it, with its version."""
    created_at: Time
    """When ckptctl first wrote to the root."""


class FenceDocument(TypedDict):
    """A token: the highest number holds the root."""

    number: Positive
    """The position in the order of attempts; no two attempts have the same."""
    attempt: str
    """The name of the attempt."""
    at: Time
    """When it took the root over."""
    host: str
    """The machine of its rank 0."""
    pid: Positive
    """The process of its rank 0."""


class LeftBehind(TypedDict):
    """A newer save that a resume listed and did not choose."""

    url: str
    """Its address."""
    number: Count
    """Its step number."""
    metadata: str | None
    """A digest of its metadata; null for a save that had none yet."""


class BranchDocument(TypedDict):
    """A resume of a run with several roots, in the root that the job saves to."""

    attempt: str
    """The name of the attempt that resumed."""
    step: Count | None
    """The step that it resumed from; null for a run that began."""
    at: Time
    """When that was decided."""
    loaded: str | None
    """A digest of the metadata of the save that was loaded."""
    left: list[LeftBehind]
    """The newer saves in the other roots."""


class NotTaken(TypedDict):
    """A newer step that was not loaded."""

    step: StepNumber
    path: str
    """Its address."""
    verdict: str
    """Its verdict."""
    reason: str
    """Why it was not loaded, in one line."""


class RestoredState(TypedDict):
    """What became of the train state."""

    restored: list[str]
    """The kinds that were restored."""
    derived: list[str]
    """The kinds that were computed from others."""
    lost: list[str]
    """The kinds that were not restored."""


class DriftFields(TypedDict):
    """A term in which a job differs from the step that it resumed from."""

    term: str
    """Its name."""
    saved: str
    """The value in the step, as JSON."""
    now: str
    """The value of the job."""


class ResumeDocument(TypedDict):
    """How a job resumed."""

    warnings: NotRequired[list[str]]
    """Roots in which the steps that the resume abandons could not be marked, and why."""
    attempt: str
    """The name of the attempt that resumed."""
    at: Time
    """When it resumed."""
    root: str
    """The root, as the script named it."""
    step: Count | None
    """The step that was loaded; null for a fresh run."""
    path: str | None
    """Its address."""
    tokens: Count | None
    """Tokens that the run had consumed there, where the step states them."""
    fell_back: bool
    """A newer step exists and was not loaded."""
    rejected: list[NotTaken]
    """The newer steps that were not loaded."""
    superseded: list[Count]
    """Newer steps that belong to an abandoned branch from now on."""
    world_size: Positive
    """Ranks of this job."""
    saved_world_size: Count | None
    """Ranks that saved the step, where it states them."""
    previous_attempt: str | None
    """The attempt before, however it ended."""
    state: RestoredState
    """What became of the train state."""
    drift: list[DriftFields]
    """The terms of the contract that differ from those of the step."""
    cluster: Cluster
    """The job, the scheduler and the machine."""
