"""Turn any exception into an unknown answer, where a promise is that nothing fails.

`ckptctl run` must restart a job whatever its logs hold, and a notification that cannot be made
must end nothing. The callers of such work call it through `guarded`, the one place of the package
that catches every exception, and report the answer as unknown, with its cause.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class Unknown:
    """An answer that could not be had: what failed, and why, in one line."""

    message: str


def guarded(
    what: str, work: Callable[[], T], *, raises: type[Exception] | tuple[type[Exception], ...] = ()
) -> T | Unknown:
    """The result of `work`; `Unknown` for any exception but those that end the process.

    `what` is the work in words, such as `reading job.log`. Exceptions of `raises` are the caller's
    to handle.
    """
    try:
        return work()
    except raises:
        raise
    except Exception as error:  # noqa: BLE001 - the place that stands between a fault and a job
        return Unknown(f"{what} failed: {described(error)}")


def described(error: BaseException) -> str:
    """The type of an exception, its message and its place, as `KeyError: 'a' (rows.py:12)`."""
    text = str(error).strip().partition("\n")[0]
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = os.path.basename(trace.tb_frame.f_code.co_filename)
        place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    about = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if len(about) > _MAX_TEXT:
        about = f"{about[:_MAX_TEXT]}…"
    return f"{about} ({place})" if place else about
