"""Move a run of torchtitan to a Checkpointer, and compare the next steps.

Start: torchrun --nproc-per-node 2 torchtitan_run.py
"""

from itertools import chain

import torch
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from ckptctl.train import Checkpointer

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()


class Data:
    at = 0

    def next(self):
        self.at += 1
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * self.at + rank))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class OfAllRanks(Data):
    """As torchtitan's own loaders: the state of each data-parallel rank under its key."""

    def state_dict(self):
        return {f"dp_rank_{rank}": {"at": self.at}, "dp_world_size": 2}

    def load_state_dict(self, state):
        self.at = state[f"dp_rank_{rank}"]["at"]


class Counter:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    fully_shard(model).set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def train(model, optimizer, scheduler, data):
    (model(data.next()) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return [one.to_local().clone() for one in model.parameters()]


def titan():
    """The objects of torchtitan's trainer, and its manager of checkpoints."""
    model, data, count = build(), OfAllRanks(), Counter()
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(
        model_parts=[model]
    )
    schedulers = LRSchedulersContainer.Config(warmup_steps=8).build(
        optimizers=optimizers, training_steps=20
    )
    manager = CheckpointManager.Config(enable=True, interval=4, folder="run-t").build(
        dataloader=data,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": count},
        sd_adapter=None,
    )
    return manager, count, (model, optimizers, schedulers, data)


manager, count, parts = titan()
for count.step in range(1, 5):
    train(*parts)
manager.save(4)
manager.close()

manager, count, parts = titan()
manager.load(step=4)
expected = [train(*parts) for _ in range(3)]
manager.close()

_, _, (model, optimizers, schedulers, _) = titan()
data = Data()
with Checkpointer(
    "run-t",
    model=model,
    optimizer=optimizers.optimizers,
    scheduler=schedulers.schedulers,
    dataloader=data,
    step_format="step-{}",
) as ckpt:
    start = ckpt.resume("auto")
    assert (start.step, data.at) == (4, 4)
    moved = [train(model, optimizers, schedulers, data) for _ in range(3)]
    assert all(map(torch.equal, chain(*moved), chain(*expected)))
    ckpt.save(7)
torch.distributed.destroy_process_group()
