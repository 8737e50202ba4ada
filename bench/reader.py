"""`dcp.load` with `Reader`, beside torch's own reader: processor time of all processes.

The processes of a job load one state with each reader in turns: same processes, same
tensors, same planner. The step is in the page cache. `Reader` compares every record that is
read whole with its checksum; torch's compares none. The limit is `dcp.load` with
`measuring.bare_reader`. With 2 layers the records are some eight times as long as with 16.

Memory is how far the peak of a process rises during a load above what it held before.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import Row, Size, bare_reader, folder

GIGABYTES = 0.8
PIECE, PERIOD = 1 << 14, 9973
SHAPES = ((1, 1), (4, 4), (4, 2), (8, 3))
"""How many processes save, and how many load."""
LAYERS = (16, 2)
READ_GOAL = 1.05


@dataclass(frozen=True)
class Job:
    """What the processes load, and how often."""

    gigabytes: float
    layers: int
    rounds: int


def rows(size: Size) -> Iterator[Row]:
    """Each shape: processor, memory, and bytes read for each byte that is needed."""
    for layers in LAYERS:
        job = Job(GIGABYTES * size.scale, layers, size.rounds)
        for saved in sorted({saved for saved, _ in SHAPES}):
            with folder() as made:
                step = str(Path(made, "step"))
                in_processes(saved, save, step, job)
                for loaded in [loaded for one, loaded in SHAPES if one == saved]:
                    yield from _rows_of(step, saved, loaded, job)


def _rows_of(step: str, saved: int, loaded: int, job: Job) -> Iterator[Row]:
    answers = Path(step).with_name("answers")
    in_processes(loaded, compare, step, job, str(answers))
    found = json.loads(answers.read_text())
    ours, stock, bare = found["own"], found["stock"], found["bare"]
    what = f"{saved} → {loaded} processes, {job.layers} layers"
    peer = "`FileSystemReader`"
    goal = 0.125 if saved == loaded == 1 else 0.25
    yield Row(f"load, {what}", ours["cpu_s"], "s", stock["cpu_s"], peer, bare["cpu_s"], goal)
    yield Row(f"memory beyond the tensors, {what}", ours["more"], "MiB", stock["more"], peer)
    needed = found["needed"]
    yield Row(
        f"bytes read for each that is needed, {what}", ours["read"] / needed, "", goal=READ_GOAL
    )


# In the processes of the job


def in_processes(size: int, act: Callable[..., None], *args: object) -> None:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(joined, (size, f"file://{meeting}/point", act, args), nprocs=size)


def joined(rank: int, size: int, method: str, act: Callable[..., None], args: Any) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    act(*args)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # what gloo's threads still hold can abort the end of an interpreter


def make_state(job: Job) -> dict[str, Any]:
    """Weights and the optimizer's state of a transformer, sharded along their first dimension."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    width = max(24, int((job.gigabytes * 1e9 / 4 / 3 / job.layers / 12) ** 0.5) // 24 * 24)
    shapes = {"qkv": (3 * width, width), "out": (width, width), "norm": (width,)}
    shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
    return {
        f"{kind}.layers.{layer}.{name}": zeros(shape, device_mesh=mesh, placements=[Shard(0)])
        for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq")
        for layer in range(job.layers)
        for name, shape in shapes.items()
    } | {
        f"optim.step.layers.{layer}.{name}": torch.zeros(())
        for layer in range(job.layers)
        for name in shapes
    }


def fill(state: dict[str, Any], *, check: bool = False) -> None:
    """Give each element a value that says where it belongs, or check that it has it.

    In short pieces: freed tensors of many megabytes would change how fast the C library
    gives memory to a reader that asks for it anew.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    values = torch.arange(PIECE + PERIOD).remainder(PERIOD).float()
    for number, tensor in enumerate(state.values()):
        if not isinstance(tensor, DTensor):
            tensor.fill_(number)
            continue
        _, first = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        row = tensor.shape[1] if tensor.dim() > 1 else 1
        begin = first[0] * row + number
        for at, piece in enumerate(tensor.to_local().view(-1).split(PIECE)):
            shift = (begin + at * PIECE) % PERIOD
            wanted = values[shift : shift + len(piece)]
            if check:
                assert torch.equal(piece, wanted), (number, at)
            else:
                piece.copy_(wanted)


def save(step: str, job: Job) -> None:
    import torch.distributed.checkpoint as dcp

    state = make_state(job)
    fill(state)
    dcp.save(state, checkpoint_id=step)


def compare(step: str, job: Job, answers: str) -> None:
    """Load with all readers in turns; the first process writes what all of them took."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from ckptctl.train import Reader

    state = make_state(job)
    readers: dict[str, Callable[[], Any]] = {
        "stock": lambda: dcp.FileSystemReader(step),
        "own": lambda: Reader(step),
        "bare": lambda: bare_reader(step),
    }
    needed = sum(local_bytes(tensor) for tensor in state.values())
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in readers}
    for number in range(job.rounds):
        for name in sorted(readers, reverse=bool(number % 2)):
            for tensor in state.values():
                tensor.fill_(-1)
            dist.barrier()
            before, held, began_s = bytes_read(), held_now(), time.process_time()
            dcp.load(state, storage_reader=readers[name]())
            taken[name].append(
                (time.process_time() - began_s, bytes_read() - before, held_most() - held)
            )
            fill(state, check=True)
    found: dict[str, Any] = {"needed": needed}
    for name, figures in taken.items():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, figures)
        found[name] = {
            "cpu_s": min(sum(row[0] for row in at_once) for at_once in zip(*everyone, strict=True)),
            "read": max(row[1] for rows in everyone for row in rows),
            "more": max(row[2] for rows in everyone for row in rows),
        }
    if dist.get_rank() == 0:
        Path(answers).write_text(json.dumps(found))


def local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def held_now() -> float:
    """Memory of this process in MiB; its peak begins anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def held_most() -> float:
    return memory("VmHWM")


def memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))
