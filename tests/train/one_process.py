"""A training job of one process, in the process of the test: fast enough to break in many ways."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from small_job import Lines, build, train_one

from ckptctl.train import Checkpointer, GlobalLoader

N_STEPS = 12


class Job:
    """The objects of a training script, as they are when it starts."""

    def __init__(
        self, root: Path | str | list[str], *, forget: str = "", batch: int = 8, **options: Any
    ):
        torch.manual_seed(1)
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=N_STEPS)
        self.loader = options.pop("dataloader", None) or GlobalLoader(Lines(), batch, seed=3)
        torch.manual_seed(100)
        random.seed(100)
        given = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "dataloader": self.loader,
        }
        given = {name: part for name, part in given.items() if name != forget}
        self.said: list[str] = []
        roots = root if isinstance(root, list) else str(root)
        self.ckpt = Checkpointer(roots, **given, tell=self.said.append, **options)
        self.losses: dict[int, float] = {}
        self.samples: dict[int, list[int]] = {}
        self.start: Any = None

    def resume(self, resume_from: Any = "auto") -> Any:
        self.start = self.ckpt.resume(resume_from)
        return self.start

    def train(self, first: int, last: int, *, save_every: int = 3, save: Any = None) -> None:
        """Train steps `first` to `last`, and save now and then."""
        batches = iter(self.loader)
        for step in range(first, last + 1):
            batch, ids = next(batches)
            loss = train_one(self.model, self.optimizer, self.scheduler, batch).item()
            self.losses[step], self.samples[step] = loss, ids.tolist()
            self.ckpt.note(step, loss=loss)
            if step % save_every == 0:
                (save or self.ckpt.save)(step, tokens=step * 64, loss=loss)
        if self.ckpt._retention is not None:
            self.ckpt._retention.wait()

    def die(self) -> None:
        """Leave as a killed process does: with nothing written. Its hooks must not stay here."""
        if self.ckpt._attempt is not None:
            self.ckpt._attempt._over = True
        with suppress(Exception):
            self.ckpt._leave("killed")


def run(root: Path | str | list[str], last: int = N_STEPS, **options: Any) -> Job:
    """A job that resumes from where the root is, trains up to a step, and is killed."""
    job = Job(root, **options)
    start = job.resume()
    job.train(start.step + 1, last)
    job.die()
    return job
