"""Keep several requests in flight, and return the answers in order.

For storages where a read is mostly waiting. All waiting is done in daemon threads:
Ctrl-C must not wait for a server that does not answer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ckptctl.errors import OutOfMemory
from ckptctl.storage.contract import Span
from ckptctl.storage.threads import start_daemon

T = TypeVar("T")
Item = TypeVar("Item")

WIDTH = 16
"""Requests in flight: with 8 MiB each it fills a fast link at 30 ms of latency."""

MAX_BYTES = 64 << 20


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
    read: Callable[[Span], bytes],
    spans: Iterable[Span],
    *,
    width: int = WIDTH,
    max_bytes: int = MAX_BYTES,
) -> Iterator[tuple[Span, bytes]]:
    """Each span with what `read` returns for it, in the order asked for.

    At most `width` reads run or wait to be taken, and no more than `max_bytes`
    bytes unless one span alone is larger. What `read` raises is raised at that
    span's turn; later reads are dropped then.
    """
    return in_flight(read, spans, width=width, max_bytes=max_bytes, n_bytes=attrgetter("length"))


def in_flight(
    ask: Callable[[Item], T],
    items: Iterable[Item],
    *,
    width: int = WIDTH,
    max_bytes: int = MAX_BYTES,
    n_bytes: Callable[[Item], int] = lambda _: 0,
) -> Iterator[tuple[Item, T]]:
    """Each item with the answer to it; see `read_in_flight`. `n_bytes` is how long that is."""
    waiting: deque[_Request[Item, T]] = deque()
    work: SimpleQueue[_Request[Item, T] | None] = SimpleQueue()
    n_threads = n_waiting = 0
    try:
        for item in items:
            new: _Request[Item, T] = _Request(item, n_bytes(item))
            while waiting and (len(waiting) >= width or n_waiting + new.n_bytes > max_bytes):
                n_waiting -= waiting[0].n_bytes
                yield _answer(waiting.popleft())
            if n_threads < width:
                try:
                    start_daemon("ckptctl-read", _work, work, ask)
                    n_threads += 1
                except OutOfMemory:
                    if n_threads == 0:
                        raise
                    width = n_threads  # fewer do, only later
            waiting.append(new)
            n_waiting += new.n_bytes
            work.put(new)
        while waiting:
            yield _answer(waiting.popleft())
    finally:
        _drop(work)
        for _ in range(n_threads):
            work.put(None)


def act_in_flight(act: Callable[[str], object], names: Iterable[str]) -> None:
    """Call `act` with each name, several at once; what one raises is raised, and ends it.

    Those that are in flight then may still come to their end.
    """

    def once(span: Span) -> bytes:
        act(span.path)
        return b""

    for _ in read_in_flight(once, (Span(name, 0, 0) for name in names)):
        pass


def run_aside(request: Callable[[], T]) -> T:
    """What `request` returns or raises, run in a daemon thread if this is the main one.

    The main thread sees Ctrl-C while it waits for a thread, and not while it waits
    within a library that is not Python.
    """
    if threading.current_thread() is not threading.main_thread():
        return request()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(request())
        except BaseException as exc:  # noqa: BLE001 - raised again below
            errors.append(exc)

    start_daemon("ckptctl-request", run).join()
    if errors:
        raise errors[0]
    return results[0]


def _answer(request: _Request[Item, T]) -> tuple[Item, T]:
    request.done.wait()
    if request.error is not None:
        raise request.error
    # The thread that asked may hold on to its task for a while: not to the bytes.
    return request.item, request.answers.pop()


def _work(work: SimpleQueue[_Request[Item, T] | None], ask: Callable[[Item], T]) -> None:
    while (task := work.get()) is not None:
        task.run(ask)


def _drop(work: SimpleQueue[_Request[Item, T] | None]) -> None:
    with suppress(Empty):
        while True:
            work.get_nowait()
