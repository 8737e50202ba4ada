"""Render the table of `cost`."""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.cli.formatting import size
from ckptctl.cli.text import EMPTY, Line, Span, line, padded
from ckptctl.cli.views.common import next_line
from ckptctl.goodput.durations import duration
from ckptctl.goodput.estimating import RecoveryCost

_NAMES = {
    "interval": "from save to save",
    "save": "a save takes",
    "mtbf": "between failures",
    "reschedule": "T1 rescheduling",
    "connect": "T2 connecting",
    "load": "T3 loading",
    "compile": "T4 compiling",
    "step": "size of a step",
}


def cost_lines(found: RecoveryCost) -> Iterator[Line]:
    """The answer, what it rests on, and what follows from it."""
    yield line(Span(found.message, "strong"), hang=2)
    yield EMPTY
    for one in found.given:
        value = size(round(one.value)) if one.unit == "B" else duration(one.value, digits=3)
        if one.value or one.source != "given":
            yield _row(_NAMES[one.name], value, one.source)
    yield EMPTY
    if found.rollback_s is not None and found.per_failure_s is not None:
        yield _row("T0 trained again", duration(found.rollback_s, digits=3), "half an interval")
        yield _row(
            "a failure costs", duration(found.per_failure_s, digits=3), "T0 + T1 + T2 + T3 + T4"
        )
    if found.lost_gpu_hours_per_failure is not None:
        yield _row("in GPU hours", f"{found.lost_gpu_hours_per_failure:,.1f}", "")
    for name, best_s, source in (
        ("best, Daly", found.daly_s, "training between two saves"),
        ("best, Young", found.young_s, "the same, first order"),
        ("best, available", found.available_s, "from save to save"),
    ):
        if best_s is not None:
            yield _row(name, duration(best_s, digits=3), source)
    if found.share is not None:
        yield _row("effective time", f"{found.share:.1%}", "of all time, as it is saved now")
    if found.best_share is not None:
        yield _row("at the best", f"{found.best_share:.1%}", "with Daly's interval")
    yield from next_line(found.next_command)


def _row(name: str, value: str, source: str) -> Line:
    return line("  ", padded(name, 18), padded(value, 12, right=True), "  ", source, hang=34)
