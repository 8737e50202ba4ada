"""Render the result of `doctor`."""

from __future__ import annotations

from ckptctl.cli.formatting import count, listed
from ckptctl.cli.text import EMPTY, Line, Span, Style, line, padded
from ckptctl.cli.views.common import next_line, section
from ckptctl.diagnostics.results import Advice, Diagnosis
from ckptctl.findings import Severity

_STYLES: dict[Severity, Style] = {
    Severity.FAULT: "bad",
    Severity.WARNING: "warn",
    Severity.REMARK: "",
}


def diagnosis_lines(found: Diagnosis) -> list[Line]:
    """How much is wrong, then each thing with what to do, then what was inspected."""
    numbers = [
        count(number, severity.value)
        for severity in Severity
        if (number := sum(each.severity is severity for each in found.advice))
    ]
    style: Style = "bad" if found.exit_code else "good"
    said = listed(numbers) if numbers else "nothing is wrong"
    facts = [line(f"  {name}: {value}", hang=4) for name, value in found.facts]
    return [
        line(Span(said, style), "  ", Span(found.target, "name"), solid=True),
        EMPTY,
        *section(each for advice in found.advice for each in _shown(advice)),
        *section(facts),
        *next_line(found.next_command),
    ]


def _shown(advice: Advice) -> list[Line]:
    word = padded(advice.severity.value, 7, _STYLES[advice.severity])
    return [
        line("  ", word, "  ", Span(advice.name, "strong"), "  ", advice.where, hang=11),
        line(f"           {advice.message}", hang=11),
        line(f"           do: {advice.fix}", hang=15),
    ]
