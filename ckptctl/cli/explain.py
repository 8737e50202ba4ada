"""`ckptctl explain`: print the page of a code, a verdict or an exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptctl.cli.documents import document
from ckptctl.cli.output import Output
from ckptctl.cli.pages import all_pages, page
from ckptctl.cli.views.explain import index_lines, page_lines

EXAMPLES = ("ckptctl explain shard.truncated", "ckptctl explain 20")
EXIT_CODES = (0, 2)


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
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
