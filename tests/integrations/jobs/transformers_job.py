"""A small training of transformers' Trainer; run by torchrun with the options of `job_options`."""

from __future__ import annotations

import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from job_options import job_options
from torch.distributed.fsdp import FSDPModule
from trainer_runs import callbacks_of, run_training
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

options = job_options()


class Summed(TrainerCallback):
    """gloo has no mean over ranks, which FSDP takes of the gradients."""

    def on_train_begin(self, args, state, control, model, **_):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


class WithFsdp(AcceleratorState):
    """accelerate leaves FSDP out on the CPU alone."""

    def __init__(self, *arguments, fsdp_plugin=None, **options):
        super().__init__(*arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type


if options.sharded:
    accelerate.accelerator.AcceleratorState = WithFsdp
generator = torch.Generator().manual_seed(1)
tokens = torch.randint(0, 32, (256, 8), generator=generator)
torch.manual_seed(3)
arguments = TrainingArguments(
    output_dir=options.root,
    use_cpu=True,
    max_steps=options.steps,
    save_steps=options.save_every,
    save_total_limit=options.keep,
    logging_steps=1,
    learning_rate=0.01,
    per_device_train_batch_size=4,
    report_to=[],
    fsdp=options.sharded,
    fsdp_config={
        "transformer_layer_cls_to_wrap": "GPT2Block",
        "state_dict_type": "SHARDED_STATE_DICT",
    },
)
trainer = Trainer(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2)),
    args=arguments,
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    callbacks=[*callbacks_of(options), *([Summed()] if options.sharded else [])],
)
run_training(trainer, options)
