"""What does `scan` show?

The step to resume from, a row for each step as soon as it has been looked at,
and the strip of all steps at the end, where a long table has not scrolled away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptctl.cli.lines import EMPTY, Line, Span, Style, line, padded
from ckptctl.cli.pictures import STEP_MARKS, step_mark, step_state, strip_of_steps
from ckptctl.cli.views.common import finding_lines, next_line, said_of, step_name
from ckptctl.cli.words import age, count, size, utc
from ckptctl.findings import Report, Severity
from ckptctl.judge.results import Scan
from ckptctl.model import STATE_KINDS, TrainState, WorldSize

_WIDE = 100
"""From so many cells on, the table has a column for the time in UTC."""


_PASSED_OVER = "passed over: older steps hold train state that this one lacks (--weights-ok)"


def chosen_lines(chosen: Report) -> list[Line]:
    """The first lines: the step that `pick` takes."""
    said = f"resume from step {step_name(chosen)}"
    looked = f": {chosen.verdict.value} (looked at: {chosen.level.value})"
    return [
        line(Span(said + looked, "good"), hang=2),
        line("  ", Span(chosen.url, "name"), solid=True),
        EMPTY,
    ]


def none_lines(scan: Scan) -> list[Line]:
    """The first lines where `pick` takes nothing."""
    if not scan.n_steps:
        absent = "" if scan.exists else ", which does not exist"
        return [line(Span("no step at all", "strong"), f" in {scan.root}{absent}", hang=2)]
    looked_at = len(scan.reports)
    which = "newest " if scan.n_steps > looked_at else ""
    said = f"none of the {which}{count(looked_at, 'step')} is usable"
    return [line(Span(said, "bad"), f" in {scan.root}", hang=2), EMPTY]


@dataclass(frozen=True, slots=True)
class StepTable:
    """The rows of the table; `newest` comes first in it and has the longest number.

    `chosen` is the address of the step that `pick` takes. `width` is the terminal's,
    None off a terminal: then the reason stands at the end of its row, however long,
    for `grep`. `roots` are there where they are several: each row has the number of its root.
    """

    newest: Report
    chosen: str | None
    now_s: float
    width: int | None
    unicode: bool
    roots: tuple[str, ...] = ()

    def head(self) -> Iterator[Line]:
        """The names of the columns, below those of the roots."""
        for number, root in enumerate(self.roots, start=1):
            yield line(f"  root {number}: ", Span(root, "name"), solid=True)
        cells = ("step", "root", "verdict", "size", "ranks", "age", "written (UTC)", "train state")
        yield line(" ", *self._cells(cells, ""))

    def row(self, report: Report, *, passed_over: bool = False) -> Iterator[Line]:
        """One step: a row, and its reason beside or below it.

        `passed_over` is a step newer than the one that `pick` takes.
        """
        state = step_state(report, passed_over=passed_over)
        mark = STEP_MARKS[state]
        written = "-" if report.written_s is None else utc(report.written_s).removesuffix(" UTC")
        cells = (
            step_name(report),
            self._root_of(report),
            mark.word,
            size(report.n_bytes),
            _ranks(report.world_size),
            age(report.written_s, self.now_s),
            written,
            state_words(report.state),
        )
        glyph = step_mark(state, unicode=self.unicode)
        row = line(glyph, *self._cells(cells, mark.style), *self._pointer(report))
        reason = _PASSED_OVER if passed_over and report.usable else reason_of(report)
        beside = line(*row.spans, "  ", reason) if reason else row
        if self.width is None or beside.width <= self.width:
            yield beside
        else:
            yield row
            yield line("    ", reason, hang=4)

    def _root_of(self, report: Report) -> str:
        under = [i for i, root in enumerate(self.roots, 1) if report.url.startswith(f"{root}/")]
        return str(max(under, key=lambda i: len(self.roots[i - 1]))) if under else ""

    def _pointer(self, report: Report) -> tuple[Span, ...]:
        if report.url != self.chosen:
            return ()
        return (Span("  "), Span("← pick" if self.unicode else "<- pick", "strong"))

    def _cells(self, cells: Sequence[str], verdict_style: Style) -> Iterator[Span]:
        step, root, verdict, n_bytes, ranks, written, written_utc, state = cells
        wide = self.width is None or self.width >= _WIDE
        columns = [
            padded(step, max(4, len(step_name(self.newest))), right=True),
            *([padded(root, 4, right=True)] if self.roots else []),
            padded(verdict, 12, verdict_style),
            padded(n_bytes, 9, right=True),
            padded(ranks, 5, right=True),
            padded(written, 7, right=True),
            *([padded(written_utc, 19)] if wide else []),
            padded(state, 18),
        ]
        for column in columns:
            yield Span("  ")
            yield column


def foot_lines(scan: Scan, width: int, *, unicode: bool) -> list[Line]:
    """What follows the table: the strip, what is to say about the root, what is next."""
    lines: list[Line] = []
    strip = strip_of_steps(scan.reports, scan.chosen, width, unicode=unicode)
    if strip:
        lines += [EMPTY, *strip]
    left_out = scan.n_steps - len(scan.reports)
    if left_out > 0:
        lines.append(line(f"  {count(left_out, 'older step')} not looked at", hang=2))
    if scan.findings:
        lines += [EMPTY, *finding_lines(scan.findings)]
    if scan.next_command:
        lines += [EMPTY, *next_line(scan.next_command)]
    return lines


def usable_urls(scan: Scan) -> list[str]:
    """What `scan --quiet` prints: the step that `pick` takes, and usable older ones."""
    urls = [report.url for report in scan.reports if report.usable]
    return urls[urls.index(scan.chosen) :] if scan.chosen in urls else urls


def reason_of(report: Report) -> str:
    """Why a step is not usable, or what to mind, in one line; empty where there is nothing."""
    for severity in (Severity.FAULT, Severity.WARNING):
        found = report.with_severity(severity)
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            return f"{found[0].code}: {said_of(found[0])}{more}"
    worth_telling = (f for f in report.findings if not report.usable or f.code == "step.pinned")
    return next(map(said_of, worth_telling), "")


def _ranks(world_size: WorldSize | None) -> str:
    if world_size is None:
        return "-"
    return f"{world_size.size}{'+' if world_size.at_least else ''}"


def state_words(state: TrainState) -> str:
    """The train state of a step in a few words: all of it, the little that it lacks, or holds."""
    held = state.held
    missing = [kind for kind in STATE_KINDS if kind not in held]
    if not held:
        return "-"
    if not missing:
        return "all"
    if held == ("model",):
        return "weights only"
    return f"no {', '.join(missing)}" if len(missing) <= 2 else ", ".join(held)
