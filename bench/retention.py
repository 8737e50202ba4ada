"""What does `keep=` cost a save, next to the same save that keeps everything?

One process, one state, two roots, saves in turns: with `keep=3` and without. Before the
rounds each root holds the steps that `keep=3` retains. The measure is `save` alone, as
the training waits for it; the removal of older steps runs beside the training.

    python bench/retention.py [--mib 96] [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from ckptctl.train import Checkpointer

WIDTH = 2048


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    n_layers = max(1, options.mib * 2**20 // (4 * WIDTH * WIDTH))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(n_layers)))
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        jobs = {
            keep: Checkpointer(
                str(Path(name) / f"keep-{keep}"), model=model, keep=keep, tell=lambda _: None
            )
            for keep in (None, 3)
        }
        taken: dict[int | None, list[float]] = {keep: [] for keep in jobs}
        for job in jobs.values():
            job.resume("none")
        for step in range(1, options.rounds + 4):
            order = list(jobs.items())
            for keep, job in order if step % 2 else reversed(order):
                began_s = time.perf_counter()
                job.save(step)
                if step > 3:
                    taken[keep].append(time.perf_counter() - began_s)
                job.flush()
        for job in jobs.values():
            job.close()
    without, with_it = (statistics.median(taken[keep]) for keep in (None, 3))
    print(f"{options.mib} MiB of state, {options.rounds} saves each, in turns, median")
    print(f"save with keep=3 takes {with_it / without:.2f} times as long as without")
    return 0


if __name__ == "__main__":
    sys.exit(main())
