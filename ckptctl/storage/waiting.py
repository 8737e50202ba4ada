"""Bound the waits for a storage: retries, a watchdog for hangs, and daemon threads.

Requests that failed in a way that may pass are repeated here and nowhere else: clients are set to
a single try, so that bounds do not multiply. A client reports a failure that may pass as
`Transient`, and a request that the storage turned away because of its rate as `Throttled`.

A read from a mount whose server is gone can hang in the kernel, where no timeout and no exception
reaches it. Stores name each operation with `busy`; while a `Watchdog` is open, its thread ends
the process with exit code 75 once one of these operations has made no progress for the bound. A
thread that sleeps uninterruptibly in the kernel is freed only by the kernel, and the process ends
only then; waits on NFS, FUSE and Lustre servers are killable.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptctl.errors import OutOfMemory, StorageUnavailable
from ckptctl.formatting import counted


class _Daemon(threading.Thread):
    """A thread whose `start` returns also where memory is lacking within the new thread.

    `Thread.start` waits for `_started`, which the new thread sets in `_bootstrap` after some
    allocations, and does not set where one of them fails.
    Source: CPython 3.11 to 3.14, `Lib/threading.py`.
    """

    lacks_memory = False

    def _bootstrap(self) -> None:
        inherited: Any = super()
        try:
            inherited._bootstrap()
        except MemoryError:
            self.lacks_memory = True
            started: threading.Event = vars(self)["_started"]
            while True:
                try:
                    started.set()
                except MemoryError:
                    time.sleep(0)  # another thread frees memory
                else:
                    return


def start_daemon(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread that runs `target(*args)`; raises `OutOfMemory` if none can be started."""
    thread = _Daemon(target=target, args=args, name=name, daemon=True)
    problem: RuntimeError | None = None
    try:
        thread.start()
    except RuntimeError as error:
        problem = error
    if problem is not None or thread.lacks_memory:
        raise OutOfMemory(
            "no thread can be started: memory or the number of processes is limited (ulimit -v, "
            "ulimit -u, the job's cgroup)"
        ) from problem
    return thread


_PRINTING_S = 5.0


class Operation:
    """One wait for the storage in one thread; one that is not `bounded` may last for any time."""

    __slots__ = ("bounded", "n_beats", "what")

    def __init__(self, what: str, *, bounded: bool = True) -> None:
        self.what = what
        self.bounded = bounded
        self.n_beats = 0

    def __enter__(self) -> None:
        _in_flight[threading.get_ident()] = self

    def __exit__(self, *exc: object) -> None:
        _in_flight.pop(threading.get_ident(), None)


_open: set[Watchdog] = set()
_in_flight: dict[int, Operation] = {}
_exempt: set[int] = set()
_UNWATCHED = nullcontext()


def busy(what: str, *, bounded: bool = True) -> Operation | nullcontext[None]:
    """A context manager around one wait for the storage; `what` begins the error message.

    A wait for a person or for the writer of a pipe is not `bounded`.
    Costs almost nothing while no watchdog is open. Time between operations (a pause before
    a retry) is not counted. Operations do not nest.
    """
    if not _open or threading.get_ident() in _exempt:
        return _UNWATCHED
    return Operation(what, bounded=bounded)


def operation_in_flight() -> str:
    """What one of the waits for the storage is for: a path or an address; empty without one."""
    operations = [*_in_flight.values()]
    return operations[-1].what if operations else ""


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
                is_quiet = same and operation.bounded
                now[key] = (operation, operation.n_beats, quiet + 1 if is_quiet else 0)
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


T = TypeVar("T")

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0
THROTTLED = 4
"""How many times longer the pauses are after a throttled request."""

SAVE_RETRY_S = 120.0
"""How long the requests of a save are retried. Object stores restart gateways, move
partitions and throttle for about a minute; a run that ends then loses more than that."""


class Transient(StorageUnavailable):
    """A request failed in a way that a retry may not; the message names only the failure."""


class Throttled(Transient):
    """The storage asked for a lower rate of requests (503 SlowDown, 429)."""


@dataclass(frozen=True, slots=True)
class Retries:
    """A failed request is retried `count` times, and then until `for_s` seconds have passed."""

    count: int = 4
    for_s: float = 0.0


def retried(
    once: Callable[[], T],
    *,
    what: str,
    retries: Retries,
    meaning: Callable[[OSError, Transient | None], Exception] | None = None,
) -> T:
    """The result of `once`, which is called again after each `Transient` within `retries`.

    Pauses double from `FIRST_PAUSE_S` to `LONGEST_PAUSE_S`, `THROTTLED` times as long after
    a `Throttled`. Each is shortened by a random share of up to a half, so that ranks that
    were throttled together do not retry together. `meaning` returns the error for an
    `OSError`, given the failure before it; only a `Transient` is retried.

    Raises `StorageUnavailable` with the number of attempts and the elapsed seconds when the
    last attempt failed.
    """
    began = time.monotonic()
    n_tries = 0
    failure: Transient | None = None
    while True:
        try:
            with busy(what):
                return once()
        except Transient as exc:
            failure = exc
        except OSError as exc:
            if meaning is None:
                raise
            error = meaning(exc, failure)
            if not isinstance(error, Transient):
                raise error from exc
            error.__cause__ = exc
            failure = error
        n_tries += 1
        if n_tries > retries.count and time.monotonic() - began >= retries.for_s:
            break
        longest = min(FIRST_PAUSE_S * 2 ** min(n_tries - 1, 30), LONGEST_PAUSE_S)
        if isinstance(failure, Throttled):
            longest *= THROTTLED
        time.sleep(longest * (1 + os.urandom(1)[0] / 255) / 2)
    tries = counted(n_tries, "try", "tries")
    raise StorageUnavailable(
        f"{what}: no answer after {tries} in {time.monotonic() - began:.0f} s ({failure.message})"
    ) from failure
