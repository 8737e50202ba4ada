"""Draw the loss around a resume as SVG, which references no other files.

`curve_of` chooses the points. The colours are distinguishable with any kind of colour vision, and
each kind of point also has its own shape. Source of the colours: Okabe and Ito, Color Universal
Design.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptctl.errors import UsageError
from ckptctl.formatting import svg_text
from ckptctl.logs.rows import Row
from ckptctl.loss.checking import LossReport
from ckptctl.loss.level import finite
from ckptctl.loss.verdict import Assessment, LossVerdict
from ckptctl.redaction import redacted
from ckptctl.storage.files import replace_file

N_BEFORE = 60
N_AFTER = 40

Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points as (step, loss), in the order of steps.

    `first_step` is the first after the resume. `base` is the level before it, `limit` the
    loss above which a rise is a jump; None where there are too few rows.
    """

    before: tuple[Point, ...]
    overwritten: tuple[Point, ...]
    after: tuple[Point, ...]
    first_step: int
    base: float | None
    limit: float | None

    @property
    def points(self) -> tuple[Point, ...]:
        """All points."""
        return (*self.before, *self.overwritten, *self.after)

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step; the first after the resume may have no finite loss."""
        steps = [self.first_step, *(step for step, _ in self.points)]
        return min(steps), max(steps)

    @property
    def losses(self) -> tuple[float, float]:
        """The lowest and the highest loss that are drawn; they differ even if all losses are equal.

        A few losses far from all others are outside the range, so that the others do not
        become a flat line.
        """
        losses = sorted(loss for _, loss in self.points)
        few = len(losses) // 40
        low, high = losses[few], losses[-1 - few]
        low = max(losses[0], low - (high - low))
        high = min(losses[-1], 2 * high - low)
        for each in (self.base, self.limit):
            if each is not None:
                low, high = min(low, each), max(high, each)
        room = 0.05 * (high - low) or 0.01 * abs(high) or 0.01
        return (max(0.0, low - room) if low >= 0 else low - room), high + room

    def x(self, step: float) -> float:
        """Where a step is in the picture."""
        first, last = self.steps
        per_step = (WIDTH - _LEFT - _RIGHT) / max(1, last - first)
        return round(_LEFT + (step - first) * per_step, 2)

    def y(self, loss: float) -> float:
        """Where a loss is in the picture; at its edge for one that is outside the range."""
        low, high = self.losses
        per_loss = (HEIGHT - _TOP - _BOTTOM) / (high - low)
        return round(HEIGHT - _BOTTOM - (min(high, max(low, loss)) - low) * per_loss, 2)


def curve_of(assessment: Assessment) -> Curve | None:
    """The points of a resume; None where no row has a finite loss."""
    resume, level = assessment.resume, assessment.level
    curve = Curve(
        before=_points(resume.before)[-N_BEFORE:],
        overwritten=_points(resume.overwritten)[:N_AFTER],
        after=_points(resume.after)[:N_AFTER],
        first_step=resume.first_step,
        base=level.base if level.shifts else None,
        limit=_limit(assessment),
    )
    return curve if curve.points else None


def _limit(assessment: Assessment) -> float | None:
    level = assessment.level
    if level.smallest_jump is None or level.base is None or level.base <= 0:
        return None
    return level.base * (1 + level.smallest_jump)


def _points(rows: Sequence[Row]) -> tuple[Point, ...]:
    return tuple((row.step, number.value) for row, number in finite(rows))


WIDTH, HEIGHT = 960, 480
BACKGROUND, INK, FAINT = "#ffffff", "#1a1a1a", "#d9d9d9"

_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 24, 64, 76
_BEFORE, _AGAIN, _AFTER, _LIMIT = "#7f7f7f", "#e69f00", "#0072b2", "#d55e00"
_VERDICTS = {
    LossVerdict.DISCONTINUOUS: "#b30000",
    LossVerdict.SUSPECT: "#a65300",
    LossVerdict.INCONCLUSIVE: "#a65300",
    LossVerdict.NO_JUMP: "#006d2c",
    LossVerdict.CONTINUOUS: "#006d2c",
}
_KINDS = (
    ("before", _BEFORE, 3.0, False),
    ("before, trained again", _AGAIN, 6.0, True),
    ("after", _AFTER, 3.0, False),
)
_TEXT_CELL = 7.0  # width of a letter of 13 pixels


def _stroke(x1: float, y1: float, x2: float, y2: float, color: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
        f'stroke-width="1"{dash}/>'
    )


def _dot(x: float, y: float, radius: float, color: str, title: str, *, hollow: bool) -> str:
    """A disc, or a ring where `hollow`; `title` is its tooltip."""
    paint = f'fill="none" stroke="{color}" stroke-width="2"' if hollow else f'fill="{color}"'
    return (
        f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" {paint}>'
        f"<title>{svg_text(title)}</title></circle>"
    )


def _text(x: float, y: float, text: str, color: str = INK, *, anchor: str = "start") -> str:
    """A text at its base line; `anchor` is `start`, `middle` or `end`."""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="13" '
        f'text-anchor="{anchor}">{svg_text(text)}</text>'
    )


def _shapes(curve: Curve, verdict: LossVerdict, message: str) -> Iterator[str]:
    """The elements of a plot, in the order in which they are painted."""
    yield (
        f'<text x="{_LEFT}" y="26" fill="{_VERDICTS[verdict]}" font-size="18" '
        f'font-weight="bold">{verdict.value}</text>'
    )
    yield _text(_LEFT, 46, _fitted(message, WIDTH - _LEFT - _RIGHT))
    yield from _axes(curve)
    if curve.limit is not None:
        y = curve.y(curve.limit)
        yield _stroke(_LEFT, y, WIDTH - _RIGHT, y, _LIMIT, dashed=True)
    if curve.before:
        x = curve.x(curve.first_step - 0.5)
        yield _stroke(x, _TOP, x, HEIGHT - _BOTTOM, INK, dashed=True)
        yield _text(x + 6, _TOP + 12, "resume")
    every = (curve.before, curve.overwritten, curve.after)
    for points, (_, color, radius, hollow) in zip(every, _KINDS, strict=True):
        yield from _dots(points, curve, color, radius, hollow=hollow)
    yield from _legend(every, with_limit=curve.limit is not None)


def _axes(curve: Curve) -> Iterator[str]:
    low, high = curve.losses
    for loss in _ticks(low, high, 6):
        y = curve.y(loss)
        yield _stroke(_LEFT, y, WIDTH - _RIGHT, y, FAINT)
        yield _text(_LEFT - 8, y + 4, f"{loss:.6g}", anchor="end")
    first, last = curve.steps
    base = HEIGHT - _BOTTOM
    for step in _ticks(first, last, 8):
        if step == int(step):
            x = curve.x(step)
            yield _stroke(x, base, x, base + 5, INK)
            yield _text(x, base + 20, f"{step:,.0f}", anchor="middle")
    yield _stroke(_LEFT, base, WIDTH - _RIGHT, base, INK)
    yield _text(WIDTH - _RIGHT, base + 38, "step", anchor="end")
    yield _text(_LEFT - 8, _TOP - 6, "loss", anchor="end")


def _ticks(low: float, high: float, n: int) -> list[float]:
    """About `n` round numbers from `low` to `high`."""
    rough = max(high - low, 1e-300) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def _dots(
    points: Sequence[Point], curve: Curve, color: str, radius: float, *, hollow: bool
) -> Iterator[str]:
    low, high = curve.losses
    for step, loss in points:
        beyond = "" if low <= loss <= high else ", outside the plot"
        title = f"step {step:,}: {loss:.6g}{beyond}"
        yield _dot(curve.x(step), curve.y(loss), radius, color, title, hollow=hollow)


def _legend(every: Sequence[Sequence[Point]], *, with_limit: bool) -> Iterator[str]:
    x, y = float(_LEFT + 8), HEIGHT - 20
    for points, (name, color, radius, hollow) in zip(every, _KINDS, strict=True):
        if points:
            yield _dot(x, y - 4, radius, color, name, hollow=hollow)
            yield _text(x + 14, y, name)
            x += 14 + _TEXT_CELL * len(name) + 30
    if with_limit:
        yield _stroke(x - 8, y - 4, x + 8, y - 4, _LIMIT, dashed=True)
        yield _text(x + 14, y, "a median above is a jump")


def _fitted(text: str, width: float) -> str:
    most = int(width / _TEXT_CELL)
    return text if len(text) <= most else f"{text[: most - 1]}…"


_FONT = "system-ui, 'DejaVu Sans', Arial, sans-serif"


def check_plot(path: str) -> None:
    """Raise `UsageError` unless the name ends in `.svg`."""
    if not path.lower().endswith(".svg"):
        raise UsageError(f"{path}: the name of a plot ends in .svg", instead="--plot loss.svg")


def svg_of(report: LossReport) -> str | None:
    """The plot of the worst resume; None where there is no loss to draw."""
    worst = report.worst
    curve = curve_of(worst) if worst is not None else None
    if worst is None or curve is None:
        return None
    title = redacted(worst.message)
    drawn = "\n".join(f"  {element}" for element in _shapes(curve, worst.verdict, title))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ckptctl" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="{_FONT}" role="img">\n'
        f"  <title>{svg_text(title)}</title>\n"
        f'  <rect width="{WIDTH}" height="{HEIGHT}" fill="{BACKGROUND}"/>\n'
        f"{drawn}\n</svg>\n"
    )


def write_plot(report: LossReport, path: str) -> bool:
    """Plot the worst resume into a file, atomically; False where there is no loss to draw.

    Raises `UsageError` where the file cannot be written.
    """
    check_plot(path)
    svg = svg_of(report)
    if svg is not None:
        replace_file(path, svg.encode("utf-8"), "the plot")
    return svg is not None
