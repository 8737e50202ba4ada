"""Keep several requests in flight, and return the results in order.

For storages where a read mostly waits. All waiting happens in daemon threads, so that
Ctrl-C does not wait for a server that does not answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ckptctl.errors import OutOfMemory
from ckptctl.storage.contract import Span
from ckptctl.storage.waiting import start_daemon

T = TypeVar("T")
Item = TypeVar("Item")

WIDTH = 16
"""Requests in flight, and inspections, removals or reads of a network file system at once."""

READ_WIDTH = 64
"""Reads of an object store in flight. Short ones wait for the server: at 30 ms of latency, 500
reads of 2 KiB through obstore take 0.6 s of the clock with 64 in flight, 1.3 s with 16."""

MAX_BYTES = 64 << 20
"""Bytes in flight: long reads are limited by it, to 16 of 4 MiB."""


_NOTICE_EVERY_S = 0.1

_TIDY_S = 2.0
"""How long calls may take to end after an interrupt, and to remove incomplete files."""


class _Request(Generic[Item, T]):
    __slots__ = ("answers", "done", "error", "item", "n_bytes")

    def __init__(self, item: Item, n_bytes: int) -> None:
        self.item = item
        self.n_bytes = n_bytes
        self.done = threading.Event()
        self.answers: list[T] = []
        self.error: BaseException | None = None

    def run(self, ask: Callable[[Item], T]) -> None:
        try:
            self.answers.append(ask(self.item))
        except BaseException as exc:  # noqa: BLE001 - raised again where the answer is taken
            self.error = exc
        self.done.set()


def read_in_flight(
    read: Callable[[Span], T],
    spans: Iterable[Span],
    *,
    width: int = READ_WIDTH,
    max_bytes: int = MAX_BYTES,
) -> Iterator[tuple[Span, T]]:
    """Each span with the result of `read`, in the requested order.

    At most `width` reads run or are buffered, and at most `max_bytes` bytes unless a single
    span is larger. An exception of `read` is raised when its span is due; later reads are
    dropped then.
    """
    return in_flight(read, spans, width=width, max_bytes=max_bytes, n_bytes=attrgetter("length"))


def in_flight(
    ask: Callable[[Item], T],
    items: Iterable[Item],
    *,
    width: int = WIDTH,
    max_bytes: int = MAX_BYTES,
    n_bytes: Callable[[Item], int] = lambda _: 0,
    while_waiting: Callable[[], object] | None = None,
) -> Iterator[tuple[Item, T]]:
    """Each item with its result; see `read_in_flight`. `n_bytes` returns the size of a result.

    `while_waiting` is called a few times a second, in the caller's thread.
    """
    waiting: deque[_Request[Item, T]] = deque()
    work: SimpleQueue[_Request[Item, T] | None] = SimpleQueue()
    n_threads = n_waiting = 0

    def serve() -> None:
        while (task := work.get()) is not None:
            task.run(ask)

    try:
        for item in items:
            new: _Request[Item, T] = _Request(item, n_bytes(item))
            while waiting and (len(waiting) >= width or n_waiting + new.n_bytes > max_bytes):
                n_waiting -= waiting[0].n_bytes
                yield _answer(waiting.popleft(), while_waiting)
            if n_threads < width:
                try:
                    start_daemon("ckptctl-read", serve)
                    n_threads += 1
                except OutOfMemory:
                    if n_threads == 0:
                        raise
                    width = n_threads  # fewer threads suffice, more slowly
            waiting.append(new)
            n_waiting += new.n_bytes
            work.put(new)
        while waiting:
            yield _answer(waiting.popleft(), while_waiting)
    finally:
        with suppress(Empty):  # what nobody has begun is dropped
            while True:
                work.get_nowait()
        for _ in range(n_threads):
            work.put(None)


def act_in_flight(
    act: Callable[[Item], T],
    items: Iterable[Item],
    *,
    width: int = WIDTH,
    stop: Callable[[], object] = lambda: None,
    while_waiting: Callable[[], object] | None = None,
) -> list[T]:
    """The result of `act` for each item, several at once; the first exception ends it.

    It is raised when all calls that were in flight have ended; `stop` asks them to. After an
    interrupt they get a moment to do so. `while_waiting` is also called after each call.
    """
    errors: list[BaseException] = []
    running: set[int] = set()
    results: list[T] = []

    def attempt(item: Item) -> Iterator[T]:
        """One result; none after an exception."""
        if errors:
            return iter(())
        running.add(threading.get_ident())
        try:
            return iter((act(item),))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            stop()
            return iter(())
        finally:
            running.discard(threading.get_ident())

    try:
        asked = in_flight(attempt, items, width=max(1, width), while_waiting=while_waiting)
        for _, found in asked:
            results += found
            if while_waiting is not None:
                while_waiting()
    except BaseException as error:
        errors.append(error)
        raise
    finally:
        stop()
        until_s = time.monotonic() + _TIDY_S
        while running and time.monotonic() < until_s:
            time.sleep(_NOTICE_EVERY_S / 10)
    if errors:
        raise errors[0]
    return results


def run_aside(request: Callable[[], T]) -> T:
    """The result of `request`, run in a daemon thread if this is the main thread.

    The main thread handles Ctrl-C while it waits for a thread, but not while it waits
    inside a native library.
    """
    if threading.current_thread() is not threading.main_thread():
        return request()
    ((_, result),) = in_flight(lambda _: request(), [None])
    return result


def _answer(
    request: _Request[Item, T], while_waiting: Callable[[], object] | None
) -> tuple[Item, T]:
    while not request.done.wait(None if while_waiting is None else _NOTICE_EVERY_S):
        if while_waiting is not None:
            while_waiting()
    if request.error is not None:
        raise request.error
    # The requesting thread may keep its task for a while; this releases the bytes.
    return request.item, request.answers.pop()
