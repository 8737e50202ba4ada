"""Pairs of ranks that end right after a collective, while a thread of gloo has not released it.

ending_ranks.py FOLDER N_PAIRS [lost]: prints the exit codes that are not 0; with `lost` rank 1 ends
before the collective, and rank 0 has to end with 75. The interval between two switches of threads
is long, so that the thread gets the GIL only when Python is being finalized.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from ckptctl.distributed.process_group import make_group
from ckptctl.errors import RanksLost

is_lost = sys.argv[3:] == ["lost"]


def end_after(number: int, rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = make_group()
    group.gather(None)
    if is_lost and rank == 1:
        os._exit(0)
    sys.setswitchinterval(1000)
    if number % 3 == 0:
        group.gather(rank)
    elif number % 3 == 1:
        group.most(rank)
    else:
        group.from_first(lambda: rank)


for number in range(int(sys.argv[2])):
    started = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            try:
                end_after(number, rank, f"{sys.argv[1]}/store-{number}")
            except RanksLost as error:
                sys.exit(error.exit_code)
            sys.exit(0)
        started.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]
    if codes != [75 if is_lost else 0, 0]:
        print(number % 3, codes, flush=True)
