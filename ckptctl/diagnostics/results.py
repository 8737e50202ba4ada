"""The results of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from ckptctl.findings import Severity

EXIT_MISTAKES = 2


@dataclass(frozen=True, slots=True)
class Advice:
    """One mistake, or one thing worth knowing, and what to do about it.

    `where` is a line of a script (`job.sh:14`), a variable, a package or a capability.
    """

    name: str
    severity: Severity
    where: str
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was looked at, what is wrong, worst first, and what was found to be right.

    `facts` are pairs of what was looked at and what is there: versions, capabilities.
    """

    what: str
    target: str
    advice: tuple[Advice, ...]
    facts: tuple[tuple[str, str], ...]
    exit_code: int
    next_command: str | None


def diagnosis(
    what: str,
    target: str,
    advice: tuple[Advice, ...],
    facts: tuple[tuple[str, str], ...] = (),
    next_command: str | None = None,
) -> Diagnosis:
    """The answer; its exit code is 0 unless something is a fault."""
    severities = list(Severity)
    worst_first = sorted(advice, key=lambda each: severities.index(each.severity))
    is_fault = any(each.severity is Severity.FAULT for each in advice)
    return Diagnosis(
        what, target, tuple(worst_first), facts, EXIT_MISTAKES if is_fault else 0, next_command
    )
