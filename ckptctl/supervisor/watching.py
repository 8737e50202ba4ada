"""Define what watches an attempt while it runs, and what a watcher reports.

The supervisor asks each watcher about once a second. A watcher that reports a hang has
collected its evidence by then: the supervisor ends the processes of the job next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ckptctl.data_classes import dataclass
from ckptctl.supervisor.processes import Process


@dataclass(frozen=True, slots=True)
class Running:
    """An attempt that is running, and its processes on this node."""

    leader: Process
    """The command itself; its workers are among `processes`."""
    processes: Callable[[], Sequence[Process]]
    """Every living process of the job on this node, by one pass over the process table."""


@dataclass(frozen=True, slots=True)
class Hang:
    """An attempt that must be ended because it does not come further."""

    message: str
    """What did not come for how long, and which rank is at fault, in one line."""
    section: str | None = None
    """`setup`, `step`, `checkpoint` or another section; None outside of sections."""
    ranks: tuple[int, ...] = ()
    """The ranks at fault; none where the evidence does not decide."""
    nodes: tuple[str, ...] = ()
    """The nodes of these ranks."""
    evidence: tuple[str, ...] = ()
    """Paths of the files that were collected: stacks, dumps of the flight recorder."""


@dataclass(frozen=True, slots=True)
class EndedElsewhere:
    """An attempt that must be ended because it goes on no longer on another node."""

    message: str
    """What happened there, in one line."""


Stop = Hang | EndedElsewhere


class Watcher(Protocol):
    """Watches one attempt after the other; called in the main thread only."""

    def prepare(self, attempt: int, logs: Sequence[str]) -> Mapping[str, str]:
        """Forget all that is in progress, and return variables for the environment of the job.

        Called before each attempt (numbered from 1 over all invocations of `run`), when no
        process of an earlier one is left. `logs` are the files that it writes to.
        """
        ...

    def poll(self, running: Running, now_s: float) -> Stop | None:
        """Return why the attempt must be ended, or None; `now_s` is the monotonic clock.

        Must return within a few seconds, except when it collects evidence of a hang.
        Exceptions end the job.
        """
        ...

    def finish(self) -> None:
        """Keep what the attempt taught; called when all its processes have ended."""
        ...
