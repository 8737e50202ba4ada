"""Draw the steps of a scan as SVG: each verdict has a colour, a glyph and a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptctl.formatting import counted
from ckptctl.markup import as_text
from ckptctl.symbols import STEP_MARKS

Document = Mapping[str, object]

_GOOD, _WARN, _BAD, _NEUTRAL = "#2a7f3f", "#b35c00", "#b3261e", "#5b6470"
_COLORS: Mapping[str, str] = {"good": _GOOD, "warn": _WARN, "bad": _BAD}
_MAX_STEPS = 40
_STEPS_PER_ROW = 8
"""So many are legible on a page."""
_ROW = 112


def timeline_of_steps(scan: Document, chosen: str | None) -> str:
    """The steps of a scan, newest first, each with its verdict; the chosen one is marked."""
    reports = [each for each in _list(scan.get("reports")) if each.get("number") is not None]
    shown = reports[:_MAX_STEPS]
    if not shown:
        return ""
    columns = min(len(shown), _STEPS_PER_ROW)
    rows = (len(shown) + columns - 1) // columns
    width = max(72, 90 * _STEPS_PER_ROW // columns)
    cells = [
        _step(report, 10 + width * (n % columns) + width // 2, _ROW * (n // columns), chosen)
        for n, report in enumerate(shown)
    ]
    title = f"The newest {counted(len(shown), 'step')} under the root, newest first"
    return _svg(20 + width * columns, _ROW * rows, title, cells)


def _step(report: Document, middle: int, y: int, chosen: str | None) -> str:
    verdict = str(report.get("verdict"))
    symbol = STEP_MARKS.get(verdict)
    color, glyph = (_COLORS[symbol.style], symbol.glyph) if symbol else (_NEUTRAL, "·")
    taken = chosen is not None and str(report.get("url")).rstrip("/") == chosen.rstrip("/")
    parts = [
        f'<rect x="{middle - 15}" y="{y + 16}" width="30" height="30" rx="4" fill="{color}"/>',
        _words(middle, y + 37, glyph, fill="#fff", size=16),
        _words(middle, y + 64, str(report.get("number")), weight="bold"),
        _words(middle, y + 80, verdict, size=11),
    ]
    if taken:
        parts.append(_words(middle, y + 100, "▲ chosen", size=11, weight="bold"))
    return "".join(parts)


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="system-ui, sans-serif">'
        f"<title>{as_text(title)}</title>{''.join(parts)}</svg>"
    )


def _words(
    x: int,
    y: int,
    text: str,
    *,
    fill: str = "currentColor",
    size: int = 12,
    weight: str = "normal",
    anchor: str = "middle",
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}">{as_text(text)}</text>'
    )


def _list(value: object) -> list[Document]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
