"""What does it cost to compare every byte, beside programs that read and digest files?

The checkpoint is written by torch (`dcp.save`, four files) into a folder that is
removed afterwards, and is in the page cache when the clock starts: what is measured
is the processor, not the disk. A second checkpoint of half the size gives what each
further gigabyte costs. Programs that are not installed are left out. Each round runs
all of them one after the other; the table has the fastest round of each, and ratios
within one run are what counts.

    python bench/content_check.py [--gigabytes 1.6] [--rounds 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = 4
SLOW = ("sha256sum -c", "rclone check", "restic check", "dcp.load", "python -m zipfile -t")
"""Two rounds of these are enough."""

SAVE = """
import sys, torch, torch.distributed.checkpoint as dcp
folder, gigabytes = sys.argv[1], float(sys.argv[2])
torch.manual_seed(0)
n = int(gigabytes * 1e9 / 4 / 48)
state = {f"layers.{i}.weight": torch.randn(n) for i in range(48)}
state |= {f"layers.{i}.bias": torch.randn(512) for i in range(48)}
writer = dcp.FileSystemWriter(folder, thread_count=%d)
dcp.save({"model": state}, storage_writer=writer, no_dist=True)
if len(sys.argv) > 3:
    torch.save(state, sys.argv[3])
"""

LOAD = """
import sys, torch, torch.distributed.checkpoint as dcp
n = int(float(sys.argv[2]) * 1e9 / 4 / 48)
state = {f"layers.{i}.weight": torch.empty(n) for i in range(48)}
state |= {f"layers.{i}.bias": torch.empty(512) for i in range(48)}
dcp.load({"model": state}, storage_reader=dcp.FileSystemReader(sys.argv[1]), no_dist=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="ckptctl-bench-") as made:
        folder = Path(made)
        run([sys.executable, "-c", SAVE % FILES, str(folder / "large"), str(asked.gigabytes),
             str(folder / "one.pt")])  # fmt: skip
        run([sys.executable, "-c", SAVE % FILES, str(folder / "small"), str(asked.gigabytes / 2)])
        sizes = " and ".join(
            f"{n_bytes(folder / size) / 1e9:.2f} GB" for size in ("large", "small")
        )
        load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        print(f"{sizes} in {FILES} files each; {load}")
        measure(folder, asked.gigabytes, asked.rounds)
    shutil.rmtree(COMPILED)
    return 0


def n_bytes(step: Path) -> int:
    return sum(file.stat().st_size for file in step.iterdir())


def commands(folder: Path, gigabytes: float) -> dict[str, dict[str, list[str]]]:
    """Each program, as it looks at the large and at the small checkpoint."""
    ours = [sys.executable, "-m", "ckptctl", "verify", "--quiet", "--level", "content"]
    table: dict[str, dict[str, list[str]]] = {}
    for size in ("large", "small"):
        step = folder / size
        shards = [str(path) for path in sorted(step.glob("*.distcp"))]
        each = {
            "cat": ["cat", *shards],
            "ckptctl, 1 thread": [*ours, "--jobs", "1", str(step)],
            "ckptctl": [*ours, str(step)],
        }
        for program in ("xxhsum", "b3sum", "sha256sum"):
            if shutil.which(program):
                sums = folder / f"{program}-{size}"
                with sums.open("wb") as out:
                    subprocess.run([program, *shards], stdout=out, check=True)
                each[f"{program} -c"] = [program, "-c", str(sums)]
        if shutil.which("rclone"):
            # Compares two copies, so each byte is read twice: here both are the same files.
            each["rclone check"] = [
                "rclone", "--config", "", "check", "--download", str(step), str(step)]  # fmt: skip
        if shutil.which("restic"):
            each["restic check"] = restic(folder, size)
        if size == "large":
            each["python -m zipfile -t"] = [
                sys.executable, "-m", "zipfile", "-t", str(folder / "one.pt")]  # fmt: skip
            each["dcp.load"] = [sys.executable, "-c", LOAD, str(step), str(gigabytes)]
        for name, command in each.items():
            table.setdefault(name, {})[size] = command
    return table


def restic(folder: Path, size: str) -> list[str]:
    """Put the checkpoint into a repository of its own; the command that reads all of that."""
    os.environ["RESTIC_PASSWORD"] = "bench"
    of_it = ["restic", "--no-cache", "-q", "-r", str(folder / f"restic-{size}")]
    subprocess.run([*of_it, "init"], check=True)
    subprocess.run([*of_it, "backup", str(folder / size)], check=True)
    return [*of_it, "check", "--read-data"]


def measure(folder: Path, gigabytes: float, rounds: int) -> None:
    table = commands(folder, gigabytes)
    best: dict[tuple[str, str], float] = {}
    peak: dict[str, int] = {}
    for number in range(rounds):
        for name, sizes in table.items():
            if name in SLOW and number >= 2:
                continue
            for size, command in sizes.items():
                seconds, n_kib = run(command)
                best[name, size] = min(seconds, best.get((name, size), seconds))
                if size == "large":
                    peak[name] = n_kib
    further = (n_bytes(folder / "large") - n_bytes(folder / "small")) / 1e9

    def per_gigabyte(name: str) -> float | None:
        small = best.get((name, "small"))
        return None if small is None else (best[name, "large"] - small) / further

    cat, cat_further = best["cat", "large"], per_gigabyte("cat")
    print(f"{'':22} {'process':>9} {'x cat':>7} {'each GB':>9} {'x cat':>7} {'peak':>9}")
    for name in table:
        seconds, each = best[name, "large"], per_gigabyte(name)
        row = f"{name:22} {seconds:7.3f} s {seconds / cat:7.2f}"
        if each is None or not cat_further:
            row += f" {'':>9} {'':>7}"
        else:
            row += f" {each:7.3f} s {each / cat_further:7.2f}"
        print(f"{row} {peak[name] / 1024:5.0f} MiB")


# Compiled once, as an installed package is, and not into the source tree.
_COMPILING = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
COMPILED = tempfile.mkdtemp(prefix="ckptctl-bytecode-")


def run(command: Sequence[str]) -> tuple[float, int]:
    """Seconds from start to end of a process, and the most memory that it held, in KiB."""
    environment = {key: value for key, value in os.environ.items() if key not in _COMPILING}
    environment |= {"PYTHONPATH": str(REPOSITORY), "PYTHONPYCACHEPREFIX": COMPILED}
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}\n{said.decode()}")
    return seconds, usage.ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
