"""A small training with DeepSpeed, ZeRO 1; run by torchrun, see `job_options`.

DeepSpeed prints no loss; a script does.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
from job_options import die, job_options

from ckptctl import CkptctlError
from ckptctl.train import resolve

options = job_options()
deepspeed.init_distributed(dist_backend="gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "bf16": {"enabled": True},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
try:
    path = resolve("auto", options.root)
    if path is not None:
        root, _, tag = path.rpartition("/")
        engine.load_checkpoint(root, tag=tag)
    if options.wrong:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(3)
            for group in engine.optimizer.optimizer.param_groups:  # what they are made from
                for part in group["params"]:
                    part.mul_(3)
    for step in range(engine.global_steps + 1, options.steps + 1):
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * world + rank))
        loss = (engine(batch.bfloat16()).float() - batch[:, :4].sin()).pow(2).mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach()
        torch.distributed.all_reduce(total)
        if rank == 0:
            print(f"step: {step} loss: {total.item() / world:.6f}", flush=True)
        if step % options.save_every == 0:
            engine.save_checkpoint(options.root)
        if step == options.kill_at:
            die()
    torch.distributed.destroy_process_group()
except CkptctlError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
