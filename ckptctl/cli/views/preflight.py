"""Render what `preflight` prints on standard error."""

from __future__ import annotations

from ckptctl.cli.text import Line, Span, Style, line, padded
from ckptctl.cli.views.common import next_line
from ckptctl.cli.views.pick import refused_lines
from ckptctl.preflight_checks.results import Outcome, Preflight

_STYLES: dict[Outcome, Style] = {
    Outcome.OK: "good",
    Outcome.WARNING: "warn",
    Outcome.FAILED: "bad",
}


def preflight_lines(found: Preflight) -> list[Line]:
    """The answer, one line for each check, why newer steps were refused, what is next."""
    if found.exit_code:
        lines = [line(Span("error:", "bad"), f" {found.message}", hang=2)]
    else:
        lines = [line(Span(f"ready: {found.message}", "good"), hang=2)]
    width = max(len(check.name) for check in found.checks)
    for check in found.checks:
        word = padded(check.outcome.value, 7, _STYLES[check.outcome])
        said = f"  {check.message}"
        lines.append(line("  ", word, "  ", padded(check.name, width), said, hang=13 + width))
    advice = next((one.next_command for one in found.checks if one.next_command), None)
    return [*lines, *refused_lines(found.pick), *next_line(found.next_command or advice)]
