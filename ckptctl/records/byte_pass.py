"""Read every byte of many files once, as fast as the storage delivers them.

Runs of bytes are assigned whole, the largest first, and their bytes are passed in pieces to
their consumers. On file systems each thread reads into its own buffer; on an object store
several requests are in flight, and one thread consumes what arrives.

`mmap` is not used: a file that is truncated while mapped would end the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Protocol

from zlib_ng.zlib_ng import crc32

from ckptctl.formats.digests import BLOCK_BYTES, Algorithm, Checksumming, Digester, Digests
from ckptctl.storage.contract import Closing, OpenFile, Span, Store, StoreKind, spread
from ckptctl.storage.in_flight import act_in_flight

PIECE_BYTES = 1 << 20
"""Bytes a read on a file system: larger ones fall out of the processor's cache."""

IN_PLACE_BYTES = 512 << 10
"""Bytes a read into long memory of the caller, which is not in the cache as a buffer is.

Half as many cost one thread less, and two threads more: they wait for each other's Python.
"""

OBJECT_PIECE_BYTES = 4 << 20
"""Bytes a request to an object store: with 16 in flight they take up 64 MiB."""

MAX_JOBS = 8
"""More threads than this rarely read a file system faster."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes read and their total, a few times a second, in the caller's thread."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes from `start` of the file.

    `ahead`: the bytes are read again later, and counted only then. `into` are the buffers to
    read them into, at most `MAX_BUFFERS`, if not a buffer of the thread. Only a piece with one
    such buffer may be longer than one read.
    """

    start: int
    length: int
    ahead: bool = False
    into: Sequence[memoryview] = ()

    def reads(self, limit: int, n_each: int) -> Iterator[tuple[int, int, Sequence[memoryview]]]:
        """The reads: where each begins in the file, its length, and its buffers.

        One, or where that would have more than `limit` bytes, several of `n_each`.
        """
        if self.length <= limit:
            yield self.start, self.length, self.into
            return
        (memory,) = self.into
        for at in range(0, self.length, n_each):
            part = memory[at : at + n_each]
            yield self.start + at, len(part), (part,)


class Run(Protocol):
    """`n_bytes` bytes of one file that one thread reads in order; `path` is that in the store."""

    path: str
    n_bytes: int

    def pieces(self, limit: int) -> Iterator[Piece]:
        """What to read, in order, by at most `limit` bytes; asked for before earlier ones come.

        A longer piece with one buffer of its own is read, and taken, part by part.
        """
        ...

    def take(self, piece: Piece, data: memoryview) -> None:
        """Consume the bytes of one read; they are overwritten after it returns, unless in `into`.

        `data` are the bytes in the first of several buffers.
        """
        ...


@dataclass(slots=True)
class Stop:
    """Ends a pass early, from another thread or a signal handler.

    While `listening`, a pass ends within one or two pieces of `ask`.
    """

    listening: bool = False
    asked: bool = False

    def ask(self) -> None:
        """End the running pass, and every later one."""
        self.asked = True


@dataclass(slots=True)
class ReadThrottle:
    """Keeps reads below a number of bytes per second, over all threads and passes that use it."""

    bytes_per_s: int
    _free_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, n_bytes: int) -> None:
        """Wait until `n_bytes` that were read have taken their time."""
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + n_bytes / self.bytes_per_s
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
    pace: ReadThrottle | None = None


@dataclass(slots=True)
class _Board:
    limits: Limits
    waiting: SimpleQueue[Run] = field(default_factory=SimpleQueue)
    n_read: list[int] = field(default_factory=list)
    given_up: bool = False

    @property
    def stopped(self) -> bool:
        limits = self.limits
        late = limits.until_s is not None and time.monotonic() > limits.until_s
        return late or self.given_up or limits.stop.asked

    def count(self, number: int, n_bytes: int, ahead: bool) -> bool:
        """Count what thread `number` has read; whether to go on, after a wait for the pace."""
        self.n_read[number] += 0 if ahead else n_bytes
        if self.limits.pace is not None:
            self.limits.pace.wait(n_bytes)
        return not self.stopped

    def runs(self) -> Iterator[Run]:
        with suppress(Empty):
            while not self.stopped:
                yield self.waiting.get_nowait()


