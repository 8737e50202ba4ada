"""Simulate a fault of one rank from inside of a training script."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Literal, get_args

from ckptctl.distributed.launcher import cluster_context
from ckptctl.errors import UsageError
from ckptctl.options import not_negative

SimulatedFault = Literal["rank_killed", "rank_hung", "random"]


def simulate_fault(
    fault: SimulatedFault = "random",
    *,
    rank: int | None = None,
    delay: float = 0.0,
    seed: int = 0,
) -> None:
    """Kill or stop one rank of this job, `delay` seconds and a random part of one from now.

    `rank_killed` ends the rank with SIGKILL; `rank_hung` stops all its threads with SIGSTOP, so
    that its peers wait in the next collective. `random` is one of both. Without `rank` it is a
    random one. Every rank must call it with the same arguments: `seed` makes them choose the same
    fault without talking to each other. Does nothing after a restart, so that the job can go on.

    Raises `UsageError` for a fault that does not exist, a rank that the job does not have, and a
    negative delay. Source of the names: `FaultToleranceConfig` of Megatron Bridge.
    """
    faults = get_args(SimulatedFault)
    if fault not in faults:
        raise UsageError(f"fault is {fault!r}; the faults are {', '.join(faults)}")
    not_negative("delay", delay)
    place = cluster_context()
    n_ranks = place.world_size or 1
    if rank is not None and not 0 <= rank < n_ranks:
        raise UsageError(f"rank is {rank}; the job has {n_ranks} ranks")
    draw = random.Random(f"{seed} {n_ranks}")  # noqa: S311  # every rank must draw the same
    chosen = draw.choice([each for each in faults if each != "random"])
    kind = chosen if fault == "random" else fault
    drawn = draw.randrange(n_ranks)
    victim = drawn if rank is None else rank
    if victim == (place.rank or 0) and not place.restarted:
        begin = threading.Thread(target=_fail, args=(kind, delay + draw.random()), daemon=True)
        begin.start()


def _fail(kind: str, after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL if kind == "rank_killed" else signal.SIGSTOP)
