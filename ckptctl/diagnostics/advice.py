"""What `doctor` reports: its names, each with what is wrong and what to do, and its results.

`slurm` and `diagnosing` decide what applies, and name the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import msgspec

from ckptctl.findings import Severity
from ckptctl.model import ExitCode, NextCommand


@dataclass(frozen=True, slots=True)
class CheckDescription:
    """What one name of `doctor` means."""

    title: str
    """What is wrong."""
    effect: str
    """What follows from it."""
    fix: str
    """What to do, as a sentence."""
    severity: Severity = Severity.FAULT
    """How bad it is, unless the place shows something else."""


CHECKS: Mapping[str, CheckDescription] = msgspec.toml.decode(
    (resources.files("ckptctl.diagnostics") / "checks.toml").read_bytes(),
    type=dict[str, CheckDescription],
)
"""By name, as `checks.toml` has them."""

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


def advice_of(
    name: str,
    where: str,
    detail: str = "",
    fix: str | None = None,
    severity: Severity | None = None,
) -> Advice:
    """What a check found: its effect, behind the `detail` that the script or the storage has.

    What to do, and the severity, are those of `CHECKS` if none is given.
    """
    check = CHECKS[name]
    effect = check.effect.removesuffix(".")
    message = f"{detail}: {effect}" if detail else effect
    return Advice(name, severity or check.severity, where, message, fix or check.fix)


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
