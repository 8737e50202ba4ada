"""A small training of Lightning with DDP or FSDP 2; run by torchrun, or by Lightning's launcher."""

from __future__ import annotations

import os

import lightning
import torch
from job_options import die, ending, job_options
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from ckptctl.integrations.lightning import CkptctlCallback, RecordOptions, resolve

options = job_options()
world = int(os.environ.get("WORLD_SIZE", "2"))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        )

    def configure_model(self):
        if options.sharded:
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])
            self.network.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def training_step(self, batch, _):
        loss = (self.network(batch) - batch[:, :4].sin()).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Damaged(Callback):
    """Other weights than those of the checkpoint."""

    def on_train_start(self, trainer, module):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(3)


class Killed(Callback):
    def on_train_batch_start(self, trainer, *_):
        if options.kill_at and trainer.global_step == options.kill_at:
            die()


lightning.seed_everything(3, verbose=False)
# An epoch is as long as the interval of the saves: in the middle of one Lightning does not go
# back to the place in the data.
data = torch.randn(4 * world * options.epoch, 16, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
sharded = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy=sharded if options.sharded else "ddp",
    devices=world,
    max_steps=options.steps,
    logger=False,
    enable_model_summary=False,
    callbacks=[
        ModelCheckpoint(
            options.root,
            every_n_train_steps=options.save_every,
            save_top_k=-1 if options.keep is None else options.keep,
            save_last="link",
        ),
        CkptctlCallback(options.root, RecordOptions(verdict_after=8, stop=options.stop)),
        Killed(),
        *([Damaged()] if options.wrong else []),
        TQDMProgressBar(refresh_rate=1),
    ],
)
with ending(options):
    path = resolve(trainer, "auto", options.root)
    trainer.fit(Module(), loader, ckpt_path=path)
    torch.distributed.destroy_process_group()
