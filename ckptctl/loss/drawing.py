"""What does the picture of a resume consist of: lines, dots and words, in pixels?

The same shapes become SVG or PNG (`plots`). Colours are those that people with any kind
of colour vision tell apart; every kind of point has a form of its own besides.
Source of the colours: Okabe and Ito, Color Universal Design.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptctl.loss.curve import Curve, Point
from ckptctl.loss.verdict import LossVerdict

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
_TEXT_CELL = 7.0  # a letter of 13 pixels is about so wide


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
    """A disc, or a ring where it is `hollow`; `title` is shown under the pointer."""

    x: float
    y: float
    radius: float
    color: str
    hollow: bool
    title: str


@dataclass(frozen=True, slots=True)
class Words:
    """A piece of text on its base line; `anchor` is `start`, `middle` or `end`."""

    x: float
    y: float
    text: str
    color: str = INK
    anchor: str = "start"
    size: int = 13
    bold: bool = False


Shape = Stroke | Dot | Words


def draw(curve: Curve, verdict: LossVerdict, message: str) -> tuple[Shape, ...]:
    """The shapes of a picture, in the order in which they are painted."""
    return tuple(_shapes(curve, verdict, message))


def _shapes(curve: Curve, verdict: LossVerdict, message: str) -> Iterator[Shape]:
    scale = _Scale(curve)
    yield Words(_LEFT, 26, verdict.value, _VERDICTS[verdict], size=18, bold=True)
    yield Words(_LEFT, 46, _fitted(message, WIDTH - _LEFT - _RIGHT))
    yield from _axes(curve, scale)
    if curve.limit is not None:
        y = scale.y(curve.limit)
        yield Stroke(_LEFT, y, WIDTH - _RIGHT, y, _LIMIT, dashed=True)
        yield Words(_LEFT + 6, y - 5, "a median above is a jump", _LIMIT)
    if curve.before:
        x = scale.x(curve.first_step - 0.5)
        yield Stroke(x, _TOP, x, HEIGHT - _BOTTOM, INK, dashed=True)
        yield Words(x + 6, _TOP + 12, "resume")
    every = (curve.before, curve.overwritten, curve.after)
    for points, (_, color, radius, hollow) in zip(every, _KINDS, strict=True):
        yield from _dots(points, scale, color, radius, hollow=hollow)
    yield from _legend(every)


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
        yield Words(_LEFT - 8, y + 4, f"{loss:.6g}", anchor="end")
    first, last = curve.steps
    base = HEIGHT - _BOTTOM
    for step in _ticks(first, last, 8):
        if step == int(step):
            x = scale.x(step)
            yield Stroke(x, base, x, base + 5, INK)
            yield Words(x, base + 20, f"{step:,.0f}", anchor="middle")
    yield Stroke(_LEFT, base, WIDTH - _RIGHT, base, INK)
    yield Words(WIDTH - _RIGHT, base + 38, "step", anchor="end")
    yield Words(_LEFT - 8, _TOP - 6, "loss", anchor="end")


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
        beyond = "" if scale.holds(loss) else ", beyond what is drawn"
        title = f"step {step:,}: {loss:.6g}{beyond}"
        yield Dot(scale.x(step), scale.y(loss), radius, color, hollow, title)


def _legend(every: Sequence[Sequence[Point]]) -> Iterator[Shape]:
    x, y = float(_LEFT + 8), HEIGHT - 20
    for points, (name, color, radius, hollow) in zip(every, _KINDS, strict=True):
        if points:
            yield Dot(x, y - 4, radius, color, hollow, name)
            yield Words(x + 14, y, name)
            x += 14 + _TEXT_CELL * len(name) + 30


def _fitted(text: str, width: float) -> str:
    most = int(width / _TEXT_CELL)
    return text if len(text) <= most else f"{text[: most - 1]}…"
