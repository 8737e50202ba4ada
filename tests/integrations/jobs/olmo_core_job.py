"""A small training of OLMo-core's trainer with FSDP; run by torchrun, see `job_options`."""

from __future__ import annotations

import torch
from job_options import die, ending, job_options, run_recipe
from olmo_core.data import DataCollator
from olmo_core.data.data_loader import TextDataLoaderBase
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import (
    CheckpointerConfig,
    Duration,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.train_module import TransformerTrainModuleConfig
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig

LENGTH, BATCH = 8, 64
options = job_options()


class Data(TextDataLoaderBase):
    """Tokens by step, the same in every run."""

    total_batches = 10_000

    def state_dict(self):
        return {"batches_processed": self.batches_processed, "epoch": self._epoch}

    def load_state_dict(self, state):
        self.batches_processed, self._epoch = state["batches_processed"], state["epoch"]

    def reshuffle(self, epoch=None, **_):
        self._epoch = epoch

    def _iter_batches(self):
        while True:
            yield self.batch(self.batches_processed * self.dp_world_size + self.dp_rank)

    def get_mock_batch(self):
        return self.batch(0)

    def batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        shape = (self.rank_batch_size // LENGTH, LENGTH)
        return {"input_ids": torch.randint(0, 32, shape, generator=generator)}


class Interfering(Callback):
    """Other weights than those of the checkpoint; SIGKILL on every rank at a step."""

    def pre_train(self):
        if options.wrong:
            with torch.no_grad():
                for parameter in self.trainer.train_module.model.parameters():
                    parameter.mul_(3)

    def pre_step(self, batch):
        if self.step == options.kill_at:
            die()


prepare_training_environment(seed=3, backend="gloo", shared_filesystem=True)
model = TransformerConfig.llama_like(d_model=16, vocab_size=32, n_layers=1, n_heads=2)
module = TransformerTrainModuleConfig(
    rank_microbatch_size=BATCH // 2,
    max_sequence_length=LENGTH,
    optim=AdamWConfig(lr=0.01),
    max_grad_norm=1.0,  # the norms in the console prove what losses of four digits do not
    dp_config=TransformerDataParallelConfig(name=DataParallelType.ddp),
).build(model.build(init_device="cpu"), device=torch.device("cpu"))
data = Data(
    collator=DataCollator(pad_token_id=0),
    work_dir=options.root,
    global_batch_size=BATCH,
    dp_world_size=get_world_size(),
    dp_rank=get_rank(),
)
config = TrainerConfig(
    save_folder=options.root,
    device="cpu",
    save_overwrite=True,
    checkpointer=CheckpointerConfig(save_overwrite=True),
    metrics_collect_interval=1,
    max_duration=Duration.steps(options.steps),
    callbacks={
        "checkpointer": CheckpointerCallback(
            save_interval=options.save_every, max_checkpoints=options.keep, save_async=False
        ),
        "interfering": Interfering(),
    },
)
with ending(options):
    changes = {"RecordOptions(stop=True)": f"RecordOptions(verdict_after=8, stop={options.stop})"}
    run_recipe("olmo-core", changes, config=config, train_module=module, data_loader=data)
    teardown_training_environment()
