"""Lightning: resume from a proven step, seal each save, log the loss, check a resume.

    trainer = Trainer(callbacks=[ModelCheckpoint("runs/a"), CkptctlCallback("runs/a")])
    trainer.fit(model, data, ckpt_path=resolve(trainer, "auto", "runs/a"))

Source: lightning 2.6 `trainer.py`, `subprocess_script.py`, `model_checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from lightning.pytorch import Callback, LightningModule, Trainer

from ckptctl.errors import UsageError
from ckptctl.integrations.recorder import Recorder, RecordOptions, step_of
from ckptctl.options import PickKeywords
from ckptctl.train import resolve as resolve_among_ranks

__all__ = ["CkptctlCallback", "RecordOptions", "resolve"]


def resolve(
    trainer: Trainer,
    resume_from: str | int | None,
    root: str | Sequence[str],
    **keywords: Unpack[PickKeywords],
) -> str | None:
    """The path for `fit(ckpt_path=…)`, the same on every rank; None for a fresh run.

    `fit` makes the process group after `ckpt_path` is given, so it is made here, under any
    launcher that runs the script in every process: torchrun, srun, or Lightning's own
    `strategy="ddp"`, whose processes are started here. Launchers that start only `fit` in
    new processes (`ddp_spawn`, notebooks) are refused. The rest is as for
    `ckptctl.train.resolve`.
    """

    def decide() -> str | None:
        # `ModelParallelStrategy` keeps its mesh in the module; `fit` connects the real one.
        trainer.strategy.connect(LightningModule())
        trainer.strategy.setup_environment()
        return resolve_among_ranks(resume_from, root, **keywords)

    launcher = trainer.strategy.launcher
    if launcher is None:
        return decide()
    if launcher.is_interactive_compatible:
        raise UsageError(
            f"{type(launcher).__name__} starts processes for `fit` alone, so the ranks cannot "
            "agree on a step before it; use strategy='ddp', or start the script with torchrun"
        )
    path: str | None = launcher.launch(decide, trainer=trainer)
    return path


class CkptctlCallback(Callback):
    """Records a training of `Trainer`; see `RecordOptions`.

    `root` is the `dirpath` of `ModelCheckpoint`. The loss of rank 0 is logged every
    `every_n_steps` steps: reading it waits for the device.
    """

    def __init__(
        self, root: str, options: RecordOptions = RecordOptions(), *, every_n_steps: int = 1
    ) -> None:
        self._root = root
        self._options = options
        self._every_n_steps = every_n_steps
        self._recorder: Recorder | None = None
        self._sealed: dict[int, str] = {}  # by checkpoint callback, its last save
        self._loss: Any = None  # of the batches that are accumulated for one step
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an attempt: the checkpoint is loaded by now."""
        self._step = trainer.global_step
        self._recorder = Recorder(self._root, self._options, trainer.global_step)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seal what was saved after the last batch: Lightning calls `ModelCheckpoint` last."""
        self._seal_saved(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the loss of a step; of accumulated batches it is the sum of their shares."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._recorder is None or loss is None:
            return
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            if self._step % self._every_n_steps == 0:
                self._recorder.log(self._step, self._loss.item())
            self._loss = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Wait for the last seal: after a save `ModelCheckpoint` removes older steps."""
        if self._recorder is not None:
            self._recorder.wait()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seal_saved(trainer)
        if self._recorder is not None:
            self._recorder.close()

    def _seal_saved(self, trainer: Trainer) -> None:
        for number, saving in enumerate(trainer.checkpoint_callbacks):
            path = getattr(saving, "_last_checkpoint_saved", "")
            # `last.ckpt` is a copy without a step number.
            is_step = step_of(path or None) is not None
            if self._recorder is not None and is_step and self._sealed.get(number) != path:
                self._sealed[number] = path
                self._recorder.saved(path)
