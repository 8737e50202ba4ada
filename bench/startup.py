"""How long does a job wait for `ckptctl pick`, next to a Python that does nothing?

`python -c pass` against `ckptctl pick` on a local root of 20 real steps, each a
fresh process, taken in turns; compiled as an installed package is. The target
is that `pick` takes at most ten times as long.

    python bench/startup.py [--rounds 21]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
N_STEPS = 20
TARGET = 10


def make_root(folder: Path) -> Path:
    """A root of 20 steps: the three that a real framework has written, over and over."""
    with tarfile.open(REPOSITORY / "fixtures" / "frameworks.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    saved = folder / "frameworks" / "kempnerforge" / "checkpoints"
    for number in range(1, N_STEPS + 1):
        source = saved / f"step_{10 * (number % 3 + 1)}"
        shutil.copytree(source, folder / "run" / f"step_{100 * number}")
    return folder / "run"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = str(make_root(folder))
        compiled = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONPATH": str(REPOSITORY)}
        environment = {**os.environ, **compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        ckptctl = [sys.executable, "-m", "ckptctl"]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "python -c 'import typer'": [sys.executable, "-c", "import typer"],
            "ckptctl --version": [*ckptctl, "--version"],
            "ckptctl --help": [*ckptctl, "--help"],
            "ckptctl explain": [*ckptctl, "explain", "shard.truncated"],
            "ckptctl pick --level listing": [*ckptctl, "pick", root, "--level", "listing"],
            "ckptctl pick": [*ckptctl, "pick", root],
        }
        taken = _in_turns(commands, environment, rounds)
    base_s = statistics.median(taken["python -c pass"])
    print(f"start of a process, {N_STEPS} steps, median and fastest of {rounds}, in turns")
    for what, seconds in taken.items():
        median_s, fastest_s = statistics.median(seconds), min(seconds)
        ratio = median_s / base_s
        print(f"  {what:30} {1e3 * median_s:6.1f} ms  {1e3 * fastest_s:6.1f} ms  {ratio:5.1f} x")
    ratio = statistics.median(taken["ckptctl pick"]) / base_s
    print(f"pick takes {ratio:.1f} times as long as a Python that does nothing (target {TARGET})")
    return 0


def _in_turns(
    commands: dict[str, list[str]], environment: dict[str, str], rounds: int
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {what: [] for what in commands}
    for turn in range(rounds + 1):
        for what, command in commands.items():
            began_s = time.perf_counter()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            if turn:  # the first turn compiles
                taken[what].append(time.perf_counter() - began_s)
    return taken


if __name__ == "__main__":
    sys.exit(main())
