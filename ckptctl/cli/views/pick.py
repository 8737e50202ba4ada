"""What does `pick` say on standard error, beside the path on standard output?"""

from __future__ import annotations

from ckptctl.cli.lines import Line, Span, line
from ckptctl.cli.views.common import finding_lines, next_line, step_name
from ckptctl.judge.results import Pick


def pick_lines(pick: Pick) -> list[Line]:
    """The answer, why newer steps were refused, how deep the look was, what is next."""
    if pick.exit_code:
        lines = [line(Span("error:", "bad"), f" {pick.message}", hang=2)]
    else:
        lines = [line(Span(pick.message, "good"), hang=2)]
    lines += refused_lines(pick)
    if pick.level is not None:
        reason = f"; {pick.level_reason}" if pick.level_reason else ""
        lines.append(line(f"  looked at: {pick.level.value}{reason}", hang=4))
    return [*lines, *finding_lines(pick.findings), *next_line(pick.next_command)]


def refused_lines(pick: Pick) -> list[Line]:
    """Why newer steps were refused, one a line."""
    return [
        line(f"  not step {step_name(over.report)}: {over.reason}", hang=4)
        for over in pick.passed_over
    ]
