"""torchtitan: resume from a proven step, load it with `Reader`, seal each save.

    config.checkpoint = VerifiedCheckpointManager.Config(enable=True, interval=500)

`load_step=-1`, torchtitan's default, becomes the newest usable step. Source: torchtitan 0.3
`components/checkpointer/dcp.py`, `trainer.py`.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from functools import partial
from typing import Any

from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import CheckpointManager, dcp

from ckptctl.integrations.recorder import Sealer, step_of
from ckptctl.train import Reader, resolve

__all__ = ["VerifiedCheckpointManager"]


class VerifiedCheckpointManager(CheckpointManager):
    """torchtitan's manager of DCP checkpoints, with proven steps.

    A thread of rank 0 seals each save, an asynchronous one as soon as it has ended.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)  # torchtitan reads its fields
    class Config(CheckpointManager.Config):
        """The options of torchtitan's manager; torchtitan requires a class of its own."""

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        if self.enable:
            self._sealer = Sealer()

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load without running code from the step, and compare what is read with its checksums."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=Reader(checkpoint_id))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        step = step_of(resolve("auto", folder or self.folder))
        return -1 if step is None else step

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not super()._save(curr_step, last_step):
            return False
        path = self._create_checkpoint_id(curr_step)
        if self.save_future is None:
            self._sealer.saved(path)
        else:
            self.save_future.add_done_callback(partial(self._written, path))
        return True

    def _written(self, path: str, saved: Future[Any]) -> None:
        # The future of rank 0 ends once the metadata is written, after the files of all ranks.
        if not saved.cancelled() and saved.exception() is None:
            self._sealer.complete(path)

    def _close(self) -> None:
        self._sealer.wait()
        super()._close()
