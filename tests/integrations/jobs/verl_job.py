"""A small SFT with verl's checkpoint handler; run by torchrun, see `job_options`.

verl registers its engines for accelerators alone. Its handler, its FSDP checkpoint manager and
its console logger run on the CPU.
"""

from __future__ import annotations

import sys

import torch
from job_options import die, job_options, run_recipe
from omegaconf import OmegaConf
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.logger import LocalLogger

from ckptctl import CkptctlError

options = job_options()
torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(3)
config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
for block in model.transformer.h:
    fully_shard(block)
fully_shard(model)
for module in (*model.transformer.h, model):
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other
adam = torch.optim.AdamW(model.parameters(), lr=0.01)
contents = ["model", "optimizer", "extra"]


class Engine:
    """What the handler asks of an engine, with verl's checkpoint manager."""

    manager = FSDPCheckpointManager(
        model=model,
        optimizer=adam,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(adam, 30),
        checkpoint_config=OmegaConf.create({"save_contents": contents, "load_contents": contents}),
    )
    save_checkpoint = manager.save_checkpoint
    load_checkpoint = manager.load_checkpoint

    def is_mp_src_rank_with_outputs(self):
        return True

    def get_data_parallel_rank(self):
        return rank


rows = torch.randint(0, 32, (4096, 8), generator=torch.Generator().manual_seed(1))
# Without a generator the loader would draw from the one of dropout when it is started.
loader = StatefulDataLoader(
    rows[rank::world], batch_size=4, generator=torch.Generator().manual_seed(5)
)
try:
    names = run_recipe("verl", {"run-7": options.root}, engine=Engine(), train_dataloader=loader)
    handler, step = names["handler"], names["global_step"]
    if options.wrong:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
    for batch in loader:
        step += 1
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        adam.step()
        adam.zero_grad()
        total = loss.detach()
        torch.distributed.all_reduce(total)
        if rank == 0:
            metrics = {"train/loss": total.item() / world, "train/lr": 0.01}
            LocalLogger().log(metrics, step)
        if step % options.save_every == 0:
            handler.save_checkpoint(step)
        if step == options.kill_at:
            die()
        if step >= options.steps:
            break
    handler.close()
    torch.distributed.destroy_process_group()
except CkptctlError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
