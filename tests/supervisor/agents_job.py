"""A gloo job that `ckptctl run --torchrun` starts on each node, and what happens in it.

agents_job.py ROOT ENDS_AT PLAN: attempt N (`CKPTCTL_RESTART_COUNT`) does what word N of PLAN
states, the last one for all that follow: `raise:4:1` raises on rank 1 at step 4, `exit:4:1` ends it
with 17, `sleep:4:3` lets rank 3 sleep in its own code, `none` nothing. Every second step is saved.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from ckptctl.train import Checkpointer, GracefulStop

ROOT, ENDS_AT, PLAN = sys.argv[1], int(sys.argv[2]), sys.argv[3].split()
FAULT, AT, RANK = (
    *PLAN[min(int(os.environ["CKPTCTL_RESTART_COUNT"]), len(PLAN) - 1)].split(":"),
    "",
    "",
)[:3]
OWN = int(os.environ["RANK"])


def wait_for_data() -> None:
    """What a data loader does whose storage does not answer."""
    while True:
        time.sleep(0.05)


def tell(event: str, step: int) -> None:
    print(f"{event} {step} rank {OWN} of {dist.get_world_size()}", flush=True)


def train(step: int) -> None:
    if FAULT and str(step) == AT and str(OWN) == RANK:
        if FAULT == "raise":
            raise ZeroDivisionError("the code of the user fails")
        if FAULT == "exit":
            os._exit(17)
        if FAULT == "sleep":
            wait_for_data()
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
with Checkpointer(ROOT, model=model) as checkpointer, GracefulStop() as stop:
    step = checkpointer.resume().step
    tell("resumed", step)
    while step < ENDS_AT:
        step += 1
        train(step)
        checkpointer.note(step)
        if stop.agreed():
            checkpointer.save(step)
            tell("saved", step)
            break
        if step % 2 == 0:
            checkpointer.save(step)
sys.exit(stop.exit_code)
