"""End a command on a signal after it has printed its partial result.

While bytes are compared, the first Ctrl-C ends the comparing, and what was proven
is told; the next one ends the process, as both do at any other time. What ends a
process is the question of `main`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ckptctl.records.byte_pass import Stop


class Ended(Stop):
    """A pass that signals end; `exit_code` is 128 + the signal's number once one came."""

    exit_code = 0


@contextmanager
def ended_by_signals() -> Iterator[Ended]:
    """Have a signal that asks us to end do so to a pass first, and to the process if none runs."""
    ended = Ended()
    before: dict[signal.Signals, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        if ended.listening and not ended.asked:
            ended.exit_code = 128 + number
            ended.ask()
        else:
            before[signal.Signals(number)](number, frame)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(each)):
            before[each] = signal.signal(each, end)
    try:
        yield ended
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
