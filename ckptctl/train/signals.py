"""Receive signals while the main thread is blocked in a collective.

A Python handler runs when the main thread returns to the interpreter, which does not happen
in a hung collective. Therefore the interpreter's wakeup descriptor wakes a thread, which
keeps the deadline and can end the process. The earlier handlers are restored at the end.

Processes that are forked meanwhile (the workers of a `DataLoader`) share neither the
handlers nor the pipe. If a scheduler signals every process of a job, a worker that dies of
the signal would end the training before its graceful stop. Therefore a worker survives a
signal that its trainer also got, and dies of one that it got alone. torch sets its own
handler for SIGTERM in its workers; `outlive_stop` replaces it.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from ckptctl.errors import UsageError

_CLOSE, _WAKE = 0, 255  # neither is the number of a signal
_QUIET, _STOPPING, _OVER = 0, 1, 2
_WORKER_WAITS_S = 1.0

OnSignal = Callable[[int], None]


class Listener:
    """Calls `on_signal` for each of `signals`, in a thread, and `due` once at a given time.

    Must be started in the main thread, the only one that can set handlers.
    """

    def __init__(self, signals: Sequence[signal.Signals], on_signal: OnSignal) -> None:
        self.signals = tuple(signals)
        self._on_signal = on_signal
        self._due: Callable[[], None] | None = None
        self._due_s = float("inf")
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
        """Restore the earlier handlers."""
        _LISTENING.discard(self)
        self._state[0] = _OVER
        for each, handler in self._before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._fd_before)
        os.write(self._write, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def call_at(self, due_s: float, due: Callable[[], None]) -> None:
        """Call `due` in the thread at `due_s` (monotonic), unless an earlier time is set."""
        if due_s < self._due_s:
            self._due, self._due_s = due, due_s
            os.write(self._write, bytes([_WAKE]))

    def _listen(self) -> None:
        while True:
            left_s = self._due_s - time.monotonic()
            ready, _, _ = select.select(
                [self._read], [], [], None if left_s == float("inf") else max(0.0, left_s)
            )
            if not ready and self._due is not None:
                due, self._due, self._due_s = self._due, None, float("inf")
                due()
                continue
            for number in os.read(self._read, 512):
                if number == _CLOSE:
                    return
                if number in self.signals:
                    self._state[0] = _STOPPING
                    self._on_signal(number)
                elif number != _WAKE and self._fd_before >= 0:
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
        for each, before in self._before.items():
            default = before in (signal.SIG_DFL, None)
            signal.signal(each, self._in_child if default else before)

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
