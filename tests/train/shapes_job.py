"""Scripts of the shapes that people train with, killed after every save: the rest as `epoch_job`.

    python shapes_job.py FOLDER '{"script": "gan", ...}'

Two ranks. `fsdp`: FSDP2, accumulation, averaged weights, workers. `gan`: two models, two
optimizers, noise. `lora`: a frozen base with adapters. `parallel`: a layer that each rank has of
its own, by hand. `curriculum`: two loaders, of which the second one follows. A row is the ids of
the samples, the loss, and a checksum of all weights.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from epoch_job import Lines, compared
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptctl.errors import CkptctlError
from ckptctl.train import Checkpointer

N_RANKS = 2
N_EPOCHS = 3
BATCH = 2


def loader_of(rank: int, n_samples: int, workers: int = 0, seed: int = 5) -> Any:
    data = Lines(n_samples)
    sampler = DistributedSampler(data, N_RANKS, rank, seed=seed)
    return StatefulDataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=workers)


def mean_over_ranks(parameters: Any) -> None:
    """What DDP does, by hand."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= N_RANKS


class Script:
    """One shape: what it saves, and a step of it."""

    accumulate = 1

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        self.loader = loader_of(rank, options["samples"], options["workers"])
        self.extra: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        torch.manual_seed(1)
        self.build(rank)

    def build(self, rank: int) -> None:
        raise NotImplementedError

    def epoch(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch."""
        self.loader.sampler.set_epoch(epoch)
        return iter(self.loader)

    def loss_of(self, batch: Any) -> Any:
        return self.model(batch).square().mean()

    def update(self, losses: list[Any]) -> None:
        mean_over_ranks(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checksum(self) -> float:
        held = chain(self.model.state_dict().values(), self.averaged())
        tensors = (one.to_local() if isinstance(one, DTensor) else one for one in held)
        return sum(tensor.double().abs().sum().item() for tensor in tensors)

    def averaged(self) -> list[Any]:
        return []


class Sharded(Script):
    accumulate = 2

    def build(self, rank: int) -> None:
        mesh = init_device_mesh("cpu", (N_RANKS,))
        self.model, self.ema = (
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)) for _ in range(2)
        )
        self.ema.load_state_dict(self.model.state_dict())
        for model in (self.model, self.ema):
            fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.extra = {"ema": self.ema}

    def update(self, losses: list[Any]) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for mean, now in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 0.25)

    def averaged(self) -> list[Any]:
        return [*self.ema.state_dict().values()]


class Adversarial(Script):
    def build(self, rank: int) -> None:
        generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
        critic = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.model = nn.ModuleDict({"generator": generator, "critic": critic})
        self.optimizer = [
            torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            torch.optim.RMSprop(critic.parameters(), lr=1e-3),
        ]

    def loss_of(self, batch: Any) -> Any:
        generator, critic = self.model["generator"], self.model["critic"]
        made = generator(torch.randn(len(batch), 3))
        loss = critic(made.detach()).mean() - critic(batch).mean()
        loss.backward()
        mean_over_ranks(critic.parameters())
        self.optimizer[1].step()
        self.optimizer[1].zero_grad()
        return -critic(made).mean() + 0 * loss.detach()

    def update(self, losses: list[Any]) -> None:
        mean_over_ranks(self.model["generator"].parameters())
        self.optimizer[0].step()
        for optimizer in self.optimizer:
            optimizer.zero_grad()


class Adapted(nn.Module):
    """A frozen layer with an adapter of a low rank."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(n_in, n_out).requires_grad_(False)
        self.down = nn.Linear(n_in, 2, bias=False)
        self.up = nn.Linear(2, n_out, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(nn.functional.dropout(self.down(x), 0.5, self.training))


class LowRank(Script):
    def build(self, rank: int) -> None:
        self.model = nn.Sequential(Adapted(4, 8), nn.Tanh(), Adapted(8, 1))
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)


class Parallel(Script):
    """The layer `own` of each rank has values of its own, and the others are equal on both."""

    def build(self, rank: int) -> None:
        shared, head = nn.Linear(4, 8), nn.Linear(8, 1)
        torch.manual_seed(10 + rank)
        self.model = nn.ModuleDict({"shared": shared, "own": nn.Linear(8, 8), "head": head})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.options = {"per_rank": ["own"]}

    def loss_of(self, batch: Any) -> Any:
        model = self.model
        return model["head"](torch.relu(model["own"](model["shared"](batch)))).square().mean()

    def update(self, losses: list[Any]) -> None:
        mean_over_ranks([*self.model["shared"].parameters(), *self.model["head"].parameters()])
        self.optimizer.step()
        self.optimizer.zero_grad()


class Curriculum(Script):
    """The first epoch is of easy samples; all later ones are of hard ones."""

    def build(self, rank: int) -> None:
        n_samples = len(self.loader.dataset)
        self.loaders = {"easy": self.loader, "hard": loader_of(rank, n_samples, 0, seed=9)}
        self.extra = {"hard": self.loaders["hard"]}
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def epoch(self, epoch: int) -> Iterator[Any]:
        loader = self.loaders["easy" if epoch == 0 else "hard"]
        loader.sampler.set_epoch(epoch)
        return iter(loader)


SCRIPTS = {
    "fsdp": Sharded,
    "gan": Adversarial,
    "lora": LowRank,
    "parallel": Parallel,
    "curriculum": Curriculum,
}


def rank_main(options: dict[str, Any], rank: int, meet: str, root: str, out: Path) -> int:
    warnings.simplefilter("ignore")
    logging.getLogger("torchdata").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=N_RANKS)
    script = SCRIPTS[options["script"]](rank, options)
    torch.manual_seed(50 + rank)
    try:
        ckpt = Checkpointer(
            root,
            model=script.model,
            optimizer=script.optimizer,
            dataloader=script.loader,
            extra=script.extra or None,
            tell=lambda text: print(text, file=sys.stderr),
            **script.options,
        )
        start = step = ckpt.resume().step
        n_steps = options["samples"] // N_RANKS // BATCH // script.accumulate
        with out.open("a") as rows:
            for epoch in range(step // n_steps, N_EPOCHS):
                row: dict[str, Any] = {"ids": [], "losses": []}
                losses: list[Any] = []
                for batch, ids in script.epoch(epoch):
                    losses.append(script.loss_of(batch))
                    losses[-1].backward()
                    row["ids"] += ids.tolist()
                    row["losses"].append(losses[-1].item())
                    if len(losses) < script.accumulate:
                        continue
                    script.update(losses)
                    step += 1
                    row["losses"].append(script.checksum())
                    rows.write(json.dumps({"rank": rank, "step": step, **row}) + "\n")
                    rows.flush()
                    row, losses = {"ids": [], "losses": []}, []
                    if step in options["save_at"] and step > start:
                        ckpt.save(step)
                        if options["kill"]:
                            dist.barrier()
                            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.close()
    except CkptctlError as error:
        os.write(2, f"rank {rank}: {type(error).__name__}: {error.message}\n".encode())
        return error.exit_code
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    print(json.dumps(compared(Path(sys.argv[1]), rank_main, **json.loads(sys.argv[2]))))
