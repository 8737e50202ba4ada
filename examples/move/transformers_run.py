"""Move a run of the Trainer of transformers to a Checkpointer, and compare the next steps.

Start: torchrun --nproc-per-node 2 transformers_run.py
"""

import subprocess

import torch
from accelerate import skip_first_batches
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from ckptctl.train import Checkpointer

tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in tokens]
config = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=True,
)


def trainer(max_steps):
    set_seed(0)
    args = TrainingArguments(
        "run-h",
        max_steps=max_steps,
        save_steps=4,
        per_device_train_batch_size=2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
    )
    return Trainer(LlamaForCausalLM(config), args, train_dataset=data)


# The old script, and what it makes of its step 4
trainer(4).train()
old = trainer(7)
old.train(resume_from_checkpoint="run-h/checkpoint-4")
expected = [parameter.detach() for parameter in old.model.parameters()]

# Once: make a step of sharded DCP in a new root
if old.is_world_process_zero():
    command = "ckptctl convert run-h/checkpoint-4 run-h-dcp/checkpoint-4 --accept-unverifiable"
    subprocess.run(command.split(), check=True)
old.accelerator.wait_for_everyone()

# The new script: the same batches, in a loop of its own
new = trainer(7)
new.create_optimizer_and_scheduler(7)
batches = new.get_train_dataloader()
model, optimizer, scheduler = new.accelerator.prepare(new.model, new.optimizer, new.lr_scheduler)
with Checkpointer("run-h-dcp", model=model, optimizer=optimizer, scheduler=scheduler) as ckpt:
    batches = iter(skip_first_batches(batches, 4))
    start = ckpt.resume("auto")
    assert start.step == 4
    model.train()
    for _ in range(start.step, 7):
        (batch,), n_items = new.get_batch_samples(batches, 1, new.args.device)
        new.training_step(model, batch, n_items)
        new.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, new.model.parameters(), expected))
    ckpt.save(7)
