"""The results of a drill: what became of each fault."""

from __future__ import annotations

from ckptctl.data_classes import dataclass
from ckptctl.model import ExitCode, NonNegative


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault, and what followed it."""

    fault: str
    """Its name, such as `rank-killed`."""
    description: str
    """What was done to the job, in one line."""
    detected_s: NonNegative | None
    """Seconds from the fault to the end of the attempt; null where it was not detected."""
    restarted_s: NonNegative | None
    """Seconds from then to the start of the next attempt, with RB-7's checks."""
    expected_step: int | None
    """The newest step that is good after the fault."""
    resumed_from: int | None
    """The step that RB-7 resumed from."""
    lost_steps: int | None
    """Steps that were trained before the fault and had to be trained again."""
    loss: str | None
    """Whether the loss continues as in the run without a fault; a verdict of `loss`."""
    loss_message: str | None
    """Why: how many steps agree, and how closely."""
    cause: str | None
    """What `run` called the cause."""
    section: str | None
    """The section in which the job hung, as `run` named it."""
    ranks: tuple[int, ...]
    """The ranks that `run` named."""
    nodes: tuple[str, ...]
    """The nodes that `run` named."""
    excluded: tuple[str, ...]
    """The nodes that the job was resumed without."""
    world_size: int | None
    """With how many ranks it was resumed; null where the command decides that."""
    runbook_exit_code: int | None
    """How RB-7 ended."""
    problems: tuple[str, ...]
    """What is not as it must be; none where the job survives the fault."""
    folder: str
    """Where its logs and the transcript of RB-7 are."""
    evidence: tuple[str, ...]
    """The files that show why the job hung: stacks, dumps of the flight recorder."""

    @property
    def passed(self) -> bool:
        """Whether the job survives the fault."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Drilled:
    """A drill: the job, the faults, and whether the job survives them."""

    command: tuple[str, ...]
    """The command of the job."""
    root: str
    """The checkpoint root, which the job of the drill did not use."""
    step: int
    """The step that the drill began with."""
    seed: int
    """What determined ranks, moments and bytes."""
    copied_by: str
    """`reflink`, `copy`, or `download` from an object store."""
    root_read_only: bool
    """Whether the real root was read-only for the job."""
    root_unchanged: bool
    """Whether the real root is the same as before the drill."""
    trials: tuple[Trial, ...]
    """The faults, in order; fewer than were asked for where a signal ended the drill."""
    message: str
    """The grade in one line."""
    exit_code: ExitCode
    """The exit code of the command."""
    next_command: str | None
    """The command to run next; null where there is nothing to do."""
