"""Ranks of HSDP train, save in the background while they train on, and resume.

    torchrun --nproc-per-node N device_ranks.py FOLDER DEVICE

DEVICE is cpu (gloo) or cuda (NCCL). Ends with 0 where each rank resumes with the bits, and draws
the random numbers, that it had when it called `save_async`.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptctl.train import Checkpointer, check_gpu, ping

WIDTH = 64


def built(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """A model of two layers on the mesh, and its optimizer with a step behind it."""
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    model = torch.nn.Sequential(*layers).to(mesh.device_type)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def train_one(model: Any, optimizer: Any, device: str) -> None:
    model(torch.rand(8, WIDTH, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Copies of this rank's shards of the weights and of what the optimizer keeps for them."""
    weights = list(model.parameters())
    kept = [value for weight in weights for value in optimizer.state[weight].values()]
    local = [one.to_local() if hasattr(one, "to_local") else one for one in (*weights, *kept)]
    return [one.detach().clone() for one in local]


def main() -> None:
    root, device = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    size = dist.get_world_size()
    shape = (2, size // 2) if size > 2 else (1, size)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicas", "shards"))

    parts = built(mesh, seed=1)
    checkpointer = Checkpointer(root, **parts, seed=7)
    assert checkpointer.resume().fresh
    torch.manual_seed(100 + dist.get_rank())
    train_one(**parts, device=device)
    checkpointer.save_async(1)
    saved = bits(**parts)
    drawn = torch.rand(8, device=device)
    for _ in range(3):
        train_one(**parts, device=device)
    assert not torch.equal(bits(**parts)[0], saved[0])
    checkpointer.close()

    parts = built(mesh, seed=2)
    checkpointer = Checkpointer(root, **parts, seed=7)
    assert checkpointer.resume().step == 1
    assert torch.equal(torch.rand(8, device=device), drawn)
    for before, after in zip(saved, bits(**parts), strict=True):
        assert before.device == after.device
        assert torch.equal(before, after)
    checkpointer.close()

    assert ping() >= 0
    report = check_gpu(None if device == "cuda" else device)
    assert report is not None
    assert report.fault is None
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
