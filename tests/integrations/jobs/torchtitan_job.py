"""A small training with torchtitan's checkpoint manager; run by torchrun, see `job_options`.

The trainer of torchtitan needs a GPU; its manager saves and loads on the CPU.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from job_options import die, job_options, run_recipe
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torchtitan.tools.logging import init_logger, logger

from ckptctl import CkptctlError

options = job_options()
init_logger()
torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
fully_shard(model)
model.set_force_sum_reduction_for_comms(True)  # gloo has no other
adam = torch.optim.AdamW(model.parameters(), lr=0.01)


class Optimizers:
    """As torchtitan's container: its state is keyed by parameter."""

    def state_dict(self):
        return get_optimizer_state_dict(model, adam)

    def load_state_dict(self, state):
        set_optimizer_state_dict(model, adam, state)


class TrainState:
    """The counters that torchtitan's trainer saves."""

    step = 0
    tokens = 0

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": self.tokens}

    def load_state_dict(self, state):
        self.step, self.tokens = state["step"], state["ntokens_seen"]


class Data:
    """Batches by step, the same in every run; a place in them is saved."""

    at = 0

    def next(self):
        self.at += 1
        generator = torch.Generator().manual_seed(self.at * world + rank)
        return torch.randn(4, 16, generator=generator)

    def state_dict(self):
        return {f"dp_rank_{rank}": self.at}

    def load_state_dict(self, state):
        self.at = state[f"dp_rank_{rank}"]


state, data = TrainState(), Data()
config = SimpleNamespace()  # the trainer's, which needs a GPU
run_recipe("torchtitan", {"interval=500": f"interval={options.save_every}"}, config=config)
config.checkpoint.folder = options.root
config.checkpoint.keep_latest_k = options.keep or 0
manager = config.checkpoint.build(
    dataloader=data,
    model_parts=[model],
    optimizers=Optimizers(),
    lr_schedulers=torch.optim.lr_scheduler.StepLR(adam, 30),
    states={"train_state": state},
    sd_adapter=None,
)
try:
    manager.load(step=-1)
    if options.wrong:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
    while state.step < options.steps:
        state.step += 1
        batch = data.next()
        state.tokens += batch.numel()
        loss = (model(batch) - batch[:, :4].sin()).pow(2).mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        torch.distributed.all_reduce(loss.detach())
        # The line of torchtitan's `MetricsProcessor.log`.
        logger.info(f"step: {state.step:2}  loss: {loss.item() / world:8.5f}  grad_norm:  1.0000")
        manager.save(state.step, last_step=state.step == options.steps)
        if state.step == options.kill_at:
            die()
    manager.close()
    torch.distributed.destroy_process_group()
except CkptctlError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
