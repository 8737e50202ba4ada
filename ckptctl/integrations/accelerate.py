"""accelerate: verify before `load_state`, seal after `save_state`, log the loss, check a resume.

    checkpoints = Checkpoints(accelerator, "run-7")
    start = checkpoints.load_state("auto") or 0
    for step in range(start + 1, 1001):
        ...
        checkpoints.log(step, loss.item())
        if step % 100 == 0:
            checkpoints.save_state(step)
    checkpoints.close()

Source: accelerate 1.15 `accelerator.py`, `checkpointing.py`.
"""

from __future__ import annotations

import os
from typing import Any, Unpack

from accelerate import Accelerator

from ckptctl.integrations.recorder import Recorder, RecordOptions, step_of
from ckptctl.options import PickKeywords
from ckptctl.selection.roots import ASIDE_FOLDER
from ckptctl.storage.opening import join_url, open_store
from ckptctl.train import resolve

__all__ = ["Checkpoints", "RecordOptions"]


class Checkpoints:
    """The saves of one `Accelerator` under `root`, in folders named by the training step.

    Every rank calls the methods at the same points, after `accelerator.prepare`. Not for
    `automatic_checkpoint_naming`, which counts saves and refuses to save again after a
    resume. `keywords` are those of `ckptctl.train.resolve`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        root: str,
        options: RecordOptions = RecordOptions(),
        **keywords: Unpack[PickKeywords],
    ) -> None:
        self._accelerator = accelerator
        self._root = root
        self._options = options
        self._keywords = keywords
        self._recorder: Recorder | None = None

    def load_state(self, resume_from: str | int = "auto", **load: Any) -> int | None:
        """Load a proven step on every rank; its training step, None for a fresh run.

        accelerate restores model, optimizer, scheduler and random numbers, not the place in
        the data: see `accelerator.skip_first_batches`. Raises as `resolve` does. `load` is
        passed to `Accelerator.load_state`.
        """
        path = resolve(resume_from, self._root, **self._keywords)
        if path is not None:
            self._accelerator.load_state(path, **load)
        step = step_of(path)
        self._recorder = Recorder(self._root, self._options, step)
        return step

    def save_state(self, step: int, **save: Any) -> str:
        """Save to `root/step_N`, and seal it; returns its path.

        An earlier save of that number, interrupted or of an abandoned branch, is moved to
        `.ckptctl/aside/`. `save` is passed to `Accelerator.save_state`.
        """
        recorder, name = self._recording(), f"step_{step}"
        recorder.wait()
        path = os.path.join(self._root, name)
        if self._accelerator.is_main_process and os.path.lexists(path):
            with open_store(self._root) as store:
                if store.folders is not None:
                    store.folders.move(name, f"{ASIDE_FOLDER}/{name}.000000.{os.urandom(2).hex()}")
        self._accelerator.wait_for_everyone()
        self._accelerator.save_state(path, **save)
        recorder.saved(path)
        return join_url(self._root, name)

    def log(self, step: int, loss: float, **values: float | None) -> None:
        """Log the loss of a step in full precision, with a learning rate or token count."""
        self._recording().log(step, loss, **values)

    def close(self) -> None:
        self._recording().close()

    def _recording(self) -> Recorder:
        if self._recorder is None:  # a script that never resumes
            self._recorder = Recorder(self._root, self._options, None)
        return self._recorder
