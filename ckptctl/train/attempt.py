"""Record an attempt of the job in the ledger, however it ends.

The attempt records the training progress, and an exception that ends the process.
`evidence` decides what the records mean for a step.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ckptctl.errors import CkptctlError
from ckptctl.formats.own.seals import Origin
from ckptctl.selection.fencing import Token
from ckptctl.train.evidence import NOT_FINITE, signature_of
from ckptctl.train.ledger import Ledger

PROGRESS_EVERY_S = 30.0
"""How often progress is recorded, in seconds."""

RECORD_TIMEOUT_S = 5.0
"""The timeout of a background write of one line, and of the wait at the end."""

Hook = Callable[..., Any]


@dataclass(slots=True)
class Attempt:
    """One attempt of the job, on one of its ranks.

    `step` is the current training step, `saved` the newest step that is saved or being
    saved.
    """

    token: Token
    ledger: Ledger
    resumed_from: int | None = None
    step: int = 0
    saved: int = 0
    cluster: dict[str, Any] = field(default_factory=dict)
    _noted_s: float = 0.0
    _has_failed: bool = False
    _over: bool = False
    _hooks: tuple[Hook, Hook] | None = None

    @property
    def origin(self) -> Origin:
        """The description of the attempt in the seals of its steps."""
        job, node = (str(self.cluster.get(name) or "") for name in ("job", "node"))
        return Origin(self.token.attempt, self.resumed_from, job, node)

    def record(self, event: str, **fields: object) -> None:
        """Write a line in a thread; does not delay training and never raises."""
        with suppress(CkptctlError):
            self.ledger.add_later(event, rank=self.ledger.rank, **fields)

    def note(self, step: int, loss: float | None) -> None:
        """Set the current step; rank 0 records it from time to time."""
        self.step = step
        if self.ledger.rank != 0:
            return
        if loss is not None and not math.isfinite(loss):
            self.failed(NOT_FINITE)
        elif time.monotonic() - self._noted_s > PROGRESS_EVERY_S:
            self._noted_s = time.monotonic()
            self.record("progress", step=step, loss=loss)

    def failed(self, evidence: str) -> None:
        """Record the first failure only: later ones are its consequences."""
        if self._has_failed:
            return
        self._has_failed = True
        self.record("failed", step=self.step, evidence=evidence)

    def ended_by(self, error: BaseException) -> None:
        """Record an exception that ends the attempt, if it is evidence against the step."""
        evidence = signature_of(error)
        if evidence is not None:
            self.failed(evidence)
        self._has_failed = True

    def watch(self) -> None:
        """Install a hook that records an uncaught exception."""
        before = sys.excepthook

        def seen(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self.ended_by(error)
            before(kind, error, trace)

        sys.excepthook = seen
        self._hooks = (before, seen)

    def leave(self, how: str) -> None:
        """Record the end, once, and restore the hook that `watch` replaced."""
        if self._hooks is not None and sys.excepthook is self._hooks[1]:
            sys.excepthook = self._hooks[0]
        self._hooks = None
        if not self._over and self.ledger.rank == 0:
            self.record("ended", step=self.step, how="exception" if self._has_failed else how)
        self._over = True
        self.ledger.close(RECORD_TIMEOUT_S)
