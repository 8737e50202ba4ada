"""The results of `preflight`. Frozen results that the command line only prints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ckptctl.errors import NothingToResume
from ckptctl.model import ExitCode, Message, NextCommand, NonNegative
from ckptctl.selection.choosing import NoStepReason
from ckptctl.selection.picking import Pick


class CheckOutcome(StrEnum):
    """What one check came to: a `failed` check stops the job, a `warning` does not."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what it inspected, what it came to, in one line; `exit_code` where it failed."""

    name: str
    """What is checked: `step`, `state`, `storage`, `probe`, `capacity`, …"""
    outcome: CheckOutcome
    """How it ended."""
    message: str
    """The result in one line."""
    exit_code: int = 0
    """The exit code of a failed check."""
    next_command: NextCommand = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one process saw of the storage. Bytes are None where the storage has no end."""

    host: str
    """The name of the machine."""
    mount: str | None = None
    """What is mounted where; null where that is unknown."""
    read_only: bool = False
    """The mount is read-only."""
    free: int | None = None
    """Bytes that can be written."""
    n_names: int = 0
    """Names under the root."""
    listing: str = ""
    """A digest of those names."""
    metadata: str = ""
    """A digest of the chosen step's metadata."""
    read_bytes: int = 0
    """Bytes read from the step."""
    read_s: NonNegative = 0.0
    """Seconds that took."""
    error: str | None = None
    """Why this process could not read; null where it could."""
    error_code: int = 0
    """The exit code of that error; 0 without one."""


class Capacity(StrEnum):
    """The ranks that there are, against those that saved the step.

    With fewer ranks a person decides: wait for the rest, or resume with fewer.
    """

    AS_SAVED = "as-saved"
    SMALLER = "smaller"
    LARGER = "larger"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Preflight:
    """Whether the job can start, and from where."""

    root: str
    """The root as given."""
    checks: tuple[Check, ...]
    """The checks that ran."""
    nodes: tuple[NodeFacts, ...]
    """What each process found, by rank."""
    pick: Pick
    """The answer of `ckptctl pick`."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand
    capacity: Capacity = Capacity.UNKNOWN
    """The number of ranks compared with those that saved the step. With fewer ranks a person
    decides: wait for the rest, or resume with fewer."""

    @property
    def path(self) -> str | None:
        """The step to resume from; null where the job cannot start, or starts fresh."""
        return None if self.exit_code or self.pick.chosen is None else self.pick.path

    @property
    def step(self) -> int | None:
        """Its step number."""
        return None if self.path is None else self.pick.step

    @property
    def reason(self) -> NoStepReason | None:
        """Why `pick` chooses no step, in one word; null where it chooses one."""
        return self.pick.reason

    @property
    def chosen(self) -> str:
        """The path to resume from; raises `NothingToResume` where there is none."""
        if self.path is None:
            raise NothingToResume(
                self.message,
                exit_code=self.exit_code,
                next_command=self.next_command,
                reason=self.reason or "",
            )
        return self.path
