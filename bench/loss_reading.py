"""How fast is a training log read, next to `wc -l` and `grep -c`?

Two logs of the form that Megatron-LM prints: one in which a line in twenty is a step,
as in what a job writes altogether, and one of steps alone, a fifth as large. Processor
time of fresh processes, the fastest of some rounds in turns, and the peak memory.

    python bench/loss_reading.py [--megabytes 1000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

STEP = (
    " [2025-05-09 06:11:20] iteration {step:8}/ 4000000 | consumed samples: {samples:12} |"
    " elapsed time per iteration (ms): 3286.6 | throughput per GPU (TFLOP/s/GPU): 30.2 |"
    " learning rate: 6.666667E-05 | global batch size:    32 | lm loss: {loss:.6E} |"
    " loss scale: 1.0 | grad norm: 6.350 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |\n"
)
NOISE = (
    "[default0]:[NCCL INFO] Channel {n:02}/0 : 1[1] -> 0[0] via P2P/CUMEM comm 0x55d nRanks 16\n"
    "[default3]:2025-05-09 06:11:20 WARNING dataloader worker {n} waited 0.31 s for its shard\n"
)
READER = (
    "import sys\n"
    "from ckptctl.loss.reading import read_logs\n"
    "print(sum(1 for _ in read_logs([sys.argv[1]])))\n"
)


def make_log(path: Path, n_bytes: int, noise_lines: int) -> int:
    """Write a log, and say how many steps are in it."""
    noise = "".join(NOISE.format(n=n) for n in range(noise_lines // 2))
    written = n_steps = 0
    with path.open("w") as file:
        while written < n_bytes:
            block = []
            for _ in range(1_000):
                n_steps += 1
                loss = 11 - 8 * n_steps / 4_000_000
                block.append(STEP.format(step=n_steps, samples=32 * n_steps, loss=loss) + noise)
            written += file.write("".join(block))
    return n_steps


def measured(command: list[str]) -> tuple[float, int, str]:
    """Processor seconds and peak MiB of a command, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LC_ALL": "C"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss // 1024, out.split()[0]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for name, n_bytes, noise_lines in (
        ("a step in 20 lines", arguments.megabytes * 1_000_000, 19),
        ("steps alone", arguments.megabytes * 200_000, 0),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "train.log")
            n_steps = make_log(path, n_bytes, noise_lines)
            commands = {
                "wc -l": ["wc", "-l", str(path)],
                "grep -c": ["grep", "-c", "lm loss", str(path)],
                "ckptctl": [sys.executable, "-c", READER, str(path)],
            }
            taken: dict[str, list[tuple[float, int, str]]] = {each: [] for each in commands}
            for _ in range(arguments.rounds):
                for each, command in commands.items():
                    taken[each].append(measured(command))
            for each in ("grep -c", "ckptctl"):
                assert int(taken[each][0][2]) == n_steps, each
        fastest = {each: min(times) for each, times in taken.items()}
        read_s, peak, _ = fastest["ckptctl"]
        print(
            f"{name}, {n_bytes / 1e9:.1f} GB, {n_steps:,} steps: "
            f"{read_s / fastest['wc -l'][0]:.1f} times wc -l, "
            f"{read_s / fastest['grep -c'][0]:.1f} times grep -c, "
            f"{1e6 * read_s / n_steps:.0f} µs a step, peak {peak} MiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
