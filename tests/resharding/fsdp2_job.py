"""A training job of real FSDP2 ranks, alone or with tensor parallelism.

    python fsdp2_job.py save STEP --ranks 4
    python fsdp2_job.py compare STEP OTHER --ranks 3 [--tp 2]

`compare` loads both steps with stock `dcp.load` into models that are sharded for these
ranks, holds every value of every rank against each other, and prints how many.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 66)
        self.down = nn.Linear(66, 24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(x + self.down(torch.relu(self.up(x)))))
        return out


def state_of(rank: int, size: int, tp: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model()
    if tp > 1:
        mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    torch.manual_seed(seed + rank // tp)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": seed}


def work(rank: int, asked: argparse.Namespace, meet: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=asked.ranks)
    if asked.verb == "save":
        dcp.save(state_of(rank, asked.ranks, asked.tp, 7), checkpoint_id=asked.steps[0])
    else:
        states = []
        for seed, step in enumerate(asked.steps):
            states.append(state_of(rank, asked.ranks, asked.tp, seed))
            dcp.load(states[-1], checkpoint_id=step)
        n = compare("", *states)
        print(f"rank {rank}: {n} values are the same", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def compare(name: str, left: Any, right: Any) -> int:
    if isinstance(left, dict):
        assert left.keys() == right.keys(), name
        return sum(compare(f"{name}.{key}", left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return sum(compare(name, a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, DTensor):
        left, right = left.to_local(), right.to_local()
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), name
        return 1
    assert left == right, name
    return 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("save", "compare"))
    parser.add_argument("steps", nargs="+")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tp", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(work, (asked, f"file://{folder}/meet"), asked.ranks, start_method="fork")
    return 0


if __name__ == "__main__":
    sys.exit(main())
