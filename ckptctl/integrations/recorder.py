"""Record a run from the hooks of a framework: log its losses, seal its saves, check a resume.

Each adapter of this package owns one `Recorder` and calls it from every rank.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock, Thread
from typing import TextIO, TypeVar

from ckptctl.distributed.launcher import cluster_context
from ckptctl.distributed.process_group import make_group
from ckptctl.errors import CkptctlError, UsageError
from ckptctl.formats.frameworks.layouts import step_name
from ckptctl.formats.own.files import utc_now
from ckptctl.loss.checking import LossReport, check_loss
from ckptctl.loss.verdict import LossVerdict
from ckptctl.options import JOB_TIMEOUT_S
from ckptctl.selection.sealing import seal
from ckptctl.storage.opening import base_name, join_url, open_store
from ckptctl.storage.shared_places import open_appended
from ckptctl.storage.waiting import start_daemon
from ckptctl.train.ledger import new_attempt, put_report, report_of, to_stderr

_LOG = "train.jsonl"
"""The log in the root, where the caller names no other."""

T = TypeVar("T")


class LossDiscontinuous(CkptctlError, exit_code=30):
    """The loss is not continuous across the resume: the training must stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """What is recorded and sealed, and what happens after a resume.

    `log` is the file of the losses, by default `train.jsonl` in the root. With `seal` each
    save is sealed. The loss is checked once `verdict_after` rows were logged after a resume;
    with `stop` a discontinuous loss ends the training with `LossDiscontinuous` (30) on every
    rank. `patience_s` is how long a rank waits for the slowest one.
    """

    log: str | None = None
    seal: bool = True
    verdict_after: int = 20
    stop: bool = False
    patience_s: float = JOB_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.verdict_after < 1:
            raise UsageError(f"verdict_after is {self.verdict_after}; it must be 1 or more")


class Sealer:
    """Seals the saves of a job in a thread of rank 0.

    Every rank creates one after the process group is initialized, and calls `saved` at the
    same points. A seal that cannot be written is reported and does not end the training.
    """

    def __init__(self, patience_s: float = JOB_TIMEOUT_S) -> None:
        self._group = make_group(patience_s)
        self._sealing: Thread | None = None
        self._lock = Lock()

    def wait(self) -> None:
        """Wait for the seal of the last save; before each save, which may remove older steps."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None

    def saved(self, path: str) -> None:
        """Seal the step at `path`, once every rank has written its files."""
        self._group.gather(None)
        self.complete(path)

    def complete(self, path: str) -> None:
        """Seal a step that every rank has written, in a thread of rank 0; not a collective."""
        if self._group.is_first:
            with self._lock:
                self.wait()
                self._sealing = start_daemon("ckptctl-seal", self._seal, path)

    def _seal(self, path: str) -> None:
        # Every rank has returned from its save: what nothing in the step can prove, such as
        # safetensors, is sealed as it was written.
        def put() -> None:
            sealed = seal(path, replace=True, accept_unverifiable=True)
            if sealed.path is None:
                to_stderr(f"warning: {path} was not sealed: {sealed.message}")

        reported(f"{path} was not sealed", put)


def step_of(path: str | None) -> int | None:
    """The training step that the name of a checkpoint has; None for a fresh run."""
    named = None if path is None else step_name(base_name(path))
    return None if named is None else named.number


def reported(failed: str, act: Callable[[], T]) -> T | None:
    """Call `act`; what fails for the storage is reported, and the training continues."""
    try:
        return act()
    except (CkptctlError, OSError) as error:
        to_stderr(f"warning: {failed}: {error}")
        return None


class Recorder(Sealer):
    """The log, the seals and the verdict of one attempt.

    Every rank creates one after the process group is initialized, and calls its methods at
    the same points; rank 0 writes. `root` is the folder of the steps. `resumed_from` is the
    training step of the checkpoint, None or 0 for a fresh run. A log or a seal that cannot
    be written is reported and does not end the training.
    """

    def __init__(self, root: str, options: RecordOptions, resumed_from: int | None) -> None:
        super().__init__(options.patience_s)
        self._root = root
        self._options = options
        self._resumed_from = resumed_from or None
        self._log_path = options.log or join_url(root, _LOG)
        self._attempt = new_attempt()
        self._n_rows = 0
        self._file: TextIO | None = None
        if self._group.is_first:
            reported("the attempt was not recorded", self._record_attempt)

    def log(self, step: int, loss: float, **values: float | None) -> None:
        """Write the loss of `step`, and check the resume when enough rows were written."""
        self.write(step, loss, **values)
        self._n_rows += 1
        if self._n_rows == self._options.verdict_after:
            self.check()

    def write(self, step: int, loss: float, **values: float | None) -> None:
        """Write the loss of `step` in full precision; not a collective."""
        if self._file is not None:
            row = {"time": utc_now(), "attempt": self._attempt, "step": step}
            for name, value in {"loss": loss, **values}.items():
                if value is not None:
                    # JSON has no NaN; `loss` reads the word.
                    is_finite = not isinstance(value, float) or math.isfinite(value)
                    row[name] = value if is_finite else str(value)
            reported("the loss was not logged", lambda: self._write(row))

    def check(self) -> None:
        """Print the verdict about the resume, on rank 0; raises `LossDiscontinuous`, see `stop`."""
        if self._resumed_from is None:
            return
        report = self._group.from_first(lambda: reported("the loss was not checked", self._checked))
        is_wrong = report is not None and report.verdict is LossVerdict.DISCONTINUOUS
        if report is not None and is_wrong and self._options.stop:
            raise LossDiscontinuous(report.message, next_command=report.next_command)

    def saved(self, path: str) -> None:
        """Seal the step at `path`, once every rank has written its files, where that is asked."""
        if self._options.seal:
            super().saved(path)

    def close(self) -> None:
        self.wait()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _record_attempt(self) -> None:
        if self._resumed_from is not None and self._options.log is None:
            with open_store(self._root) as store:
                store.list_dir()  # what was resumed from is there: no other root is created
        self._file = os.fdopen(open_appended(self._log_path), "a", encoding="utf-8")
        step = self._resumed_from
        # `loss` reads the words as the boundary between two attempts in this file.
        words = "this is a fresh start" if step is None else f"resuming from step {step}"
        self._write({"time": utc_now(), "attempt": self._attempt, "message": words})
        cluster = cluster_context().placed(self._group.rank, self._group.size)
        # The framework does not report what it restored.
        report = report_of(self._root, self._attempt, self._group.size) | {
            "step": step,
            "path": None if step is None else f"{self._root}@{step}",
            "cluster": cluster,
        }
        with open_store(self._root) as store:
            put_report(store, self._attempt, report)

    def _write(self, row: dict[str, object]) -> None:
        assert self._file is not None  # noqa: S101 - asked for where there is one
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def _checked(self) -> LossReport:
        report = check_loss(self._log_path, resume_step=self._resumed_from)
        to_stderr(f"loss after the resume from step {self._resumed_from}: {report.message}")
        return report
