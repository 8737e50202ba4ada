"""The results of `run`: each attempt of the job, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ckptctl.formatting import duration
from ckptctl.model import ExitCode, NextCommand, NonNegative, Positive, Time


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


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of the job: when it started, how long it ran, how it ended, what followed."""

    number: Positive
    """Counted from 1."""
    started_at: Time
    """When it was started."""
    seconds: NonNegative
    """How long it ran."""
    exit_code: int
    """The exit code of the job; 128 + N for signal N."""
    step: int | None
    """The newest usable step after it."""
    inspected: bool
    """The root could be inspected after it."""
    progress: bool
    """That step is newer than any before."""
    left: int
    """Restarts without progress that are left."""
    decision: Decision
    """What the supervisor did next."""
    reason: str
    """Why, in one line."""
    cause: str | None = None
    """The class of failure in its logs, such as `infra-node`, or `hang`; null where unknown."""
    section: str | None = None
    """The section in which it hung: `setup`, `step`, `checkpoint`; null otherwise."""
    ranks: tuple[int, ...] = ()
    """The ranks at fault, as far as the evidence decides."""
    nodes: tuple[str, ...] = ()
    """The nodes at fault, as far as the evidence decides."""
    world_size: int | None = None
    """The ranks that it had; null where `run` does not choose them."""

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
            f"{step}{newer}: {self.decision.value}, {cause}{self.reason}"
        )


@dataclass(frozen=True, slots=True)
class Supervised:
    """How the job ended, and after which attempts."""

    command: tuple[str, ...]
    """The command of the job."""
    root: str
    """The root in which progress was measured."""
    attempts: tuple[Attempt, ...]
    """Every attempt of the job, in order; none where it was not started."""
    warnings: tuple[str, ...]
    """Why the progress of the job cannot be measured."""
    message: str
    """How it ended, in one line."""
    exit_code: ExitCode
    next_command: NextCommand
