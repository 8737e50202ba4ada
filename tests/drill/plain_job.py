"""A job of two ranks without a process group, each in a session of its own, as under torchrun.

plain_job.py ROOT STEP TEMPLATE: goes on after the step at the path STEP. Each tenth step is saved
by rank 0: the tensors of the step TEMPLATE, a little different in every step, and a count of its
own. Rank 0 waits for rank 1 in every step, and rank 1 ignores SIGTERM.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any


def launch() -> int:
    """Start both ranks; the first that ends ends the other."""
    reads, writes = os.pipe()
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv, str(reads), str(writes)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            pass_fds=(reads, writes),
            start_new_session=True,
        )
        for rank in (0, 1)
    ]
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
    return 1


def at_step(step: int, value: Any) -> Any:
    """A value of the template as it is in a step: a counter has its number."""
    if not hasattr(value, "ndim"):
        return value
    return value * 0 + step if value.ndim == 0 else value * (1 + step / 64)


def train(rank: int) -> None:
    """Train until the process is killed."""
    root, start, template = map(Path, sys.argv[1:4])
    reads, writes = map(int, sys.argv[4:6])
    if rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            os.write(writes, b"x")
            time.sleep(0.05)
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    from torch.utils._pytree import tree_map

    held: dict[str, Any] = {}
    reader = dcp.FileSystemReader(template)
    _load_state_dict(
        held, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    state = torch.load(template / "train_state.pt", weights_only=False)
    for step in range(int(start.name.removeprefix("step_")) + 1, 1_000_000):
        os.read(reads, 1)
        print(json.dumps({"step": step, "loss": 2 + random.Random(step).random()}), flush=True)
        if step % 10 == 0:
            trained = tree_map(partial(at_step, step), held)
            dcp.save(trained, checkpoint_id=root / f"tmp-{step}", no_dist=True)
            torch.save({**state, "step": step}, root / f"tmp-{step}" / "train_state.pt")
            (root / f"tmp-{step}").rename(root / f"step_{step}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]))
    sys.exit(launch())
