"""The documents that `ckptctl run` keeps: its state, and the lease of its holder.

They are data from outside: read strictly and within bounds. They hold no command and no pid
that is signalled, and a limit below a built-in one has no effect.
"""

# Annotations stay objects, so that reading a document evaluates no string as code.
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypedDict

from ckptctl.errors import OwnFileUnreadable
from ckptctl.formats.own.files import read_back
from ckptctl.formatting import duration
from ckptctl.model import Count, Id, NonNegative, Positive, Time

STATE_SCHEMA = "ckptctl.supervisor/2"
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


class Decision(StrEnum):
    """What the supervisor does after an attempt."""

    DONE = "done"
    RESTART = "restart"
    STOPPED = "stopped"
    NEVER = "never-restart"
    GIVEN_UP = "given-up"
    WAIT = "wait-for-capacity"

    @property
    def as_end(self) -> str:
        """The decision as the end of a run, for a message."""
        return _ENDS[self]


_ENDS = {
    Decision.DONE: "done",
    Decision.RESTART: "stopped before a restart",
    Decision.STOPPED: "stopped",
    Decision.NEVER: "not restarted",
    Decision.GIVEN_UP: "given up",
    Decision.WAIT: "waiting for capacity",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of a job: when it started, how long it ran, how it ended, what followed."""

    number: Positive
    """Counted from 1, over all invocations of `run`."""
    started_at: Time
    """When it was started."""
    seconds: NonNegative = 0.0
    """How long it ran, as far as that is recorded."""
    exit_code: Count | None = None
    """The exit code of the job, 128 + N for signal N; null while it runs, or where its supervisor
    was killed."""
    step: Count | None = None
    """The newest usable step after it."""
    inspected: bool = False
    """`ckptctl run` could inspect the root after it."""
    progress: bool = False
    """`ckptctl run` found a usable step after it that is newer than any before."""
    free: bool = False
    """It cost nothing of the budget of `ckptctl run`."""
    left: Count | None = None
    """Restarts without progress that were left after it."""
    decision: Decision | None = None
    """What `ckptctl run` did next; null while it runs, and where none supervised it."""
    reason: str = ""
    """Why, in one line."""
    cause: str | None = None
    """The class of failure in its logs, such as `infra-node`, `hang`, or the error that its ledger
    recorded; null where unknown."""
    section: str | None = None
    """The section in which it hung: `setup`, `step`, `checkpoint`; null otherwise."""
    ranks: tuple[Count, ...] = ()
    """The ranks at fault, as far as the evidence decides."""
    nodes: tuple[str, ...] = ()
    """The nodes at fault, as far as the evidence decides."""
    host: str = ""
    """The machine that supervised it; empty where none did."""
    allocation: str = ""
    """The nodes that it had, in the scheduler's short form; may be empty."""
    world_size: Count | None = None
    """The ranks that it had; null where that is not known."""

    @property
    def sentence(self) -> str:
        """How it ended and what follows, in one line."""
        none = (
            "no usable step" if self.inspected else "the storage did not answer which steps exist"
        )
        step = none if self.step is None else f"newest usable step {self.step}"
        newer = " (newer)" if self.progress else ""
        restarted = self.cause is not None and self.decision is Decision.RESTART
        cause = f"{self.cause}, " if restarted else ""
        return (
            f"attempt {self.number} ended with {self.exit_code} after {duration(self.seconds)}, "
            f"{step}{newer}: {self.decision}, {cause}{self.reason}"
        )


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


@dataclass(frozen=True, slots=True)
class SectionTimes:
    """What earlier attempts needed in one section of the job."""

    n: Count = 0
    """Reports of sound ranks from it."""
    longest_s: NonNegative = 0.0
    """The longest time between two."""


class SupervisorDocument(TypedDict):
    """The state of a supervised run, in one revision."""

    run: Id
    """The name of the run; the marker of its processes begins with it."""
    root: str
    """The root, as the machine that wrote this names it."""
    best: Count | None
    """The newest step that was ever usable."""
    not_finite: list[Count]
    """The steps that are no progress: they were saved when the losses were NaN or infinite."""
    owner: OwnerDocument | None
    """Who supervises the job; null when nobody does."""
    attempts: list[Attempt]
    """The attempts, in order; the oldest are dropped first."""
    excluded: list[ExcludedDocument]
    """The nodes that were taken out of the job, in order."""
    resets: list[ResetDocument]
    """When the budget was reset, in order."""
    sections: dict[str, SectionTimes]
    """What the limits of sections are learned from."""


class LeaseDocument(TypedDict):
    """The sign of life of a `ckptctl run`."""

    owner: Id
    """Its name."""
    beat: Count
    """Counts the renewals."""


def read_state(data: bytes) -> SupervisorDocument:
    """The state; raises `OwnFileUnsupported` for another version, else `OwnFileUnreadable`."""
    state = read_back(
        data, STATE_SCHEMA, SupervisorDocument, max_objects=_MAX_OBJECTS, numbers="finite"
    )
    numbers = [attempt.number for attempt in state["attempts"]]
    if len(numbers) > MAX_ATTEMPTS:
        raise OwnFileUnreadable(f"it holds more than {MAX_ATTEMPTS:,} attempts")
    if any(later != number + 1 for number, later in pairwise(numbers)):
        raise OwnFileUnreadable("its attempts are not in order")
    return state
