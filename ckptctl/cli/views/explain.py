"""Render a page of Markdown on a terminal, and the index of all pages.

The pages use little of Markdown: headings, paragraphs, lists, tables, fenced commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptctl.cli.pages import Page
from ckptctl.cli.text import EMPTY, Line, Span, line, padded
from ckptctl.cli.views.common import next_line

_HEADINGS = {"finding": "finding codes", "verdict": "verdicts", "exit-code": "exit codes"}


def page_lines(text: str, width: int | None) -> Iterator[Line]:
    """The page: on a terminal prose fills its width, off a terminal it is as it was written."""
    if width is None:
        yield from (line(each, solid=True) for each in text.splitlines())
        return
    for number, block in enumerate(text.split("\n\n")):
        if number:
            yield EMPTY
        yield from _block_lines(block.splitlines())


def _block_lines(block: Sequence[str]) -> Iterator[Line]:
    if block[0].startswith("#"):
        yield line(Span(block[0].lstrip("# "), "strong"), hang=2)
    elif block[0].startswith("```"):
        yield from (line("  ", Span(each, "command"), solid=True) for each in block[1:-1])
    elif block[0].startswith("|"):
        yield from (line(each, solid=True) for each in block)
    elif block[0].startswith("- "):
        items = "\n".join(block).removeprefix("- ").split("\n- ")
        yield from (line("- ", " ".join(item.split()), hang=2) for item in items)
    else:
        yield line(" ".join(block))


def index_lines(pages: Sequence[Page]) -> Iterator[Line]:
    """Every page by its name and title."""
    width = max(len(page.name) for page in pages)
    for kind, heading in _HEADINGS.items():
        yield line(Span(heading, "strong"))
        for page in pages:
            if page.kind == kind:
                yield line("  ", padded(page.name, width), "  ", page.title, hang=width + 4)
        yield EMPTY
    yield from next_line("ckptctl explain CODE")
