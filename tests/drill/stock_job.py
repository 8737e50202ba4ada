"""A training script that knows nothing of ckptctl: stock `dcp.save` and `dcp.load`.

stock_job.py --root DIR [--resume-from STEP] [--steps N] [--forgets]
"""

from __future__ import annotations

import argparse
import copy
import json
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--resume-from", default="")
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--forgets", action="store_true", help="load nothing, and count on")
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def state(step: int) -> dict[str, object]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(step)}


start = 0
if options.resume_from:
    loaded = copy.deepcopy(state(0))  # loading writes into the tensors of what it gets
    dcp.load(loaded, checkpoint_id=options.resume_from)
    if not options.forgets:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
    start = int(loaded["step"])
for step in range(start + 1, options.steps + 1):
    draw = torch.Generator().manual_seed(step)
    batch = torch.randn(32, 64, generator=draw)
    loss = (model(batch) - batch.roll(1, 1)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    time.sleep(0.2)
    if dist.get_rank() == 0:
        print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
    if step % 10 == 0:
        dcp.save(state(step), checkpoint_id=f"{options.root}/step_{step}")
dist.destroy_process_group()
