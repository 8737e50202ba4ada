"""Read every byte of many files once, as fast as the storage delivers them.

Runs of bytes are assigned whole, the largest first, and their bytes are passed in pieces to
their consumers. On file systems each thread reads into its own buffer; on an object store
several requests are in flight, and one thread consumes what arrives. This module does not
interpret the bytes.

`mmap` is not used: a file that is truncated while mapped would end the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from ckptctl.data_classes import dataclass, field
from ckptctl.errors import OutOfMemory
from ckptctl.storage.contract import Kind, Span, Store
from ckptctl.storage.waiting import start_daemon

PIECE_BYTES = 1 << 20
"""Bytes a read on a file system: larger ones fall out of the processor's cache."""

OBJECT_PIECE_BYTES = 4 << 20
"""Bytes a request to an object store: with 16 in flight they take up 64 MiB."""

MAX_JOBS = 8
"""More threads than this rarely read a file system faster."""

_PROGRESS_EVERY_S = 0.1

OnProgress = Callable[[int, int], None]
"""Called with the bytes read and their total, a few times a second, in the caller's thread."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes from `start` of the file, read at once.

    `ahead`: the bytes are read again later, and counted only then. `into` is the memory to
    read them into, if not a buffer of the thread.
    """

    start: int
    length: int
    ahead: bool = False
    into: memoryview | None = None


class Run(Protocol):
    """Bytes of one file that one thread reads in order; `path` is that in the store."""

    @property
    def path(self) -> str:
        """The path of the file, relative to the store's root."""
        ...

    @property
    def n_bytes(self) -> int:
        """The number of bytes to read."""
        ...

    def pieces(self, limit: int) -> Iterator[Piece]:
        """The reads, none longer than `limit`; may be requested before earlier ones are taken."""
        ...

    def take(self, piece: Piece, data: memoryview) -> None:
        """Consume the bytes of a piece; they are overwritten after it returns, unless in `into`."""
        ...


@dataclass(slots=True)
class Stop:
    """Ends a pass early, from another thread or a signal handler.

    While `listening`, a pass ends within one or two pieces of `ask`.
    """

    listening: bool = False
    _asked: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        """End the running pass, and every later one."""
        self._asked.set()

    @property
    def asked(self) -> bool:
        """Whether the pass should end."""
        return self._asked.is_set()


class Pace:
    """Keeps reads below a number of bytes per second, over all threads and passes that use it."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, n_bytes: int) -> None:
        """Wait until `n_bytes` that were read have taken their time."""
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + n_bytes / self._bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a pass. `until_s` is by `time.monotonic`; `jobs` None chooses a suitable number.

    `pace` bounds the rate of the reads.
    """

    jobs: int | None = None
    until_s: float | None = None
    stop: Stop = field(default_factory=Stop)
    on_progress: OnProgress | None = None
    pace: Pace | None = None


@dataclass(slots=True)
class _Board:
    """State that the threads of a pass share."""

    limits: Limits
    waiting: SimpleQueue[Run] = field(default_factory=SimpleQueue)
    ended: SimpleQueue[BaseException | None] = field(default_factory=SimpleQueue)
    n_read: list[int] = field(default_factory=list)
    given_up: bool = False

    @property
    def stopped(self) -> bool:
        until_s = self.limits.until_s
        late = until_s is not None and time.monotonic() > until_s
        return self.given_up or late or self.limits.stop.asked

    def count(self, number: int, piece: Piece) -> None:
        """Count a piece that thread `number` has read, and wait if the pace demands it."""
        self.n_read[number] += 0 if piece.ahead else piece.length
        if self.limits.pace is not None:
            self.limits.pace.wait(piece.length)

    def runs(self) -> Iterator[Run]:
        with suppress(Empty):
            while not self.stopped:
                yield self.waiting.get_nowait()


def read_runs(
    store: Store, runs: Sequence[Run], limits: Limits, *, to_the_last: bool = False
) -> int:
    """Read all runs and pass them their bytes; returns how many bytes were read.

    Ends early at `limits.until_s` or after `limits.stop.ask()`, without completing runs in
    progress. Storage errors and exceptions of a run are raised: at once, or with
    `to_the_last` when no thread reads into shared memory any more.

    Cost: every byte once; a buffer of 1 MiB per thread on a file system, and 64 MiB in all
    on an object store.
    """
    board = _Board(limits)
    for run in sorted(runs, key=lambda run: -run.n_bytes):
        board.waiting.put(run)
    total = sum(run.n_bytes for run in runs)
    n_threads = _start(store, board, _n_threads(store, limits.jobs, len(runs)))
    limits.stop.listening = True
    failed: BaseException | None = None
    try:
        while n_threads:
            try:
                error = board.ended.get(timeout=_PROGRESS_EVERY_S)
            except Empty:
                if limits.on_progress is not None:
                    limits.on_progress(sum(board.n_read), total)
                continue
            n_threads -= 1
            if error is not None:
                failed = failed or error
                board.given_up = True
                if not to_the_last:
                    break
    finally:
        limits.stop.listening = False
        board.given_up = True
    if failed is not None:
        raise failed
    return sum(board.n_read)


def _start(store: Store, board: _Board, n_wanted: int) -> int:
    """Start the threads; returns how many. Fewer threads than intended still read everything."""
    board.n_read = [0] * n_wanted
    read = _read_objects if store.kind is Kind.OBJECT else _read_files
    for number in range(n_wanted):
        try:
            start_daemon("ckptctl-bytes", _work, read, store, board, number)
        except OutOfMemory:
            if number == 0:
                raise
            return number
    return n_wanted


def _n_threads(store: Store, jobs: int | None, n_runs: int) -> int:
    if store.kind is Kind.OBJECT:
        return min(1, n_runs)
    # A thread that waits for a server leaves the processor to the others.
    usual = MAX_JOBS if store.kind is Kind.NETWORK else min(MAX_JOBS, os.cpu_count() or 1)
    return min(jobs or usual, n_runs)


def _work(
    read: Callable[[Store, _Board, int], None], store: Store, board: _Board, number: int
) -> None:
    try:
        read(store, board, number)
        board.ended.put(None)
    except BaseException as error:  # noqa: BLE001 - raised again where the pass is waited for
        board.ended.put(error)


def _read_files(store: Store, board: _Board, number: int) -> None:
    buffer = memoryview(bytearray(PIECE_BYTES))
    for run in board.runs():
        with store.open_file(run.path) as file:
            for piece in run.pieces(PIECE_BYTES):
                if board.stopped:
                    return
                data = buffer[: piece.length] if piece.into is None else piece.into
                file.read_into(piece.start, data)
                run.take(piece, data)
                board.count(number, piece)


def _read_objects(store: Store, board: _Board, number: int) -> None:
    asked_for: deque[tuple[Run, Piece]] = deque()

    def spans() -> Iterator[Span]:
        for run in board.runs():
            for piece in run.pieces(OBJECT_PIECE_BYTES):
                if board.stopped:
                    return
                asked_for.append((run, piece))
                yield Span(run.path, piece.start, piece.length)

    for _, data in store.read_spans(spans()):
        if board.stopped:
            return
        run, piece = asked_for.popleft()
        taken = memoryview(data)
        if piece.into is not None:
            piece.into[:] = taken
            taken = piece.into
        run.take(piece, taken)
        board.count(number, piece)
