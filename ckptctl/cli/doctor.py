"""`ckptctl doctor`: find mistakes in a job script, an environment or a storage."""

from __future__ import annotations

import os
from typing import Annotated

import ckptctl
from ckptctl.cli.commands import COMMANDS, command_of
from ckptctl.cli.options import SEAL_KEY
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import (
    EMPTY,
    SEVERITY_STYLES,
    Line,
    Style,
    StyledText,
    line,
    next_line,
    padded,
    section,
)
from ckptctl.diagnostics.advice import Advice, Diagnosis
from ckptctl.findings import Severity
from ckptctl.formatting import counted, listed
from ckptctl.options import Parameter, StorageOptions
from ckptctl.signatures import PASSWORD

EXAMPLES = (
    "ckptctl doctor train.sbatch",
    "ckptctl doctor env",
    "ckptctl doctor storage s3://bucket/run-1234",
)
EXIT_CODES = (0, 2, 29, 75, 77)


def doctor(
    what: Annotated[
        str,
        Parameter(
            "WHAT",
            "slurm: a job script; env: versions and variables of this environment; "
            "storage: a root. Or the job script itself.",
        ),
    ],
    target: Annotated[
        str | None, Parameter("TARGET", "The job script (- for standard input), or the root.")
    ] = None,
    *,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Find mistakes in a job script, an environment or a storage.

    A script is read, not run. To check a storage, small files are written to a new folder under the
    root's .ckptctl/, and removed. A fault ends with 29, a warning with 0. With --quiet the names of
    the findings are printed.
    """
    known = frozenset(name for name in os.environ if not name.startswith("CKPTCTL_"))
    found = ckptctl.doctor(what, target, known_variables=known | _own_variables(), storage=storage)
    out.answer(
        document_of("doctor", found),
        lambda: diagnosis_lines(found),
        bare=tuple(f"{advice.name} {advice.where}" for advice in found.advice),
    )
    return found.exit_code


def _own_variables() -> frozenset[str]:
    """The variables of all options, the key of seals, and those that ckptctl sets for others."""
    from ckptctl.distributed.launcher import ATTEMPT, RESTART_COUNT
    from ckptctl.formats.own.heartbeats import FOLDER_VARIABLE, KEY_VARIABLE
    from ckptctl.supervisor.nodes import EXCLUDED
    from ckptctl.supervisor.processes import MARKER

    for_jobs = {RESTART_COUNT, ATTEMPT, MARKER, EXCLUDED, FOLDER_VARIABLE, KEY_VARIABLE}
    variables = {
        str(parameter.envvar) for name in COMMANDS for parameter in command_of(name).params
    }
    return frozenset(variables) | for_jobs | {SEAL_KEY, PASSWORD, "CKPTCTL_COLUMNS"}


def diagnosis_lines(found: Diagnosis) -> list[Line]:
    """How much is wrong, then each thing with what to do, then what was inspected."""
    numbers = [
        counted(number, severity.value)
        for severity in Severity
        if (number := sum(advice.severity is severity for advice in found.advice))
    ]
    style: Style = "bad" if found.exit_code else "good"
    result = listed(numbers) if numbers else "nothing is wrong"
    facts = [line(f"  {name}: {value}", hang=4) for name, value in found.facts]
    return [
        line(StyledText(found.target, "name"), ": ", StyledText(result, style), solid=True),
        EMPTY,
        *section(text for advice in found.advice for text in _shown(advice)),
        *section(facts),
        *next_line(found.next_command),
    ]


def _shown(advice: Advice) -> list[Line]:
    word = padded(advice.severity.value, 7, SEVERITY_STYLES[advice.severity])
    return [
        line("  ", word, "  ", StyledText(advice.name, "strong"), "  ", advice.where, hang=11),
        line(f"           {advice.message}", hang=11),
        line(f"           do: {advice.fix}", hang=15),
    ]
