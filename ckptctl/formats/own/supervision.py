"""The documents that `ckptctl run` keeps: its state, and the lease of its holder.

They are data from outside: read strictly and within bounds. They hold no command and no pid
that is signalled, and a limit below a built-in one has no effect.
"""

# Annotations stay objects, so that reading a document evaluates no string as code.
from itertools import pairwise
from typing import NotRequired, TypedDict

from ckptctl.errors import OwnFileUnreadable
from ckptctl.formats.own.files import read_back
from ckptctl.model import Count, Id, Message, Positive, Time

STATE_SCHEMA = "ckptctl.supervisor/1"
LEASE_SCHEMA = "ckptctl.lease/1"

MAX_ATTEMPTS = 1_000
"""Attempts that a state holds; the oldest are dropped first."""
MAX_STATE_BYTES = 4 << 20
MAX_LEASE_BYTES = 4 << 10
_MAX_OBJECTS = 16 * MAX_ATTEMPTS


class OwnerDocument(TypedDict):
    """The `ckptctl run` that supervises the job."""

    id: Id
    """Its name, unique among all."""
    host: str
    """The name of its machine."""
    machine: str
    """The boot and the pid namespace of its machine; empty where they are unknown."""
    pid: Positive
    """Its process."""
    started: Count
    """When that process began, in clock ticks since the machine booted."""
    root: str
    """The root, as that machine names it."""


class AttemptDocument(TypedDict):
    """One attempt of the job."""

    number: Positive
    """Counted from 1, over all invocations."""
    started_at: Time
    """When it was started."""
    host: str
    """The machine that supervised it."""
    milliseconds: Count
    """How long it ran; 0 while it runs, or where its supervisor was killed."""
    exit_code: Count | None
    """The exit code of the job; null while it runs, or where its supervisor was killed."""
    step: Count | None
    """The newest usable step after it."""
    inspected: bool
    """The root could be inspected after it."""
    progress: bool
    """That step is newer than any before."""
    free: bool
    """It cost nothing of the budget."""
    decision: str | None
    """What followed; null while it runs."""
    reason: str
    """Why, in one line."""
    cause: str | None
    """The class of failure; null where unknown."""
    section: str | None
    """The section in which it hung."""
    ranks: list[Count]
    """The ranks at fault."""
    nodes: list[str]
    """The nodes at fault."""
    allocation: str
    """The nodes that the job had, in the scheduler's short form."""
    world_size: Count | None
    """The ranks that it had; null where `run` does not choose them."""


class ExcludedDocument(TypedDict):
    """A node that was taken out of the job."""

    node: str
    """Its name."""
    cause: str
    """Why: a class of failure, `hang` or `suspect`."""
    at: Time
    """When that was decided."""
    attempt: Positive
    """The attempt after which it was decided."""


class ResetDocument(TypedDict):
    """A person's word that the budget is full again."""

    at: Time
    """When it was given."""
    by: str
    """Who gave it."""
    reason: str
    """Why."""
    after: Count
    """The number of the last attempt before it."""


class SectionDocument(TypedDict):
    """What earlier attempts needed in one section of the job."""

    n: Count
    """Reports of sound ranks from it."""
    longest_milliseconds: Count
    """The longest time between two."""


class SupervisorDocument(TypedDict):
    """The state of a supervised run, in one revision."""

    not_finite: NotRequired[list[Count]]
    """The steps that are no progress: they were saved when the losses were NaN or infinite; absent
    without any."""
    run: Id
    """The name of the run; the marker of its processes begins with it."""
    root: str
    """The root, as the machine that wrote this names it."""
    best: Count | None
    """The newest step that was ever usable."""
    owner: OwnerDocument | None
    """Who supervises the job; null when nobody does."""
    attempts: list[AttemptDocument]
    """The attempts, in order; the oldest are dropped first."""
    excluded: list[ExcludedDocument]
    """The nodes that were taken out of the job, in order."""
    resets: list[ResetDocument]
    """When the budget was reset, in order."""
    sections: dict[str, SectionDocument]
    """What the limits of sections are learned from."""


class CauseDocument(TypedDict):
    """Why an attempt failed, as far as its logs show."""

    failure: str
    """The class of the failure."""
    domain: str
    """What failed: the infrastructure, the job, or neither."""
    restart: str
    """Whether a restart can help."""
    confidence: str
    """How certain the class is: `high`, `medium` or `low`."""
    rule: str
    """The rule that decided; empty where none did."""
    message: Message
    rank: Count | None
    """The rank that failed first."""
    nodes: list[str]
    """The nodes that are suspected."""


class LeaseDocument(TypedDict):
    """The sign of life of a `ckptctl run`."""

    owner: Id
    """Its name."""
    beat: Count
    """Counts the renewals."""


def read_state(data: bytes) -> SupervisorDocument:
    """The state; raises `OwnFileUnsupported` for another version, else `OwnFileUnreadable`."""
    state = read_back(data, STATE_SCHEMA, SupervisorDocument, max_objects=_MAX_OBJECTS)
    numbers = [attempt["number"] for attempt in state["attempts"]]
    if len(numbers) > MAX_ATTEMPTS:
        raise OwnFileUnreadable(f"it holds more than {MAX_ATTEMPTS:,} attempts")
    if any(later != number + 1 for number, later in pairwise(numbers)):
        raise OwnFileUnreadable("its attempts are not in order")
    return state
