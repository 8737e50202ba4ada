"""A gloo job of two nodes that saves at step 4, and loses a rank in its first attempt.

launched_job.py ROOT FOLDER: each rank adds the step that it resumed from to a file of FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ckptctl.train import Checkpointer


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 4)
    with Checkpointer(sys.argv[1], model=model) as checkpointer:
        start = checkpointer.resume()
        with Path(sys.argv[2], f"rank-{rank}").open("a") as file:
            file.write(f"{start.step}\n")
        for step in range(start.step + 1, start.step + 5):
            dist.all_reduce(torch.ones(1))
            checkpointer.note(step)
        if start.step == 0:
            checkpointer.save(4)
            dist.barrier()
            if rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    dist.destroy_process_group()


main()
