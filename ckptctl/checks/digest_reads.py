"""What do the bytes of many files come to?

Reads every byte of the files, or of the blocks, that it is given, and digests
it. On file systems several threads read and digest at once; from a network or an
object store one thread digests what arrives, since the reads are in flight by
themselves. What the digests should be is the question of `sealed`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ckptctl.formats.digests import Algorithm, Digester, Digests
from ckptctl.storage.contract import Kind, Span, Store

MAX_JOBS = 4
"""More threads than this seldom read a file system faster."""

_PIECE = 1 << 20
_PIECE_OF_OBJECT = 8 << 20  # less would be more requests than a link can hide


@dataclass(frozen=True, slots=True)
class Stretch:
    """`length` bytes of a file, from `start` on: the unit that has one digest."""

    path: str
    start: int
    length: int


OnBytes = Callable[[int], None]
"""Told how many more bytes were digested; called from several threads."""


def read_digests(
    store: Store,
    stretches: Iterable[Stretch],
    algorithm: Algorithm,
    *,
    jobs: int | None = None,
    on_bytes: OnBytes | None = None,
) -> Iterator[tuple[Stretch, Digests]]:
    """Each stretch with its digests, in no order. Paths are those in the store.

    `jobs` is how many threads read, None for as many as is good here. Storage errors
    pass through; what is still being read then is dropped.

    Cost: every byte once, and some 2 MiB of memory for each thread; 64 MiB in all
    where reads are in flight.
    """
    waiting: SimpleQueue[Stretch] = SimpleQueue()
    for stretch in stretches:
        waiting.put(stretch)
    results: SimpleQueue[tuple[Stretch, Digests] | BaseException | None] = SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        try:
            for result in _digested(store, _taken(waiting, stopped), algorithm, on_bytes, stopped):
                results.put(result)
            results.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where results are taken
            results.put(error)

    n_threads = _n_threads(store, jobs, waiting.qsize())
    for _ in range(n_threads):
        # Daemons: Ctrl-C must not wait for a storage that does not answer.
        threading.Thread(target=work, name="ckptctl-digest", daemon=True).start()
    try:
        while n_threads:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                n_threads -= 1
            else:
                yield result
    finally:
        stopped.set()


def _n_threads(store: Store, jobs: int | None, n_stretches: int) -> int:
    usual = min(MAX_JOBS, os.cpu_count() or 1) if store.kind is Kind.LOCAL else 1
    return min(jobs or usual, n_stretches)


def _taken(waiting: SimpleQueue[Stretch], stopped: threading.Event) -> Iterator[Stretch]:
    with suppress(Empty):
        while not stopped.is_set():
            yield waiting.get_nowait()


def _digested(
    store: Store,
    stretches: Iterator[Stretch],
    algorithm: Algorithm,
    on_bytes: OnBytes | None,
    stopped: threading.Event,
) -> Iterator[tuple[Stretch, Digests]]:
    piece = _PIECE_OF_OBJECT if store.kind is Kind.OBJECT else _PIECE
    begun: deque[tuple[Stretch, Digester]] = deque()

    def spans() -> Iterator[Span]:
        for stretch in stretches:
            begun.append((stretch, Digester(algorithm, stretch.length)))
            end = stretch.start + stretch.length
            # A stretch of no bytes is one empty read: it keeps its turn.
            for at in range(stretch.start, max(end, stretch.start + 1), piece):
                if stopped.is_set():
                    return
                yield Span(stretch.path, at, min(piece, end - at))

    for span, data in store.read_spans(spans()):
        stretch, digester = begun[0]
        digester.update(data)
        if on_bytes is not None:
            on_bytes(len(data))
        if span.offset + span.length == stretch.start + stretch.length:
            begun.popleft()
            yield stretch, digester.digests()
