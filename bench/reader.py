"""What does `dcp.load` take with ckptctl's Reader, beside torch's own reader?

The processes of a job load one state with each of the two in turns: same processes, same
tensors, same planner. The checkpoint is written by `dcp.save` into a folder that is
removed afterwards, one at a time, and lies in the page cache: what is measured is the
processor. Each round takes the slowest process; a figure is the fastest round, and ratios
within one run are what counts. All records that are read whole are compared with their
checksums by the Reader, and by nobody in torch's.

Memory is how far the peak of a process rises during a load above what it held before,
with all tensors in place; bytes read are those that the kernel counted for the process.

torch's reader makes each record once more in memory, and what that costs depends on how
long the records are: with `--layers 2` they are some eight times as long as with 16.

    python bench/reader.py [--gigabytes 1.6] [--layers 16] [--rounds 5] [--only 4:2] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

PIECE, PERIOD = 1 << 14, 9973
CASES = ((1, 1), (4, 4), (4, 2), (8, 3))
"""How many processes save, and how many load."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.6)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="one case, as SAVED:LOADED")
    parser.add_argument("--folder")
    asked = parser.parse_args()
    cases = [case for case in CASES if asked.only in (None, f"{case[0]}:{case[1]}")]
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{asked.gigabytes} GB, {asked.layers} layers; {machine}")
    print("              | wall, s               | processor, s      | read/needed | MiB more")
    print("saved loaded  | stock   own ratio xcat | stock   own ratio | stock   own | stock own")
    for saved in sorted({saved for saved, _ in cases}):
        with tempfile.TemporaryDirectory(dir=asked.folder, prefix="ckptctl-bench-") as made:
            step = Path(made) / "step"
            in_processes(saved, save, str(step), asked)
            for loaded in [loaded for one, loaded in cases if one == saved]:
                measure(step, saved, loaded, asked)
    return 0


def measure(step: Path, saved: int, loaded: int, asked: argparse.Namespace) -> None:
    answers = Path(step.parent, "answers")
    in_processes(loaded, compare, str(step), asked, str(answers))
    said = json.loads(answers.read_text())
    cat_s = min(seconds(lambda: cat(step)) for _ in range(asked.rounds))
    stock, own = said["stock"], said["own"]
    print(
        f"{saved:5} {loaded:6}  | {stock['s']:5.2f} {own['s']:5.2f} {stock['s'] / own['s']:5.1f} "
        f"{own['s'] / cat_s:4.1f} | {stock['cpu_s']:5.2f} {own['cpu_s']:5.2f} "
        f"{stock['cpu_s'] / own['cpu_s']:5.1f} | {stock['read']:5.3f} {own['read']:5.3f} | "
        f"{stock['more']:5.0f} {own['more']:3.0f}",
        flush=True,
    )


def cat(step: Path) -> None:
    with open(os.devnull, "wb") as nowhere:
        files = sorted(map(str, step.glob("*.distcp")))
        subprocess.run(["cat", *files], check=True, stdout=nowhere)


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


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


def make_state(asked: argparse.Namespace) -> dict[str, Any]:
    """Weights and the optimizer's state of a transformer, sharded along their first dimension."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    width = int((asked.gigabytes * 1e9 / 4 / 3 / asked.layers / 12) ** 0.5) // 24 * 24
    shapes = {"qkv": (3 * width, width), "out": (width, width), "norm": (width,)}
    shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
    return {
        f"{kind}.layers.{layer}.{name}": zeros(shape, device_mesh=mesh, placements=[Shard(0)])
        for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq")
        for layer in range(asked.layers)
        for name, shape in shapes.items()
    } | {
        f"optim.step.layers.{layer}.{name}": torch.zeros(())
        for layer in range(asked.layers)
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


def save(step: str, asked: argparse.Namespace) -> None:
    import torch.distributed.checkpoint as dcp

    state = make_state(asked)
    fill(state)
    dcp.save(state, checkpoint_id=step)


def compare(step: str, asked: argparse.Namespace, answers: str) -> None:
    """Load with both readers in turns; the first process writes what all of them took."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from ckptctl.train import Reader

    state = make_state(asked)
    readers: dict[str, Callable[[], Any]] = {
        "stock": lambda: dcp.FileSystemReader(step),
        "own": lambda: Reader(step),
    }
    needed = sum(local_bytes(tensor) for tensor in state.values())
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in readers}
    for number in range(asked.rounds):
        for name in sorted(readers, reverse=bool(number % 2)):
            for tensor in state.values():
                tensor.fill_(-1)
            dist.barrier()
            before, held, began_s = bytes_read(), held_now(), time.process_time()
            took_s = seconds(lambda name=name: dcp.load(state, storage_reader=readers[name]()))
            worked_s = time.process_time() - began_s
            read, more = (bytes_read() - before) / needed, held_most() - held
            taken[name].append((took_s, worked_s, read, more))
            fill(state, check=True)
    said = {}
    for name, rows in taken.items():
        all_rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_rows, rows)
        said[name] = {
            "s": min(max(row[0] for row in at_once) for at_once in zip(*all_rows, strict=True)),
            "cpu_s": min(sum(row[1] for row in at_once) for at_once in zip(*all_rows, strict=True)),
            "read": max(row[2] for rows in all_rows for row in rows),
            "more": max(row[3] for rows in all_rows for row in rows),
        }
    if dist.get_rank() == 0:
        Path(answers).write_text(json.dumps(said))


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


if __name__ == "__main__":
    sys.exit(main())
