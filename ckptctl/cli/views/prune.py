"""Render the plan of `prune`."""

from __future__ import annotations

from ckptctl.cli.formatting import size
from ckptctl.cli.text import Line, Span, line, padded
from ckptctl.cli.views.common import next_line
from ckptctl.selection.pruning import Pruned


def prune_lines(found: Pruned) -> list[Line]:
    """The answer, then every step with its decision and the reason, newest first."""
    lines = [line(Span(found.message, "strong"), hang=2)]
    width = max((len(str(one.number)) for one in found.decisions), default=0)
    gone = "removed" if found.applied else "goes"
    for one in found.decisions:
        word = padded(gone if one.removed else "stays", 7, "warn" if one.removed else "good")
        step = padded(str(one.number), width, right=True)
        room = padded(size(one.n_bytes), 9, right=True)
        lines.append(line("  ", word, "  ", step, room, f"  {one.reason}", hang=22 + width))
    return [*lines, *next_line(found.next_command)]
