"""Evidence from the exit code of a job and from the state of its scheduler.

The same number has different meanings: torchrun turns every exit code into 1, SLURM writes
`code:signal`, Kubernetes and shells add 128 to a signal.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from ckptctl.errors import UsageError
from ckptctl.failures.matching import LogReader
from ckptctl.failures.results import Evidence, Role

SCHEDULERS = ("slurm", "kubernetes", "torchrun", "ft_launcher", "shell")

# failure, role, description, action, restart
_Meaning = tuple[str, Role, str, str, str]

_CODES: Mapping[int, _Meaning] = {
    2: ("job-config", Role.SUSPECT, "exit code 2: usually a wrong argument", "", ""),
    16: (
        "job-divergence",
        Role.SUSPECT,
        "exit code 16: Megatron requests a rerun on another device",
        "resume-elsewhere",
        "free",
    ),
    17: ("job-divergence", Role.SUSPECT, "exit code 17: Megatron's validation failed", "", "no"),
    53: ("infra-node", Role.SUSPECT, "exit code 53: SLURM could not start or write there", "", ""),
    75: ("infra-storage", Role.SUSPECT, "exit code 75: the storage did not answer", "", "yes"),
    93: ("job-code", Role.SUSPECT, "exit code 93: the supervisor stopped restarting", "", "no"),
    126: ("job-config", Role.ROOT, "exit code 126: the command cannot be executed", "", "no"),
    127: ("job-config", Role.ROOT, "exit code 127: the command was not found", "", "no"),
}
_SIGNALS: Mapping[int, _Meaning] = {
    signal.SIGHUP: ("user", Role.SUSPECT, "its terminal session was closed", "", ""),
    signal.SIGINT: ("user", Role.ROOT, "somebody pressed Ctrl-C", "", ""),
    signal.SIGQUIT: ("user", Role.SUSPECT, "somebody pressed Ctrl-\\", "", ""),
    signal.SIGILL: (
        "job-code",
        Role.SUSPECT,
        "an instruction that the processor does not support",
        "",
        "",
    ),
    signal.SIGTRAP: ("job-code", Role.SUSPECT, "a trap", "", ""),
    signal.SIGABRT: ("unknown", Role.CASCADE, "the process aborted after an error", "", ""),
    signal.SIGBUS: (
        "infra-storage",
        Role.SUSPECT,
        "usually a truncated memory-mapped file, or full shared memory",
        "",
        "",
    ),
    signal.SIGFPE: ("job-code", Role.SUSPECT, "an arithmetic error", "", ""),
    signal.SIGKILL: (
        "unknown",
        Role.SUSPECT,
        "killed; this alone does not show that memory ran out",
        "",
        "",
    ),
    signal.SIGUSR1: ("preemption", Role.SUSPECT, "nobody handled the scheduler's warning", "", ""),
    signal.SIGUSR2: ("preemption", Role.SUSPECT, "nobody handled the scheduler's warning", "", ""),
    signal.SIGSEGV: ("job-code", Role.SUSPECT, "an access to invalid memory", "", ""),
    signal.SIGTERM: ("preemption", Role.SUSPECT, "the process was asked to end", "", ""),
    signal.SIGXCPU: ("walltime", Role.ROOT, "its CPU time limit was reached", "", ""),
}
_OOM_BY_SLURM = 125
_FORM = re.compile(r"(-?\d{1,4})(?::(\d{1,3}))?")


def evidence_of_exit(exit_code: int | str, scheduler: str | None) -> Evidence | None:
    """The evidence from an exit code; None for 0 and 1, which show nothing.

    Raises `UsageError` for anything but `137`, `-9`, or SLURM's `0:9`.
    """
    form = _FORM.fullmatch(str(exit_code).strip())
    if form is None:
        raise UsageError(
            f"an exit code is a number like 137, -9 or 0:9, not {exit_code!r}",
            instead="--exit-code 137",
        )
    code, number = int(form[1]), int(form[2] or 0)
    if number == 0 and code < 0:
        code, number = 0, -code
    elif number == 0 and 128 < code < 128 + signal.NSIG:
        number = code - 128
    if number:
        return _of_signal(str(exit_code), number, scheduler)
    if code == 1 and scheduler in ("torchrun", "ft_launcher"):
        return None
    meaning = _CODES.get(code)
    return None if meaning is None else _evidence(str(exit_code), meaning, f"exit.{code}")


def _of_signal(given: str, number: int, scheduler: str | None) -> Evidence | None:
    if number == _OOM_BY_SLURM and scheduler in (None, "slurm"):
        meaning = ("job-oom", Role.CAUSE, "SLURM: out of memory", "", "")
        return _evidence(given, meaning, "exit.oom")
    known = _SIGNALS.get(number)
    if known is None:
        return None
    failure, role, says, action, restart = known
    name = signal.Signals(number).name
    return _evidence(given, (failure, role, f"{name}: {says}", action, restart), f"exit.{name}")


def _evidence(given: str, meaning: _Meaning, rule: str) -> Evidence:
    failure, role, says, action, restart = meaning
    return Evidence(
        rule=rule,
        failure=failure,
        role=role,
        says=says,
        file="--exit-code",
        line=0,
        text=given,
        action=action,
        restart=restart,
    )


def evidence_of_state(state: str) -> Evidence | None:
    """The evidence from a SLURM state (`OUT_OF_MEMORY`) or a Kubernetes reason."""
    reader = LogReader("--state")
    for form in (f"State={state}", f"Reason: {state}"):
        for found in reader.take([(0, form)]):
            return found
    return None
