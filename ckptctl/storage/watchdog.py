"""A watchdog for storage operations that hang in the kernel.

A read from a mount whose server is gone can hang in the kernel, where no timeout and no
exception ends it. Stores announce each operation with `busy`. While a `Watchdog` is open,
its thread ends the process with exit code 75 once an operation has made no progress for the
limit.

A thread in uninterruptible sleep keeps the process alive until the kernel releases it;
waits on NFS, FUSE and Lustre servers are killable. Retries and timeouts of requests are
part of the stores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ckptctl.errors import StorageUnavailable
from ckptctl.storage.threads import start_daemon

_PRINTING_S = 5.0


class Operation:
    """One wait for the storage in one thread."""

    __slots__ = ("n_beats", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.n_beats = 0

    def __enter__(self) -> None:
        _in_flight[threading.get_ident()] = self

    def __exit__(self, *exc: object) -> None:
        _in_flight.pop(threading.get_ident(), None)


class _Unwatched(Operation):
    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


_open: set[Watchdog] = set()
_in_flight: dict[int, Operation] = {}
_exempt: set[int] = set()
_UNWATCHED = _Unwatched("")


def busy(what: str) -> Operation:
    """A context manager around one wait for the storage; `what` begins the error message.

    Costs almost nothing while no watchdog is open. Time between operations (a pause before
    a retry) is not counted. Operations do not nest.
    """
    if not _open or threading.get_ident() in _exempt:
        return _UNWATCHED
    return Operation(what)


def leave_unwatched() -> None:
    """Exempt the calling thread: a stall in it must not end the process.

    For a background thread that lives as long as the process.
    """
    _exempt.add(threading.get_ident())


def beat() -> None:
    """Record progress of this thread's operation, if any."""
    if operation := _in_flight.get(threading.get_ident()):
        operation.n_beats += 1


class Watchdog:
    """Ends the process when an operation makes no progress for `bound_s` seconds.

    `on_stall` gets the error to print. When it returns, or after a few seconds, the process
    ends with `os._exit`, without finalizers, because they could wait for the stuck thread.
    Operations that started before the watchdog was opened are not watched.
    """

    def __init__(self, bound_s: float, on_stall: Callable[[StorageUnavailable], None]) -> None:
        self._bound_s = bound_s
        self._on_stall = on_stall
        self._closed = threading.Event()

    def __enter__(self) -> Watchdog:
        _open.add(self)
        start_daemon("ckptctl-watchdog", self._watch)
        return self

    def __exit__(self, *exc: object) -> None:
        _open.discard(self)
        self._closed.set()

    def _watch(self) -> None:
        # Quiet time is counted in wake-ups of this thread, not by a clock:
        # a process that was stopped, or a machine that slept, is not a stall.
        wake_ups = 8
        seen: dict[int, tuple[Operation, int, int]] = {}
        while not self._closed.wait(self._bound_s / wake_ups):
            now: dict[int, tuple[Operation, int, int]] = {}
            for key, operation in list(_in_flight.items()):
                before, n_beats, quiet = seen.get(key, (None, 0, 0))
                same = before is operation and n_beats == operation.n_beats
                now[key] = (operation, operation.n_beats, quiet + 1 if same else 0)
                if now[key][2] >= wake_ups:
                    self._end(operation)
            seen = now

    def _end(self, operation: Operation) -> None:
        error = StorageUnavailable(
            f"{operation.what}: no progress for {self._bound_s:g} s; the storage hangs, and the "
            "state of the checkpoint is unknown"
        )
        try:
            # In a separate thread, because printing to a full pipe may block.
            printing = threading.Thread(target=self._on_stall, args=(error,), daemon=True)
            printing.start()
            printing.join(_PRINTING_S)
        finally:
            os._exit(StorageUnavailable.exit_code)
