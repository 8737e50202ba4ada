"""Four ranks that resume from a root whose newest step is damaged, in each way once.

    python matrix_job.py FOLDER [NUMBER ...]

The processes are started once. For each damage of `tools/damage_table.py` (or those of
the given numbers) they resume from a copy of one root, as a job that has just started
would, sealed and not, with an older step to fall back to and without. Rank 0 prints what
each came to as a line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_job import Lines, build, train_one
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptctl.errors import CkptctlError
from ckptctl.train import Checkpointer, GlobalLoader

N_RANKS = 4
TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "damage_table.py"


def main() -> None:
    folder = Path(sys.argv[1])
    wanted = tuple(map(int, sys.argv[2:]))
    pids = []
    for rank in range(N_RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(folder, rank, wanted)
                code = 0
            except BaseException:  # noqa: BLE001 - a forked rank must not go on as the launcher
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(map(abs, ends)))


def rank_main(folder: Path, rank: int, wanted: tuple[int, ...]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=N_RANKS
    )
    with job(folder / "whole", rank) as (ckpt, parts):
        ckpt.resume()
        train(ckpt, *parts)
    damages = runpy.run_path(str(TOOL))["DAMAGES"]
    for number, what in enumerate(damages):
        if wanted and number not in wanted:
            continue
        for sealed, fallback in product((True, False), (2, 0)):
            root = folder / "damaged"
            if rank == 0:
                shutil.rmtree(root, ignore_errors=True)
                shutil.copytree(folder / "whole", root)
                for seal in () if sealed else root.glob("step_*/.ckptctl/seal.json"):
                    seal.unlink()
                damages[what](root / "step_20")
            dist.barrier()
            ended = [None] * N_RANKS
            dist.all_gather_object(ended, how_it_resumes(root, rank, fallback))
            if rank == 0:
                row = {"damage": what, "sealed": sealed, "fallback": fallback, "ended": ended}
                os.write(1, (json.dumps(row) + "\n").encode())
    dist.destroy_process_group()


@contextmanager
def job(root: Path, rank: int, **options: Any) -> Iterator[tuple[Checkpointer, tuple[Any, ...]]]:
    """A `Checkpointer`, and the objects of a training script."""
    torch.manual_seed(1)
    model = build()
    mesh = init_device_mesh("cpu", (N_RANKS,))
    fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    loader = GlobalLoader(Lines(), 4, seed=3, rank=rank, n_ranks=N_RANKS)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with Checkpointer(
        str(root), **parts, dataloader=loader, tell=lambda line: None, **options
    ) as ckpt:
        yield ckpt, (model, optimizer, scheduler, loader)


def train(ckpt: Checkpointer, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
    """Twenty steps, of which two are saved."""
    for step, (batch, _) in zip(range(1, 21), loader, strict=False):
        train_one(model, optimizer, scheduler, batch)
        if step % 10 == 0:
            ckpt.save(step)


def how_it_resumes(root: Path, rank: int, fallback: int) -> list[object]:
    """What a rank comes to: the step and a sum over what it holds then, or its error."""
    try:
        with job(root, rank, max_fallback=fallback) as (ckpt, (model, *_)):
            start = ckpt.resume()
            held = sum(each.to_local().double().sum().item() for each in model.parameters())
            return ["resumed", start.step, start.fell_back, held]
    except CkptctlError as error:
        return ["raised", type(error).__name__, error.exit_code, error.message]


if __name__ == "__main__":
    main()
