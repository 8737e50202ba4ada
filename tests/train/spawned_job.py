"""A job that starts its two ranks itself, with `mp.spawn`.

    python spawned_job.py FOLDER whole:12 cut:6 cut:12

trains below FOLDER up to a step, once for each `ROOT:STEP`, and prints a line of JSON
for each: what `resolve` said, and the losses of rank 0.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import count

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_job import Lines, build, train_one

from ckptctl.train import Checkpointer, GlobalLoader, resolve

N_RANKS = 2


def rank_main(rank: int, meet: str, root: str, last: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=N_RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(build())
    average = torch.optim.swa_utils.AveragedModel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    loader = GlobalLoader(Lines(), 8, seed=3)
    torch.manual_seed(50 + rank)
    with Checkpointer(
        root,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        dataloader=loader,
        grad_scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
        extra={"average": average},
    ) as ckpt:
        path = resolve("auto", root)
        start = ckpt.resume()
        losses = []
        for step, (batch, _) in zip(count(start.step + 1), loader):
            losses.append(train_one(model, optimizer, scheduler, batch).item())
            if step % 3 == 0:
                ckpt.save_async(step)
            if step == last:
                break
    if rank == 0:
        restored = start.report["state"]["restored"]
        print(json.dumps({"path": path, "losses": losses, "restored": restored}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    for life in sys.argv[2:]:
        name, _, last = life.partition(":")
        root = f"{sys.argv[1]}/{name}"
        mp.spawn(rank_main, (tempfile.mktemp(), root, int(last)), nprocs=N_RANKS)
