"""Start one attempt of a job, forward signals, and wait for all its processes.

The command runs in a session of its own. Signals that we get are passed on to it, and
to it alone: what it does with its processes is its business. When it has ended, whatever
is left of its session is killed: an orphan of the old life must not write beside the new.
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
_LOOK_AGAIN_S = 0.05


class Signals:
    """The signals that came: which one asks the job to end, and whom to pass them on to."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def _came(self, number: int, _frame: object) -> None:
        if number in _ENDS_THE_JOB and self.asked is None:
            self.asked = signal.Signals(number)
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(number)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the signals; handlers are given back at the end."""
        before: dict[signal.Signals, Any] = {
            each: signal.signal(each, self._came)
            for each in PASSED_ON
            # A job that was started with a signal ignored wants it ignored.
            if signal.getsignal(each) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def run(self, command: Sequence[str], stdout: int | None, variables: Mapping[str, str]) -> int:
        """Run the command to its end; its exit code, 128 + N where signal N ended it.

        `variables` are added to our environment for it. Raises `UsageError` where it cannot
        be started.
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
            # It came between the last look and the start: nobody has passed it on.
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
            time.sleep(min(left_s, _LOOK_AGAIN_S))


def _kill_session(leader: int) -> None:
    """End what the command has left behind in its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
