"""A training that saves steps of DCP: `watched_training.py ROOT`; killed in its last save."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

root = Path(sys.argv[1])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())


def state(step: int) -> dict[str, object]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


for step in range(1, 5):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    if step < 3:
        dcp.save(state(step), checkpoint_id=str(root / f"step_{step}"), no_dist=True)
        continue
    # A slow storage: file after file, the metadata last.
    whole = root.parent / f"whole-{step}"
    dcp.save(state(step), checkpoint_id=str(whole), no_dist=True)
    (root / f"step_{step}").mkdir()
    for path in sorted(whole.iterdir(), key=lambda path: path.name == ".metadata"):
        half = path.stat().st_size // 2
        with (root / f"step_{step}" / path.name).open("wb") as file:
            for part in (path.read_bytes()[:half], path.read_bytes()[half:]):
                file.write(part)
                file.flush()
                time.sleep(0.3)
                if step == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
    shutil.rmtree(whole)
