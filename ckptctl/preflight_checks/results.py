"""What does `preflight` answer? Frozen answers that the command line only prints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ckptctl.errors import NothingToResume
from ckptctl.resharding.advising import Advice
from ckptctl.selection.results import Pick


class Outcome(str, Enum):
    """What one check came to: a `warning` is worth a look, a `failed` check stops the job."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what it looked at, what it came to, in one line; `exit_code` where it failed."""

    name: str
    outcome: Outcome
    message: str
    exit_code: int = 0
    next_command: str | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one process saw of the storage. Bytes are None where the storage has no end.

    `listing` is a digest of the names under the root, `metadata` of the chosen step's
    metadata. `read_bytes` were read in `read_s` seconds from one of its shard files;
    what a cache gave is in there. `error` is why it could not look.
    """

    host: str
    mount: str | None = None
    read_only: bool = False
    free: int | None = None
    n_names: int = 0
    listing: str = ""
    metadata: str = ""
    read_bytes: int = 0
    read_s: float = 0.0
    error: str | None = None
    error_code: int = 0


@dataclass(frozen=True, slots=True)
class Sized:
    """What a load of the chosen step on `world_size` ranks means.

    `lost` are the kinds of train state that exist once per rank and are not restored.
    `resharding` is what is read, None where that is not counted or nothing is resharded.
    `rank_bytes` is an even share of the step. `share` is the number of
    ranks against those that saved, `step_s` the time of a training step if speed goes with it.
    """

    world_size: int
    loads: bool
    lost: tuple[str, ...]
    resharding: Advice | None
    rank_bytes: int
    share: float | None
    step_s: float | None
    message: str


class Capacity(str, Enum):
    """The ranks that there are, against those that saved the step.

    With fewer ranks a person decides: wait for the rest, or resume with fewer.
    """

    AS_SAVED = "as-saved"
    SMALLER = "smaller"
    LARGER = "larger"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Preflight:
    """Whether the job can start, and from where.

    `path` and `step` are None where it cannot, or where the run is fresh. `pick` is
    what was chosen and refused; `nodes` are what each process saw, by rank. `resharding` is
    there where the ranks are not those that saved, and what they would read is known.
    `capacity` compares the ranks with those that saved, and `sizes` says what a load means
    at each number of ranks that was asked about.
    """

    root: str
    path: str | None
    step: int | None
    checks: tuple[Check, ...]
    nodes: tuple[NodeFacts, ...]
    pick: Pick
    resharding: Advice | None
    message: str
    exit_code: int
    next_command: str | None
    capacity: Capacity = Capacity.UNKNOWN
    sizes: tuple[Sized, ...] = ()

    @property
    def chosen(self) -> str:
        """The path to resume from; raises `NothingToResume` where there is none."""
        if self.path is None:
            raise NothingToResume(
                self.message, exit_code=self.exit_code, next_command=self.next_command
            )
        return self.path
