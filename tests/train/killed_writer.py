"""Saves steps with `Writer`, each killed before another of its calls that change files.

    python killed_writer.py FOLDER

The save in `FOLDER/run-N/step_1` is killed before its call N; a write is two calls. Ends
with the first save that completes, and prints how many were killed.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "campaign"))

import torch
import torch.distributed.checkpoint as dcp
from watched_calls import Call, watch

from ckptctl.train import Writer


def save(step: Path, number: int) -> None:
    n_seen = 0

    def before(call: Call) -> None:
        nonlocal n_seen
        n_seen += 1
        if n_seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    state = {"long": torch.arange(300_000), **{f"short.{i}": torch.ones(i + 1) for i in range(5)}}
    watch(step.parent, before)
    dcp.save(state, storage_writer=Writer(step, thread_count=2), no_dist=True)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    n_killed = 0
    while True:
        step = Path(sys.argv[1]) / f"run-{n_killed + 1}" / "step_1"
        step.parent.mkdir()
        pid = os.fork()
        if pid == 0:
            save(step, n_killed + 1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            print(n_killed)
            sys.exit(code)
        n_killed += 1


if __name__ == "__main__":
    main()
