"""OLMo-core: resume from a proven step, seal each save, log the loss, check a resume.

    config = TrainerConfig(save_folder="run-7", callbacks={"ckptctl": CkptctlCallback()}, ...)
    trainer = config.build(train_module, data_loader)
    resume(trainer)
    trainer.fit()

Source: OLMo-core 3.0 `train/trainer.py`, `train/checkpoint.py`, `train/callbacks/`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

from olmo_core.train import LoadStrategy, Trainer
from olmo_core.train.callbacks import Callback

from ckptctl.integrations.recorder import Recorder, RecordOptions
from ckptctl.options import PickKeywords
from ckptctl.train import resolve

__all__ = ["CkptctlCallback", "RecordOptions", "resume"]


def resume(
    trainer: Trainer, resume_from: str | int = "auto", **keywords: Unpack[PickKeywords]
) -> str | None:
    """Load a proven step of `save_folder` on every rank; its path, None for a fresh run.

    Call it before `trainer.fit()`, which then loads nothing: by itself `fit` takes the newest
    step of `save_folder`, whatever `load_path` names. Raises as `ckptctl.train.resolve` does.
    """
    path = resolve(resume_from, trainer.save_folder, **keywords)
    if path is None:
        trainer.load_strategy = LoadStrategy.never
    else:
        trainer.load_checkpoint(path, load_trainer_state=True, load_optim_state=True)
    return path


@dataclasses.dataclass  # OLMo-core reads its fields
class CkptctlCallback(Callback):
    """Records a training of `Trainer`; see `RecordOptions`."""

    options: RecordOptions = RecordOptions()

    # Without annotations, which would make fields of them.
    _recorder = None
    _resumed_from = None
    _saved = None

    def post_checkpoint_loaded(self, path: Any) -> None:
        self._resumed_from = self.step

    def pre_train(self) -> None:
        """Begin an attempt: the checkpoint is loaded by now."""
        folder = self.trainer.save_folder
        self._recorder = Recorder(folder, self.options, self._resumed_from)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Log the loss of a step; OLMo-core calls this some steps later, in a thread."""
        if self._recorder is not None and "train/CE loss" in metrics:
            values = {
                "lr": metrics.get("optim/LR (group 0)"),
                "grad_norm": metrics.get("optim/total grad norm"),
            }
            self._recorder.write(step, metrics["train/CE loss"], **values)

    def post_step(self) -> None:
        """Check the resume once the rows for it were logged, at the same step on every rank."""
        wanted = self.options.verdict_after + self.trainer.metrics_collect_interval
        if self._recorder is not None and self.step == (self._resumed_from or 0) + wanted:
            self._recorder.check()

    def post_checkpoint_saved(self, path: Any) -> None:
        """Keep the step to seal; an asynchronous save calls this in a thread."""
        self._saved = str(path)

    def pre_optim_step(self) -> None:
        """Seal the last save: the gradients of this step came from every rank."""
        self._seal_saved()

    def close(self) -> None:
        self._seal_saved()
        if self._recorder is not None:
            self._recorder.close()

    def _seal_saved(self) -> None:
        path, self._saved = self._saved, None
        if self._recorder is not None and path is not None:
            self._recorder.complete(path)
