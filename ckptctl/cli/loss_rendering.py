"""Format the report of `loss`: verdict, tables, findings, and a picture of the curve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.cli.rendering import (
    EMPTY,
    Line,
    StyledText,
    finding_lines,
    line,
    next_line,
    padded,
    section,
)
from ckptctl.findings import Finding
from ckptctl.formatting import counted, listed
from ckptctl.logs.rows import Number
from ckptctl.loss.checking import LossReport
from ckptctl.loss.evidence import FaultState
from ckptctl.loss.level import share, signed
from ckptctl.loss.plots import Curve, Point, curve_of, svg_of
from ckptctl.loss.replay import Replayed
from ckptctl.loss.resumes import LoggedResume
from ckptctl.loss.speed import Pace
from ckptctl.loss.verdict import Assessment, LossVerdict
from ckptctl.symbols import Style, Symbol

STYLES: Mapping[LossVerdict, Style] = {
    LossVerdict.DISCONTINUOUS: "bad",
    LossVerdict.SUSPECT: "warn",
    LossVerdict.INCONCLUSIVE: "warn",
    LossVerdict.NO_JUMP: "good",
    LossVerdict.CONTINUOUS: "good",
}
_SOURCES = {
    "report": "from the resume report",
    "log": "from the log",
    "asked": "as named here",
}
_MAX_ROWS = 10
_TITLES = ("step", "before", "after", "difference", "lr", "gradient norm", "tokens")

_HEIGHT = 11
_LABEL = 10  # cells for the loss at the left
_MARKS = {
    "before": Symbol("·", ".", "", "before"),
    "overwritten": Symbol("○", "o", "warn", "before, trained again"),
    "after": Symbol("●", "x", "strong", "after"),
    "both": Symbol("◉", "@", "good", "both"),
    "beyond": Symbol("▲", "^", "bad", "beyond"),
    "resume_point": Symbol("│", "|", "", "resume"),
    "limit": Symbol("╌", "-", "", "limit of a jump"),
}
_ORDER = ("limit", "resume_point", "before", "overwritten", "after", "both", "beyond")
_AXES = {True: ("┤", "└", "─"), False: ("|", "+", "-")}

Grid = list[list[str | None]]


def loss_lines(report: LossReport, *, width: int | None, unicode: bool) -> list[Line]:
    """The verdict, the resume, the steps logged twice, the picture `width` wide, the faults."""
    arrow = "→" if unicode else "->"
    lines = [
        line(
            StyledText(report.verdict.value, STYLES[report.verdict]), f": {report.message}", hang=2
        ),
        EMPTY,
    ]
    for assessment in report.assessments:
        lines += _resume_lines(assessment, several=len(report.assessments) > 1)
    lines += section(_recomputed_lines(report, arrow))
    worst = report.worst
    if worst is not None:
        lines += section(_replay_lines(worst, arrow, several=len(report.assessments) > 1))
        lines += section(_level_lines(worst))
        curve = curve_of(worst)
        if curve is not None and width is not None:
            lines += section(picture_of_loss(curve, width, unicode=unicode))
    lines += section(finding_lines(_every_finding(report)))
    lines += section(_fault_lines(report))
    lines += section(_missing_lines(report))
    for command in report.next_commands:
        lines += next_line(command)
    return lines


def _recomputed_lines(report: LossReport, arrow: str) -> Iterator[Line]:
    """The order of the logs, the work that is repeated, and the speed of the resumed job."""
    if report.order:
        yield line(f"  {report.order}", hang=4)
    if report.recomputed is not None:
        yield line(f"  recomputed: {report.recomputed.message}", hang=4)
    worst = report.worst
    if worst is not None and worst.throughput.pace is not Pace.UNKNOWN:
        pace = worst.throughput
        style: Style = "warn" if pace.pace is Pace.SLOWER else ""
        change = " (too few rows after the resume for a comparison)"
        if pace.is_known:
            change = f" ({pace.name} {pace.before:,.4g} {arrow} {pace.after:,.4g})"
        yield line("  speed after the resume: ", StyledText(pace.pace.value, style), change, hang=4)


def _every_finding(report: LossReport) -> tuple[Finding, ...]:
    """All findings, without the position of the first row: it is printed above already."""
    worst = report.worst
    if worst is None:
        return report.findings
    position = str(worst.resume.position)
    own = (
        replace(finding, where="") if finding.where == position else finding
        for finding in worst.findings
    )
    return (*own, *report.findings)


def _resume_lines(assessment: Assessment, *, several: bool) -> Iterator[Line]:
    resume = assessment.resume
    if several:
        word = StyledText(assessment.verdict.value, STYLES[assessment.verdict])
        yield line(f"resume {resume.number}: ", word, f": {assessment.message}", hang=2)
    yield line(f"  {_resume_point_text(resume)}", hang=4)
    yield line(f"  first row after the resume: {resume.position}", solid=True)
    if resume.marker is not None and resume.marker.text:
        yield line(f"  line in the log: {resume.marker.text.strip()}", hang=4)
    yield EMPTY


def _resume_point_text(resume: LoggedResume) -> str:
    first = f"step {resume.first_step:,} is the first after the resume"
    if resume.resume_point is None:
        return f"{first}; the step of the checkpoint is unknown"
    source = _SOURCES[resume.resume_point.source]
    return f"resumed after step {resume.resume_point.step:,} ({source}); {first}"


def _replay_lines(assessment: Assessment, arrow: str, *, several: bool) -> Iterator[Line]:
    """The table of the steps that were logged twice."""
    rows = assessment.replay.rows
    if not rows:
        return
    whose = f"resume {assessment.resume.number}: " if several else ""
    yield line(StyledText(f"{whose}{counted(len(rows), 'step')} logged twice", "strong"))
    cells: list[tuple[str, ...]] = [_TITLES]
    cells += [_cells(row, arrow) for row in rows[:_MAX_ROWS]]
    shown = [i for i in range(len(cells[0])) if any(row[i] != "-" for row in cells[1:])]
    widths = {i: max(len(row[i]) for row in cells) for i in shown}
    for number, row in enumerate(cells):
        style: Style = "strong" if number == 0 else ""
        spans = [padded(f"  {row[i]}", widths[i] + 2, style, right=True) for i in shown]
        yield line(*spans, solid=True)
    if len(rows) > _MAX_ROWS:
        yield line(f"  and {len(rows) - _MAX_ROWS} more (all of them with --json)", hang=2)
    left_out = assessment.replay.not_compared
    if left_out:
        steps = listed([str(step) for step in left_out[:5]])
        yield line(
            f"  not compared: {counted(len(left_out), 'step')} whose rows are means over different "
            f"numbers of steps ({steps})",
            hang=4,
        )


def _cells(row: Replayed, arrow: str) -> tuple[str, ...]:
    before, after = row.before, row.after
    return (
        str(row.step),
        _printed(before.loss),
        _printed(after.loss),
        f"{100 * row.difference:+.4f} %",
        _both(before.lr, after.lr, arrow),
        _both(before.grad_norm, after.grad_norm, arrow),
        _both(before.tokens, after.tokens, arrow),
    )


def _both(a: Number | None, b: Number | None, arrow: str) -> str:
    if a is None or b is None:
        return "-"
    same = abs(a.value - b.value) <= max(a.quantum, b.quantum)
    return _short(b) if same else f"{_short(a)} {arrow} {_short(b)}"


def _short(number: Number) -> str:
    whole = number.value == int(number.value) and abs(number.value) < 1e15
    return f"{number.value:,.0f}" if whole else f"{number.value:.4g}"


def _printed(number: Number | None) -> str:
    """A loss with as many decimals as the log prints, of a double the first seven digits."""
    if number is None:
        return "-"
    if 1e-12 <= number.quantum < 1:
        return f"{number.value:.{len(f'{number.quantum:.12f}'.rstrip('0')) - 2}f}"
    return f"{number.value:.7g}"


def _level_lines(assessment: Assessment) -> Iterator[Line]:
    level, replay = assessment.level, assessment.replay
    if replay.rows:
        yield line(
            f"  median difference {share(replay.median)}, largest {share(replay.most)}; printing "
            f"rounds by {share(replay.rounding)}, and batches differ by {share(replay.noise)}",
            hang=4,
        )
    if not level.shifts:
        return
    shifts = ", ".join(
        f"{signed(shift.found)} over {shift.n_rows} rows (limit {signed(shift.threshold)})"
        for shift in level.shifts
    )
    yield line(f"  median loss compared with the 20 rows before: {shifts}", hang=4)
    if level.smallest_jump is not None:
        yield line(f"  a jump below {share(level.smallest_jump)} would not be detected", hang=4)


_FAULT_TITLES = (
    (FaultState.EXCLUDED, "excluded faults"),
    (FaultState.OPEN, "faults not excluded"),
)
"""A fault that was found is among the findings."""


def _fault_lines(report: LossReport) -> Iterator[Line]:
    for state, title in _FAULT_TITLES:
        chosen = [fault for fault in report.faults if fault.state is state]
        if chosen:
            yield line(StyledText(title, "strong"))
        for fault in chosen:
            yield line(f"  {fault.name}: {fault.why}", hang=4)


def _missing_lines(report: LossReport) -> Iterator[Line]:
    if report.missing:
        yield line(StyledText("the log lacks", "strong"))
    for gap in report.missing:
        yield line(f"  {gap.what}: {gap.remedy}", hang=4)


_CANARY = (
    "After a clean stop no step was logged twice, and the curve alone does not show a lost",
    "optimizer, lost random numbers, or data that is repeated or skipped. A canary does:",
    "",
    "1. Resume from the step before the newest one, in a separate job with its own log folder",
    "   and without saving. It needs 5 to 10 steps that the log of the run holds already.",
    '   With ckptctl.train: Checkpointer.resume("auto", replay=5), up to Start.last.',
    "2. Log every step, with five significant digits or more.",
    "3. Compare: the log of the run first, the log of the canary last.",
    "",
    "     ckptctl loss --canary train.log canary.log",
    "",
    "The verdict is continuous only where these steps agree. The job then resumes from the newest",
    "step, which the same code saves and reads; check it with ckptctl verify STEP --level content.",
)


def canary_lines() -> list[Line]:
    """What a canary is, and how to make one."""
    return [line(text) if text else EMPTY for text in _CANARY]


def picture_of_loss(curve: Curve, width: int, *, unicode: bool) -> list[Line]:
    """A grid of characters: the loss before and after a resume, and the steps logged twice.

    One column is one or more steps. With `unicode` false, only ASCII is used.
    """
    columns = max(20, width - _LABEL - 4)
    grid: Grid = [[None] * columns for _ in range(_HEIGHT)]
    scale = _Scale(curve, columns)
    resume_point = scale.column(curve.first_step) - 1
    if curve.before and resume_point >= 0:
        for cells in grid:
            cells[resume_point] = "resume_point"
    if curve.limit is not None:
        _draw_limit(grid[scale.row(curve.limit)])
    for kind, points in (("before", curve.before), ("overwritten", curve.overwritten)):
        _draw(grid, scale, points, kind)
    _draw(grid, scale, curve.after, "after")
    lines = [line("loss")]
    axis, corner, bottom = _AXES[unicode]
    for number, cells in enumerate(grid):
        label = _number(scale.loss(number)) if number in (0, _HEIGHT // 2, _HEIGHT - 1) else ""
        drawn = [_span(kind, unicode) for kind in cells]
        lines.append(line("  ", label.rjust(_LABEL - 1), axis, *drawn, solid=True))
    lines.append(line(" " * (_LABEL + 1), corner, bottom * columns, solid=True))
    lines.append(line(" " * (_LABEL + 2), _steps(curve, scale, columns), solid=True))
    return [*lines, _legend(grid, unicode)]


class _Scale:
    """From steps and losses to columns and rows."""

    def __init__(self, curve: Curve, columns: int) -> None:
        self._first, last = curve.steps
        self._low, self._high = curve.losses
        self._per_step = (columns - 1) / max(1, last - self._first)

    def column(self, step: int) -> int:
        return round((step - self._first) * self._per_step)

    def row(self, loss: float) -> int:
        share = (self._high - loss) / (self._high - self._low)
        return min(_HEIGHT - 1, max(0, round(share * (_HEIGHT - 1))))

    def holds(self, loss: float) -> bool:
        return self._low <= loss <= self._high

    def loss(self, row: int) -> float:
        return self._high - row * (self._high - self._low) / (_HEIGHT - 1)


def _draw(grid: Grid, scale: _Scale, points: Sequence[Point], kind: str) -> None:
    for step, loss in points:
        cells, column = grid[scale.row(loss)], scale.column(step)
        there = cells[column]
        twice = {there, kind} == {"overwritten", "after"} or there == "both"
        cells[column] = ("both" if twice else kind) if scale.holds(loss) else "beyond"


def _draw_limit(cells: list[str | None]) -> None:
    for column in range(0, len(cells), 2):
        cells[column] = cells[column] or "limit"


def _span(kind: str | None, unicode: bool) -> StyledText:
    if kind is None:
        return StyledText(" ")
    mark = _MARKS[kind]
    style: Style = mark.style
    return StyledText(mark.glyph if unicode else mark.ascii, style)


def _steps(curve: Curve, scale: _Scale, columns: int) -> str:
    """The first step, the first after the resume, and the last, below their columns."""
    cells = [" "] * columns
    first, last = curve.steps
    for step in (curve.first_step, last, first):
        text = str(step)
        at = min(columns - len(text), max(0, scale.column(step) - len(text) // 2))
        around = cells[max(0, at - 1) : at + len(text) + 1]
        if not "".join(around).strip():
            cells[at : at + len(text)] = text
    return "".join(cells)


def _legend(grid: Grid, unicode: bool) -> Line:
    used = {kind for cells in grid for kind in cells if kind is not None}
    pieces: list[StyledText] = []
    for kind in _ORDER[2:] + _ORDER[:2]:
        if kind in used:
            pieces += [StyledText("   " if pieces else ""), _span(kind, unicode)]
            pieces.append(StyledText(f" {_MARKS[kind].word}"))
    return line("  ", *pieces, hang=2)


def _number(value: float) -> str:
    """In at most nine characters, the cells left of the axis."""
    text = f"{value:.4g}"
    return text if len(text) < _LABEL else f"{value:.3g}"


def write_html(path: str, report: LossReport, completed: Callable[[Line], Line]) -> None:
    """Write the verdict on a resume, the curve and the evidence as one HTML page.

    `completed` makes a command in a line one that the caller can run.
    """
    from ckptctl.cli.html_pages import as_html, write_page

    picture = svg_of(report)
    write_page(
        path,
        f"Loss: {report.verdict.value}",
        f"{report.verdict.value}: {report.message}",
        STYLES[report.verdict],
        (
            *([f"<figure class=plot tabindex=0>{picture}</figure>"] if picture else []),
            *as_html(map(completed, loss_lines(report, width=None, unicode=True)[2:])),
        ),
    )
