"""Tell the tasks of a Slurm step that they end: srun itself would kill them.

srun answers SIGTERM by killing all its tasks at once, so that nothing is saved. `scancel --signal`
sends a signal to the tasks, on all nodes.

Source: measured with Slurm 22.05: `scontrol show step` names the host and pid of each srun.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ckptctl.distributed.process_table import Process, entry_of, environment_of

_KILLS_TASKS = (signal.SIGTERM, signal.SIGINT)
"""srun passes other signals on; the first SIGINT it answers with a report alone."""
_ASK_S = 10.0
"""How long the controller of Slurm is waited for."""


def signal_step(pid: int, number: int) -> bool:
    """Send the tasks of an srun a signal that would make it kill them; whether that was done.

    False for any other process and signal, and where the controller does not answer or knows no
    step of this srun. Cost: none but for an srun; else two calls of Slurm's commands.
    """
    return bool(number in _KILLS_TASKS and _signal([pid], number))


def without_signalled_steps(processes: Sequence[Process], number: int) -> list[Process]:
    """The processes that are still to be signalled, once the tasks of each srun were told.

    An srun that was not told (see `signal_step`) is among them. Its tasks on this node are not,
    nor its second process, which ends with it.
    """
    steps = _signal((one.pid for one in processes), number)
    ids = {os.fsencode(f"SLURM_STEP_ID={step.rpartition('.')[2]}") for step in steps.values()}
    return [
        one
        for one in processes
        if not (one.pid in steps or _parent(one.pid) in steps)
        and ids.isdisjoint(environment_of(one.pid))
    ]


def _signal(pids: Iterable[int], number: int) -> dict[int, str]:
    """Signal the tasks of those processes that are an srun of this job; their steps, by pid."""
    sruns = {pid for pid in pids if _name(pid) == "srun"}
    job = os.environ.get("SLURM_JOB_ID")
    steps = {pid: step for step, pid in _steps(job) if pid in sruns} if sruns and job else {}
    name = signal.Signals(number).name.removeprefix("SIG")
    done = steps and _slurm("scancel", f"--signal={name}", *steps.values()) is not None
    return steps if done else {}


def _parent(pid: int) -> int:
    entry = entry_of(pid)
    return entry.parent if entry else 0


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _steps(job: str) -> Iterable[tuple[str, int]]:
    """The steps of a job, with the pid of the srun of each."""
    shown = _slurm("scontrol", "show", "step", job, "-o") or ""
    for line in shown.splitlines():
        step = re.search(r"\bStepId=(\S+)", line)
        pid = re.search(r"\bSrunHost:Pid=\S*?:([0-9]{1,10})\b", line)
        if step and pid:
            yield step[1], int(pid[1])


def _slurm(*command: str) -> str | None:
    """What a command of Slurm prints; None where it fails or does not answer."""
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
        return asked.stdout
    return None
