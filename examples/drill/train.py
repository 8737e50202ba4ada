"""A training job that resumes by itself, on any number of ranks, with the same losses.

    torchrun --standalone --nproc-per-node 4 train.py --root DIR

A small transformer learns to continue lines of letters, spread over the ranks by `fully_shard`.
All that makes the resume correct is `Checkpointer`. Rank 0 prints one JSON line a step: loss,
tokens, and the digest of the samples that the step consumed.

It computes in 64 bits and prints 9 digits, so that the order in which ranks add does not show:
4 ranks and 2 ranks print the same. It has no dropout, because each rank draws that from random
numbers of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ckptctl.train import Checkpointer, GlobalLoader

N_SAMPLES, LETTERS, LENGTH, WIDTH = 960, 11, 16, 32
BATCH = 24


def main() -> None:
    """Train from the newest usable step of the root."""
    options = _parse()
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.manual_seed(1)
    model = Letters()
    mesh = init_device_mesh("cpu", (n_ranks,))
    fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = GlobalLoader(Lines(), BATCH, seed=3, rank=rank, n_ranks=n_ranks)
    parts = {"model": model, "optimizer": optimizer, "dataloader": loader}

    with Checkpointer(options.root, **parts, seed=7) as checkpointer:
        start = checkpointer.resume()
        batches = iter(loader)
        moves = threading.Event()
        threading.Thread(target=dump_when_stuck, args=(rank, moves), daemon=True).start()
        for step in range(start.step + 1, options.steps + 1):
            time.sleep(options.pace)
            batch, _ = next(batches)
            loss = mean_over_ranks(train(model, optimizer, batch), len(batch))
            tokens, digest = step * BATCH * LENGTH, samples_of_all(loader)
            if rank == 0:
                row = {"step": step, "loss": float(f"{loss:.9g}"), "tokens": tokens}
                print(json.dumps({**row, "samples_digest": digest}), flush=True)
            moves.set()
            checkpointer.note(step)
            if step % options.save_every == 0:
                checkpointer.save(step, tokens=tokens, loss=loss)
    dist.destroy_process_group()


def train(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    """One step; gives the loss of this rank."""
    logits = model(batch[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def mean_over_ranks(loss: torch.Tensor, n_own: int) -> float:
    """The loss over the samples of all ranks."""
    total = torch.tensor([loss * n_own, n_own])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def dump_when_stuck(rank: int, moves: threading.Event) -> None:
    """Dump torch's flight recorder while no step ends for 5 s, as NCCL's watchdog does.

    gloo has no watchdog. The file is named like that of NCCL.
    """
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE", "/tmp/nccl_trace_rank_")
    while True:
        if not moves.wait(5):
            Path(f"{prefix}{rank}").write_bytes(_dump_fr_trace())
        moves.clear()


def samples_of_all(loader: GlobalLoader) -> str:
    """The digest of what all ranks consumed in this step."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, loader.digest)
    total = every[0]
    for more in every[1:]:
        total = total + more
    return str(total)


class Letters(nn.Module):
    """A transformer of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
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
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--save-every", type=int, default=12)
    parser.add_argument("--pace", type=float, default=0.2, metavar="SECONDS", help="of each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
