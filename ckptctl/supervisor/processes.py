"""Start an attempt of a job, forward signals, watch it, and end its processes and no other one.

The command runs in its own session. Signals are forwarded only to the command, which
handles its own processes and decides how long that takes; a second Ctrl-C kills all of them.
When it has ended, what is left of the job is killed: a process of the old attempt must not
write beside the new one.

A launcher such as torchrun starts each worker in a session of its own, so the process group
of the command does not hold them. A process belongs to a job if its environment has the
job's marker, or if an ancestor of it belongs to the job. Orphans of a job become children of
its supervisor, which is a subreaper while it runs, so that a process that cleared its
environment is found, too. A process is signalled through a pidfd that is opened before its pid and
start time are compared again: a pid that the kernel gave to another process meanwhile is not hit.

Source: pidfd_send_signal(2) and PR_SET_CHILD_SUBREAPER of prctl(2), Linux 5.3 on.
Without /proc only the process group of the command is ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import NamedTuple

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
from ckptctl.errors import UsageError
from ckptctl.formatting import counted, some_of
from ckptctl.supervisor.slurm import signal_step, without_signalled_steps

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

        def is_first(entry: ProcessEntry) -> bool:
            own = entry.process == self.leader or _has_marker(entry, self._marker)
            return own or self._is_adopted(entry)

        return [found.process for found in _of_job(table(), is_first)]

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


@dataclass(frozen=True, slots=True)
class Running:
    """An attempt that is running, and its processes on this node."""

    leader: Process
    """The command itself; its workers are among `processes`."""
    processes: Callable[[], Sequence[Process]]
    """Every living process of the job on this node, by one pass over the process table."""
    marker: str = ""
    """What marks its processes, on all nodes."""


class JobLog(NamedTuple):
    """A log of the job; `fd` is the file where this process created it, whatever its path names."""

    path: str
    fd: int | None = None

    def size(self) -> int:
        """Its bytes; 0 before it is there."""
        with suppress(OSError):
            return os.stat(self.path if self.fd is None else self.fd).st_size
        return 0


@dataclass(frozen=True, slots=True)
class Hang:
    """An attempt that must be ended because it does not come further."""

    message: str
    """What did not come for how long, and which rank is at fault, in one line."""
    section: str | None = None
    """`setup`, `step`, `checkpoint` or another section; None outside of sections."""
    ranks: tuple[int, ...] = ()
    """The ranks at fault; none where the evidence does not decide."""
    nodes: tuple[str, ...] = ()
    """The nodes of these ranks."""
    hardware: tuple[str, ...] = ()
    """Those of them whose hardware the evidence speaks against, not the program."""
    evidence: tuple[str, ...] = ()
    """Paths of the files that were collected: stacks, dumps of the flight recorder."""


class Watcher:
    """Watches one attempt after the other; called in the main thread only."""

    def prepare(self, _attempt: int, _logs: Sequence[JobLog]) -> Mapping[str, str]:
        """Forget all that is in progress, and return variables for the environment of the job.

        Called before each attempt (numbered from 1 over all invocations of `run`), when no
        process of an earlier one is left. The logs are the files that it writes to.
        """
        return {}

    def poll(self, _running: Running, _now_s: float) -> Hang | None:
        """Return why the attempt must be ended, or None, by the time of the monotonic clock.

        Must return within a few seconds, except when it collects evidence of a hang.
        Exceptions end the job.
        """
        return None

    def finish(self) -> None:
        """Keep what the attempt taught; called when all its processes have ended."""


PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ENDS_THE_JOB = frozenset(PASSED_ON) - {signal.SIGUSR2}
_PAUSE_S = 0.05
_ASK_S = 1.0
"""How often the watchers are asked."""


class Signals:
    """Receives signals, forwards them to the job, and keeps the one that ends it.

    `tell` gets what was sent to the job, and what follows.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.asked: signal.Signals | None = None
        self._tell = tell
        self._runs = self._kills = False
        self._child: subprocess.Popen[bytes] | None = None
        self._ctrl_c = CtrlC()

    def _receive(self, number: int, _frame: object) -> None:
        if not self._ctrl_c.is_second(number):
            self._forward(number)
            return
        self._kills = True
        if not self._runs:
            raise KeyboardInterrupt

    def _forward(self, number: int) -> None:
        if number in _ENDS_THE_JOB and self.asked is None:
            self.asked = signal.Signals(number)
        if self._child is not None and not signal_step(self._child.pid, number):
            with suppress(ProcessLookupError):
                self._child.send_signal(number)

    def listening(self) -> AbstractContextManager[None]:
        """Receive signals and adopt orphans; what was before is restored at the end."""
        return receiving(PASSED_ON, self._receive)

    def run(
        self,
        command: Sequence[str],
        output: tuple[int | None, int | None],
        variables: Mapping[str, str],
        on_start: Callable[[], None],
        poll: Callable[[Running], Hang | None],
    ) -> tuple[int, Hang | None]:
        """Run the command to its end; its exit code, 128 + N if signal N ended it.

        `output` are the descriptors for its output and errors; None are those of this process.
        `variables` are added to its environment; they hold the job's marker. `on_start` is called
        when it has started, `poll` about once a second; the job is ended if it returns why, or
        raises. Raises `UsageError` if the command cannot be started.
        """
        bystanders = children()
        self._runs = True
        try:
            child = subprocess.Popen(
                list(command),
                stdout=output[0],
                stderr=output[1],
                env={**os.environ, **variables},
                start_new_session=True,
            )
        except OSError as error:
            self._runs = False
            raise UsageError(f"{command[0]}: {error.strerror}; it was not started") from error
        self._child = child
        if self.asked is not None:
            # The signal arrived before there was a process to forward it to.
            self._forward(self.asked)
        job = JobProcesses(variables[MARKER], child.pid, bystanders)
        running = Running(job.leader, job.processes, variables[MARKER])
        stop = None
        try:
            on_start()
            reported = False
            while stop is None and not self._kills:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_ASK_S)
                    break
                if self._kills:
                    break
                if self.asked is not None and not reported:
                    reported = True
                    again = "Ctrl-C again" if self.asked == signal.SIGINT else "Ctrl-C twice"
                    self._tell(
                        f"passed {self.asked.name} on to the command, and waits without a limit "
                        f"until it ends; {again} kills it with all its processes"
                    )
                stop = poll(running)
        finally:
            self._end(job, runs=child.poll() is None)
            self._child = None
            self._runs = False
        code = child.wait()
        return 128 - code if code < 0 else code, stop

    def _end(self, job: JobProcesses, *, runs: bool) -> None:
        """End what is left of a job: with a grace where its command `runs`, but after Ctrl-C."""
        if self._kills:
            self._tell("Ctrl-C a second time: the job and all its processes get SIGKILL")
        elif runs:
            self._tell(f"the job gets SIGTERM, and what is left after {GRACE_S:.0f} s SIGKILL")
        left = job.end(GRACE_S if runs else 0.0, hurries=lambda: self._kills)
        if left:
            pids = some_of([process.pid for process in left])
            self._tell(
                f"warning: {counted(len(left), 'process', 'processes')} of the job did not end "
                f"after SIGKILL, stuck in the kernel: {pids}"
            )

    def pause(self, seconds: float) -> None:
        """Wait; a signal that asks the job to end also ends the wait."""
        until_s = time.monotonic() + seconds
        while self.asked is None and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _PAUSE_S))
