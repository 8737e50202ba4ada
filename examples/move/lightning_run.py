"""Move a sharded run of Lightning to a Checkpointer, and compare the next steps.

Start: torchrun --nproc-per-node 2 lightning_run.py
"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptctl.train import Checkpointer

N_RANKS = 2
data = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))


def loss_of(network, batch):
    return (network(batch) - 1).square().mean()


def optimizers(network):
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = build()

    def configure_model(self):
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])
        self.network.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def training_step(self, batch, _):
        return loss_of(self.network, batch)

    def configure_optimizers(self):
        optimizer, scheduler = optimizers(self.network)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


module = Module()
lightning.Trainer(
    accelerator="cpu",
    strategy=ModelParallelStrategy(data_parallel_size=N_RANKS, tensor_parallel_size=1),
    devices=N_RANKS,
    max_steps=7,
    use_distributed_sampler=False,  # each rank takes the same batches
    logger=False,
    enable_model_summary=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint("run-l", every_n_train_steps=4, save_top_k=-1)],
).fit(module, torch.utils.data.DataLoader(data, batch_size=1))
expected = [one.to_local() for one in module.network.parameters()]

network = build()
fully_shard(network, mesh=init_device_mesh("cpu", (N_RANKS,)))
network.set_force_sum_reduction_for_comms(True)
optimizer, scheduler = optimizers(network)
with Checkpointer("run-l", model=network, optimizer=optimizer, scheduler=scheduler) as ckpt:
    start = ckpt.resume("auto")
    for step in range(start.step, 7):
        loss_of(network, data[step][None]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert start.step == 4
    assert all(map(torch.equal, expected, (one.to_local() for one in network.parameters())))
    ckpt.save(7)
torch.distributed.destroy_process_group()
