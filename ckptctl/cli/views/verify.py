"""Render the report on one step."""

from __future__ import annotations

import shlex

from ckptctl.cli.formatting import age, count, exact_size, size, utc
from ckptctl.cli.pictures import LACKING, STEP_MARKS, map_of_ranks, step_mark, step_state
from ckptctl.cli.text import EMPTY, Line, Span, line
from ckptctl.cli.views.common import (
    finding_lines,
    next_line,
    ranks_in_words,
    section,
    state_lines,
)
from ckptctl.findings import ByStore, Report, Severity, Verdict
from ckptctl.model import Level
from ckptctl.storage.opening import parent_url

_NOT_SEEN = {
    Level.LISTING: "the contents of the shard files were not read",
    Level.STRUCTURE: "the bytes of the tensors were not compared",
    Level.CONTENT: "every byte was compared",
}


def report_lines(report: Report, now_s: float, *, unicode: bool) -> list[Line]:
    """The verdict, the facts, the findings, the map of ranks, what a resume restores."""
    state = step_state(report)
    word = STEP_MARKS[state].word
    if state == LACKING:
        word = "complete, but without an optimizer"
        word = word if report.usable else "complete, but not usable as requested"
    verdict = Span(f"{word}:", STEP_MARKS[state].style)
    glyph = step_mark(state, unicode=unicode)
    return [
        line(glyph, " ", verdict, " ", Span(report.url, "name"), solid=True),
        *(line("  ", fact, hang=4) for fact in _facts(report, now_s)),
        EMPTY,
        *section(finding_lines(report.findings)),
        *section(map_of_ranks(report, unicode=unicode)),
        *section(state_lines(report.state, usable=report.usable)),
        *next_line(next_command(report)),
    ]


_DEEPER = {Level.LISTING: Level.STRUCTURE, Level.STRUCTURE: Level.CONTENT}


def next_command(report: Report) -> str | None:
    """What to run after `verify`: never the same command again, and nothing where all is proven.

    A deeper look at a step that can be used, what is known of the worst fault, or the
    choice of another step.
    """
    url = shlex.quote(report.url)
    root = shlex.quote(parent_url(report.url))
    if report.usable:
        deeper = _DEEPER.get(report.level)
        return f"ckptctl verify {url} --level {deeper.value}" if deeper else None
    if report.verdict is Verdict.COMPLETE:
        return f"ckptctl show {url}"
    fault = report.with_severity(Severity.FAULT)[0]
    given = fault.next_command
    if given is not None and not _repeats(given, report):
        return given
    if report.verdict is Verdict.UNKNOWN:
        return f"ckptctl doctor storage {root}"
    if report.verdict is Verdict.CHANGED or report.verdict is Verdict.UNSAFE:
        return f"ckptctl explain {fault.code}"
    if report.number is None:
        return f"ckptctl explain {fault.code}"
    return f"ckptctl pick {root} --before {report.number}"


def _repeats(command: str, report: Report) -> bool:
    """Whether a command inspects the step once more, or shows what could not be read."""
    words = shlex.split(command)
    if words == ["ckptctl", "verify", report.url]:
        return True
    return words[:2] == ["ckptctl", "show"] and not report.n_tensors


def _by_store(found: ByStore) -> str:
    same = f"{found.n_same:,} of {count(found.n_files, 'file')}, {exact_size(found.n_bytes)},"
    told = (
        f"; {found.n_reported:,} of them sealed with the store's checksum alone"
        if found.n_reported
        else ""
    )
    return f"the store's checksums of {same} match the seal{told}; their bytes were not read"


def _facts(report: Report, now_s: float) -> list[str]:
    number = "" if report.number is None else f"step {report.number}, "
    held = f"{count(report.n_tensors, 'tensor')} in {count(report.n_records, 'record')}"
    read = f"{report.level.value} ({size(report.bytes_read)} read)"
    seen = f"checked: {read}; {_NOT_SEEN[report.level]}"
    if report.verdict is Verdict.UNKNOWN:
        seen = "could not be inspected; nothing below is checked"
    facts = [
        f"{number}layout {report.layout}, {ranks_in_words(report.world_size)}",
        f"{exact_size(report.n_bytes)} in {count(report.n_files, 'file')}, {held}",
        seen,
    ]
    if report.bytes_in_records:
        proven = f"{exact_size(report.bytes_proven)} of {exact_size(report.bytes_in_records)}"
        records = count(report.records_proven, "record")
        facts[-1] = f"checked: {read}; {proven} in records, {records}, match their checksums"
    if report.values_scanned:
        bad = sum(finding.code == "values.not-finite" for finding in report.findings)
        says = "see below" if bad else "all of them finite"
        facts.append(f"{count(report.values_scanned, 'floating-point value')} scanned: {says}")
    if report.seal is not None:
        what = "every byte" if report.level is Level.CONTENT else "sizes and metadata"
        facts.append(f"sealed by {report.seal}; {what} compared with the seal")
    if report.by_store is not None and report.by_store.n_same:
        facts.append(_by_store(report.by_store))
    if report.written_s is not None:
        when = f"written {age(report.written_s, now_s)} ago, {utc(report.written_s)}"
        facts.insert(1, when)
    return facts
