"""A small training with Ray Train, by the code of its page; it starts its own two workers.

`--kill-at` kills both: at a step that is saved, as soon as Ray has made the folder of the save.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

from job_options import job_options, run_recipe

os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")  # else each report takes 2 s
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # see the page
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
options = job_options()
root = os.path.abspath(options.root)
snapshot = Path(root, "checkpoint_manager_snapshot.json")


def listed() -> int:
    """How many checkpoints Ray's snapshot lists; 0 while it is written."""
    indices = re.search(r'"checkpoint_report_indices":\[([0-9,]+)\]', snapshot.read_text())
    return len(indices[1].split(",")) if indices else 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_save(names: list[str]) -> None:
    while len(os.listdir(root)) == len(names):
        pass
    die()


def at_step(step: int) -> None:
    """Called by each worker before each update."""
    if step != options.kill_at:
        return
    if step % options.save_every:
        while listed() < step // options.save_every:  # some time after it was reported
            time.sleep(0.1)
        die()
    threading.Thread(target=die_in_save, args=[os.listdir(root)], daemon=True).start()


os.makedirs(os.path.dirname(root), exist_ok=True)
loaded = 'start = state["step"]'
run_recipe(
    "ray-train",
    {
        '"/shared/ray", "run-7"': f"{os.path.dirname(root)!r}, {os.path.basename(root)!r}",
        "start + 1, 13": f"start + 1, {options.steps + 1}",
        "step % 4": f"step % {options.save_every}",
        "loss.backward()": "at_step(step); loss.backward()",
        loaded: loaded + "; [p.data.mul_(3) for p in model.parameters()]" * options.wrong,
    },
    at_step=at_step,
)
