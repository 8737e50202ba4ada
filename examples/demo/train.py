"""A small training job that saves checkpoints, and can be killed in the middle of a save.

    torchrun --standalone --nproc-per-node 4 train.py --root DIR --steps 80 --save-every 20

A language model of two layers learns sums such as `17 plus 25 is 42.`, spread
over the ranks by `fully_shard`. `Checkpointer` saves all that a resume needs:
weights, optimizer, scheduler, step, the random numbers of every rank and the
position in the data. Started again, the job continues from the newest complete step.

`--die-during-save N` ends the job with SIGKILL while step N is being written.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import Dataset

from ckptctl.train import Checkpointer, GlobalLoader

LETTERS = "\n .0123456789ilpsu"
WIDTH = 64
LENGTH = 48
BATCH = 8
DYING_RANK = 1
DYING_BYTES = 200_000


def main() -> None:
    options = _parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    # torch warns at length about FSDP over a CPU; this is a demonstration.
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.manual_seed(0)

    model = SumReader()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    loader = GlobalLoader(Sums(), BATCH * mesh.size(), seed=0)
    random.seed(rank)
    torch.manual_seed(rank)

    ckpt = Checkpointer(
        options.root, model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader
    )
    start = ckpt.resume(options.resume_from)
    batches = iter(loader)
    for step in range(start.step + 1, options.steps + 1):
        batch = next(batches)
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 0:
            _print_loss(step, loss.detach())
        if step % options.save_every == 0:
            if step == options.die_during_save:
                _die_in_the_next_save()
            ckpt.save(step, tokens=loader.position * LENGTH)
            if rank == 0:
                print(f"saved step {step}", flush=True)
    ckpt.close()
    dist.destroy_process_group()


def _die_in_the_next_save() -> None:
    """Have the whole job killed while the shard file of rank 1 grows.

    The metadata is written last, after every rank has reported. Rank 1 never
    does, so there is none; how far the other ranks came is left to chance, as
    it is when a node is lost.
    """
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() != DYING_RANK:
        return
    myself = pids.pop(DYING_RANK)

    write = os.write

    def write_and_die(descriptor: int, data: Any) -> int:
        n_bytes = write(descriptor, memoryview(data)[:DYING_BYTES])
        is_shard = os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp")
        if is_shard and os.fstat(descriptor).st_size >= DYING_BYTES:
            for pid in (os.getppid(), *pids, myself):
                os.kill(pid, signal.SIGKILL)
        return n_bytes

    os.write = write_and_die


def _print_loss(step: int, loss: torch.Tensor) -> None:
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step:>4}  loss {loss.item() / dist.get_world_size()!r}", flush=True)


class Sums(Dataset[torch.Tensor]):
    """Lines of sums: item `index` is always the same text."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        draw = random.Random(index)
        text = ""
        while len(text) <= LENGTH:
            a, b = draw.randrange(50), draw.randrange(50)
            text += f"{a} plus {b} is {a + b}.\n"
        return torch.tensor([LETTERS.index(letter) for letter in text[: LENGTH + 1]])


class Block(nn.Module):
    """Attention to what came before, then a layer of its own for each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is of shape (lines, letters, WIDTH), and so is the result."""
        heads = [
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1)
        ]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class SumReader(nn.Module):
    """Guesses each next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Logits of shape (lines, letters, number of letters)."""
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model and save checkpoints.")
    parser.add_argument("--root", required=True, metavar="DIR", help="checkpoint root")
    parser.add_argument("--steps", type=int, default=80, metavar="N")
    parser.add_argument("--save-every", type=int, default=20, metavar="N", help="steps")
    parser.add_argument(
        "--resume-from", default="auto", metavar="STEP", help="auto, none, a step or a path"
    )
    parser.add_argument(
        "--die-during-save", type=int, metavar="N", help="end with SIGKILL while saving step N"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
