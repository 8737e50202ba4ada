"""What does `verify` show of one step?"""

from __future__ import annotations

from ckptctl.cli.lines import EMPTY, Line, Span, line
from ckptctl.cli.pictures import LACKING, STEP_MARKS, map_of_ranks, step_mark, step_state
from ckptctl.cli.views.common import (
    finding_lines,
    next_line,
    ranks_in_words,
    section,
    state_lines,
)
from ckptctl.cli.words import age, count, exact_size, size, utc
from ckptctl.findings import Report
from ckptctl.model import Level

_NOT_SEEN = {
    Level.LISTING: "what is inside the shard files was not looked at",
    Level.STRUCTURE: "the bytes of the tensors were not looked at",
    Level.CONTENT: "every byte was looked at",
}


def report_lines(report: Report, now_s: float, *, unicode: bool) -> list[Line]:
    """The verdict, the facts, the findings, the map of ranks, what a resume restores."""
    state = step_state(report)
    word = "whole, but not usable as asked" if state == LACKING else STEP_MARKS[state].word
    verdict = Span(f"{word}:", STEP_MARKS[state].style)
    glyph = step_mark(report, unicode=unicode)
    return [
        line(glyph, " ", verdict, " ", Span(report.url, "name"), solid=True),
        *(line("  ", fact, hang=4) for fact in _facts(report, now_s)),
        EMPTY,
        *section(finding_lines(report.findings)),
        *section(map_of_ranks(report, unicode=unicode)),
        *section(state_lines(report.state)),
        *next_line(next_command(report)),
    ]


def next_command(report: Report) -> str | None:
    """What to run after `verify`: what the worst finding says, never the same look again."""
    same = f"ckptctl verify {report.url}"
    said = (f.next_command for f in report.findings if f.next_command not in (None, same))
    if not report.usable:
        return next(said, f"ckptctl explain {report.verdict.value}")
    if report.level is Level.LISTING:
        return f"{same} --level structure"
    return f"ckptctl show {report.url}"


def _facts(report: Report, now_s: float) -> list[str]:
    number = "" if report.number is None else f"step {report.number}, "
    held = f"{count(report.n_tensors, 'tensor')} in {count(report.n_records, 'record')}"
    read = f"{report.level.value} ({size(report.bytes_read)} read)"
    facts = [
        f"{number}layout {report.layout}, {ranks_in_words(report.world_size)}",
        f"{exact_size(report.n_bytes)} in {count(report.n_files, 'file')}, {held}",
        f"looked at: {read}; {_NOT_SEEN[report.level]}",
    ]
    if report.written_s is not None:
        when = f"written {age(report.written_s, now_s)} ago, {utc(report.written_s)}"
        facts.insert(1, when)
    return facts
