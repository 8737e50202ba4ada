"""Four ranks save the same states with torch's writer and with `Writer`, and two load them.

    python writer_ranks.py FOLDER

Ends with 0 where stock `dcp.load` gives the same bits from both.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import _shard as sharding
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from ckptctl.train import Writer


def dtensors(size: int, *, filled: bool) -> dict[str, Any]:
    """Shards that are even, uneven, empty, strided in memory, replicated, and on two axes."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (2, size // 2))
    full = {
        "even": (torch.randn(16, 3), mesh, [Shard(0)]),
        "uneven": (torch.randn(9, 3), mesh, [Shard(0)]),
        "empty on some": (torch.randn(2, 5), mesh, [Shard(0)]),
        "columns": (torch.randn(6, 8), mesh, [Shard(1)]),
        "replicated": (torch.randn(4, 4), mesh, [Replicate()]),
        "grid": (torch.randn(8, 8), grid, [Shard(0), Shard(1)]),
        "half": (torch.randn(8, 8).to(torch.bfloat16), grid, [Replicate(), Shard(0)]),
    }
    state: dict[str, Any] = {
        name: distribute_tensor(tensor if filled else torch.zeros_like(tensor), on, how)
        for name, (tensor, on, how) in full.items()
    }
    return state | {f"rank {rank}": rank if filled else -1 for rank in range(4)}


def sharded_tensors(size: int, *, filled: bool) -> dict[str, Any]:
    """The shards of FSDP's first version."""
    spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(size)])
    torch.manual_seed(1)
    whole = torch.randn(10, 6) if filled else torch.zeros(10, 6)
    return {"sharded": sharding._shard_tensor(whole, spec)}


def bits(value: Any) -> Any:
    if hasattr(value, "local_shards"):
        return [shard.tensor.tolist() for shard in value.local_shards()]
    return value.to_local().tolist() if hasattr(value, "to_local") else value


def rank_main(number: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meet = f"file://{folder}/meet-4"
    dist.init_process_group("gloo", init_method=meet, rank=number, world_size=4)
    for state_of in (dtensors, sharded_tensors):
        state = state_of(4, filled=True)
        root = Path(folder) / state_of.__name__
        dcp.save(state, storage_writer=dcp.FileSystemWriter(root / "torch"))
        if number == 0:
            root.mkdir(exist_ok=True)
        dist.barrier()
        dcp.save(state, storage_writer=Writer(root / "ours"))
        loaded = []
        for name in ("torch", "ours"):
            into = state_of(4, filled=False)
            dcp.load(into, storage_reader=dcp.FileSystemReader(root / name))
            loaded.append({key: bits(value) for key, value in into.items()})
        assert loaded[0] == loaded[1] == {key: bits(value) for key, value in state.items()}
    local = {"own": torch.full((3 + number,), float(number)), "step": number}
    root = Path(folder) / "rank_local"
    if "use_collectives" in inspect.signature(dcp.save).parameters:
        dcp.save(local, storage_writer=dcp.FileSystemWriter(root / "torch"), use_collectives=False)
        dist.barrier()
        dcp.save(local, storage_writer=Writer(root / "ours"), use_collectives=False)
        into = {"own": torch.zeros(3 + number), "step": -1}
        dcp.load(into, storage_reader=dcp.FileSystemReader(root / "ours"))
        assert torch.equal(into["own"], local["own"])
    dist.barrier()
    dist.destroy_process_group()


def pair_main(number: int, folder: str) -> None:
    """Two ranks load what four saved."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meet = f"file://{folder}/meet-2"
    dist.init_process_group("gloo", init_method=meet, rank=number, world_size=2)
    wanted, into = dtensors(2, filled=True), dtensors(2, filled=False)
    dcp.load(into, storage_reader=dcp.FileSystemReader(Path(folder) / "dtensors" / "ours"))
    assert {key: bits(value) for key, value in into.items()} == {
        key: bits(value) for key, value in wanted.items()
    }
    dist.destroy_process_group()


if __name__ == "__main__":
    start_processes(rank_main, (sys.argv[1],), nprocs=4, start_method="fork")
    start_processes(pair_main, (sys.argv[1],), nprocs=2, start_method="fork")
