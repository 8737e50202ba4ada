"""`ckptctl scan`: list the steps of roots, and the one that `pick` would choose.

A row is printed as soon as its step has been inspected.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import ckptctl
from ckptctl.cli.options import MetricsOpt, OfStep, OptionalRootOpt, RootsArg
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.pictures import (
    LACKING,
    STEP_MARKS,
    claim_glyphs,
    claims_legend,
    glyph,
    not_proven,
    step_state,
)
from ckptctl.cli.rendering import (
    EMPTY,
    Line,
    Style,
    StyledText,
    finding_lines,
    line,
    message_with_path,
    next_line,
    padded,
    step_name,
)
from ckptctl.findings import EXIT_FRESH, ClaimName, Report, Severity, Verdict
from ckptctl.formatting import age, and_more, counted, size, utc
from ckptctl.model import TrainState
from ckptctl.options import Parameter, PickPolicy, StorageOptions
from ckptctl.selection.choosing import KINDS_THAT_COUNT, NoStepReason, PassedOver
from ckptctl.selection.picking import NEWEST, Scan, step_in_words

EXAMPLES = ("ckptctl scan /shared/ckpt/run-1234", "ckptctl scan s3://bucket/run-1234 --last 20")
EXIT_CODES = (0, 2, 10, 11, 75, 77)


def scan(
    roots: RootsArg,
    optional_root: OptionalRootOpt = None,
    last: Annotated[
        int, Parameter("--last N", "Only the newest N steps; 0 for all of them.", min=0)
    ] = NEWEST,
    metrics: MetricsOpt = None,
    *,
    policy: PickPolicy,
    requirements: OfStep,
    storage: StorageOptions,
    out: Output,
) -> int:
    """List the steps of a root with their verdicts and the step that pick would choose.

    Steps are listed newest first, as soon as each has been inspected; --before STEP continues
    where the list ended. Without --level the steps that decide the choice are inspected as
    deeply as by pick, the others by their listing and metadata; --level content reads every byte
    of every listed step. With --quiet the address of the step that pick chooses is printed, and
    those of usable older ones, one per line.
    """
    named = dict.fromkeys((*roots, *(optional_root or ())))
    shown = _Shown(out, tuple(root.rstrip("/") or root for root in named))
    found = ckptctl.scan(
        *roots,
        optional_roots=optional_root or (),
        last=last or None,
        on_report=shown.on_report,
        policy=policy,
        requirements=requirements,
        storage=storage,
    )
    if metrics is not None:
        from ckptctl.cli.monitoring import root_samples, write_metrics

        write_metrics(metrics, root_samples(found))
    shown.finish(found)
    return found.exit_code


class _Shown:
    """Prints rows as they come, held back until the verdict can be printed first."""

    def __init__(self, out: Output, roots: tuple[str, ...]) -> None:
        self._out = out
        self._roots = roots if len(roots) > 1 else ()
        self._waiting: list[tuple[Report, PassedOver | None]] = []
        self._table: StepTable | None = None
        self._above: Report | None = None

    def on_report(self, report: Report, is_chosen: bool, over: PassedOver | None) -> None:
        """One more step was inspected."""
        if not self._out.talks:
            return
        if self._table is None:
            self._waiting.append((report, over))
        if is_chosen:
            self._out.lines(chosen_lines(report))
            self._begin(report.url)
        elif self._table is not None:
            self._row(self._table, report, over)
        else:
            self._out.progress(f"{counted(len(self._waiting), 'step')} inspected")

    def finish(self, scan: Scan) -> None:
        """All steps were inspected."""
        if self._out.talks and self._table is None:
            self._out.lines(none_lines(scan))
            if scan.reports:
                self._out.lines([EMPTY])
                self._begin(None)
        out = self._out.out
        self._out.answer(
            document_of("scan", scan),
            lambda: foot_lines(scan, unicode=out.unicode, legend=is_wide(out.width)),
            bare=usable_urls(scan),
        )

    def _begin(self, chosen: str | None) -> None:
        out = self._out.out
        first, _ = self._waiting[0]
        table = StepTable(first, chosen, time.time(), out.width, out.unicode, self._roots)
        self._table = table
        self._out.lines(table.head())
        for report, over in self._waiting:
            self._row(table, report, over)

    def _row(self, table: StepTable, report: Report, over: PassedOver | None) -> None:
        self._out.lines(table.row(report, over, self._above))
        self._above = report


_WIDE = 116
"""From so many cells on, the table has columns for claims, ranks and the time in UTC."""


def is_wide(width: int | None) -> bool:
    """Whether the table has all columns; `width` is None off a terminal."""
    return width is None or width >= _WIDE


def chosen_lines(chosen: Report) -> list[Line]:
    """The first lines: the step that `pick` takes, and how sure that is."""
    left = not_proven(chosen, [name for name in ClaimName if name is not ClaimName.STATE])
    proven = f"not proven: {left}" if left else "every claim proven"
    answer = f"resume from step {step_in_words(chosen)}"
    inspected = f": {chosen.verdict.value} (checked: {chosen.level.value}; {proven})"
    return [
        line(StyledText(answer + inspected, "good"), hang=2),
        line("  ", StyledText(chosen.url, "name"), solid=True),
        EMPTY,
    ]


def none_lines(scan: Scan) -> list[Line]:
    """The first lines where `pick` takes nothing."""
    if not scan.n_steps:
        fresh = scan.exit_code == EXIT_FRESH
        return [line(StyledText(scan.message, "strong" if fresh else "bad"), hang=2)]
    return [
        line(StyledText(scan.message, "bad"), hang=2),
        line("  ", StyledText(scan.root, "name")),
    ]


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
            yield line(f"  root {number}: ", StyledText(root, "name"), solid=True)
        cells = (
            *("step", "root", "verdict", "claims", "checked", "size", "ranks", "age"),
            *("written (UTC)", "train state"),
        )
        yield line(" ", *self._cells(cells, ""))

    def row(
        self, report: Report, over: PassedOver | None = None, above: Report | None = None
    ) -> Iterator[Line]:
        """One step: a row, and its reason beside or below it.

        `over` is why `pick` refused it, None where it did not. What the step of the row
        above lacks as well is not repeated where it takes a line of its own.
        """
        is_lacking = over is not None and over.word is NoStepReason.STATE_MISSING
        state = step_state(report, is_lacking=is_lacking)
        words = state_words(report.state)
        cells = (
            step_name(report),
            self._root_of(report),
            STEP_MARKS[state].word if state == LACKING else report.verdict.value,
            claim_glyphs(report.claims, unicode=self.unicode),
            "-" if report.verdict is Verdict.UNKNOWN else report.level.value,
            size(report.n_bytes),
            "-" if (n := report.world_size) is None else f"{n.size}{'+' if n.at_least else ''}",
            age(report.written_s, self.now_s),
            "-" if report.written_s is None else utc(report.written_s).removesuffix(" UTC"),
        )
        mark = STEP_MARKS[state]
        shown = glyph(mark, self.unicode)
        arrow = StyledText("  ← pick" if self.unicode else "  <- pick", "strong")
        pointer = (arrow,) if report.url == self.chosen else ()
        row = line(shown, *self._cells((*cells, words), mark.style), *pointer)
        below = ""
        if self.width is not None and row.width > self.width:
            repeats = above is not None and state_words(above.state) == words
            short = "as above" if repeats else f"{words.partition(' ')[0]} …"
            below = "" if repeats else words
            row = line(shown, *self._cells((*cells, short), mark.style), *pointer)
        complete = report.verdict is Verdict.COMPLETE
        reason = over.reason if over is not None and complete else reason_of(report)
        beside = line(*row.spans, "  ", reason) if reason else row
        if not below and (self.width is None or beside.width <= self.width):
            yield beside
            return
        yield row
        yield from (line("    ", text, hang=4) for text in (below, reason) if text)

    def _root_of(self, report: Report) -> str:
        under = [i for i, root in enumerate(self.roots, 1) if report.url.startswith(f"{root}/")]
        return str(max(under, key=lambda i: len(self.roots[i - 1]))) if under else ""

    def _cells(self, cells: Sequence[str], verdict_style: Style) -> Iterator[StyledText]:
        step, root, verdict, claims, checked, n_bytes, ranks, written, written_utc, state = cells
        wide = is_wide(self.width)
        columns = [
            padded(step, max(4, len(step_name(self.newest))), right=True),
            *([padded(root, 4, right=True)] if self.roots else []),
            padded(verdict, 12, verdict_style),
            *([padded(claims, 6)] if wide else []),
            padded(checked, 9),
            padded(n_bytes, 9, right=True),
            *([padded(ranks, 5, right=True)] if wide else []),
            padded(written, 7, right=True),
            *([padded(written_utc, 19)] if wide else []),
            padded(state, 18 if wide else 0),
        ]
        for column in columns:
            yield StyledText("  ")
            yield column


def foot_lines(scan: Scan, *, unicode: bool, legend: bool = False) -> list[Line]:
    """What follows the table: the findings about the root, the next command.

    `legend`: the table has a column of claims.
    """
    lines: list[Line] = []
    if legend and scan.reports:
        lines += [EMPTY, line(claims_legend(unicode=unicode), hang=2)]
    if scan.n_older:
        more = f"{counted(scan.n_older, 'older step')} of {scan.n_steps:,} not shown"
        lines.append(
            line(f"  {more} (--before {scan.more_before} continues, --last 0 shows all)", hang=2)
        )
    n_read = sum(report.bytes_read for report in scan.reports)
    if scan.reports:
        lines.append(line(f"  {size(n_read)} read of {counted(len(scan.reports), 'step')}", hang=2))
    if scan.findings:
        lines += [EMPTY, *finding_lines(scan.findings)]
    if scan.next_command:
        lines += [EMPTY, *next_line(scan.next_command)]
    return lines


def usable_urls(scan: Scan) -> list[str]:
    """What `scan --quiet` prints: the step that `pick` takes, and usable older ones.

    Nothing where `pick` takes none: a script would take the first of them.
    """
    over = dict(scan.refused)
    good = [r.url for r in scan.reports if r.usable and r.url not in over]
    if scan.chosen in good:
        return good[good.index(scan.chosen) :]
    # An unverifiable step that was accepted, or one that is older than those shown.
    return [scan.chosen] if scan.chosen is not None else []


def reason_of(report: Report) -> str:
    """Why a step is not usable, or what to mind, in one line; empty where there is nothing."""
    for severity in (Severity.FAULT, Severity.WARNING):
        found = report.with_severity(severity)
        if found:
            return f"{found[0].code}: {message_with_path(found[0])}{and_more(found)}"
    worth_telling = (f for f in report.findings if not report.usable or f.code == "step.pinned")
    return next(map(message_with_path, worth_telling), "")


def state_words(state: TrainState) -> str:
    """The train state of a step in a few words: all of it, or what it lacks."""
    held = state.held
    missing = [kind for kind in KINDS_THAT_COUNT if kind not in held]
    if not held:
        return "-"
    if not missing:
        return "all, of an adapter" if state.model.of_adapter else "all"
    if held == ("model",):
        return "weights only"
    return f"lacks {', '.join(missing)}"