def read_runs(store: Store, runs: Sequence[Run], limits: Limits) -> int:
    """Read all runs and pass them their bytes; returns how many bytes were read.

    Ends early at `limits.until_s` or after `limits.stop.ask()`, without completing runs in
    progress. Storage errors and exceptions of a run are raised when all threads have ended, and
    none reads into shared memory any more.

    Cost: every byte once; a buffer of 1 MiB per thread on a file system, and 64 MiB in all
    on an object store.
    """
    n_threads = _n_threads(store, limits.jobs, len(runs))
    board = _Board(limits, n_read=[0] * n_threads)
    for run in sorted(runs, key=lambda run: -run.n_bytes):
        board.waiting.put(run)
    total = sum(run.n_bytes for run in runs)
    read = _read_objects if store.kind is StoreKind.OBJECT else _read_files

    def give_up() -> None:
        board.given_up = True

    def show_progress() -> None:
        if limits.on_progress is not None:
            limits.on_progress(sum(board.n_read), total)

    limits.stop.listening = True
    try:
        act_in_flight(
            lambda number: read(store, board, number),
            range(n_threads),
            width=n_threads,
            stop=give_up,
            while_waiting=show_progress,
        )
    finally:
        limits.stop.listening = False
    return sum(board.n_read)


def _n_threads(store: Store, jobs: int | None, n_runs: int) -> int:
    if store.kind is StoreKind.OBJECT:
        return min(1, n_runs)
    # A thread that waits for a server leaves the processor to the others.
    usual = MAX_JOBS if store.kind is StoreKind.NETWORK else min(MAX_JOBS, os.cpu_count() or 1)
    return min(jobs or usual, n_runs)


def _read_files(store: Store, board: _Board, number: int) -> None:
    buffer = memoryview(bytearray(PIECE_BYTES))
    for run in board.runs():
        with store.open_file(run.path) as file:
            for piece, n_bytes in read_run(file, run, buffer):
                if not board.count(number, n_bytes, piece.ahead):
                    return


def read_run(file: OpenFile, run: Run, buffer: memoryview) -> Iterator[tuple[Piece, int]]:
    """Read one run of an open file in this thread; yields each piece with its bytes, as read.

    Pieces without memory of their own pass through `buffer`.
    """
    limit = len(buffer)
    for piece in run.pieces(limit):
        for start, n_bytes, into in piece.reads(limit, IN_PLACE_BYTES):
            into = into or (buffer[:n_bytes],)
            file.read_into(start, *into)
            run.take(piece, into[0])
            yield piece, n_bytes


_MAX_OPEN = 8


