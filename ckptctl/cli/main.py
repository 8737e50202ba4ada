"""Start and end the process.

Signals, standard streams and the exit code; the commands are `app`'s business, which is imported
when Ctrl-C is already taken care of. Before that Python itself reports a Ctrl-C, with a traceback:
so this module imports little, and not `typing`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

TYPE_CHECKING = False  # as in `ckptctl`
if TYPE_CHECKING:
    from typing import NoReturn

_FEW_COLLECTIONS = 200_000
_NOTHING_KNOWN = 75
_NO_MEMORY = (
    b"error: there is not enough memory; nothing is known, good or bad\n"
    b"next: ckptctl explain step.no-memory\n"
)


class Stopped(BaseException):
    """A signal asks us to stop; a command that can be continued states how in `next_command`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number
        self.next_command: str | None = None


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_signals() -> None:
    """From here on no signal ends the process before it has reported what it did.

    Handlers that are not ours stay: a program may call commands in its own process.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_IGN)


def main() -> NoReturn:
    """Run the command line, and exit with its code."""
    # A start makes many objects and no garbage; looking for it costs 8 %.
    gc.set_threshold(_FEW_COLLECTIONS)
    try:
        for number in _SIGNALS:
            # A signal that was ignored when the job started stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _stop)
        from ckptctl.cli.app import run

        exit_code = run(sys.argv[1:])
    except Stopped as stopped:
        exit_code = stopped.exit_code
    except (MemoryError, SystemError):
        # Too little memory even for the usual message; CPython raises `SystemError` where it
        # loses the exception of a failed allocation. These two calls allocate nothing.
        os.write(2, _NO_MEMORY)
        os._exit(_NOTHING_KNOWN)
    _flush()
    # Everything is printed. Taking the interpreter apart takes as long as starting it, and
    # would wait for a thread that hangs in a storage.
    os._exit(exit_code)


def _stop(number: int, _frame: object) -> NoReturn:
    raise Stopped(number)


def _flush() -> None:
    """Flush what is left; where that fails, `run` has already reported it."""
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - `suppress` allocates
            stream.flush()
        except (OSError, AttributeError, MemoryError):
            pass
