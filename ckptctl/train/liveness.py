"""Check that all ranks answer and that each GPU computes correctly.

A dead peer shows up as a collective that times out half an hour later without naming a
rank. A ping has its own timeout and names the ranks that did not answer. It does not
measure the speed of a rank.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ckptctl.distributed.process_group import ProcessGroup, make_group, ranks_lost
from ckptctl.errors import GpuFailed, RanksLost, UsageError

if TYPE_CHECKING:
    import torch


_TIMEOUT_S = 60.0
_POLL_S = 0.01
_SIDE = 256


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The result of checking one GPU: `fault` as text, None for a healthy GPU."""

    device: str
    fault: str | None


class Liveness:
    """Pings the ranks, and checks their GPUs, every `every` steps.

    ```python
    alive = Liveness(every=500)
    for step in range(start, n_steps + 1):
        alive.check(step)
    ```

    Every rank makes one, once its process group is initialized, and calls `check` for every
    step; `group` can be shared. At every 500th step its cost cannot be measured.
    """

    def __init__(
        self, *, every: int, timeout_s: float = _TIMEOUT_S, group: ProcessGroup | None = None
    ) -> None:
        if every < 1:
            raise UsageError(f"every is {every}; it must be 1 or more")
        self._every = every
        self._timeout_s = timeout_s
        self._group = make_group() if group is None else group

    def check(self, step: int) -> bool:
        """Whether this step was checked. Raises `RanksLost` and `GpuFailed`, on every rank."""
        if step % self._every:
            return False
        ping(self._group, timeout_s=self._timeout_s)
        reports = self._group.gather((self._group.host, check_gpu(timeout_s=self._timeout_s)))
        for rank, (host, report) in enumerate(reports):
            if report is not None and report.fault is not None:
                raise GpuFailed(
                    f"rank {rank} on {host}: {report.device} {report.fault}",
                    next_command="nvidia-smi --query-gpu=index,name,pstate,ecc.errors.uncorrected"
                    ".volatile.total --format=csv",
                )
        return True


def ping(group: ProcessGroup | None = None, *, timeout_s: float = _TIMEOUT_S) -> float:
    """Seconds until every rank had answered. Every rank calls it.

    Uses gloo first, which names the ranks that do not answer; then the process group of the
    training (NCCL). Raises `RanksLost` after `timeout_s`.
    """
    if not timeout_s > 0:
        raise UsageError(f"timeout_s is {timeout_s}; it must be above 0")
    group = make_group() if group is None else group
    if group.size == 1:
        return 0.0
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD
    # A group may have gloo for the CPU and NCCL for the GPU; the latter can hang.
    on_gpu = "cuda:nccl" in dist.get_backend_config(world) and torch.cuda.is_available()
    began_s = time.monotonic()
    try:
        dist.monitored_barrier(group.handle, timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise ranks_lost(error) from error
    number = torch.ones(1, device="cuda" if on_gpu else "cpu")  # its error is no lost rank
    until_s = time.monotonic() + timeout_s
    try:
        work = dist.all_reduce(number, group=world, async_op=True)
        while not work.is_completed():
            if time.monotonic() > until_s:
                backend = "nccl" if on_gpu else dist.get_backend(world)
                raise RanksLost(
                    f"the ranks answer over gloo, but {backend} gave no answer "
                    f"in {timeout_s:g} s: a GPU or its network hangs",
                    next_command="ckptctl classify LOG",
                )
            time.sleep(_POLL_S)
        work.wait()
    except RuntimeError as error:
        raise ranks_lost(error) from error
    return time.monotonic() - began_s


def check_gpu(
    device: int | str | None = None, *, timeout_s: float = _TIMEOUT_S
) -> GpuReport | None:
    """Check that the GPU of this process computes correctly, and in time; None without a GPU.

    Multiplies two matrices of small whole numbers, whose product is known exactly. A GPU
    that hangs leaves a thread behind. Cost: some milliseconds, 1 MB of GPU memory.
    """
    import torch

    if device is None:
        if not torch.cuda.is_available():
            return None
        device = torch.cuda.current_device()
    asked = torch.device(device)
    found: list[GpuReport] = []
    poll = threading.Thread(target=lambda: found.append(_poll(asked)), daemon=True)
    poll.start()
    poll.join(timeout_s)
    return found[0] if found else GpuReport(str(asked), f"gave no answer in {timeout_s:g} s")


def _poll(device: torch.device) -> GpuReport:
    import torch

    try:
        rows = torch.arange(_SIDE, device=device, dtype=torch.float32).remainder(7)
        product = torch.ones(_SIDE, _SIDE, device=device) @ rows.expand(_SIDE, _SIDE).T
        expected = float(sum(number % 7 for number in range(_SIDE)))
        wrong = int((product != expected).sum().item())
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return GpuReport(str(device), f"failed: {first[:200]}")
    fault = f"computes wrongly: {wrong:,} of {_SIDE * _SIDE:,} numbers" if wrong else None
    return GpuReport(str(device), fault)
