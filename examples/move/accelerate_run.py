"""Move a run of accelerate to a Checkpointer, and compare the next steps.

Start: torchrun --nproc-per-node 2 accelerate_run.py
"""

import subprocess

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ckptctl.train import Checkpointer

data = torch.randn(14, 8, generator=torch.Generator().manual_seed(1))
accelerator = Accelerator(cpu=True)


def build():
    accelerator.free_memory()
    set_seed(0, device_specific=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))


def train(parts, first, last):
    model, optimizer, scheduler = parts
    for step in range(first, last):
        batch = data[2 * step + accelerator.process_index]
        accelerator.backward((model(batch) - 1).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


old = build()
train(old, 0, 4)
accelerator.save_state("run-a/checkpoint-4")
expected = train(old, 4, 7)

# Once: make a step of sharded DCP in a new root
if accelerator.is_main_process:
    command = "ckptctl convert run-a/checkpoint-4 run-a-dcp/step_4 --accept-unverifiable"
    subprocess.run(command.split(), check=True)
accelerator.wait_for_everyone()

model, optimizer, scheduler = build()
with Checkpointer("run-a-dcp", model=model, optimizer=optimizer, scheduler=scheduler) as ckpt:
    start = ckpt.resume("auto")
    assert start.step == 4
    moved = train((model, optimizer, scheduler), 4, 7)
    assert all(map(torch.equal, moved, expected))
    ckpt.save(7)
accelerator.end_training()
