"""Find and end the processes of a job, and no other process.

A launcher such as torchrun starts each worker in a session of its own, so the process group
of the command does not hold them. A process belongs to a job if its environment has the
job's marker, or if an ancestor of it belongs to the job. Orphans of a job become children of
its supervisor, which is a subreaper while it runs, so that a process that cleared its
environment is found, too.

A process is signalled through a pidfd that is opened before its pid and start time are compared
again: a pid that the kernel gave to another process meanwhile is not hit.

Source: pidfd_send_signal(2) and PR_SET_CHILD_SUBREAPER of prctl(2), Linux 5.3 on.
Without /proc only the process group of the command is ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

from ckptctl.distributed.process_table import (
    ENDED,
    Process,
    ProcessEntry,
    entry_of,
    environment_of,
    is_alive,
    machine,
    table,
)
from ckptctl.supervisor.slurm import without_signalled_steps

MARKER = "CKPTCTL_SUPERVISED"
"""The variable that marks the processes of a job; its value is `RUN@ROOT`."""

GRACE_S = 15.0
"""How long a job may take to end after SIGTERM. Source: `workers_stop_timeout` of NVRx."""

_KILLED_S = 60.0
"""How long processes are waited for after SIGKILL; one that waits in the kernel may stay."""
_POLL_S = 0.05
_ONE_CTRL_C_S = 0.5
"""Within this time a second SIGINT is the same Ctrl-C: `timeout` of coreutils sends two."""
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37


def marked(value: str) -> list[Process]:
    """The living processes of a job on this machine, by the value of its marker."""
    return [each.process for each in _of_job(table(), partial(_has_marker, value=value))]


class JobProcesses:
    """The processes of one attempt that this process has started.

    `bystanders` are the children that this process had before; they are never signalled.
    """

    def __init__(self, marker: str, leader: int, bystanders: Collection[int]) -> None:
        entry = entry_of(leader)
        self.leader = entry.process if entry else Process(leader, 0)
        self._marker = marker
        self._bystanders = frozenset(bystanders)

    def processes(self) -> list[Process]:
        """Every living process of the attempt, by one pass over the process table."""
        return [each.process for each in _of_job(table(), self._is_first)]

    def end(self, grace_s: float, hurries: Callable[[], bool]) -> list[Process]:
        """End every process; those that are still there after a minute, stuck in the kernel.

        With a grace they get SIGTERM first, and have that many seconds to end, or until
        somebody `hurries`.
        """
        if not machine():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.leader.pid, signal.SIGKILL)
        left = end_processes(self.processes, grace_s, hurries)
        for entry in filter(self._is_adopted, table().values()):
            if entry.state == "Z":  # nobody else collects it
                with suppress(ChildProcessError):
                    os.waitpid(entry.process.pid, os.WNOHANG)
        return left

    def _is_first(self, entry: ProcessEntry) -> bool:
        own = entry.process == self.leader or _has_marker(entry, self._marker)
        return own or self._is_adopted(entry)

    def _is_adopted(self, entry: ProcessEntry) -> bool:
        """Whether it is an orphan of the job: what this process starts is in its own session."""
        return (
            entry.parent == os.getpid()
            and entry.session != os.getsid(0)
            and entry.process.pid not in self._bystanders
            and entry.process != self.leader
        )


def children() -> set[int]:
    """The children of this process."""
    return {each.process.pid for each in table().values() if each.parent == os.getpid()}


def descendants(bystanders: Collection[int]) -> list[Process]:
    """The living processes below this one, without those that `bystanders` are or have started.

    Orphans are found, too, while this process adopts them.
    """

    def is_first(entry: ProcessEntry) -> bool:
        return entry.parent == os.getpid() and entry.process.pid not in bystanders

    return [each.process for each in _of_job(table(), is_first)]


def end_processes(
    find: Callable[[], Sequence[Process]],
    grace_s: float,
    hurries: Callable[[], bool] = lambda: False,
) -> list[Process]:
    """End what `find` finds, with SIGTERM and a grace, then SIGKILL; those that remained.

    The tasks of an srun get the signal in its place, which would kill them. `find` is called
    again until it finds none: a process that is being ended can still start others. The grace
    ends early once somebody `hurries`.
    """
    if grace_s > 0 and not hurries():
        signal_all(without_signalled_steps(find(), signal.SIGTERM), signal.SIGTERM)
        until_s = time.monotonic() + grace_s
        while find() and time.monotonic() < until_s and not hurries():
            time.sleep(_POLL_S)
    until_s = time.monotonic() + _KILLED_S
    while (left := list(find())) and time.monotonic() < until_s:
        signal_all(left, signal.SIGKILL)
        time.sleep(_POLL_S)
    return left


def signal_all(processes: Sequence[Process], number: signal.Signals) -> None:
    """Send a signal to those processes that are still the same."""
    for process in processes:
        with suppress(OSError):  # it has ended, or is another user's
            fd = os.pidfd_open(process.pid)
            try:
                if is_alive(process):
                    signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of all orphans below it, as far as the system can."""
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        yield
        return
    before = ctypes.c_int(0)
    prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


class CtrlC:
    """Shows whether a person presses Ctrl-C a second time."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_second(self, number: int) -> bool:
        """Take a signal that was received."""
        if number != signal.SIGINT:
            return False
        now_s = time.monotonic()
        self._first_s = now_s if self._first_s is None else self._first_s
        return now_s - self._first_s >= _ONE_CTRL_C_S


@contextmanager
def receiving(
    signals: Iterable[signal.Signals], receive: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Receive signals and adopt orphans; what was before is restored at the end."""
    before = {
        each: signal.signal(each, receive)
        for each in signals
        # A signal that was ignored at the start (`nohup`) stays ignored.
        if signal.getsignal(each) is not signal.SIG_IGN
    }
    try:
        with adopting_orphans():
            yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _of_job(
    table: Mapping[int, ProcessEntry], is_first: Callable[[ProcessEntry], bool]
) -> Iterator[ProcessEntry]:
    """The living processes that `is_first` holds for, and all below them; never this process."""
    belongs: dict[int, bool] = {0: False, 1: False, os.getpid(): False}

    def check(pid: int) -> bool:
        path: list[int] = []
        while pid not in belongs and pid in table and not is_first(table[pid]):
            belongs[pid] = False  # also ends a loop, which a changing table can show
            path.append(pid)
            pid = table[pid].parent
        found = belongs.get(pid, pid in table)
        belongs.update(dict.fromkeys([*path, pid], found))
        return found

    for pid, entry in table.items():
        if check(pid) and entry.state not in ENDED:
            yield entry


def _has_marker(entry: ProcessEntry, value: str) -> bool:
    return os.fsencode(f"{MARKER}={value}") in environment_of(entry.process.pid)
