"""Stop all ranks at the same step when the scheduler asks the job to stop.

A signal sets a flag. At a step boundary the ranks agree: one that was told is enough,
and all stop at the same step. Whatever hangs after that is ended by force before the
scheduler's own kill, with a word of where it hung. Saving is the script's (or
`Checkpointer`'s) business; the loss is `LossGuard`'s.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from types import TracebackType

from ckptctl.distributed.launcher import cluster_context
from ckptctl.distributed.process_group import ProcessGroup, make_group
from ckptctl.errors import UsageError
from ckptctl.train.deadlines import checked_deadline, notice_in
from ckptctl.train.signals import Listener

ECHO_S = 5.0
"""A second signal so soon is the same stop: SLURM and torchrun both pass one on."""

_AFTER_THE_END_S = 27.0
"""Of the 30 s that SLURM waits at the time limit between SIGTERM and SIGKILL (`KillWait`)."""

_STDERR = 2


class GracefulStop:
    """SIGTERM and SIGUSR1 become a question to ask after each step.

    ```python
    with GracefulStop(notice_s=120) as stop:
        for step in range(start, n_steps + 1):
            train(step)
            if stop.agreed():
                save(step)
                break
    sys.exit(stop.exit_code)
    ```

    Every rank enters it, in its main thread, once its process group is there, and every
    rank calls `agreed` equally often; `every` makes them ask each other at every n-th
    call only. `notice_s` is what the scheduler leaves between signal and kill
    (`--signal=B:TERM@120`). `deadline_s` is when to end by force, in seconds after the
    signal: by default nine tenths of the notice, 600 where no notice is known, `math.inf`
    for never; the time limit of a SLURM job counts too. A second signal, more than 5 s
    after the first, ends at once. `group` can be one that `make_group` made, to share it.

    Raises `UsageError` where the deadline lies behind the kill. Cost of `agreed`: one
    reduction of one number among the ranks, over gloo.
    """

    def __init__(
        self,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        deadline_s: float | None = None,
        notice_s: float | None = None,
        every: int = 1,
        group: ProcessGroup | None = None,
    ) -> None:
        if every < 1:
            raise UsageError(f"every is {every}; it must be 1 or more")
        self.notice = notice_in(os.environ, notice_s)
        self.deadline_s = checked_deadline(deadline_s, self.notice)
        self._ends_s = cluster_context().ends_s
        self._listener = Listener([signal.Signals(each) for each in signals], self._heard)
        self._every = every
        self._group = group
        self._n_asked = 0
        self._told: tuple[int, float] | None = None
        self._agreed = 0
        self._force_s: float | None = None

    def __enter__(self) -> GracefulStop:
        if self._group is None:
            self._group = make_group()
        self._listener.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._listener.stop()

    @property
    def asked(self) -> bool:
        """Whether this process was told to stop; the other ranks may not know yet."""
        return self._told is not None

    @property
    def stopped_by(self) -> signal.Signals | None:
        """What the ranks agreed to stop for, None before they did."""
        return signal.Signals(self._agreed) if self._agreed else None

    @property
    def exit_code(self) -> int:
        """How to end: 128 + the signal after a stop, which a scheduler takes as preempted, else 0.

        torchrun makes 1 of every code but 0; there the ledger of the run says it.
        """
        return 128 + self._agreed if self._agreed else 0

    @property
    def left_s(self) -> float:
        """Seconds until the forced exit; infinite while nobody was told to stop."""
        return float("inf") if self._force_s is None else self._force_s - time.monotonic()

    def agreed(self) -> bool:
        """Whether all ranks stop here: any one that was told is enough. Every rank must call it.

        Raises `RanksLost` where a rank is gone.
        """
        if self._group is None:
            raise UsageError("GracefulStop was not entered: write `with GracefulStop() as stop:`")
        if self._agreed:
            return True
        self._n_asked += 1
        if self._n_asked % self._every:
            return False
        (self._agreed,) = self._group.most(self._told[0] if self._told else 0)
        if self._agreed and self._told is None:
            # Told by another rank: the time runs here too.
            self._set_deadline(time.monotonic())
        return bool(self._agreed)

    def document(self) -> dict[str, str | int | None]:
        """How this attempt ended, for a record: torchrun passes no exit codes on."""
        return {
            "how": "preempted" if self._agreed else "finished",
            "signal": self.stopped_by.name if self.stopped_by else None,
            "exit_code": self.exit_code,
        }

    def _heard(self, number: int) -> None:
        now_s = time.monotonic()
        if self._told is None:
            self._told = (number, now_s)
            self._set_deadline(now_s)
        elif now_s - self._told[1] > ECHO_S:
            self._force(number, f"a second signal, {signal.Signals(number).name}")

    def _set_deadline(self, now_s: float) -> None:
        deadline_s = self.deadline_s
        if self._ends_s is not None:
            deadline_s = min(deadline_s, max(0.0, self._ends_s + _AFTER_THE_END_S - time.time()))
        if deadline_s == float("inf"):
            return
        self._force_s = now_s + deadline_s
        number = self._told[0] if self._told else self._agreed
        self._listener.call_at(
            self._force_s, lambda: self._force(number, f"no end {deadline_s:g} s after the signal")
        )

    def _force(self, number: int, why: str) -> None:
        """End the process from the thread, with a word of where each thread is."""
        message = f"ckptctl: {why}: ending now, with code {128 + number}\n"
        os.write(_STDERR, message.encode())
        faulthandler.dump_traceback(_STDERR)
        os._exit(128 + number)
