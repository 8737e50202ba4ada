"""How are several reads kept in flight while their results come in order?

For storages where a read is mostly waiting. All waiting is done in daemon threads:
Ctrl-C must not wait for a server that does not answer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from ckptctl.errors import OutOfMemory
from ckptctl.storage.contract import Span
from ckptctl.storage.threads import start_daemon

T = TypeVar("T")

WIDTH = 16
"""Reads in flight: with 8 MiB each it fills a fast link at 30 ms of latency."""

MAX_BYTES = 64 << 20


class _Read:
    __slots__ = ("data", "done", "error", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.done = threading.Event()
        self.data = b""
        self.error: BaseException | None = None

    def run(self, read: Callable[[Span], bytes]) -> None:
        try:
            self.data = read(self.span)
        except BaseException as exc:  # noqa: BLE001 - raised again where the result is taken
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
    waiting: deque[_Read] = deque()
    work: SimpleQueue[_Read | None] = SimpleQueue()
    n_threads = n_bytes = 0
    try:
        for span in spans:
            while waiting and (len(waiting) >= width or n_bytes + span.length > max_bytes):
                n_bytes -= waiting[0].span.length
                yield _result(waiting.popleft())
            if n_threads < width:
                try:
                    start_daemon("ckptctl-read", _work, work, read)
                    n_threads += 1
                except OutOfMemory:
                    if n_threads == 0:
                        raise
                    width = n_threads  # fewer do, only later
            waiting.append(_Read(span))
            n_bytes += span.length
            work.put(waiting[-1])
        while waiting:
            yield _result(waiting.popleft())
    finally:
        _drop(work)
        for _ in range(n_threads):
            work.put(None)


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


def _result(read: _Read) -> tuple[Span, bytes]:
    read.done.wait()
    if read.error is not None:
        raise read.error
    # The thread that read it may hold on to its task for a while: not to the bytes.
    data, read.data = read.data, b""
    return read.span, data


def _work(work: SimpleQueue[_Read | None], read: Callable[[Span], bytes]) -> None:
    while (task := work.get()) is not None:
        task.run(read)


def _drop(work: SimpleQueue[_Read | None]) -> None:
    with suppress(Empty):
        while True:
            work.get_nowait()
