"""Stop all ranks at the same step when the scheduler asks the job to stop.

A signal sets a flag. At a step boundary the ranks agree: a signal to one of them is enough,
and all stop at the same step. A process that hangs after that is ended before the scheduler
kills it, and prints the stack of each thread. Of the schedulers only SLURM states when, by the
time limit of a job; torchrun kills its processes 30 s after it passes a signal on.
"""

from __future__ import annotations

import faulthandler
import math
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from ckptctl.distributed.launcher import cluster_context
from ckptctl.distributed.process_group import ProcessGroup, make_group
from ckptctl.errors import UsageError
from ckptctl.formatting import seconds_of
from ckptctl.storage.waiting import start_daemon

_CLOSE = 0  # not the number of a signal
_QUIET, _STOPPING, _OVER = 0, 1, 2
_WORKER_WAITS_S = 1.0


class Listener:
    """Calls `on_signal` for each of `signals`, in a thread.

    Must be started in the main thread, the only one that can set handlers.
    """

    def __init__(self, signals: Sequence[int], on_signal: Callable[[int], None]) -> None:
        self.signals = tuple(map(signal.Signals, signals))
        self._on_signal = on_signal
        # Shared with the processes that are forked from here on: the state of the trainer.
        self._state = mmap.mmap(-1, 1)
        self._before: dict[int, Any] = {}

    def start(self) -> None:
        """Set the handlers. Raises `UsageError` outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signal handlers can only be set in the main thread")
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._listen, name="ckptctl-stop", daemon=True)
        self._thread.start()
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {each: signal.signal(each, _nothing) for each in self.signals}
        _LISTENING.add(self)

    def stop(self) -> None:
        _LISTENING.discard(self)
        self._state[0] = _OVER
        for each, handler in self._before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._fd_before)
        os.write(self._write, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _listen(self) -> None:
        while True:
            for number in os.read(self._read, 512):
                if number == _CLOSE:
                    return
                if number in self.signals:
                    self._state[0] = _STOPPING
                    self._on_signal(number)
                elif self._fd_before >= 0:
                    with suppress(OSError):
                        os.write(self._fd_before, bytes([number]))

    def leave_to_child(self) -> None:
        """In a forked process: stop listening."""
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)
        self.outlive()

    def outlive(self) -> None:
        """In a forked process: handle signals as a worker."""
        for number, before in self._before.items():
            default = before in (signal.SIG_DFL, None)
            signal.signal(number, self._in_child if default else before)

    def _in_child(self, number: int, _frame: FrameType | None) -> None:
        until_s = time.monotonic() + _WORKER_WAITS_S
        while self._state[0] == _QUIET and time.monotonic() < until_s:
            time.sleep(0.01)
        if self._state[0] == _OVER:
            os._exit(0)  # the trainer ends its workers: not a failure
        if self._state[0] == _QUIET:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def outlive_stop(_worker: int = 0) -> None:
    """Keep a worker of a `DataLoader` alive until the trainer has stopped gracefully.

    For `worker_init_fn`. Works for workers that are forked (torch's default on Linux
    before Python 3.14) while a `GracefulStop` is entered; does nothing in others.
    """
    for listener in _INHERITED:
        listener.outlive()


_LISTENING: weakref.WeakSet[Listener] = weakref.WeakSet()
_INHERITED: list[Listener] = []


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing; the interpreter writes to the wakeup descriptor only if there is a handler."""


def _after_fork() -> None:
    # The children of a worker inherit the listeners of the worker.
    for listener in tuple(_LISTENING):
        _LISTENING.discard(listener)
        _INHERITED.append(listener)
        listener.leave_to_child()


os.register_at_fork(after_in_child=_after_fork)


_AFTER_THE_END_S = 27.0
"""How much of the 30 s between SIGTERM and SIGKILL at SLURM's time limit (`KillWait`) is used."""

_LATE_S = 60.0
"""How late SLURM may end a job. An older end is that of a limit that was extended since: the
variable of the job keeps its first value."""

_STDERR = 2

_DEFAULT_DEADLINE_S = 600.0
"""If the time of the kill is unknown: long enough for a save, short enough for a hang."""

_TORCHRUN_NOTICE_S = 30.0  # torch 2.13, distributed/run.py: --shutdown-timeout
_SHARE = 0.9  # of the notice: a forced exit must come before the kill


def _deadline(deadline_s: float | None, notice_s: float | None) -> float:
    """The deadline in seconds after the signal.

    By default nine tenths of the notice that the caller or torchrun gives. Raises `UsageError`
    if it is not before the kill.
    """
    for name, value_s in (("notice_s", notice_s), ("deadline_s", deadline_s)):
        if value_s is not None and not value_s > 0:
            raise UsageError(f"{name} is {value_s}; it must be above 0")
    source, next_command = "notice_s", None
    if notice_s is None and cluster_context().launcher == "torchrun":
        timeout = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        is_number = timeout.isascii() and timeout.isdecimal()
        notice_s = float(timeout) if is_number else _TORCHRUN_NOTICE_S
        source = "torchrun's --shutdown-timeout"
        next_command = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 torchrun --shutdown-timeout 120 ..."
    if deadline_s is None:
        return _DEFAULT_DEADLINE_S if notice_s is None else notice_s * _SHARE
    if notice_s is not None and deadline_s >= notice_s and not math.isinf(deadline_s):
        raise UsageError(
            f"deadline_s is {deadline_s:g} s, and the kill comes {notice_s:g} s after the signal "
            f"({source}): a hung process would be killed before the forced exit could report where "
            "it hangs",
            next_command=next_command,
        )
    return deadline_s


