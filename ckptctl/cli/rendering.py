"""Render what several commands print: findings, train state, next commands, pages of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptctl.cli.text import EMPTY, Line, Span, Style, line, padded
from ckptctl.findings import Finding, Report, Severity
from ckptctl.formatting import counted, listed
from ckptctl.model import STATE_KINDS, TrainState, WorldSize

if TYPE_CHECKING:
    from ckptctl.selection.results import Pick

SEVERITY_STYLES: dict[Severity, Style] = {
    Severity.FAULT: "bad",
    Severity.WARNING: "warn",
    Severity.NOTE: "",
}


def next_line(command: str | None) -> list[Line]:
    """The last line of an answer: one command, whole, to be copied."""
    return [line("next: ", Span(command, "command"), solid=True)] if command else []


def error_lines(message: str, next_command: str | None) -> list[Line]:
    """Why ckptctl could not do its work, and what to do about it."""
    lines = [line(Span("error:", "bad"), f" {message}", hang=2)]
    if next_command:
        lines.append(line("next:  ", Span(next_command, "command"), solid=True))
    return lines


def finding_lines(findings: Sequence[Finding]) -> list[Line]:
    """Findings, one a line, with their codes for `ckptctl explain`."""
    width = max((len(finding.code) for finding in findings), default=0)
    return [_finding_line(finding, width) for finding in findings]


def _finding_line(finding: Finding, code_width: int) -> Line:
    style = SEVERITY_STYLES[finding.severity]
    word = padded(finding.severity.value, 7, style)
    code = padded(finding.code, code_width, style)
    return line("  ", word, "  ", code, "  ", said_of(finding), hang=13 + code_width)


def said_of(finding: Finding) -> str:
    """The message of a finding, with the path that it concerns."""
    if not finding.where or all(name in finding.message for name in finding.where.split(", ")):
        return finding.message
    return f"{finding.where}: {finding.message}"


def state_lines(state: TrainState, *, usable: bool) -> list[Line]:
    """What a resume restores, and what it does not; nothing where nobody could look."""
    if not state.held:
        return []
    missing = [kind for kind in STATE_KINDS if not state.part(kind).found]
    verb = "restores" if usable else "would restore"
    lines = [line(f"  a resume {verb} {', '.join(_state_facts(state))}", hang=4)]
    if missing:
        lines.append(line("  but not ", Span(listed(missing, "or"), "warn"), hang=4))
    return lines


def _state_facts(state: TrainState) -> Iterator[str]:
    for kind in state.held:
        part = state.part(kind)
        facts = []
        if part.value is not None:
            facts.append(f"{part.value:,}")
        if part.n_ranks is not None:
            facts.append(f"for {counted(part.n_ranks, 'rank')}")
        yield f"{kind} ({' '.join(facts)})" if facts else kind


def ranks_in_words(world_size: WorldSize | None) -> str:
    """The world size of the writer, with where it was read from."""
    if world_size is None:
        return "written by an unknown number of ranks"
    least = "at least " if world_size.at_least else ""
    source = _SOURCES.get(world_size.source, world_size.source)
    return f"written by {least}{counted(world_size.size, 'rank')} ({source})"


_SOURCES = {
    "shard-files": "by its shard files",
    "train-state": "by its train state",
    "seal": "by its seal",
    "asked": "as you say",
}


def step_name(report: Report) -> str:
    """The step's number, or its folder's name where that gives none."""
    if report.number is not None:
        return str(report.number)
    return report.url.rstrip("/").rpartition("/")[2]


def section(lines: Iterable[Line]) -> list[Line]:
    """The lines and an empty one, or nothing at all."""
    taken = [*lines]
    return [*taken, EMPTY] if taken else []


def page_lines(text: str, width: int | None) -> Iterator[Line]:
    """The page: on a terminal prose fills its width, off a terminal it is as it was written."""
    if width is None:
        yield from (line(each, solid=True) for each in text.splitlines())
        return
    for number, block in enumerate(text.split("\n\n")):
        if number:
            yield EMPTY
        yield from _block_lines(block.splitlines())


def _block_lines(block: Sequence[str]) -> Iterator[Line]:
    if block[0].startswith("#"):
        yield line(Span(block[0].lstrip("# "), "strong"), hang=2)
    elif block[0].startswith("```"):
        yield from (line("  ", Span(each, "command"), solid=True) for each in block[1:-1])
    elif block[0].startswith("|"):
        yield from (line(each, solid=True) for each in block)
    elif block[0].startswith("- "):
        items = "\n".join(block).removeprefix("- ").split("\n- ")
        yield from (line("- ", " ".join(item.split()), hang=2) for item in items)
    else:
        yield line(" ".join(block))


def refused_lines(pick: Pick) -> list[Line]:
    """Why newer steps were refused, one a line; what the answer says already is not said again."""
    return [
        line(f"  not step {step_name(over.report)}: {over.reason}", hang=4)
        for over in pick.passed_over
        if over.reason not in pick.message
    ]
