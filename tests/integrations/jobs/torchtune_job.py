"""torchtune's full_finetune_distributed on a small model; run by torchrun, see `job_options`.

An epoch has as many steps as lie between two saves: torchtune saves at the end of each.
"""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path

import torch
import torchtune
from job_options import job_options
from omegaconf import OmegaConf
from torchtune.models.llama2 import llama2
from torchtune.training.metric_logging import DiskLogger

import ckptctl

options = job_options()
WEIGHTS = "model-00001-of-00001.bin"
RECIPE = "FullFinetuneRecipeDistributed"
MODEL = {"vocab_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16}
MODEL |= {"max_seq_len": 16}


class Tokenizer:
    pad_id = 0


class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    def __init__(self, _: Tokenizer) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(1, 32, (4 * options.save_every, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return {"tokens": self.rows[number].tolist(), "labels": self.rows[number].tolist()}


class Logger(DiskLogger):
    def log_dict(self, payload, step: int) -> None:
        super().log_dict(payload, step)
        if step == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def component(made: type) -> str:
    return f"torchtune_job.{made.__name__}"


def base_model(folder: Path) -> None:
    """The weights that a run starts from."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    torch.save(llama2(**MODEL).state_dict(), folder / f"base-{os.environ['RANK']}.bin")
    os.replace(folder / f"base-{os.environ['RANK']}.bin", folder / "base.bin")


def main() -> None:
    root = Path(options.root)
    base_model(root.parent / "base")
    # As in a job script, before the launch: nothing is written yet, so all ranks choose the same.
    path = ckptctl.pick(str(root), allow_fresh=True).path if root.exists() else None
    settings = {
        "output_dir": str(root),
        "tokenizer": {"_component_": component(Tokenizer)},
        "dataset": {"_component_": component(Rows)},
        "seed": 3,
        "shuffle": True,
        "model": {"_component_": "torchtune.models.llama2.llama2", **MODEL},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(root.parent / "base"),
            "checkpoint_files": ["base.bin" if path is None else f"{Path(path).name}/{WEIGHTS}"],
            "output_dir": str(root),
            "model_type": "LLAMA2",
        },
        "resume_from_checkpoint": path is not None,
        "batch_size": 2,
        "epochs": options.steps // options.save_every,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 1,
        "device": "cpu",
        "dtype": "fp32",
        "metric_logger": {"_component_": component(Logger), "log_dir": str(root.parent / "logs")},
    }
    # torchtune runs its recipes as scripts; they are no package that can be imported.
    recipes = Path(torchtune.__file__).parent.parent / "recipes"
    recipe_class = runpy.run_path(str(recipes / "full_finetune_distributed.py"))[RECIPE]
    # What the recipe does with the memory of a GPU fails without one.
    for name in ("get_memory_stats", "log_memory_stats", "cleanup_before_training"):
        setattr(torchtune.training, name, lambda *_, **__: None)
    recipe = recipe_class(OmegaConf.create(settings))
    recipe.setup(OmegaConf.create(settings))
    if options.wrong:
        for parameter in recipe._model.parameters():
            parameter.data.mul_(3)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    main()
