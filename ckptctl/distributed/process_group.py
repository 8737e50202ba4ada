"""Combine the shares of several processes into one report.

`torchrun` and `srun` start the same command several times. The processes find each
other by what their launcher put into the environment, and speak through
`torch.distributed` (gloo). While they read, they meet every second: a process that
is gone ends the others with an error, and is never taken for one that found nothing.
What they share is the question of `judge`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ckptctl.errors import MissingExtra, StorageUnavailable

if TYPE_CHECKING:
    from ckptctl.inspection.content import Outcomes

T = TypeVar("T")

PATIENCE_S = 300.0
"""How long one process waits for the slowest; one that died is noticed at once."""

_MEET_EVERY_S = 1.0
_SOME_PORT = 20_000
_N_PORTS = 20_000
_FIRST_NODE = re.compile(r"([^,\[]+)(?:\[([0-9]+))?")


@dataclass(frozen=True, slots=True)
class Place:
    """Which of how many processes this is; `meet_at` is where they meet, None for torch to say."""

    rank: int
    size: int
    meet_at: tuple[str, int] | None = None


def place_in(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher gave this process; None where it is the only one.

    `torchrun` says everything, to a process and to all that it starts: one whose parent
    was told the same belongs to a training process, and must stay out of its job. Under
    `srun` only the variables of the job step count: a batch script has those of the job,
    and is one process.
    """
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and "MASTER_ADDR" in environment:
        alone = int(size) < 2 or _is_of_parent("RANK")
        return None if alone else Place(int(rank), int(size))
    rank = environment.get("SLURM_PROCID", "")
    size = environment.get("SLURM_STEP_NUM_TASKS", "")
    if not (rank.isdecimal() and size.isdecimal() and int(size) > 1):
        return None
    job = environment.get("SLURM_JOB_ID", "0")
    port = _SOME_PORT + (int(job) if job.isdecimal() else 0) % _N_PORTS
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    first = _FIRST_NODE.match(nodes)
    host = first[1] + (first[2] or "") if first else "127.0.0.1"
    return Place(int(rank), int(size), (host, port))


def _is_of_parent(name: str) -> bool:
    """Whether the process that started this one was itself started with a variable."""
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return False
    return any(each.startswith(f"{name}=".encode()) for each in variables)


@contextmanager
def joined(place: Place, *, patience_s: float = PATIENCE_S) -> Iterator[RankGroup]:
    """The crew of all processes, each of which must call this.

    Raises `MissingExtra` without torch, `StorageUnavailable` where not all come in time.
    """
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingExtra(
            f"{place.size} processes were started, and sharing the bytes among them takes torch",
            next_command="pip install 'ckptctl[torch]'",
        ) from error
    from datetime import timedelta

    method = None if place.meet_at is None else f"tcp://{place.meet_at[0]}:{place.meet_at[1]}"
    together(
        lambda: dist.init_process_group(
            "gloo",
            init_method=method,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=patience_s),
        ),
        f"not all {place.size} processes came",
    )
    try:
        yield RankGroup(place)
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


class RankGroup:
    """See `inspection.content.ProcessGroup`."""

    def __init__(self, place: Place) -> None:
        self.rank = place.rank
        self.size = place.size
        self._progress = (0, 0)
        self._next_s = 0.0
        self._told: Callable[[int, int], None] | None = None
        self._gathered = False

    def watch(self, told: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
        """See `ProcessGroup.watch`: what is returned meets the others every second."""
        self._told = told
        return self._tell

    def gather(self, found: Outcomes) -> tuple[Outcomes, ...]:
        """See `ProcessGroup.gather`."""
        import torch.distributed as dist

        self._progress = (self._progress[1], self._progress[1])
        while not self._meet(ready=True):
            time.sleep(_MEET_EVERY_S / 10)
        gathered: list[Outcomes | None] | None = [None] * self.size if self.rank == 0 else None
        together(lambda: dist.gather_object(found, gathered), "a process is gone")
        self._gathered = True
        return tuple(one for one in (gathered or ())[1:] if one is not None)

    def everyone(self, value: T) -> tuple[T, ...]:
        """What every process has, by rank, in every process. All of them must call it."""
        import torch.distributed as dist

        found: list[T | None] = [None] * self.size
        together(lambda: dist.all_gather_object(found, value), "a process is gone")
        return tuple(found)  # type: ignore[arg-type]

    def agree(self, exit_code: int) -> int:
        """The exit code of rank 0, in every process.

        A process whose own look failed before all had read waits for nobody: the others
        see that it is gone.
        """
        import torch
        import torch.distributed as dist

        if not self._gathered:
            return exit_code
        agreed = torch.tensor([exit_code])

        def tell() -> None:
            dist.broadcast(agreed, 0)
            dist.barrier()  # nobody leaves while another still reads

        together(tell, "a process is gone")
        return int(agreed.item())

    def _tell(self, done: int, total: int) -> None:
        self._progress = (done, total)
        if time.monotonic() >= self._next_s:
            self._meet(ready=False)
            self._next_s = time.monotonic() + _MEET_EVERY_S

    def _meet(self, *, ready: bool) -> bool:
        """Add up the progress of all; whether all are ready."""
        import torch
        import torch.distributed as dist

        sums = torch.tensor([int(ready), *self._progress])
        together(lambda: dist.all_reduce(sums), "a process is gone")
        n_ready, done, total = sums.tolist()
        if self._told is not None:
            self._told(int(done), int(total))
        return bool(n_ready == self.size)


def together(act: Callable[[], T], what: str) -> T:
    """What `act` gives, which all processes do; `StorageUnavailable` where one of them does not."""
    try:
        return act()
    except RuntimeError as error:  # what gloo raises, and its timeouts
        lines = str(error).splitlines() or [type(error).__name__]
        raise StorageUnavailable(
            f"{what}, so the step was not looked at as a whole ({lines[0][:200]})"
        ) from error
