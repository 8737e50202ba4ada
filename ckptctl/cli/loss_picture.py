"""What does the loss around a resume look like in a terminal?

A grid of glyphs, one column for some steps, the boundary between before and after, and
the line that a rise has to pass. ASCII stands in where the terminal knows no more.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptctl.cli.lines import Line, Span, Style, line
from ckptctl.cli.pictures import Mark
from ckptctl.loss.curve import Curve, Point

_HEIGHT = 11
_LABEL = 10  # cells for the loss at the left
_MARKS = {
    "before": Mark("·", ".", "", "before"),
    "overwritten": Mark("○", "o", "warn", "before, trained again"),
    "after": Mark("●", "x", "strong", "after"),
    "both": Mark("◉", "@", "good", "both"),
    "beyond": Mark("▲", "^", "bad", "beyond"),
    "boundary": Mark("│", "|", "", "resume"),
    "limit": Mark("╌", "-", "", "a median above is a jump"),
}
_ORDER = ("limit", "boundary", "before", "overwritten", "after", "both", "beyond")
_AXES = {True: ("┤", "└", "─"), False: ("|", "+", "-")}

Grid = list[list[str | None]]


def picture_of_loss(curve: Curve, width: int, *, unicode: bool) -> list[Line]:
    """The loss before and after a resume, with the steps that were logged twice."""
    columns = max(20, width - _LABEL - 4)
    grid: Grid = [[None] * columns for _ in range(_HEIGHT)]
    scale = _Scale(curve, columns)
    boundary = scale.column(curve.first_step) - 1
    if curve.before and boundary >= 0:
        for cells in grid:
            cells[boundary] = "boundary"
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


def _span(kind: str | None, unicode: bool) -> Span:
    if kind is None:
        return Span(" ")
    mark = _MARKS[kind]
    style: Style = mark.style
    return Span(mark.glyph if unicode else mark.ascii, style)


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
    pieces: list[Span] = []
    for kind in _ORDER[2:] + _ORDER[:2]:
        if kind in used:
            pieces += [Span("   " if pieces else ""), _span(kind, unicode)]
            pieces.append(Span(f" {_MARKS[kind].word}"))
    return line("  ", *pieces, hang=2)


def _number(value: float) -> str:
    return f"{value:.4g}"
