"""The results of `doctor`."""

from __future__ import annotations

from ckptctl.data_classes import dataclass
from ckptctl.diagnostics.names import CHECKS
from ckptctl.findings import Severity
from ckptctl.model import ExitCode, NextCommand

EXIT_FAULTS = 29


@dataclass(frozen=True, slots=True)
class Advice:
    """One mistake or note, and what to do about it."""

    name: str
    """Its stable name, such as `signal.no-trap`."""
    severity: Severity
    """The severity."""
    where: str
    """A line of the script, a variable, a package, or a capability."""
    message: str
    """What is wrong, and its consequence."""
    fix: str
    """What to do."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was inspected, the mistakes, worst first, and the facts found."""

    what: str
    """What was examined: `slurm`, `env` or `storage`."""
    target: str
    """The script or the root as given."""
    advice: tuple[Advice, ...]
    """The advice, worst first."""
    facts: tuple[tuple[str, str], ...]
    """What was found, by name."""
    exit_code: ExitCode
    next_command: NextCommand


def fault(name: str, where: str, message: str, fix: str | None = None) -> Advice:
    """Advice against a fault; what to do is that of `CHECKS`, if no `fix` is given."""
    return Advice(name, Severity.FAULT, where, message, fix or CHECKS[name].fix)


def warning(name: str, where: str, message: str) -> Advice:
    """Advice against what may be a mistake."""
    return Advice(name, Severity.WARNING, where, message, CHECKS[name].fix)


def diagnosis(
    what: str,
    target: str,
    advice: tuple[Advice, ...],
    facts: tuple[tuple[str, str], ...] = (),
    next_command: str | None = None,
) -> Diagnosis:
    """The diagnosis; its exit code is 0 unless something is a fault."""
    severities = list(Severity)
    worst_first = sorted(advice, key=lambda each: severities.index(each.severity))
    is_fault = any(each.severity is Severity.FAULT for each in advice)
    return Diagnosis(
        what, target, tuple(worst_first), facts, EXIT_FAULTS if is_fault else 0, next_command
    )
