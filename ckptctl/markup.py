"""Put text into Markdown and SVG so that it stays text: a log, a name or a command of another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape

from ckptctl.formatting import safe


def code(text: str) -> str:
    """A piece of code in a line; `–` for nothing."""
    text = safe(text)
    if not text.strip():
        return "–"
    fence = "`" * (_longest_run(text) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def row(*cells: str) -> str:
    """A row of a table; also in code a `|` would end its cell."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def block(kind: str, lines: Iterable[str]) -> Iterator[str]:
    """Lines as a block of code, whatever they contain."""
    text = "\n".join(map(safe, lines))
    fence = "`" * max(3, _longest_run(text) + 1)
    yield from (f"{fence}{kind}", text, fence)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def as_text(text: str) -> str:
    """Text of somebody else in SVG: no markup, no control characters, no other direction."""
    return escape(safe(text))
