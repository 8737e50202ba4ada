"""Write an answer as one HTML page (`--html`): the lines of the terminal, and pictures.

Every colour has a word beside it, as in the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from textwrap import dedent

from ckptctl.cli.output import replace_text
from ckptctl.cli.rendering import Line, StyledText, made_safe, wrapped
from ckptctl.markup import as_text, page
from ckptctl.symbols import Style


def write_page(path: str, title: str, headline: str, style: Style, parts: Iterable[str]) -> None:
    """Write a page, whole; `parts` are HTML below the headline."""
    headline = f"<h1 class={style or 'strong'}>{as_text(headline)}</h1>"
    replace_text(path, page(title, (headline, *parts)), "the page")


def as_block(lines: Iterable[Line], width: int) -> str:
    """Lines of the terminal as they are, in `width` columns; a phone scrolls them sideways."""
    shown = (part for a_line in lines for part in wrapped(made_safe(a_line), width))
    text = "\n".join("".join(map(_span, a_line.spans)) for a_line in shown)
    return f"<pre tabindex=0>{text}</pre>"


def as_html(lines: Iterable[Line]) -> Iterator[str]:
    """Lines of the terminal: paths, commands and tables as they are, prose as paragraphs."""
    for solid, group in groupby(map(made_safe, lines), key=lambda a_line: a_line.solid):
        texts = ["".join(map(_span, a_line.spans)) for a_line in group]
        if solid:
            yield f"<pre tabindex=0>{dedent(chr(10).join(texts))}</pre>"
        else:
            yield from (f"<p>{text.strip()}</p>" for text in texts if text.strip())


def _span(span: StyledText) -> str:
    text = as_text(span.text)
    return f"<span class={span.style}>{text}</span>" if span.style else text
