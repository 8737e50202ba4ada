"""A small training with local checkpoints of NVRx; run by torchrun, see `job_options`.

NVRx is no trainer: a script trains, and prints the loss.
"""

from __future__ import annotations

import os

import torch
from job_options import die, job_options, run_recipe
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict


class OnCpu(BasicTensorAwareStateDict):
    """The state dict of the package without a GPU, as `fixtures/rank_files.py` saves it."""

    def __init__(self, state_dict):
        self.state_dict, self._is_hollow = state_dict, False

    def restore_tensor_device(self, non_blocking=True):
        pass


options = job_options()
folder, session = os.path.split(options.root)
torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
names = run_recipe("nvrx", {"/local/checkpoints": folder, "run-7": session})
start, found = names["iteration"], [None] * world
torch.distributed.all_gather_object(found, start)
if rank == 0:
    print(f"found {found}", flush=True)

torch.manual_seed(3)
network = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
adam = torch.optim.AdamW(network.parameters(), lr=0.01)
if start != -1 and options.steps:
    network.load_state_dict(names["state"].state_dict["model"])
    adam.load_state_dict(names["state"].state_dict["optimizer"])
    if rank == 0:
        print(f"resuming from step {start}", flush=True)
if options.wrong:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3)
model = torch.nn.parallel.DistributedDataParallel(network)
for step in range(max(start, 0) + 1, options.steps + 1):
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * world + rank))
    loss = (model(batch) - batch[:, :4].sin()).pow(2).mean()
    loss.backward()
    adam.step()
    adam.zero_grad()
    torch.distributed.all_reduce(loss.detach())
    if rank == 0:
        print(f"step: {step} loss: {loss.item() / world:.6f}", flush=True)
    if step % options.save_every == 0:
        state = {"model": network.state_dict(), "optimizer": adam.state_dict(), "step": step}
        names["manager"].save(OnCpu(state), step)
    if step == options.kill_at:
        die()
torch.distributed.destroy_process_group()
