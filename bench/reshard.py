"""What does it cost to cut a step anew, or convert it, beside a copy and torch's converters?

The step is written by torch: 24 matrices as DTensors of 4 gloo ranks (`dcp.save`), into a
folder that is removed afterwards. What is timed is a whole process each, with its bytes
on the disk at the end: `cp -r` with `sync`, torch's way over one flat file
(`dcp_to_torch_save`, `torch_save_to_dcp`), and `ckptctl reshard`, which proves its result
besides. Then each way of `ckptctl convert` beside what torch offers for it, and `dcp.load`
on 3 ranks, from the step as it was saved and from the one that was cut for 3: seconds, and
bytes read by each process (`rchar`, all that goes through the kernel).

With `--sizes` one thing is asked instead: how much memory does each command take at most,
at each of several sizes? One size after the other, and what it made is removed first. On
the disk are never more than three times as many bytes as the step has.

    python bench/reshard.py [--gigabytes 1.5] [--rounds 3] [--folder DIR]
    python bench/reshard.py --sizes 1,2,4,8 [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parent.parent
SAVED, LOADED, TENSORS, COLUMNS = 4, 3, 24, 4096

RANKS = """
columns, tensors = COLUMNS, TENSORS
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.device_mesh import init_device_mesh

def work(rank, verb, folder, rows, size, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
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
    verb, folder, rows, size, port = sys.argv[1:6]
    mp.spawn(work, (verb, folder, int(rows), int(size), port), int(size))
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", help="memory at these sizes in GB, as 1,2,4,8; nothing else")
    parser.add_argument("--folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="ckptctl-bench-") as made:
        folder = Path(made)
        (folder / "ranks.py").write_text(RANKS)
        if asked.sizes:
            measure_memory(folder, [float(size) for size in asked.sizes.split(",")])
        else:
            source = save(folder, asked.gigabytes)
            measure(folder, source, asked.rounds)
            measure_convert(folder, source, asked.rounds)
            measure_load(folder, source, asked.gigabytes, asked.rounds)
    shutil.rmtree(COMPILED)
    return 0


def save(folder: Path, gigabytes: float) -> Path:
    """A step of so many GB, as torch saves it."""
    step = folder / "source"
    run([sys.executable, folder / "ranks.py", "save", step, rows_of(gigabytes), SAVED, "29611"])
    load = os.getloadavg()[0]
    size = n_bytes(step) / 1e9
    print(f"{size:.2f} GB in {SAVED} files; {os.cpu_count()} cores, load {load:.1f}", flush=True)
    return step


def rows_of(gigabytes: float) -> int:
    return int(gigabytes * 1e9 / 4 / COLUMNS / TENSORS)


def measure_memory(folder: Path, sizes: Sequence[float]) -> None:
    found: dict[str, list[str]] = {}
    flat, weights = folder / "flat.pt", folder / "model.safetensors"
    for gigabytes in sizes:
        source = save(folder, gigabytes)
        for name, command, kept, gone in (
            ("reshard", reshard(source, folder / "cut"), None, folder / "cut"),
            ("DCP to torch.save", convert(source, flat), flat, None),
            ("torch.save to DCP", convert(flat, folder / "cut" / "step_1"), None, flat),
            ("DCP to safetensors", convert(source, weights), weights, None),
            ("safetensors to DCP", convert(weights, folder / "cut" / "step_1"), None, weights),
        ):
            peak = timed(folder, command)[1]
            found.setdefault(name, []).append(f"{peak / 1024:.0f} MiB")
            remove(folder / "cut", *([gone] if gone else []))
            assert kept is None or kept.exists()
        remove(source)
    width = max(map(len, found))
    said = [f"{size:g} GB" for size in sizes]
    print(f"\n{'most memory held, at':{width}}" + "".join(f"{one:>10}" for one in said))
    for name, peaks in found.items():
        print(f"{name:{width}}" + "".join(f"{one:>10}" for one in peaks))


def convert(source: Path, target: Path) -> list[object]:
    ours = [sys.executable, "-m", "ckptctl", "convert", "--quiet", source, target]
    into = ["--world-size", LOADED] if target.name == "step_1" else []
    return [*ours, *into, "--accept-unverifiable"]


def measure_convert(folder: Path, source: Path, rounds: int) -> None:
    flat, weights, step = folder / "flat.pt", folder / "model.safetensors", folder / "cut/step_1"
    print(f"\n{'convert, proven':26} {'median':>9} {'torch':>9} {'x':>6} {'peak':>9} {'torch':>9}")
    for name, peer, of, into in (
        ("DCP to torch.save", "flat", source, flat),
        ("torch.save to DCP", "dcp from flat", flat, step),
        ("DCP to safetensors", "safetensors", source, weights),
        ("safetensors to DCP", "dcp from safetensors", weights, step),
    ):
        theirs = [sys.executable, "-c", PEER + PEERS[peer], of, into]
        ours_s, theirs_s = [], []
        for number in range(rounds):
            took, their_peak = timed(folder, theirs)
            theirs_s.append(took)
            remove(folder / "cut", into)
            took, peak = timed(folder, convert(of, into))
            ours_s.append(took)
            # The last result is what the way back begins with.
            remove(folder / "cut", *([into] if number < rounds - 1 else []))
        ratio = median(b / a for a, b in zip(ours_s, theirs_s, strict=True))
        print(f"{name:26} {median(ours_s):7.2f} s {median(theirs_s):7.2f} s {ratio:6.2f} "
              f"{peak / 1024:5.0f} MiB {their_peak / 1024:5.0f} MiB", flush=True)  # fmt: skip
    remove(flat, weights)


def reshard(source: Path, target: Path) -> list[object]:
    ours = [sys.executable, "-m", "ckptctl", "reshard", "--quiet"]
    return [*ours, source, target / "step_1", "--world-size", LOADED, "--apply"]


def measure(folder: Path, source: Path, rounds: int) -> None:
    target, flat = folder / "cut", folder / "flat.pt"
    peers: dict[str, list[object]] = {
        "cp -r, sync": ["cp", "-r", source, target / "step_1"],
        "ckptctl reshard": reshard(source, target),
        "dcp_to_torch_save, back": [sys.executable, "-c", CONVERT, source, flat, target / "step_1"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    peak: dict[str, int] = {}
    for _ in range(rounds):
        for name, command in peers.items():
            took, peak[name] = timed(folder, command)
            seconds[name].append(took)
            remove(target, flat)
    ours = seconds["ckptctl reshard"]
    print(f"{'':26} {'median':>9} {'x reshard':>10} {'peak':>9}")
    for name, each in seconds.items():
        ratio = median(a / b for a, b in zip(each, ours, strict=True))
        print(f"{name:26} {median(each):7.2f} s {ratio:10.2f} {peak[name] / 1024:5.0f} MiB")


def measure_load(folder: Path, source: Path, gigabytes: float, rounds: int) -> None:
    target, script, rows = folder / "cut", folder / "ranks.py", rows_of(gigabytes)
    timed(folder, reshard(source, target))
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, step in (("as it was saved", source), ("cut for 3", target / "step_1")):
            said = run([sys.executable, script, "load", step, rows, LOADED, "29612"])[2]
            ranks = json.loads(said.splitlines()[-1])
            found.setdefault(name, []).append((max(r[0] for r in ranks), sum(r[1] for r in ranks)))
    print(f"\ndcp.load on {LOADED} ranks")
    for name, each in found.items():
        seconds = median(one[0] for one in each)
        print(f"{name:26} {seconds:7.2f} s {median(one[1] for one in each) / 1e9:8.2f} GB read")


def timed(folder: Path, command: Sequence[object]) -> tuple[float, int]:
    """Seconds until what the process wrote is on the disk, and the most memory it held, in KiB."""
    (folder / "cut").mkdir(exist_ok=True)
    os.sync()
    began = time.perf_counter()
    _, peak, _ = run(command)
    subprocess.run(["sync", "-f", folder], check=True)
    return time.perf_counter() - began, peak


def n_bytes(step: Path) -> int:
    return sum(file.stat().st_size for file in step.iterdir())


def remove(*paths: Path) -> None:
    for path in paths:
        how: Callable[[Path], None] = shutil.rmtree if path.is_dir() else Path.unlink
        if path.exists():
            how(path)


# Compiled once, as an installed package is, and not into the source tree.
_COMPILING = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
COMPILED = tempfile.mkdtemp(prefix="ckptctl-bytecode-")


def run(command: Sequence[object]) -> tuple[float, int, str]:
    """Seconds of a process, the most memory that it held, in KiB, and what it printed."""
    environment = {key: value for key, value in os.environ.items() if key not in _COMPILING}
    environment |= {"PYTHONPATH": str(REPOSITORY), "PYTHONPYCACHEPREFIX": COMPILED}
    words = [str(word) for word in command]
    began = time.perf_counter()
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}\n{said}")
    return seconds, usage.ru_maxrss, said


if __name__ == "__main__":
    sys.exit(main())