class OpenFiles(Closing):
    """Reads runs in the thread of the caller, and keeps a few files open until it is closed.

    Pieces without memory of their own pass through a buffer of `n_bytes`.
    """

    def __init__(self, store: Store, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._store = store
        self._open: OrderedDict[str, OpenFile] = OrderedDict()

    @cached_property
    def _buffer(self) -> memoryview:
        return memoryview(bytearray(self.n_bytes))

    def file(self, path: str) -> OpenFile:
        """A file of the store; the one that was not used for longest is closed for it."""
        file = self._open.get(path)
        if file is None:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            file = self._open[path] = self._store.open_file(path)
        else:
            self._open.move_to_end(path)
        return file

    def read(self, runs: Iterable[Run]) -> int:
        """Read all runs in order; returns how many bytes were read."""
        return sum(
            n_bytes
            for run in runs
            for _, n_bytes in read_run(self.file(run.path), run, self._buffer)
        )

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def _read_objects(store: Store, board: _Board, number: int) -> None:
    asked_for: deque[tuple[Run, Piece, Sequence[memoryview]]] = deque()

    def spans() -> Iterator[Span]:
        for run in board.runs():
            for piece in run.pieces(OBJECT_PIECE_BYTES):
                for start, n_bytes, into in piece.reads(OBJECT_PIECE_BYTES, OBJECT_PIECE_BYTES):
                    if board.stopped:
                        return
                    asked_for.append((run, piece, into))
                    yield Span(run.path, start, n_bytes)

    for _, data in store.view_spans(spans()):
        run, piece, into = asked_for.popleft()
        spread(data, into)
        run.take(piece, into[0] if into else memoryview(data))
        if not board.count(number, len(data), piece.ahead):
            return


@dataclass(frozen=True, slots=True)
class Stretch:
    """`length` bytes of a file from `start`, with one digest. `path` is in the store."""

    path: str
    start: int
    length: int


def _in_order(start: int, n_bytes: int, limit: int) -> Iterator[Piece]:
    end = start + n_bytes
    for at in range(start, end, limit):
        yield Piece(at, min(limit, end - at))


class DigestRun:
    """Digests a stretch; see `byte_pass.Run`. `around` is the run that already reads it.

    `beside` receives the same bytes, for a checksum of another kind.
    """

    def __init__(
        self,
        stretch: Stretch,
        algorithm: Algorithm,
        around: Run | None = None,
        *,
        beside: Checksumming | None = None,
    ) -> None:
        self.stretch = stretch
        self.path = stretch.path
        self.n_bytes = stretch.length
        self.beside = beside
        self._around = around
        self._digester = Digester(algorithm)
        self._n_taken = 0

    @property
    def digests(self) -> Digests | None:
        """The digest of the bytes; None if the pass ended before all were read."""
        return self._digester.digests() if self._n_taken == self.n_bytes else None

    def pieces(self, limit: int) -> Iterator[Piece]:
        if self._around is not None:
            yield from self._around.pieces(limit)
            return
        yield from _in_order(self.stretch.start, self.n_bytes, limit)

    def take(self, piece: Piece, data: memoryview) -> None:
        if self._around is not None:
            self._around.take(piece, data)
        if not piece.ahead:
            self._digester.update(data)
            if self.beside is not None:
                self.beside.update(data)
            self._n_taken += len(data)


class StretchRun(Run, Protocol):
    """A run that reads records, starting at byte `start` of its file."""

    start: int


class BlockDigests:
    """Digests whole files block by block, in the pass that reads their records.

    `sizes` maps files to their sizes; `folder` is their location in the store.
    """

    def __init__(self, folder: str, sizes: Mapping[str, int], algorithm: Algorithm) -> None:
        self._prefix = f"{folder}/" if folder else ""
        self._sizes = sizes
        self._algorithm = algorithm
        self._runs: dict[str, list[DigestRun]] = {}

    def runs(self, others: Sequence[StretchRun] = ()) -> list[Run]:
        """The runs to read: `others`, wrapped to digest the blocks they cover, and the rest."""
        by_stretch = {Stretch(run.path, run.start, run.n_bytes): run for run in others}
        for path, size in self._sizes.items():
            blocks = [
                Stretch(self._prefix + path, start, min(BLOCK_BYTES, size - start))
                for start in range(0, max(1, size), BLOCK_BYTES)
            ]
            self._runs[path] = [
                DigestRun(block, self._algorithm, by_stretch.pop(block, None)) for block in blocks
            ]
        own: list[Run] = [run for runs in self._runs.values() for run in runs]
        return [*own, *by_stretch.values()]

    @property
    def whole(self) -> bool:
        return all(digest is not None for found in self.found.values() for digest in found)

    @property
    def found(self) -> Mapping[str, Sequence[str | None]]:
        """The digest of each block by file; None for a block that was not read whole."""
        read = {path: [run.digests for run in runs] for path, runs in self._runs.items()}
        return {
            path: [None if digests is None else digests.whole for digests in blocks]
            for path, blocks in read.items()
        }


@dataclass(slots=True)
class CrcRun:
    """Computes the `crc` of `n_bytes` bytes of a file; see `byte_pass.Run`."""

    path: str
    start: int
    n_bytes: int
    crc: int = 0

    def pieces(self, limit: int) -> Iterator[Piece]:
        return _in_order(self.start, self.n_bytes, limit)

    def take(self, piece: Piece, data: memoryview) -> None:  # noqa: ARG002 - in order
        self.crc = crc32(data, self.crc)