class GracefulStop:
    """Turns SIGTERM and SIGUSR1 into an answer that all ranks ask for after each step.

    ```python
    with GracefulStop(notice_s=120) as stop:
        for step in range(start, n_steps + 1):
            train(step)
            if stop.agreed():
                save(step)
                break
    sys.exit(stop.exit_code)
    ```

    Every rank enters it, in its main thread, once its process group is initialized, and
    every rank calls `agreed` equally often; with `every` they communicate at every n-th call
    only. `notice_s` is the time between signal and kill (`--signal=B:TERM@120`).
    `deadline_s` is when the process is ended, in seconds after the signal: by default nine
    tenths of the notice, 600 where no notice is known, `math.inf` for never; the time limit
    of a SLURM job counts too, unless it is over: then it was extended. Further signals change
    nothing: SLURM and torchrun both send one, and SLURM another when its time is over. `group` can
    be one that `make_group` made, to share it.

    Raises `UsageError` where the deadline lies after the kill. Cost of `agreed`: one
    all-reduce of one number.
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
        self.deadline_s = _deadline(deadline_s, notice_s)
        ends_at = cluster_context().ends_at
        self._ends_s = None if ends_at is None else seconds_of(ends_at)
        self._listener = Listener(signals, self._on_signal)
        self._deadlines: SimpleQueue[tuple[float, float] | None] = SimpleQueue()
        self._every = every
        self._group = group
        self._n_asked = 0
        self._received: tuple[int, float] | None = None
        self._agreed = 0
        self._force_s: float | None = None

    def __enter__(self) -> GracefulStop:
        if self._group is None:
            self._group = make_group()
        # Started before it is needed: a node that stops a job may have no room for a thread.
        start_daemon("ckptctl-deadline", self._end_late)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.stop()
        self._deadlines.put(None)

    @property
    def asked(self) -> bool:
        """Whether this process got a signal; the other ranks may not have received it."""
        return self._received is not None

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The signal for which the ranks agreed to stop; None before that."""
        return signal.Signals(self._agreed) if self._agreed else None

    @property
    def exit_code(self) -> int:
        """128 + the signal after a stop, as a shell reports it; else 0.

        torchrun turns every nonzero code into 1; the ledger of the run records the reason.
        """
        return 128 + self._agreed if self._agreed else 0

    @property
    def left_s(self) -> float:
        """Seconds until the forced exit; infinite without a signal."""
        return math.inf if self._force_s is None else self._force_s - time.monotonic()

    def agreed(self) -> bool:
        """Whether all ranks stop here, because one of them got a signal. Every rank calls it.

        Raises `RanksLost`.
        """
        if self._group is None:
            raise UsageError("GracefulStop was not entered: write `with GracefulStop() as stop:`")
        if self._agreed:
            return True
        self._n_asked += 1
        if self._n_asked % self._every:
            return False
        (self._agreed,) = self._group.most(self._received[0] if self._received else 0)
        if self._agreed and self._received is None:
            # Another rank got the signal: start the deadline here too.
            self._set_deadline(time.monotonic())
        return bool(self._agreed)

    def _on_signal(self, number: int) -> None:
        now_s = time.monotonic()
        if self._received is None:
            self._received = (number, now_s)
            self._set_deadline(now_s)

    def _set_deadline(self, now_s: float) -> None:
        deadline_s = self.deadline_s
        left_s = None if self._ends_s is None else self._ends_s - time.time()
        if left_s is not None and left_s > -_LATE_S:
            deadline_s = min(deadline_s, max(0.0, left_s) + _AFTER_THE_END_S)
        if math.isinf(deadline_s):
            return
        self._force_s = now_s + deadline_s
        self._deadlines.put((self._force_s, deadline_s))

    def _end_late(self) -> None:
        """Wait for the earliest deadline, and end the process there."""
        earliest = self._deadlines.get()
        while earliest is not None:
            try:
                other = self._deadlines.get(timeout=max(0.0, earliest[0] - time.monotonic()))
            except Empty:
                break
            earliest = None if other is None else min(earliest, other)
        else:
            return
        code = 128 + (self._received[0] if self._received else self._agreed)
        why = f"still running {earliest[1]:g} s after the signal"
        os.write(_STDERR, f"ckptctl: {why}: ending now, with code {code}\n".encode())
        faulthandler.dump_traceback(_STDERR)
        os._exit(code)
