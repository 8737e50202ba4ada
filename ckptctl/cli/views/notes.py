"""Render the results of `seal`, `reject`, `accept` and `pin`."""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.cli.formatting import count, exact_size
from ckptctl.cli.text import EMPTY, Line, Span, line
from ckptctl.cli.views.common import finding_lines, next_line, section
from ckptctl.formats.own.marks import Mark
from ckptctl.selection.results import Marked, Sealed


def sealed_lines(sealed: Sealed) -> list[Line]:
    """That the step is sealed and how, or why it is not."""
    found = sealed.report.findings
    if sealed.path is not None:  # there is one now
        found = tuple(finding for finding in found if finding.code != "seal.missing")
    findings = section(finding_lines(found))
    if sealed.path is None:
        head = line(Span(sealed.message, "bad"), hang=2)
        url = line("  ", Span(sealed.url, "name"), solid=True)
        return [head, url, EMPTY, *findings, *next_line(sealed.next_command)]
    digested = f"{count(sealed.n_files, 'file')}, {exact_size(sealed.n_bytes)}"
    digested += f", digests by {sealed.kind}"
    if sealed.n_stored:
        digested += f", the store's own checksums of {count(sealed.n_stored, 'file')}"
    return [
        line(Span("sealed", "good"), " ", Span(sealed.url, "name"), solid=True),
        line(f"  {digested}", hang=4),
        line(f"  inspected before at: {sealed.report.level.value}", hang=4),
        line("  ", "replaced " if sealed.replaced else "written to ", sealed.path, solid=True),
        EMPTY,
        *findings,
        *next_line(sealed.next_command),
    ]


def marked_lines(marked: Marked) -> list[Line]:
    """What was said of the step, what that lifts, and what stands now."""
    lines = [line(Span(marked.message, "strong"), solid=True)]
    if marked.mark is not None:
        lines.append(line(f"  {_said(marked.mark)}", hang=4))
        lines.append(line("  written to ", marked.path or "", solid=True))
    lines += [line(f"  lifted: {_told(one)}", hang=4) for one in marked.lifted]
    lines += _others(marked)
    return [*lines, EMPTY, *next_line(marked.next_command)]


def _others(marked: Marked) -> Iterator[Line]:
    for one in marked.standing:
        if one != marked.mark and not one.word.lifts:
            yield line(f"  also applies: {_told(one)}", hang=4)


def _told(mark: Mark) -> str:
    return f"{mark.word.value} {_said(mark)}"


def _said(mark: Mark) -> str:
    reason = f": {mark.reason}" if mark.reason else ""
    evidence = f"; see {', '.join(mark.evidence)}" if mark.evidence else ""
    return f"by {mark.by} at {mark.at}{reason}{evidence}"
