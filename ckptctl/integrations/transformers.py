"""transformers' Trainer: seal each save, log the loss in full precision, check a resume.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[CkptctlCallback()])
    trainer.train(resume_from_checkpoint=resolve("auto", arguments.output_dir))

`resolve` is that of `ckptctl.train`; call it after `TrainingArguments` or `Trainer` has made
the process group. Source: transformers 5.23 `trainer.py`, `trainer_callback.py`.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckptctl.integrations.recorder import Recorder, RecordOptions
from ckptctl.train import resolve

__all__ = ["CkptctlCallback", "RecordOptions", "resolve"]


class CkptctlCallback(TrainerCallback):
    """Records a training of `Trainer`; see `RecordOptions`.

    The log has one row for each row that the Trainer logs: `logging_steps=1` gives `ckptctl
    loss` the most to compare.
    """

    def __init__(self, options: RecordOptions = RecordOptions()) -> None:
        self._options = options
        self._recorder: Recorder | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin an attempt: the Trainer has loaded the checkpoint by now."""
        self._recorder = Recorder(args.output_dir, self._options, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Log a row that has a loss; the row at the end of the training has none."""
        if self._recorder is not None and logs and "loss" in logs:
            values = {name: logs.get(name) for name in ("learning_rate", "grad_norm")}
            tokens = state.num_input_tokens_seen or None
            self._recorder.log(state.global_step, logs["loss"], **values, tokens=tokens)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Wait for the last seal where a save follows: the save may remove that step."""
        if self._recorder is not None and control.should_save:
            self._recorder.wait()

    # `save_strategy` decides at one of these three.
    on_epoch_end = on_step_end
    on_evaluate = on_step_end

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Seal the step; the Trainer calls this without a barrier."""
        if self._recorder is not None:
            name = f"checkpoint-{state.global_step}"
            self._recorder.saved(os.path.join(args.output_dir, name))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._recorder is not None:
            self._recorder.close()
