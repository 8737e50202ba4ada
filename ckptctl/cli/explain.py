"""`ckptctl explain`: what does a word or a number of ckptctl mean?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ckptctl.cli.documents import explain_document
from ckptctl.cli.lines import EMPTY, Line, Span, line, padded
from ckptctl.cli.output import Output
from ckptctl.cli.pages import Page, all_pages, page

EXAMPLES = ("ckptctl explain shard.short", "ckptctl explain 20")
EXIT_CODES = (0, 2)

_HEADINGS = {"finding": "finding codes", "verdict": "verdicts", "exit-code": "exit codes"}


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE",
            help="A finding code, a verdict or an exit code; without one everything is listed.",
        ),
    ] = None,
    *,
    out: Output,
) -> int:
    """What does a finding code, a verdict or an exit code mean, and what is there to do?

    With --quiet the title alone is printed.
    """
    pages = [page(name)] if name is not None else list(all_pages())
    out.answer(
        lambda: explain_document(asdict(each) for each in pages),
        lambda: _index(pages),
        bare=(each.title if name else each.name for each in pages),
        page=pages[0].text if name is not None else None,
    )
    return 0


def _index(pages: list[Page]) -> list[Line]:
    width = max(len(each.name) for each in pages)
    lines: list[Line] = []
    for kind, heading in _HEADINGS.items():
        lines.append(line(Span(heading, "strong")))
        for each in pages:
            if each.kind == kind:
                lines.append(line("  ", padded(each.name, width), "  ", each.title, hang=width + 4))
        lines.append(EMPTY)
    return [*lines, line("next: ", Span("ckptctl explain CODE", "command"), solid=True)]
