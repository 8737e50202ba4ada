"""A training as the scripts of `examples/jobs` start it: it saves only when it is told to end.

`ENDS_AT` is the step after which it is done, `RAISES_AT` the one at which its code fails, and
`SAVE_TAKES_S` makes an emergency save slow. What happens is printed, one line an event.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist

from ckptctl.train import Checkpointer, GracefulStop, cluster_context

arguments = argparse.ArgumentParser()
arguments.add_argument("--root", required=True)
arguments.add_argument("--resume-from", default="auto")
options = arguments.parse_args()

if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
place = cluster_context()


def tell(event: str, step: int) -> None:
    print(f"{event} step {step} rank {place.rank or 0} on {place.node}", flush=True)


with (
    Checkpointer(options.root, model=model, optimizer=optimizer) as ckpt,
    GracefulStop() as stop,
):
    step = ckpt.resume(options.resume_from).step
    tell("resumed", step)
    while step < int(os.environ.get("ENDS_AT", "1000000")):
        step += 1
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        time.sleep(0.1)
        ckpt.note(step, loss=1.0)
        if step == int(os.environ.get("RAISES_AT", "-1")):
            raise ValueError("the code of the user fails")
        if stop.agreed():
            tell("stopping", step)
            time.sleep(float(os.environ.get("SAVE_TAKES_S", "0")))
            ckpt.save(step)
            tell("saved", step)
            break
    else:
        tell("done", step)
sys.exit(stop.exit_code)
