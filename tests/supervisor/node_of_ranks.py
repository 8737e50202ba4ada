"""The ranks of one node of a gloo job, in which one rank after the other keeps the others waiting.

node_of_ranks.py FOLDER PLAN: `LOCAL_WORLD_SIZE` ranks from rank `FIRST` on. In case N each rank
reports a step; the one that word N of PLAN names (`sleep:3`, `stop:3`, `recv:3`) does that, and
all others wait in a collective. A file `N` in FOLDER ends a sleep.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ckptctl.train import heartbeat

FOLDER = Path(sys.argv[1])


def wait_for_data(number: int) -> None:
    """What a data loader does whose storage does not answer."""
    while not (FOLDER / str(number)).exists():
        time.sleep(0.05)


def train(rank: int) -> None:
    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(FOLDER / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(hours=1)
    )
    for number, word in enumerate(sys.argv[2].split()):
        dist.barrier()
        heartbeat("step", step=number)
        (FOLDER / f"{number}-{rank}").write_text(str(os.getpid()))
        fault, _, who = word.partition(":")
        if int(who) == rank:
            if fault == "sleep":
                wait_for_data(number)
            elif fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault == "recv":
                dist.recv(torch.ones(1), src=(rank + 1) % world_size)
        dist.all_reduce(torch.ones(1))
        time.sleep(1.1)  # an unchanged section is written once a second


first = int(os.environ["FIRST"])
for n in range(int(os.environ["LOCAL_WORLD_SIZE"])):
    if os.fork() == 0:
        os.environ |= {"RANK": str(first + n), "LOCAL_RANK": str(n)}
        train(first + n)
        os._exit(0)
signal.pause()
