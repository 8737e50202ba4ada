"""Receive signals while the main thread is blocked in a collective.

A Python handler runs when the main thread gets back to Python, which a hung collective
never does. So the interpreter's wakeup descriptor tells a thread of ours at once; it
keeps the time and can end the process. Handlers are restored when it stops listening.

Processes that are forked meanwhile (the workers of a `DataLoader`) share neither the
handlers nor the pipe. Where a scheduler signals every process of a job, a worker that
died of it would end the training before it has stopped by itself: so a worker outlives
a signal that its trainer got as well, and dies of one that was meant for it alone.
torch sets a handler of its own for SIGTERM in its workers: `outlive_stop` comes after.
What is done with a signal is the question of `graceful`.
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

_CLOSE, _LOOK_AGAIN = 0, 255  # neither is a signal
_QUIET, _STOPPING, _OVER = 0, 1, 2
_WORKER_WAITS_S = 1.0

Heard = Callable[[int], None]


class Listener:
    """Tells `heard` of every one of `signals`, in a thread; calls `due` once, when asked to.

    Must be started in the main thread, which is where Python hears signals.
    """

    def __init__(self, signals: Sequence[signal.Signals], heard: Heard) -> None:
        self.signals = tuple(signals)
        self._heard = heard
        self._due: Callable[[], None] | None = None
        self._due_s = float("inf")
        # Shared with what is forked from here on: how the trainer is doing.
        self._state = mmap.mmap(-1, 1)
        self._before: dict[int, Any] = {}

    def start(self) -> None:
        """Take the signals over. Raises `UsageError` outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals can be taken over in the main thread of a program alone")
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._listen, name="ckptctl-stop", daemon=True)
        self._thread.start()
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {each: signal.signal(each, _nothing) for each in self.signals}
        _LISTENING.add(self)

    def stop(self) -> None:
        """Give the signals back to whoever had them."""
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
        """Call `due` in the thread at `due_s` on the monotonic clock; an earlier time stands."""
        if due_s < self._due_s:
            self._due, self._due_s = due, due_s
            os.write(self._write, bytes([_LOOK_AGAIN]))

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
                    self._heard(number)
                elif number != _LOOK_AGAIN and self._fd_before >= 0:
                    with suppress(OSError):
                        os.write(self._fd_before, bytes([number]))

    def leave_to_child(self) -> None:
        """In a process that was forked: hear nothing any more."""
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)
        self.outlive()

    def outlive(self) -> None:
        """In a process that was forked: treat the signals as a worker should."""
        for each, before in self._before.items():
            default = before in (signal.SIG_DFL, None)
            signal.signal(each, self._in_child if default else before)

    def _in_child(self, number: int, _frame: FrameType | None) -> None:
        until_s = time.monotonic() + _WORKER_WAITS_S
        while self._state[0] == _QUIET and time.monotonic() < until_s:
            time.sleep(0.01)
        if self._state[0] == _OVER:
            os._exit(0)  # the trainer ends, and ends its workers: no failure of theirs
        if self._state[0] == _QUIET:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def outlive_stop(_worker: int = 0) -> None:
    """Let a worker of a `DataLoader` live as long as the trainer needs it to stop gracefully.

    For `worker_init_fn`. Works for workers that are forked (torch's default on Linux
    before Python 3.14) while a `GracefulStop` is entered; does nothing in others.
    """
    for listener in _INHERITED:
        listener.outlive()


_LISTENING: weakref.WeakSet[Listener] = weakref.WeakSet()
_INHERITED: list[Listener] = []


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """A handler must be there for the interpreter to write to the wakeup descriptor."""


def _after_fork() -> None:
    # A worker's own children inherit from the worker: what it inherited is theirs too.
    for listener in tuple(_LISTENING):
        _LISTENING.discard(listener)
        _INHERITED.append(listener)
        listener.leave_to_child()


os.register_at_fork(after_in_child=_after_fork)
