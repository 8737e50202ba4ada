"""The time between the signal to stop and the kill.

SLURM (`--signal`, `KillWait`, 30 s) and Kubernetes (`terminationGracePeriodSeconds`,
30 s) do not tell a job how long they wait. torchrun does: it passes a signal on to its
processes and kills them 30 s later, whatever the scheduler would have granted. And the
time limit of a SLURM job is in its environment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ckptctl.distributed.launcher import cluster_context
from ckptctl.errors import UsageError

UNTOLD_DEADLINE_S = 600.0
"""Where nobody says when the kill comes: long enough for a save, short enough for a hang."""

_TORCHRUN_NOTICE_S = 30.0  # torch 2.13, distributed/run.py: --shutdown-timeout
_SHARE = 0.9  # of the notice: a forced exit after the kill would never come


@dataclass(frozen=True, slots=True)
class Notice:
    """`seconds` from the signal to the kill, and `source`: who says so."""

    seconds: float
    source: str
    next_command: str | None = None


def notice_in(environment: Mapping[str, str], notice_s: float | None = None) -> Notice | None:
    """The notice that the caller gives, or the one that torchrun gives; None where none is known.

    Raises `UsageError` for a notice that is not above 0.
    """
    if notice_s is not None:
        if not notice_s > 0:
            raise UsageError(f"notice_s is {notice_s}; it must be above 0")
        return Notice(notice_s, "notice_s")
    if cluster_context(environment).launcher != "torchrun":
        return None
    told = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    seconds = float(told) if told.isascii() and told.isdecimal() else _TORCHRUN_NOTICE_S
    return Notice(
        seconds,
        "torchrun's --shutdown-timeout",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 torchrun --shutdown-timeout 120 ...",
    )


def checked_deadline(deadline_s: float | None, notice: Notice | None) -> float:
    """The deadline in seconds after the signal; nine tenths of the notice where none is given.

    Raises `UsageError` for one that the kill would come before: it would never act.
    """
    if deadline_s is None:
        return UNTOLD_DEADLINE_S if notice is None else notice.seconds * _SHARE
    if not deadline_s > 0:
        raise UsageError(f"deadline_s is {deadline_s}; it must be above 0")
    if notice is not None and deadline_s >= notice.seconds and not math.isinf(deadline_s):
        raise UsageError(
            f"deadline_s is {deadline_s:g} s, and the kill comes {notice.seconds:g} s after the "
            f"signal ({notice.source}): the forced exit would never act, and what hangs "
            "would be killed without a word",
            next_command=notice.next_command,
        )
    return deadline_s
