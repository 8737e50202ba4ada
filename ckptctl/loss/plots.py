"""How does the picture of a resume become a file?

SVG is text, and written here; HTML is the same SVG in a page. Neither asks for anything
outside itself. PNG is painted by Pillow, an extra. What is drawn is the question of
`drawing`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from ckptctl.errors import MissingExtra, UsageError
from ckptctl.loss.checking import LossReport
from ckptctl.loss.curve import curve_of
from ckptctl.loss.drawing import (
    BACKGROUND,
    HEIGHT,
    WIDTH,
    Dot,
    Shape,
    Stroke,
    draw,
)

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

FORMATS = (".svg", ".html", ".png")

_FONT = "system-ui, 'DejaVu Sans', Arial, sans-serif"
_SHARP = 2  # PNG has so many pixels for one of the drawing
_DASH = 6


def check_plot(path: str) -> None:
    """Raise `UsageError` unless a picture can be written under such a name.

    Raises `MissingExtra` where it takes a package that is not installed.
    """
    if os.path.splitext(path)[1].lower() not in FORMATS:
        raise UsageError(
            f"{path}: a picture is a file that ends in {', '.join(FORMATS)}",
            instead="--plot loss.svg",
        )
    if path.lower().endswith(".png"):
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise MissingExtra(
                f"{path}: PNG takes Pillow, which is not installed; .svg and .html take nothing",
                next_command="pip install 'ckptctl[plot]'",
            ) from error


def write_plot(report: LossReport, path: str) -> bool:
    """Draw what was judged into a file, whole or not at all; False where there is nothing to draw.

    Raises `UsageError` where the file cannot be written.
    """
    check_plot(path)
    judged = report.judged
    curve = curve_of(judged) if judged is not None else None
    if judged is None or curve is None:
        return False
    shapes = draw(curve, judged.verdict, judged.message)
    ending = os.path.splitext(path)[1].lower()
    if ending == ".png":
        data = _png(shapes)
    else:
        text = _svg(shapes, judged.message)
        data = (_html(text, judged.message) if ending == ".html" else text).encode("utf-8")
    aside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(aside, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except OSError as error:
        raise UsageError(f"the picture cannot be written to {path}: {error.strerror}") from error
    return True


def _svg(shapes: Iterable[Shape], title: str) -> str:
    drawn = "\n".join(f"  {_element(shape)}" for shape in shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="{_FONT}" role="img">\n'
        f"  <title>{escape(title)}</title>\n"
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
            f"<title>{escape(shape.title)}</title></circle>"
        )
    weight = ' font-weight="bold"' if shape.bold else ""
    return (
        f'<text x="{shape.x:g}" y="{shape.y:g}" fill="{shape.color}" font-size="{shape.size}" '
        f'text-anchor="{shape.anchor}"{weight}>{escape(shape.text)}</text>'
    )


def _html(svg: str, title: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        "<style>body { margin: 1rem; } svg { max-width: 100%; height: auto; }</style>\n"
        f"</head>\n<body>\n{svg}</body>\n</html>\n"
    )


def _png(shapes: Iterable[Shape]) -> bytes:
    import io

    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WIDTH * _SHARP, HEIGHT * _SHARP), BACKGROUND)
    brush = ImageDraw.Draw(image)
    for shape in shapes:
        _paint(brush, shape)
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
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
        place = (shape.x * _SHARP, shape.y * _SHARP)
        brush.text(place, shape.text, fill=shape.color, font=font, anchor=anchor)


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
