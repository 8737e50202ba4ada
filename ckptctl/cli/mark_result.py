"""Print the result of `reject`, `accept` and `pin`."""

from __future__ import annotations

from ckptctl.cli.documents import document
from ckptctl.cli.output import Output
from ckptctl.cli.views.notes import marked_lines
from ckptctl.selection.results import Marked


def answer_marked(marked: Marked, out: Output) -> int:
    """Print what was said of a step, or with `--quiet` where that lies; gives the exit code."""
    out.answer(
        lambda: document("marked", marked),
        lambda: marked_lines(marked),
        bare=() if marked.path is None else (marked.path,),
    )
    return marked.exit_code
