"""A training job that resumes by itself, and that a drill can kill at any moment.

    torchrun --standalone --nproc-per-node 4 train.py --root DIR --steps 40 --save-every 8

A small transformer with dropout learns to continue lines of letters, spread over the
ranks by `fully_shard`. All that makes the resume correct is `Checkpointer`. Rank 0
prints one JSON line a step: loss in all digits, learning rate, tokens, and the digest
of the samples that the step consumed.

    --kill-rank STEP      one rank ends with SIGKILL before this step
    --kill-save STEP      every rank ends with SIGKILL while it writes this step
    --weights-only        a mistake: load weights, and nothing else
    --older-step STEP     a mistake: load this step, whatever --resume-from names
    --slow                log half the throughput, as behind a slow link
    --pace SECONDS        wait so long in each step, as a larger model needs
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ckptctl.train import Checkpointer, GlobalLoader

N_SAMPLES, LETTERS, LENGTH, WIDTH = 960, 11, 16, 32
BATCH = 24
DYING_RANK = 1


def main() -> None:
    """Train from where the root says."""
    options = _parse()
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.manual_seed(1)
    model = Letters()
    mesh = init_device_mesh("cpu", (n_ranks,))
    fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    loader = GlobalLoader(Lines(), BATCH, seed=3, rank=rank, n_ranks=n_ranks)
    torch.manual_seed(100 + rank)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": loader}
    if options.weights_only:
        parts = {"model": model, "dataloader": loader, "scheduler": scheduler}

    with Checkpointer(options.root, **parts, seed=7) as checkpointer:
        resume_from = options.resume_from
        if options.older_step is not None:
            resume_from = f"{options.root}/step_{options.older_step}"
        start = checkpointer.resume(resume_from)
        batches = iter(loader)
        for step in range(start.step + 1, options.steps + 1):
            if step == options.kill_rank and rank == DYING_RANK:
                os.kill(os.getpid(), signal.SIGKILL)
            begun = time.monotonic()
            time.sleep(options.pace)
            batch, _ = next(batches)
            loss = train(model, optimizer, scheduler, batch)
            loss = mean_over_ranks(loss, len(batch))
            tokens = step * BATCH * LENGTH
            digest = samples_of_all(loader)
            if rank == 0:
                row = {"step": step, "loss": loss, "lr": scheduler.get_last_lr()[0]}
                row |= {"tokens": tokens, "samples_digest": digest}
                row |= {"step_time_s": round(time.monotonic() - begun, 4)}
                row |= {"tokens_per_second": 500 if options.slow else 1000}
                print(json.dumps(row), flush=True)
            if step % options.save_every == 0:
                if step == options.kill_save:
                    die_while_writing()
                checkpointer.save(step, tokens=tokens, loss=loss)
    dist.destroy_process_group()


def train(model: nn.Module, optimizer: Any, scheduler: Any, batch: torch.Tensor) -> torch.Tensor:
    """One step; gives the loss of this rank."""
    logits = model(batch[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return loss.detach()


def mean_over_ranks(loss: torch.Tensor, n_own: int) -> float:
    """The loss over the samples of all ranks."""
    total = torch.tensor([loss.double() * n_own, n_own], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def samples_of_all(loader: GlobalLoader) -> str:
    """The digest of what all ranks consumed in this step."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, loader.digest)
    total = every[0]
    for more in every[1:]:
        total = total + more
    return str(total)


def die_while_writing() -> None:
    """End this rank with SIGKILL when it flushes its first shard file."""
    fsync = os.fsync

    def dying(fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        if os.readlink(f"/proc/self/fd/{number}").endswith(".distcp"):
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(fd)

    os.fsync = dying


class Letters(nn.Module):
    """A transformer of one layer, with dropout: a resume that loses the RNG shows."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Logits of the next letter, at each place."""
        mask = torch.triu(torch.full((letters.shape[1],) * 2, float("-inf")), 1)
        return self.head(self.layer(self.letters(letters), src_mask=mask))


class Lines:
    """`N_SAMPLES` lines of letters; each comes with its number."""

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draw = random.Random(index)
        line = [draw.randrange(LETTERS)]
        while len(line) <= LENGTH:
            line.append((line[-1] * 3 + draw.randrange(2)) % LETTERS)
        return torch.tensor(line), index


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training job for the drill.")
    parser.add_argument("--root", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument("--resume-from", default="auto")
    parser.add_argument("--kill-rank", type=int, metavar="STEP")
    parser.add_argument("--kill-save", type=int, metavar="STEP")
    parser.add_argument("--weights-only", action="store_true")
    parser.add_argument("--older-step", type=int, metavar="STEP")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
