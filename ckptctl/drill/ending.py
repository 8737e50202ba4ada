"""End everything that a drill has started, also after a signal.

`ckptctl run`, RB-7, the launcher and its ranks are in sessions of their own. While a drill
runs, this process adopts orphans, so that all of them remain below it and are found there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from ckptctl.supervisor.processes import (
    GRACE_S,
    Process,
    children,
    descendants,
    end_processes,
    receiving,
    signal_all,
)

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Interrupted(BaseException):
    """A signal asks to end; no handler of errors may catch it."""


class Ending:
    """What this process has started since, and the signal that asked it to end, if one did."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._bystanders = children()
        self._interrupts = False

    def listening(self) -> AbstractContextManager[None]:
        """Receive signals and adopt orphans; what was before is restored at the end."""
        return receiving(_ENDS, self._receive)

    def _receive(self, number: int, _frame: object) -> None:
        self.asked = self.asked or signal.Signals(number)
        if self._interrupts:
            # A second signal must not interrupt what ends the processes.
            self._interrupts = False
            raise _Interrupted

    def call(self, work: Callable[[], None]) -> None:
        """Call a function that a signal interrupts; `asked` holds the signal afterwards."""
        try:
            try:
                self._interrupts = True
                if self.asked is None:
                    work()
            finally:
                self._interrupts = False
        except _Interrupted:
            pass

    def end(self) -> None:
        """End every process that was started, and wait for it."""
        signal_all(self._started(), signal.SIGCONT)  # a stopped process ignores SIGTERM
        end_processes(self._started, GRACE_S)
        for pid in children() - self._bystanders:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _started(self) -> list[Process]:
        return descendants(self._bystanders)
