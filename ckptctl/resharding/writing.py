"""Write many shard files with several threads, and share them among processes.

Each thread produces one file at a time, in order, so memory is what one thread needs
times the number of threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from ckptctl.data_classes import dataclass
from ckptctl.errors import UsageError
from ckptctl.records.byte_pass import OnProgress
from ckptctl.resharding.planning import TargetFile
from ckptctl.resharding.reading import Buffers
from ckptctl.storage.contract import Kind, Store
from ckptctl.storage.objects import PART_BYTES

DEFAULT_MEMORY = 256 << 20
"""The default memory limit of a reshard, in bytes."""

MIN_MEMORY = 96 << 20
"""The smallest memory limit, in bytes: the interpreter and the plan take up half of it."""

_OWN_BYTES = 48 << 20
_MAX_JOBS = 8
_LARGEST_BLOCK = 2 << 20
_SMALLEST_BLOCK = 64 << 10
_PROGRESS_EVERY_S = 0.1
_PARTS_IN_FLIGHT = 5

_TIDY_S = 2.0
"""How long threads may take to remove incomplete files when the command ends."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many threads write, and what each may hold."""

    jobs: int
    buffers: Buffers


def budget(memory: int, jobs: int | None, source: Store, target: Store) -> Budget:
    """The threads and buffers that fit in `memory` bytes; raises `UsageError` if too little.

    An upload holds a few more parts.
    """
    if memory < MIN_MEMORY:
        raise UsageError(
            f"--memory is {memory:,} bytes; at least {MIN_MEMORY >> 20} MiB are needed",
            instead="--memory 256M",
        )
    waits = Kind.LOCAL not in (source.kind, target.kind) or source.kind is Kind.OBJECT
    usual = _MAX_JOBS if waits else min(_MAX_JOBS, os.cpu_count() or 1)
    upload = _PARTS_IN_FLIGHT * PART_BYTES if target.kind is Kind.OBJECT else 0
    free = memory - _OWN_BYTES
    n = max(1, min(jobs or usual, free // (upload + 8 * _SMALLEST_BLOCK)))
    each = free // n - upload
    block = _SMALLEST_BLOCK
    while block < _LARGEST_BLOCK and 8 * block <= each:
        block *= 2
    return Budget(n, Buffers(block, block, max(0, each - 2 * block) // 2))


def share_of(files: Sequence[TargetFile], rank: int, size: int) -> tuple[TargetFile, ...]:
    """The files that process `rank` of `size` writes: about as many bytes as the others."""
    if size == 1:
        return tuple(files)
    loads = [0] * size
    own = []
    for file in sorted(files, key=lambda each: -each.n_bytes):
        lightest = loads.index(min(loads))
        loads[lightest] += file.n_bytes
        if lightest == rank:
            own.append(file)
    return tuple(own)


class Cancelled(Exception):
    """Another thread failed, or the command was stopped; incomplete files are removed."""


class WriteProgress:
    """Counts the bytes that several threads have written, and stops these threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.n_bytes = 0

    def add(self, n_bytes: int) -> None:
        """Count more bytes; raises `Cancelled` once the threads are to stop."""
        if self._ended.is_set():
            raise Cancelled
        with self._lock:
            self.n_bytes += n_bytes

    def end(self) -> None:
        """Stop all threads."""
        self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether the threads are to stop."""
        return self._ended.is_set()


def in_threads(
    tasks: Sequence[Callable[[], None]],
    n_threads: int,
    progress: WriteProgress,
    total: int,
    on_progress: OnProgress | None,
) -> None:
    """Run all tasks; the first error stops the others at their next block, and is raised.

    `on_progress` is called in the caller's thread.
    """
    waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def work() -> None:
        try:
            while not progress.ended:
                waiting.get_nowait()()
        except Empty:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            ended.put(error)
            return
        ended.put(None)

    n_left = min(n_threads, len(tasks))
    # Daemons: Ctrl-C must not wait for a storage that does not answer.
    threads = [
        threading.Thread(target=work, name="ckptctl-write", daemon=True) for _ in range(n_left)
    ]
    for thread in threads:
        thread.start()
    next_s = time.monotonic()
    try:
        while n_left:
            try:
                error = ended.get(timeout=_PROGRESS_EVERY_S)
            except Empty:
                error, n_ended = None, 0
            else:
                n_ended = 1
            if error is not None:
                raise error
            n_left -= n_ended
            if on_progress is not None and time.monotonic() >= next_s:
                on_progress(progress.n_bytes, total)
                next_s = time.monotonic() + _PROGRESS_EVERY_S
    finally:
        progress.end()
        until_s = time.monotonic() + _TIDY_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
