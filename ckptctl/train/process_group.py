"""Communication among the ranks of a job, with time limits.

Through a gloo group of their own, beside whatever the training uses, with a
timeout. What one rank finds out, all know: an error of one is raised in every
one. A job of one process needs no group. What is told is the callers' business.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckptctl.distributed.process_group import place_in
from ckptctl.errors import CkptctlError, RanksLost, UsageError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

PATIENCE_S = 1800.0
"""How long a rank waits for the slowest; one that died is noticed at once."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What one rank came to: a value, or an error in words that all processes understand."""

    value: T | None = None
    error: tuple[type[CkptctlError], str, dict[str, Any]] | None = None

    def raised(self, who: str = "") -> CkptctlError:
        """The error again; `who` is the rank that it happened on."""
        assert self.error is not None  # noqa: S101 - asked for where there is one
        kind, message, fields = self.error
        error = kind.__new__(kind)
        error.__dict__.update(fields)
        error.message = f"{who}{message}"
        error.args = (error.message,)
        return error


def outcome_of(act: Callable[[], T]) -> Outcome[T]:
    """Do it, and keep what comes of it, be it an error of ours."""
    try:
        return Outcome(act())
    except CkptctlError as error:
        return Outcome(error=(type(error), error.message, dict(error.__dict__)))


class Group:
    """The ranks of one job. Every method is called by every rank, in the same order."""

    def __init__(self, rank: int, size: int, handle: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.size = size
        self.handle = handle
        self.host = socket.gethostname()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which looks and decides."""
        return self.rank == 0

    def gather(self, value: T) -> tuple[T, ...]:
        """What every rank has, by rank, on every rank."""
        if self.size == 1:
            return (value,)
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        self._bounded(lambda: dist.all_gather_object(found, value, group=self.handle))
        return tuple(found)

    def most(self, *numbers: int) -> tuple[int, ...]:
        """The largest of each number over all ranks: one small message, cheap at every step."""
        if self.size == 1:
            return numbers
        import torch
        import torch.distributed as dist

        highest = torch.tensor(numbers)
        self._bounded(lambda: dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.handle))
        return tuple(highest.tolist())

    def from_first(self, act: Callable[[], T]) -> T:
        """What rank 0 comes to when it does `act`, on every rank; its error is everyone's."""
        outcome: Outcome[T] = outcome_of(act) if self.is_first else Outcome()
        if self.size > 1:
            import torch.distributed as dist

            told = [outcome]
            self._bounded(lambda: dist.broadcast_object_list(told, group=self.handle, src=0))
            outcome = told[0]
        if outcome.error is not None:
            raise outcome.raised()
        return outcome.value  # type: ignore[return-value]

    def from_all(self, act: Callable[[], T]) -> tuple[T, ...]:
        """What each rank comes to; where one or more fail, the first error is everyone's."""
        outcomes = self.gather((self.host, outcome_of(act)))
        for rank, (host, outcome) in enumerate(outcomes):
            if outcome.error is not None:
                raise outcome.raised(f"rank {rank} on {host}: " if self.size > 1 else "")
        return tuple(outcome.value for _, outcome in outcomes)  # type: ignore[misc]

    def _bounded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except RuntimeError as error:  # what gloo raises, and its timeouts
            raise ranks_lost(error) from error


def ranks_lost(error: BaseException) -> RanksLost:
    """What it means that gloo failed."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return RanksLost(
        f"a rank of this job is gone, or did not come in time ({first[:200]})",
        next_command="ckptctl classify LOG",
    )


def make_group(patience_s: float = PATIENCE_S) -> Group:
    """The group of all ranks of the job that this process belongs to.

    Every rank calls it. Raises `UsageError` where a launcher started several processes
    that do not know of each other yet: each would take itself for the only one.
    """
    try:
        import torch.distributed as dist
    except ModuleNotFoundError:
        known = False  # `resolve` works where torch does not
    else:
        known = dist.is_available() and dist.is_initialized()
    if not known:
        place = place_in(os.environ)
        if place is not None:
            raise UsageError(
                f"{place.size} processes were started, and they do not know of each other: "
                "call torch.distributed.init_process_group() before ckptctl.train"
            )
        return Group(0, 1, None)
    if dist.get_world_size() == 1:
        return Group(0, 1, None)
    try:
        handle = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))
    except RuntimeError as error:
        raise ranks_lost(error) from error
    return Group(dist.get_rank(), dist.get_world_size(), handle)
