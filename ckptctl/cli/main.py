"""How does the process begin and end?

Signals, standard streams and the exit code; the commands are `app`'s business,
which is imported when Ctrl-C is already taken care of.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

_STORAGE_GONE = 75


class Stopped(BaseException):
    """A signal asks us to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def main() -> NoReturn:
    """Run what the command line says, and leave with its exit code."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            # A job that was started with a signal ignored wants it ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _stop)
        from ckptctl.cli.app import run

        exit_code = run(sys.argv[1:])
    except Stopped as stopped:
        exit_code = stopped.exit_code
    _let_go_of_output()
    if exit_code in (_STORAGE_GONE, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        # A thread may still hang in a storage, and the interpreter would wait for it.
        os._exit(exit_code)
    sys.exit(exit_code)


def _stop(number: int, _frame: object) -> NoReturn:
    raise Stopped(number)


def _let_go_of_output() -> None:
    """Keep the interpreter from trying once more to write what could not be written."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
