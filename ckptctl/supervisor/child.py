"""Start one attempt of a job, forward signals, and wait for all its processes.

The command runs in a session of its own. Signals are passed on to the command only, which
handles its own processes. When it has ended, what is left of its process group is killed: a
process of the old attempt must not write beside the new one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ckptctl.errors import UsageError

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ENDS_THE_JOB = frozenset(PASSED_ON) - {signal.SIGUSR2}
_POLL_S = 0.05


class Signals:
    """Receives signals, passes them on to the job, and keeps the one that asks to end."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def _receive(self, number: int, _frame: object) -> None:
        if number in _ENDS_THE_JOB and self.asked is None:
            self.asked = signal.Signals(number)
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(number)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive signals; the earlier handlers are restored at the end."""
        before: dict[signal.Signals, Any] = {
            each: signal.signal(each, self._receive)
            for each in PASSED_ON
            # A signal that was ignored at the start (`nohup`) stays ignored.
            if signal.getsignal(each) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def run(self, command: Sequence[str], stdout: int | None, variables: Mapping[str, str]) -> int:
        """Run the command to its end; its exit code, 128 + N where signal N ended it.

        `variables` are added to its environment. Raises `UsageError` where it cannot be
        started.
        """
        try:
            self._child = subprocess.Popen(
                list(command),
                stdout=stdout,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"{command[0]}: {error.strerror}; it was not started") from error
        if self.asked is not None:
            # It came before the start, when there was no process to pass it on to.
            self._child.send_signal(self.asked)
        try:
            code = self._child.wait()
        finally:
            _kill_session(self._child.pid)
            self._child = None
        return 128 - code if code < 0 else code

    def pause(self, seconds: float) -> None:
        """Wait; a signal that asks the job to end ends the waiting too."""
        until_s = time.monotonic() + seconds
        while self.asked is None and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))


def _kill_session(leader: int) -> None:
    """Kill what the command left in its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
