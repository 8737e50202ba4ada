"""Draw the loss around a resume as SVG or PNG.

`curve_of` chooses the points; the terminal draws the same ones. SVG is written
here and references no other files. PNG needs Pillow, an extra. The colours are
distinguishable with any kind of colour vision, and each kind of point also has its own
shape. Source of the colours: Okabe and Ito, Color Universal Design.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.errors import MissingExtra, UsageError
from ckptctl.logs.rows import Row
from ckptctl.loss.checking import LossReport
from ckptctl.loss.level import finite
from ckptctl.loss.verdict import Assessment, LossVerdict
from ckptctl.markup import as_text
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


@dataclass(frozen=True, slots=True)
class Stroke:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    color: str
    dashed: bool = False
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Dot:
    """A disc, or a ring where `hollow`; `title` is its tooltip."""

    x: float
    y: float
    radius: float
    color: str
    hollow: bool
    title: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text at its base line; `anchor` is `start`, `middle` or `end`."""

    x: float
    y: float
    text: str
    color: str = INK
    anchor: str = "start"
    size: int = 13
    bold: bool = False


Shape = Stroke | Dot | Text


def draw(curve: Curve, verdict: LossVerdict, message: str) -> tuple[Shape, ...]:
    """The shapes of a plot, in the order in which they are painted."""
    return tuple(_shapes(curve, verdict, message))


def _shapes(curve: Curve, verdict: LossVerdict, message: str) -> Iterator[Shape]:
    scale = _Scale(curve)
    yield Text(_LEFT, 26, verdict.value, _VERDICTS[verdict], size=18, bold=True)
    yield Text(_LEFT, 46, _fitted(message, WIDTH - _LEFT - _RIGHT))
    yield from _axes(curve, scale)
    if curve.limit is not None:
        y = scale.y(curve.limit)
        yield Stroke(_LEFT, y, WIDTH - _RIGHT, y, _LIMIT, dashed=True)
    if curve.before:
        x = scale.x(curve.first_step - 0.5)
        yield Stroke(x, _TOP, x, HEIGHT - _BOTTOM, INK, dashed=True)
        yield Text(x + 6, _TOP + 12, "resume")
    every = (curve.before, curve.overwritten, curve.after)
    for points, (_, color, radius, hollow) in zip(every, _KINDS, strict=True):
        yield from _dots(points, scale, color, radius, hollow=hollow)
    yield from _legend(every, with_limit=curve.limit is not None)


class _Scale:
    def __init__(self, curve: Curve) -> None:
        self._first, last = curve.steps
        self._low, self._high = curve.losses
        self._per_step = (WIDTH - _LEFT - _RIGHT) / max(1, last - self._first)
        self._per_loss = (HEIGHT - _TOP - _BOTTOM) / (self._high - self._low)

    def x(self, step: float) -> float:
        return round(_LEFT + (step - self._first) * self._per_step, 2)

    def holds(self, loss: float) -> bool:
        return self._low <= loss <= self._high

    def y(self, loss: float) -> float:
        loss = min(self._high, max(self._low, loss))
        return round(HEIGHT - _BOTTOM - (loss - self._low) * self._per_loss, 2)


def _axes(curve: Curve, scale: _Scale) -> Iterator[Shape]:
    low, high = curve.losses
    for loss in _ticks(low, high, 6):
        y = scale.y(loss)
        yield Stroke(_LEFT, y, WIDTH - _RIGHT, y, FAINT)
        yield Text(_LEFT - 8, y + 4, f"{loss:.6g}", anchor="end")
    first, last = curve.steps
    base = HEIGHT - _BOTTOM
    for step in _ticks(first, last, 8):
        if step == int(step):
            x = scale.x(step)
            yield Stroke(x, base, x, base + 5, INK)
            yield Text(x, base + 20, f"{step:,.0f}", anchor="middle")
    yield Stroke(_LEFT, base, WIDTH - _RIGHT, base, INK)
    yield Text(WIDTH - _RIGHT, base + 38, "step", anchor="end")
    yield Text(_LEFT - 8, _TOP - 6, "loss", anchor="end")


def _ticks(low: float, high: float, n: int) -> list[float]:
    """About `n` round numbers from `low` to `high`."""
    rough = max(high - low, 1e-300) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def _dots(
    points: Sequence[Point], scale: _Scale, color: str, radius: float, *, hollow: bool
) -> Iterator[Dot]:
    for step, loss in points:
        beyond = "" if scale.holds(loss) else ", outside the plot"
        title = f"step {step:,}: {loss:.6g}{beyond}"
        yield Dot(scale.x(step), scale.y(loss), radius, color, hollow, title)


def _legend(every: Sequence[Sequence[Point]], *, with_limit: bool) -> Iterator[Shape]:
    x, y = float(_LEFT + 8), HEIGHT - 20
    for points, (name, color, radius, hollow) in zip(every, _KINDS, strict=True):
        if points:
            yield Dot(x, y - 4, radius, color, hollow, name)
            yield Text(x + 14, y, name)
            x += 14 + _TEXT_CELL * len(name) + 30
    if with_limit:
        yield Stroke(x - 8, y - 4, x + 8, y - 4, _LIMIT, dashed=True)
        yield Text(x + 14, y, "a median above is a jump")


def _fitted(text: str, width: float) -> str:
    most = int(width / _TEXT_CELL)
    return text if len(text) <= most else f"{text[: most - 1]}…"


