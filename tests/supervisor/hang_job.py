"""A gloo job under torchrun in which one rank does what keeps its peers from going on.

hang_job.py ROOT PLAN: attempt N of the job (`CKPTCTL_RESTART_COUNT`) does what word N of PLAN
says, such as `stop:step:2`: rank 2 stops itself in a step. Every attempt trains four steps more
than the newest one that is saved, and saves the last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

FAULT, WHERE, RANK = (
    *sys.argv[2].split()[int(os.environ["CKPTCTL_RESTART_COUNT"])].split(":"),
    "",
    "",
)[:3]
OWN = int(os.environ["RANK"])
IS_FAULTY = str(OWN) == RANK


def stop_at(where: str) -> None:
    """Stop this process where the plan says so."""
    if FAULT == "stop" and where == WHERE and IS_FAULTY:
        os.kill(os.getpid(), signal.SIGSTOP)


stop_at("start")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint.state_dict  # noqa: E402  # what a save would import
import torch.distributed.fsdp  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from ckptctl.train import Checkpointer, heartbeat  # noqa: E402


class Slow:
    """State that takes a while to save, or stops the process that saves it."""

    def state_dict(self) -> dict[str, int]:
        stop_at("checkpoint")
        if FAULT == "slow" and WHERE == "save":
            time.sleep(float(RANK))
        return {"value": 1}

    def load_state_dict(self, _state: object) -> None:
        pass


class Samples(Dataset):
    """Samples; on the faulty rank the worker waits for one without end."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if FAULT == "loader" and IS_FAULTY and index == 2:
            time.sleep(1e6)
        return torch.ones(4)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # a save holds the model once: it must be equal on all ranks
    model = torch.nn.Linear(4, 4)
    with Checkpointer(sys.argv[1], model=model, extra={"slow": Slow()}) as checkpointer:
        stop_at("setup")
        start = checkpointer.resume()
        stop_at("first-step")
        batches = iter(DataLoader(Samples(), num_workers=1, multiprocessing_context="fork"))
        last = start.step + 4
        for step in range(start.step + 1, last + 1):
            dist.all_reduce(next(batches))
            checkpointer.note(step)
            if step == start.step + 2:
                misbehave()
        checkpointer.save(last)
        checkpointer.note(last)
    stop_at("outside")
    dist.barrier()


def misbehave() -> None:
    """Do what the plan says, in the section `step`."""
    stop_at("step")
    if FAULT == "other" and IS_FAULTY:
        dist.recv(torch.ones(4), src=(OWN + 1) % dist.get_world_size())
    if FAULT == "slow" and WHERE == "step":
        time.sleep(float(RANK))
    if FAULT == "slow" and WHERE == "evaluation" and OWN == 0:
        work = f"import time; end = time.time() + {RANK}\nwhile time.time() < end: pass"
        subprocess.run([sys.executable, "-c", work], check=True)
    if FAULT == "stop" and WHERE == "evaluation":
        heartbeat("evaluation")
        stop_at("evaluation")
    dist.barrier()


main()
