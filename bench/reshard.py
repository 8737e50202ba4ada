"""Resharding and converting a step, beside a copy and torch's converters.

The step is written by torch: 24 matrices as DTensors of 4 gloo ranks (`dcp.save`). Whole
processes, by the clock, each with its bytes on the disk at the end: `cp -r`, torch's way
over one flat file (`dcp_to_torch_save`, `torch_save_to_dcp`), and `ckptctl reshard`, which
proves its result and seals it. Then `dcp.load` on 3 ranks, from the step as it was saved and
from the one that was resharded for 3.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from measuring import Row, Size, Spent, ckptctl, folder, in_turns, least, process, python

GIGABYTES = 0.8
SAVED, LOADED, TENSORS, COLUMNS = 4, 3, 24, 4096

RANKS = """
columns, tensors = COLUMNS, TENSORS
import json, sys, tempfile, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.device_mesh import init_device_mesh

def work(rank, verb, folder, rows, size, method):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    each = -(-rows // size)
    own = max(0, min(each, rows - rank * each))
    torch.manual_seed(rank)
    make = torch.randn if verb == "save" else torch.empty
    state = {f"model.layers.{i}.weight": DTensor.from_local(
        make(own, columns), mesh, [Shard(0)], run_check=False, shape=(rows, columns),
        stride=(columns, 1))
        for i in range(tensors)}
    if verb == "save":
        dcp.save(state, checkpoint_id=folder)
        return
    dist.barrier()
    before, began = rchar(), time.perf_counter()
    dcp.load(state, checkpoint_id=folder)
    mine = torch.tensor([time.perf_counter() - began, rchar() - before], dtype=torch.float64)
    every = [torch.zeros(2, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(every, mine)
    if rank == 0:
        print(json.dumps([e.tolist() for e in every]))

def rchar():
    return int(open("/proc/self/io").readline().split()[1])

if __name__ == "__main__":
    verb, folder, rows, size = sys.argv[1:5]
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(work, (verb, folder, int(rows), int(size), f"file://{meeting}/point"), int(size))
""".replace("COLUMNS", str(COLUMNS)).replace("TENSORS", str(TENSORS))

CONVERT = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
step, flat, target = sys.argv[1:]
dcp_to_torch_save(step, flat)
torch_save_to_dcp(flat, target)
"""

# What people write who have a step and want the other, or the other way round.
PEERS = {
    "flat": "format_utils.dcp_to_torch_save(source, target)",
    "dcp from flat": "format_utils.torch_save_to_dcp(source, target)",
    "safetensors": """
state = {}
state_dict_loader._load_state_dict(state, FileSystemReader(source), no_dist=True,
    planner=default_planner._EmptyStateDictLoadPlanner())
save_file({name: tensor for name, tensor in walk(state)}, target)
""",
    "dcp from safetensors": "dcp.save(load_file(source), checkpoint_id=target, no_dist=True)",
}
PEER = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, default_planner, format_utils
from torch.distributed.checkpoint import state_dict_loader
from safetensors.torch import load_file, save_file

def walk(state, front=""):
    for name, value in state.items():
        if isinstance(value, dict):
            yield from walk(value, f"{front}{name}.")
        else:
            yield f"{front}{name}", value

source, target = sys.argv[1:]
"""
CONVERSIONS = (
    ("DCP to torch.save", "flat", "source", "flat.pt"),
    ("torch.save to DCP", "dcp from flat", "flat.pt", "cut/step_1"),
    ("DCP to safetensors", "safetensors", "source", "model.safetensors"),
    ("safetensors to DCP", "dcp from safetensors", "model.safetensors", "cut/step_1"),
)


def rows(size: Size) -> Iterator[Row]:
    """Reshard, load what it wrote, and convert both ways."""
    n_rows = max(8, int(GIGABYTES * size.scale * 1e9 / 4 / COLUMNS / TENSORS))
    with folder() as name:
        parent = Path(name)
        script, source = parent / "ranks.py", parent / "source"
        script.write_text(RANKS)
        process([sys.executable, script, "save", source, n_rows, SAVED])
        yield from _reshard(parent, source, size.rounds)
        yield from _load(parent, source, n_rows, size.rounds)
        for conversion in CONVERSIONS:
            yield from _convert(parent, *conversion, size.rounds)


def _reshard(parent: Path, source: Path, rounds: int) -> Iterator[Row]:
    target, flat = parent / "cut", parent / "flat.pt"
    commands = {
        "ours": reshard(source, target),
        "cp": ["cp", "-r", source, target / "step_1"],
        "torch": python(CONVERT, source, flat, target / "step_1"),
    }
    taken = in_turns(
        {
            what: lambda command=command: durable(parent, command)
            for what, command in commands.items()
        },
        rounds,
        lambda: remove(target, flat),
    )
    remove(target, flat)
    what = f"reshard {n_bytes(source) / 1e9:.1f} GB from {SAVED} ranks to {LOADED}"
    ours = least(taken, "ours", "clock_s")
    yield Row(what, ours, "s", least(taken, "cp", "clock_s"), "`cp -r`", goal=1.5)
    peer = "`dcp_to_torch_save` and back"
    yield Row(what, ours, "s", least(taken, "torch", "clock_s"), peer, goal=0.2)
    peaks = [least(taken, who, "peak_mib") for who in ("ours", "torch")]
    yield Row(f"memory, {what}", peaks[0], "MiB", peaks[1], peer)


def _load(parent: Path, source: Path, n_rows: int, rounds: int) -> Iterator[Row]:
    target = parent / "cut"
    durable(parent, reshard(source, target))
    read = {}

    def load(step: Path) -> Spent:
        spent = process([sys.executable, parent / "ranks.py", "load", step, n_rows, LOADED])
        ranks = json.loads(spent.printed.splitlines()[-1])
        read[step] = sum(rank[1] for rank in ranks)
        return replace(spent, clock_s=max(rank[0] for rank in ranks))

    cut = target / "step_1"
    taken = in_turns({"cut": lambda: load(cut), "as saved": lambda: load(source)}, rounds)
    remove(target)
    seconds = [least(taken, step, "clock_s") for step in ("cut", "as saved")]
    yield Row(f"`dcp.load` on {LOADED} ranks, resharded", seconds[0], "s", seconds[1], "as saved")
    gigabytes = [read[step] / 1e9 for step in (cut, source)]
    yield Row("bytes that it reads", gigabytes[0], "GB", gigabytes[1], "as saved")


def _convert(
    parent: Path, name: str, peer: str, source: str, target: str, rounds: int
) -> Iterator[Row]:
    of, into = parent / source, parent / target
    theirs = python(PEER + PEERS[peer], of, into)
    # The last result, which is ours, is what the way back begins with.
    taken = in_turns(
        {
            "torch": lambda: durable(parent, theirs),
            "ours": lambda: durable(parent, convert(of, into)),
        },
        rounds | 1,
        lambda: remove(parent / "cut", into),
    )
    ours, torchs = (least(taken, who, "clock_s") for who in ("ours", "torch"))
    yield Row(f"convert {name}, verified", ours, "s", torchs, "torch, not verified")
    peaks = [least(taken, who, "peak_mib") for who in ("ours", "torch")]
    yield Row(f"memory, convert {name}", peaks[0], "MiB", peaks[1], "torch")


def convert(source: Path, target: Path) -> list[object]:
    into = ["--world-size", LOADED] if target.name == "step_1" else []
    return ckptctl("convert", "--quiet", source, target, *into, "--accept-unverifiable")


def reshard(source: Path, target: Path) -> list[object]:
    step = target / "step_1"
    return ckptctl("reshard", "--quiet", source, step, "--world-size", LOADED, "--apply")


def durable(parent: Path, command: Sequence[object]) -> Spent:
    """What a process takes until what it wrote is on the disk."""
    (parent / "cut").mkdir(exist_ok=True)
    os.sync()
    spent = process(command)
    synced = process(["sync", "-f", parent])
    return replace(spent, clock_s=spent.clock_s + synced.clock_s)


def n_bytes(step: Path) -> int:
    return sum(file.stat().st_size for file in step.iterdir())


def remove(*paths: Path) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
