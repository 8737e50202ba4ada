"""Start one attempt of a job, forward signals, watch it, and end all its processes.

The command runs in its own session. Signals are forwarded only to the command, which
handles its own processes and decides how long that takes; a second Ctrl-C kills all of them.
When it has ended, what is left of the job is killed: a process of the old attempt must not
write beside the new one.

Each watcher is polled about once a second. A watcher that reports a hang has collected its
evidence by then: the processes of the job are ended next.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from ckptctl.distributed.process_table import Process
from ckptctl.errors import UsageError
from ckptctl.formatting import counted, some_of
from ckptctl.supervisor.processes import GRACE_S, MARKER, CtrlC, JobProcesses, children, receiving
from ckptctl.supervisor.slurm import signal_step


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
_POLL_S = 1.0
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
            while _code_of(child) is None and stop is None and not self._kills:
                if self.asked is not None and not reported:
                    reported = True
                    self._tell(_passed_on(self.asked))
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
            pids = some_of([each.pid for each in left])
            self._tell(
                f"warning: {counted(len(left), 'process', 'processes')} of the job did not end "
                f"after SIGKILL, stuck in the kernel: {pids}"
            )

    def pause(self, seconds: float) -> None:
        """Wait; a signal that asks the job to end also ends the wait."""
        until_s = time.monotonic() + seconds
        while self.asked is None and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _PAUSE_S))


def _passed_on(number: signal.Signals) -> str:
    """What was done with a signal, and what follows."""
    again = "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C twice"
    return (
        f"passed {number.name} on to the command, and waits without a limit until it ends; "
        f"{again} kills it with all its processes"
    )


def _code_of(child: subprocess.Popen[bytes]) -> int | None:
    """The exit code of the command once it has ended within a second, else None."""
    with suppress(subprocess.TimeoutExpired):
        return child.wait(_POLL_S)
    return None
