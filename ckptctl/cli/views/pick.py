"""Render what `pick` prints on standard error.

Of the findings on the step that it takes only those are said that the one who resumes
from it must know: suspicions, and what another world size costs. `verify` says the rest.
"""

from __future__ import annotations

from ckptctl.cli.text import Line, Span, line
from ckptctl.cli.views.common import finding_lines, next_line, step_name
from ckptctl.findings import Finding, Report, Severity
from ckptctl.selection.results import Pick

_WORLD_SIZE = {"state.lost", "world-size.differs"}  # there only where --world-size asks


def pick_lines(pick: Pick) -> list[Line]:
    """The answer, why newer steps were refused, how deep the look was, what is next."""
    if pick.exit_code:
        lines = [line(Span("error:", "bad"), f" {pick.message}", hang=2)]
    else:
        lines = [line(Span(pick.message, "good"), hang=2)]
    lines += refused_lines(pick)
    if pick.level is not None:
        reason = f"; {pick.level_reason}" if pick.level_reason else ""
        lines.append(line(f"  checked: {pick.level.value}{reason}", hang=4))
    if pick.chosen is not None:
        lines.append(line(f"  train state: {pick.about_state}", hang=4))
    findings = (*pick.findings, *_to_be_known(pick.chosen))
    return [*lines, *finding_lines(findings), *next_line(pick.next_command)]


def _to_be_known(chosen: Report | None) -> list[Finding]:
    findings = chosen.findings if chosen else ()
    return [
        finding
        for finding in findings
        if finding.severity is Severity.WARNING or finding.code in _WORLD_SIZE
    ]


def refused_lines(pick: Pick) -> list[Line]:
    """Why newer steps were refused, one a line; what the answer says already is not said again."""
    return [
        line(f"  not step {step_name(over.report)}: {over.reason}", hang=4)
        for over in pick.passed_over
        if over.reason not in pick.message
    ]
