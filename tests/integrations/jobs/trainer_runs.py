"""What the jobs of transformers' `Trainer`, and of TRL's trainers, which derive from it, share."""

from __future__ import annotations

from argparse import Namespace

import torch
from job_options import die, ending
from transformers import Trainer, TrainerCallback

from ckptctl.integrations.transformers import CkptctlCallback, RecordOptions, resolve


class Killed(TrainerCallback):
    """SIGKILL on every rank at a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.at:
            die()


class Damaged(TrainerCallback):
    """Other weights than those of the checkpoint, and of the base model of an adapter."""

    def on_train_begin(self, args, state, control, model, **_):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)


def callbacks_of(options: Namespace) -> list[TrainerCallback]:
    """The callbacks that the options of a job ask for."""
    record = CkptctlCallback(RecordOptions(verdict_after=8, stop=options.stop))
    return [record, *([Killed(options.kill_at)] if options.kill_at else [])]


def run_training(trainer: Trainer, options: Namespace) -> None:
    """Train from the step that `resolve` chooses, and end as the options of the job ask for."""
    with ending(options):
        path = resolve("auto", options.root)
        if options.wrong:
            trainer.add_callback(Damaged())
        trainer.train(resume_from_checkpoint=path)
        torch.distributed.destroy_process_group()
