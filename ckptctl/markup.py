"""Put text into Markdown and HTML so that it stays text: a log, a name or a command of another.

A page references nothing outside itself. It is readable without scripts, in light and dark, on
a phone and on paper.
"""

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


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page; `parts` are HTML, `title` is text."""
    return _PAGE.format(title=as_text(title), style=_STYLE, body="\n".join(parts))


def as_text(text: str) -> str:
    """Text of somebody else as HTML: no markup, no control characters, no other direction."""
    return escape(safe(text))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""

_STYLE = """
:root { color-scheme: light dark; --good: #1a7f37; --warn: #9a5b00; --bad: #b3261e; --none: #656d76;
  --line: #8884; }
@media (prefers-color-scheme: dark) {
  :root { --good: #4ac26b; --warn: #e0a03a; --bad: #ff8a80; --none: #9198a1; }
  /* A plot has colours of its own for a white page: white becomes the page's dark. */
  .plot svg, img { filter: invert(.93) hue-rotate(180deg); }
}
body { font: 16px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 72rem; margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.35rem; line-height: 1.3; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
code, pre { font: .9em/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre, .wide, figure { overflow-x: auto; }
/* On a phone a plot begins with its right end, behind the resume. */
.plot { direction: rtl; } .plot svg { direction: ltr; width: 100%; }
pre { padding: .6rem .8rem; border-radius: 6px; background: #8881; }
figure { margin: 1rem 0; } svg { max-width: 100%; min-width: 36rem; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; }
th { white-space: nowrap; }
td { border-top: 1px solid var(--line); }
td div { width: max-content; max-width: min(24rem, 60vw); }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.survived { color: var(--good); } .failed { color: var(--bad); }
pre.command { border-left: 4px solid #3b6ea5; } img { max-width: 100%; background: #fff; }
.strong, .name, .command { font-weight: 600; }
@media print {
  body { font-size: 12px; } svg { min-width: 0; } .wide, pre, figure { overflow: visible; }
  pre { white-space: pre-wrap; } td div { width: auto; }
}
"""
