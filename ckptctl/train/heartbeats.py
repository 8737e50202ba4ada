"""Write the heartbeat of this rank for the `ckptctl run` that started the job.

Without `ckptctl run` nothing is written, and no signal handler is set. The file is on the node
itself. Its folder must be this user's, and the key of the attempt in the environment, or nothing
is written. No failure to write reaches the training.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from ckptctl.distributed.launcher import cluster_context
from ckptctl.distributed.process_table import Process, is_alive, own_process, signals_of
from ckptctl.errors import OwnFileUnreadable, StorageError, UsageError
from ckptctl.formats.own.heartbeats import (
    FOLDER_VARIABLE,
    KEY_VARIABLE,
    MAX_BYTES,
    REPORTED,
    Reported,
    file_name,
    first_heartbeat,
    heartbeat_bytes,
    read_heartbeat,
    stacks_name,
)
from ckptctl.storage.shared_places import HeldFolder, open_private_folder

EVERY_S = 1.0
"""How often an unchanged section is written at most, in seconds."""

_FIRST_FREE, _LAST_FREE = 35, 64
"""Real-time signals; glibc uses 32 and 33, and 34 is `SIGRTMIN`, which programs take first.

One is free that nothing in this process handles, ignores or blocks.
"""


def heartbeat(section: Reported | None = None, *, step: int | None = None) -> None:
    """Report that this rank makes progress, and which section of the job it is in.

    `ckptctl run` ends a job whose rank does not report within the limit of its section. Without
    `section` the rank stays in the one that it is in, `outside` at first. `Checkpointer` reports
    setup, steps and saves by itself; an evaluation is best begun with
    `heartbeat("evaluation")`. Costs a microsecond, and a write of a small file on this node at
    most once a second. Does nothing in a job that `ckptctl run` did not start.

    Raises `UsageError` for a section that does not exist.
    """
    if section is not None and section not in REPORTED:
        raise UsageError(f"section is {section!r}; the sections are {', '.join(REPORTED)}")
    writer = _writer()
    if writer is not None:
        writer.beat(section, step)


@contextmanager
def inside(section: Reported) -> Iterator[None]:
    """Report a section, and at its end the one before it."""
    writer = _writer()
    before: Reported = "outside" if writer is None else writer.section
    heartbeat(section)
    try:
        yield
    finally:
        heartbeat(before)


def report_saving(step: int | None) -> None:
    """Report that an asynchronous save of a step began; None when it has ended."""
    writer = _writer()
    if writer is not None:
        writer.save(step)


_LOCK = threading.Lock()
_writers: dict[int, _HeartbeatWriter | None] = {}
"""The writer by process id: a forked process does not report for its parent."""


def _writer() -> _HeartbeatWriter | None:
    pid = os.getpid()
    if pid not in _writers:
        with _LOCK:
            if pid not in _writers:
                # A process that was forked from a rank is no rank.
                _writers[pid] = None if _writers else _opened()
    return _writers[pid]


def _opened() -> _HeartbeatWriter | None:
    path, key = os.environ.get(FOLDER_VARIABLE, ""), os.environ.get(KEY_VARIABLE, "")
    if not path or not key:
        return None
    try:
        folder = _opened_folder(path)
    except (OSError, StorageError):
        return None
    rank, size = cluster_context().rank or 0, None
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, size = int(distributed.get_rank()), int(distributed.get_world_size())
    writer = _HeartbeatWriter(folder, key, rank, size)
    # A program that a rank starts inherits its environment, and must not report for it.
    if not writer.is_taken():
        return writer
    folder.close()
    return None


def _opened_folder(path: str) -> HeldFolder:
    """The folder of `run`; on another node of its SLURM job one of the same name."""
    try:
        return open_private_folder(path)
    except FileNotFoundError:
        if cluster_context().scheduler != "slurm":
            raise
    from ckptctl.supervisor.heartbeats import folder_on_other_node  # on other nodes alone

    return folder_on_other_node(path)


class _HeartbeatWriter:
    def __init__(self, folder: HeldFolder, key: str, rank: int, size: int | None) -> None:
        self._folder = folder
        self._key = key
        self._name = file_name(rank)
        self._stacks_name = stacks_name(rank)
        self._lock = threading.Lock()
        self._written_s = float("-inf")
        self._stacks: BinaryIO | None = None
        self._beat = first_heartbeat(rank, own_process(), cluster_context())
        if size is not None:
            self._beat["world_size"] = size

    def is_taken(self) -> bool:
        try:
            beat = read_heartbeat(self._folder.read(self._name, MAX_BYTES + 1), self._key)
        except (OSError, StorageError, OwnFileUnreadable):
            return False
        return beat["pid"] != os.getpid() and is_alive(Process(beat["pid"], beat["started"]))

    @property
    def section(self) -> Reported:
        return self._beat["section"]

    def beat(self, section: Reported | None, step: int | None) -> None:
        """Count one report; write it if the section is another or a second has passed."""
        with self._lock:
            beat = self._beat
            beat["count"] += 1
            if step is not None:
                beat["step"] = step
            is_new = section is not None and section != beat["section"]
            if section is not None:
                beat["section"] = section
            if is_new or time.monotonic() - self._written_s >= EVERY_S:
                self._write()

    def save(self, step: int | None) -> None:
        with self._lock:
            self._beat["saving"] = step
            self._beat["count"] += 1
            self._write()

    def _write(self) -> None:
        self._written_s = time.monotonic()
        # A full or removed folder must not end a training job.
        with suppress(OSError, StorageError):
            self._keep_folder()
            self._keep_handler()
            self._folder.write(self._name, heartbeat_bytes(self._beat, self._key))

    def _keep_folder(self) -> None:
        """Open the folder again where `ckptctl run` had to make it again.

        Raises `PathUntrusted` where another user did, and `OSError` while it is missing.
        """
        if self._folder.is_there():
            return
        folder = open_private_folder(self._folder.path)
        self._folder.close()
        self._folder = folder
        if self._stacks is not None and self._beat["stack_signal"] is not None:
            before, self._stacks = self._stacks, self._opened_stacks()
            self._register(self._beat["stack_signal"])
            before.close()

    def _keep_handler(self) -> None:
        """Set the handler that writes stacks once; withdraw it if the job uses its signal."""
        number = self._beat["stack_signal"]
        if self._stacks is None:
            used = signals_of(os.getpid(), "SigBlk", "SigIgn", "SigCgt")
            free = range(_LAST_FREE, _FIRST_FREE - 1, -1)
            number = next((n for n in free if not used >> (n - 1) & 1), None)
            if number is not None:
                self._stacks = self._opened_stacks()
                self._register(number)
                self._beat["stack_signal"] = number
        elif number is not None and signal.getsignal(number) is not signal.SIG_DFL:
            # The job has set a handler of its own since. It stays, and is never called by us.
            self._beat["stack_signal"] = None

    def _opened_stacks(self) -> BinaryIO:
        """The file to which the handler writes for as long as the process lives."""
        return os.fdopen(self._folder.append(self._stacks_name, 0o600), "ab", buffering=0)

    def _register(self, number: int) -> None:
        if self._stacks is not None:
            # Not chained: system calls that it interrupts are restarted then.
            faulthandler.register(number, self._stacks, all_threads=True, chain=False)
