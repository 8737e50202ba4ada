"""Measure the start of commands against a Python that does nothing.

`python -c pass` against `ckptctl` on a local root of 20 real steps, each a fresh
process, taken in turns; compiled as an installed package is. Processor time beside
the time by the clock: the former changes less on a busy machine.

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
TARGETS = {
    "ckptctl --version": 7,
    "ckptctl --help": 7,
    "ckptctl pick": 8,
    "ckptctl verify": 10,
    "ckptctl preflight": 10,
}
"""How many times as long as `python -c pass` each may take."""


def make_root(folder: Path) -> Path:
    """A root of 20 steps: three that a real framework wrote, and copies of the first as older."""
    with tarfile.open(REPOSITORY / "fixtures" / "frameworks.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    root = folder / "frameworks" / "kempnerforge" / "checkpoints"
    others = [number for number in range(1, 30) if number % 10][: N_STEPS - 3]
    for number in others:
        shutil.copytree(root / "step_10", root / f"step_{number}")
    return root


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
            "ckptctl verify": [*ckptctl, "verify", f"{root}/step_30"],
            "ckptctl preflight": [*ckptctl, "preflight", root],
        }
        taken = _in_turns(commands, environment, rounds)
    base_cpu_s, base_s = (
        statistics.median(each) for each in zip(*taken["python -c pass"], strict=True)
    )
    print(f"start of a process, {N_STEPS} steps, median of {rounds} in turns, times python -c pass")
    print("  command                        processor   clock  target")
    for what, both in taken.items():
        cpu_s, clock_s = (statistics.median(each) for each in zip(*both, strict=True))
        target = TARGETS.get(what, "")
        print(f"  {what:30} {cpu_s / base_cpu_s:9.1f} {clock_s / base_s:7.1f} {target:>7}")
    return 0


def _in_turns(
    commands: dict[str, list[str]], environment: dict[str, str], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of processor and clock of each command in each round."""
    taken: dict[str, list[tuple[float, float]]] = {what: [] for what in commands}
    for turn in range(rounds + 1):
        for what, command in commands.items():
            began_s = time.perf_counter()
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began_s
            if status:
                raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), command)
            if turn:  # the first turn compiles
                taken[what].append((used.ru_utime + used.ru_stime, seconds))
    return taken


if __name__ == "__main__":
    sys.exit(main())
