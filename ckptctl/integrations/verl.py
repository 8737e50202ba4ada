"""verl: resume from a proven step, and seal each save.

SFT, in a subclass of verl's trainer or in a script of its own:

    trainer.ckpt_handler = VerifiedCheckpointHandler(engine, dataloader, default_local_dir="run-7")

PPO, where one process drives the workers:

    trainer.checkpoint_callback_class=ckptctl.integrations.verl.SealingCallback

Source: verl 0.9 `utils/checkpoint/checkpoint_handler.py`, `trainer/ppo/checkpoint_callback.py`.
"""

from __future__ import annotations

import os
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.utils.checkpoint import CheckpointHandler

from ckptctl.integrations.recorder import Sealer
from ckptctl.train import resolve

__all__ = ["SealingCallback", "VerifiedCheckpointHandler"]


class VerifiedCheckpointHandler(CheckpointHandler):
    """verl's handler of the checkpoints of SFT, with proven steps.

    With `resume_mode="auto"` it resumes from the newest usable step of `default_local_dir`,
    whatever the tracker file names. A thread of rank 0 seals each save.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._sealer = Sealer()

    def save_checkpoint(self, step: int) -> None:
        """Save, and seal; a save first waits for the last seal, because it may remove that step."""
        self._sealer.wait()
        super().save_checkpoint(step)
        self._sealer.saved(os.path.join(self.default_local_dir, f"global_step_{step}"))

    def close(self) -> None:
        self._sealer.wait()

    def _find_latest_checkpoint(self) -> str | None:
        return resolve("auto", self.default_local_dir)


class SealingCallback(CheckpointCallback):
    """Seals each save of verl's PPO trainer, in the process that drives the workers.

    An asynchronous save has not ended when verl calls this: leave those to `ckptctl watch`.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._sealer = Sealer()

    def on_save(
        self,
        trainer: Any,
        global_step: int,
        checkpoint_dir: str,
        async_save: bool = False,
        **_: Any,
    ) -> None:
        """Seal the step: the workers have returned from their saves."""
        if not async_save:
            self._sealer.complete(checkpoint_dir)
