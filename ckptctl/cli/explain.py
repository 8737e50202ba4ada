"""`ckptctl explain`: print the page of a code, a verdict or an exit code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from ckptctl.cli.documents import document
from ckptctl.cli.options import argument
from ckptctl.cli.output import Output
from ckptctl.cli.pages import Page, all_pages, page
from ckptctl.cli.rendering import next_line, page_lines
from ckptctl.cli.text import EMPTY, Line, Span, line, padded

EXAMPLES = ("ckptctl explain shard.truncated", "ckptctl explain 20")
EXIT_CODES = (0, 2)


def explain(
    name: Annotated[
        str | None,
        argument(
            metavar="CODE",
            help="A finding code, a verdict, an exit code, or the name of a document; without one "
            "the codes and verdicts are listed.",
        ),
    ] = None,
    *,
    out: Output,
) -> int:
    """Explain a finding code, a verdict or an exit code, and what to do about it.

    With --quiet the title alone is printed. Of a document of --json (`ckptctl.pick/1`) the
    JSON Schema is printed.
    """
    if name is not None and name.startswith("ckptctl."):
        from ckptctl.cli.schemas import schema

        out.document(schema(name))
        return 0
    pages = [page(name)] if name is not None else list(all_pages())
    out.answer(
        lambda: document("explain", explained=pages),
        lambda: index_lines(pages) if name is None else page_lines(pages[0].text, out.out.width),
        bare=(each.name if name is None else each.title for each in pages),
    )
    return 0


_HEADINGS = {"finding": "finding codes", "verdict": "verdicts", "exit-code": "exit codes"}


def index_lines(pages: Sequence[Page]) -> Iterator[Line]:
    """Every page by its name and title."""
    width = max(len(each.name) for each in pages)
    for kind, heading in _HEADINGS.items():
        yield line(Span(heading, "strong"))
        for each in pages:
            if each.kind == kind:
                yield line("  ", padded(each.name, width), "  ", each.title, hang=width + 4)
        yield EMPTY
    yield from next_line("ckptctl explain CODE")
