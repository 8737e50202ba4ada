"""The results of `rerun`: each replay, and where a suspicious value comes from."""

from __future__ import annotations

from dataclasses import dataclass

from ckptctl.model import ExitCode, NextCommand, NonNegative
from ckptctl.rerun.deciding import ReplayNodes, ValueOrigin
from ckptctl.rerun.recording import Comparison


@dataclass(frozen=True, slots=True)
class LoggedLoss:
    """The loss of one step."""

    step: int
    """The training step."""
    loss: float | None
    """The loss; null where it is not finite, or the run failed at this step."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay, and how it compares with the first record."""

    nodes: ReplayNodes
    """Whether it ran on the nodes of the record or on others."""
    names: tuple[str, ...]
    """The names of these nodes."""
    command: tuple[str, ...]
    """The command, as it was started."""
    exit_code: int | None
    """How it ended; null where it was ended after its last step."""
    losses: tuple[LoggedLoss, ...]
    """The losses that it logged, around the suspicious step."""
    compared: Comparison | None
    """How its values compare with those of the first record; null where it logged none."""
    copied_by: str
    """`reflink`, `copy`, or `download` from an object store; empty in a dry run."""
    folder: str
    """Where its output is."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """Where a suspicious value comes from, and the evidence."""

    answer: ValueOrigin | None
    """Where it comes from; null in a dry run."""
    message: str
    """The answer and its reason in one line."""
    root: str
    """The checkpoint root, which no replay used."""
    step: int
    """The suspicious training step."""
    from_step: int
    """The training step from which it was replayed."""
    last_step: int
    """The last step of a replay."""
    losses: tuple[LoggedLoss, ...]
    """The losses of the first record, around the suspicious step."""
    replays: tuple[Replay, ...]
    """The replays, in order; in a dry run those that would come first."""
    scatter: NonNegative | None
    """The largest relative difference between losses of replays on the same nodes: 0 for a
    deterministic job; null where they were replayed once."""
    suspects: tuple[str, ...]
    """The nodes at fault, if it is persistent."""
    excluded: bool
    """The node at fault was excluded."""
    root_read_only: bool
    """Whether the real root was read-only for the job."""
    root_unchanged: bool
    """Whether the real root is the same as before."""
    exit_code: ExitCode
    next_command: NextCommand
