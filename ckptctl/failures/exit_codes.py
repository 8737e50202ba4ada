"""Evidence from the exit code of a job and from the state of its scheduler.

The same number means different things from different reporters: torchrun makes 1 of
everything, SLURM writes `code:signal`, Kubernetes and shells add 128 to a signal.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from ckptctl.errors import UsageError
from ckptctl.failures.evidence import Evidence, Role
from ckptctl.failures.matching import LogReader

SCHEDULERS = ("slurm", "kubernetes", "torchrun", "ft_launcher", "shell")

# failure, role, what it says, action, restart
_Meaning = tuple[str, Role, str, str, str]

_CODES: Mapping[int, _Meaning] = {
    2: ("job-config", Role.SUSPECT, "exit code 2: mostly a wrong argument", "", ""),
    16: (
        "job-divergence",
        Role.SUSPECT,
        "exit code 16: Megatron asks for a run elsewhere to tell a bad device from a bad result",
        "resume-elsewhere",
        "free",
    ),
    17: ("job-divergence", Role.SUSPECT, "exit code 17: Megatron's validation failed", "", "no"),
    53: ("infra-node", Role.SUSPECT, "exit code 53: SLURM could not start or write there", "", ""),
    75: ("infra-storage", Role.SUSPECT, "exit code 75: the storage did not answer", "", "yes"),
    93: ("job-code", Role.SUSPECT, "exit code 93: the supervisor says not to restart", "", "no"),
    126: ("job-config", Role.ROOT, "exit code 126: the command cannot be executed", "", "no"),
    127: ("job-config", Role.ROOT, "exit code 127: the command was not found", "", "no"),
}
_SIGNALS: Mapping[int, _Meaning] = {
    signal.SIGHUP: ("user", Role.SUSPECT, "the session that it ran in was closed", "", ""),
    signal.SIGINT: ("user", Role.ROOT, "somebody pressed Ctrl-C", "", ""),
    signal.SIGQUIT: ("user", Role.SUSPECT, "somebody pressed Ctrl-\\", "", ""),
    signal.SIGILL: ("job-code", Role.SUSPECT, "an instruction that the processor lacks", "", ""),
    signal.SIGTRAP: ("job-code", Role.SUSPECT, "a trap", "", ""),
    signal.SIGABRT: ("unknown", Role.CASCADE, "it ended itself after an error", "", ""),
    signal.SIGBUS: (
        "infra-storage",
        Role.SUSPECT,
        "mostly a mapped file that was cut off, or full shared memory",
        "",
        "",
    ),
    signal.SIGFPE: ("job-code", Role.SUSPECT, "an arithmetic fault", "", ""),
    signal.SIGKILL: ("unknown", Role.SUSPECT, "killed; that alone is not out of memory", "", ""),
    signal.SIGUSR1: ("preemption", Role.SUSPECT, "nobody handled the scheduler's warning", "", ""),
    signal.SIGUSR2: ("preemption", Role.SUSPECT, "nobody handled the scheduler's warning", "", ""),
    signal.SIGSEGV: ("job-code", Role.SUSPECT, "an access to memory that is not its own", "", ""),
    signal.SIGTERM: ("preemption", Role.SUSPECT, "it was told to stop", "", ""),
    signal.SIGXCPU: ("walltime", Role.ROOT, "its time was over", "", ""),
}
_OOM_BY_SLURM = 125
_FORM = re.compile(r"(-?\d{1,4})(?::(\d{1,3}))?")


def evidence_of_exit(exit_code: int | str, scheduler: str | None) -> Evidence | None:
    """What an exit code is evidence of; None where it says nothing (0, or 1).

    Raises `UsageError` for what is no exit code: those are `137`, `-9`, and SLURM's `0:9`.
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
    """What a state of SLURM (`OUT_OF_MEMORY`) or a reason of Kubernetes is evidence of."""
    reader = LogReader("--state")
    for form in (f"State={state}", f"Reason: {state}"):
        for found in reader.take([(0, form)]):
            return found
    return None
