"""A job under torchrun that saves when it is told to stop, slowly.

    torchrun --nproc-per-node 2 emergency_job.py ROOT [MOMENT]

`MOMENT` is how often a save proves that the root is its own before it takes a long time:
2 is when all shards are there and the metadata is not.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from small_job import Lines, build, train_one
from torch.distributed.fsdp import fully_shard

from ckptctl.train import Checkpointer, GlobalLoader, GracefulStop, saving


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = build()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    batches = GlobalLoader(Lines(), 8, seed=3)
    with (
        Checkpointer(
            sys.argv[1],
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            dataloader=batches,
        ) as ckpt,
        GracefulStop() as stop,
    ):
        start = ckpt.resume()
        with open(f"{sys.argv[1]}.pid-{os.getpid()}", "w"):
            say("pid", os.getpid(), "from", start.step)
        for step, (batch, _) in enumerate(batches, start.step + 1):
            train_one(model, optimizer, scheduler, batch)
            if step % 3 == 0 and step <= 6:
                ckpt.save(step)
            if step == 10:
                say("ready")
            if step >= 10:
                time.sleep(0.01)
            if stop.agreed():
                slow_down(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
                ckpt.save(step)
                say("saved", step)
                break
    dist.destroy_process_group()
    sys.exit(stop.exit_code)


def slow_down(moment: int) -> None:
    """Have the next save last longer than anybody waits, on rank 0 from that moment on."""
    check, n_asked = saving.check_token, 0

    def slow(*args: object) -> None:
        nonlocal n_asked
        n_asked += 1
        check(*args)
        if n_asked == moment:
            say("saving")
            time.sleep(600)

    saving.check_token = slow


if __name__ == "__main__":
    main()