if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

FORMATS = (".svg", ".png")

_FONT = "system-ui, 'DejaVu Sans', Arial, sans-serif"
_SHARP = 2  # pixels of a PNG for one of the drawing
_DASH = 6


def check_plot(path: str) -> None:
    """Raise `UsageError` unless the name ends as one of `FORMATS`.

    Raises `MissingExtra` where the format needs a package that is not installed.
    """
    if os.path.splitext(path)[1].lower() not in FORMATS:
        raise UsageError(
            f"{path}: the name of a plot ends in {', '.join(FORMATS)}",
            instead="--plot loss.svg",
        )
    if path.lower().endswith(".png"):
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise MissingExtra(
                f"{path}: PNG needs Pillow, which is not installed; .svg needs no package",
                next_command="pip install 'ckptctl[plot]'",
            ) from error


def _drawn(report: LossReport) -> tuple[list[Shape], str] | None:
    worst = report.worst
    curve = curve_of(worst) if worst is not None else None
    if worst is None or curve is None:
        return None
    message = redacted(worst.message)
    return [*draw(curve, worst.verdict, message)], message


def write_plot(report: LossReport, path: str) -> bool:
    """Plot the worst resume into a file, atomically; False where there is no loss to draw.

    Raises `UsageError` where the file cannot be written.
    """
    check_plot(path)
    drawn = _drawn(report)
    if drawn is None:
        return False
    is_png = os.path.splitext(path)[1].lower() == ".png"
    data = _png(drawn[0]) if is_png else _svg(*drawn).encode("utf-8")
    replace_file(path, data, "the plot")
    return True


def _svg(shapes: Iterable[Shape], title: str) -> str:
    drawn = "\n".join(f"  {_element(shape)}" for shape in shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ckptctl" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="{_FONT}" role="img">\n'
        f"  <title>{as_text(title)}</title>\n"
        f'  <rect width="{WIDTH}" height="{HEIGHT}" fill="{BACKGROUND}"/>\n'
        f"{drawn}\n</svg>\n"
    )


def _element(shape: Shape) -> str:
    if isinstance(shape, Stroke):
        dash = f' stroke-dasharray="{_DASH} {_DASH - 2}"' if shape.dashed else ""
        return (
            f'<line x1="{shape.x1:g}" y1="{shape.y1:g}" x2="{shape.x2:g}" y2="{shape.y2:g}" '
            f'stroke="{shape.color}" stroke-width="{shape.width:g}"{dash}/>'
        )
    if isinstance(shape, Dot):
        paint = f'fill="none" stroke="{shape.color}" stroke-width="2"'
        paint = paint if shape.hollow else f'fill="{shape.color}"'
        return (
            f'<circle cx="{shape.x:g}" cy="{shape.y:g}" r="{shape.radius:g}" {paint}>'
            f"<title>{as_text(shape.title)}</title></circle>"
        )
    weight = ' font-weight="bold"' if shape.bold else ""
    return (
        f'<text x="{shape.x:g}" y="{shape.y:g}" fill="{shape.color}" font-size="{shape.size}" '
        f'text-anchor="{shape.anchor}"{weight}>{as_text(shape.text)}</text>'
    )


def _png(shapes: Iterable[Shape]) -> bytes:
    import io

    from PIL import Image, ImageDraw, PngImagePlugin

    image = Image.new("RGB", (WIDTH * _SHARP, HEIGHT * _SHARP), BACKGROUND)
    brush = ImageDraw.Draw(image)
    for shape in shapes:
        _paint(brush, shape)
    written = io.BytesIO()
    about = PngImagePlugin.PngInfo()
    about.add_text("Software", "ckptctl")  # by which a later plot may replace the file
    image.save(written, "PNG", optimize=True, pnginfo=about)
    return written.getvalue()


def _paint(brush: ImageDraw, shape: Shape) -> None:
    from PIL import ImageFont

    if isinstance(shape, Stroke):
        for x1, y1, x2, y2 in _dashes(shape):
            ends = (x1 * _SHARP, y1 * _SHARP, x2 * _SHARP, y2 * _SHARP)
            brush.line(ends, fill=shape.color, width=round(shape.width * _SHARP))
    elif isinstance(shape, Dot):
        x, y, r = shape.x * _SHARP, shape.y * _SHARP, shape.radius * _SHARP
        inside = None if shape.hollow else shape.color
        brush.ellipse(
            (x - r, y - r, x + r, y + r), fill=inside, outline=shape.color, width=2 * _SHARP
        )
    else:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
        font = ImageFont.load_default(shape.size * _SHARP)
        position = (shape.x * _SHARP, shape.y * _SHARP)
        brush.text(position, shape.text, fill=shape.color, font=font, anchor=anchor)


def _dashes(stroke: Stroke) -> Iterable[tuple[float, float, float, float]]:
    if not stroke.dashed:
        yield stroke.x1, stroke.y1, stroke.x2, stroke.y2
        return
    across, down = stroke.x2 - stroke.x1, stroke.y2 - stroke.y1
    n = max(1, int(max(abs(across), abs(down)) / (2 * _DASH - 2)))
    for i in range(n):
        at, end = i / n, (i + 0.6) / n
        yield (
            stroke.x1 + at * across,
            stroke.y1 + at * down,
            stroke.x1 + end * across,
            stroke.y1 + end * down,
        )
