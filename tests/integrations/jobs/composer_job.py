"""A small training with Composer; run by torchrun with the arguments of `job_options`."""

from __future__ import annotations

import os
import sys

import torch
from job_options import define_torchvision_operators, die, job_options

from ckptctl import CkptctlError
from ckptctl.train import resolve

os.environ.setdefault("NODE_RANK", "0")  # which torchrun does not set, and Composer demands
define_torchvision_operators()

options = job_options()


def train() -> None:
    from composer import Callback, ComposerModel, Time, Trainer
    from composer.utils import dist

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
            self.network = torch.nn.Sequential(*layers)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.network(batch)

        def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return (outputs - batch[:, :4].sin()).pow(2).mean()

    class Faults(Callback):
        def fit_start(self, state, logger) -> None:
            for parameter in state.model.parameters() if options.wrong else ():
                parameter.data.mul_(3)

        def batch_end(self, state, logger) -> None:
            if int(state.timestamp.batch) == options.kill_at:
                die()

    dist.initialize_dist("cpu")
    torch.manual_seed(3)
    data = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=dist.get_sampler(data))
    model = Model()
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration=Time(options.steps, "ba"),
        device="cpu",
        save_folder=options.root,
        save_filename="ep{epoch}-ba{batch}-rank{rank}.pt",
        save_interval=f"{options.save_every}ba",
        save_overwrite=True,
        load_path=resolve("auto", options.root),
        seed=3,
        callbacks=[Faults()],
        progress_bar=False,
        log_to_console=True,
        console_log_interval="1ba",
    )
    trainer.fit()
    trainer.close()
    torch.distributed.destroy_process_group()


try:
    train()
except CkptctlError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
