"""`ckptctl cost`: estimate what a failure costs, and the best interval between saves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import ckptctl
from ckptctl.cli.options import OfNames
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import EMPTY, Line, StyledText, line, next_line, padded
from ckptctl.formatting import duration, listed, percent, size
from ckptctl.goodput.estimating import Given, RecoveryCost
from ckptctl.options import Parameter, StorageOptions

EXAMPLES = (
    "ckptctl cost /shared/ckpt/run-1234 --mtbf 8h --load 4m --reschedule 5m",
    "ckptctl cost --interval 1h --save-time 60 --nodes 2048 --failures-per-node-day 0.0065",
)
EXIT_CODES = (0, 2, 75, 77)


def cost(
    root: Annotated[
        str | None,
        Parameter("ROOT", "Folder or URL of a run; what its attempts recorded need not be given."),
    ] = None,
    interval: Annotated[
        float | None,
        Parameter(
            "--interval TIME",
            "Time from save to save: 30m, 1.5h, 3600.",
            variable="CKPTCTL_SAVE_INTERVAL",
        ),
    ] = None,
    save_time: Annotated[
        float | None, Parameter("--save-time TIME", "How long training stops for a save.")
    ] = None,
    mtbf: Annotated[
        float | None, Parameter("--mtbf TIME", "Mean time between failures of the whole job.")
    ] = None,
    nodes: Annotated[
        int | None,
        Parameter(
            "--nodes N",
            "Number of nodes, to compute --mtbf from their failure rate.",
            min=1,
            variable="CKPTCTL_NODE_COUNT",
        ),
    ] = None,
    failures_per_node_day: Annotated[
        float | None,
        Parameter(
            "--failures-per-node-day RATE",
            "Failures per node and day; 0.0065 and 0.00234 were measured on two clusters.",
            min=0,
        ),
    ] = None,
    reschedule: Annotated[
        float | None, Parameter("--reschedule TIME", "T1: time from the failure to new processes.")
    ] = None,
    connect: Annotated[
        float | None, Parameter("--connect TIME", "T2: time until the ranks are connected.")
    ] = None,
    load: Annotated[
        float | None, Parameter("--load TIME", "T3: time until the checkpoint is loaded.")
    ] = None,
    compiling: Annotated[
        float | None, Parameter("--compile TIME", "T4: time until the model is compiled.")
    ] = None,
    print_cadence: Annotated[
        bool,
        Parameter(
            "--print-cadence",
            "Print only how the interval compares with the time between failures: "
            "short-enough, longer-than-best, above-mtbf or unknown; the rest on standard error.",
            hidden=True,
        ),
    ] = False,
    *,
    requirements: OfNames,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Estimate what a failure of a run costs, and the best interval between saves.

    T = T0 + T1 + T2 + T3 + T4: half an interval is repeated, then rescheduling, connecting, loading
    and compiling. With a mean time between failures: the best interval (Young, Daly), and the share
    of time spent on training that is kept. With --quiet the best interval is printed, in seconds.
    """
    found = ckptctl.recovery_cost(
        root,
        interval_s=interval,
        save_s=save_time,
        mtbf_s=mtbf,
        n_nodes=nodes,
        failures_per_node_day=failures_per_node_day,
        reschedule_s=reschedule,
        connect_s=connect,
        load_s=load,
        compile_s=compiling,
        pattern=requirements.pattern,
        storage=storage,
    )
    bare = () if found.daly_s is None else (f"{found.daly_s:.0f}",)
    out.answer(
        document_of("cost", found),
        lambda: cost_lines(found),
        bare=(found.cadence.value,) if print_cadence else bare,
        bare_only=print_cadence,
    )
    return found.exit_code


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
    yield line(StyledText(found.message, "strong"), hang=2)
    yield EMPTY
    for one in found.given:
        value = size(round(one.value)) if one.unit == "B" else duration(one.value, digits=3)
        if one.name in _NAMES and (one.value or one.source != "given"):
            yield _row(_NAMES[one.name], value, _origin(one))
    if found.unknown and found.per_failure_s is not None:
        names = listed([_NAMES[name] for name in found.unknown])
        yield line(f"  not counted, because unknown: {names}", hang=4)
    yield EMPTY
    if found.rollback_s is not None and found.per_failure_s is not None:
        lost = next((one for one in found.given if one.name == "lost"), None)
        source = "half an interval" if lost is None else _origin(lost)
        yield _row("T0 trained again", duration(found.rollback_s, digits=3), source)
        yield _row(
            "a failure costs", duration(found.per_failure_s, digits=3), "T0 + T1 + T2 + T3 + T4"
        )
    if found.daly_s is not None:
        best = duration(found.daly_s, digits=3)
        yield _row("best, Daly", best, "training between two saves")
    if found.share is not None:
        low, high = found.share_low, found.share_high
        bounds = "" if low is None or high is None else f"; 95 %: {percent(low)} to {percent(high)}"
        source = f"of all time, as it is saved now{bounds}"
        yield _row("effective time", percent(found.share), source)
    if found.best_share is not None:
        yield _row("at the best", percent(found.best_share), "with Daly's interval")
    if found.goodput is not None:
        yield _row("so far", percent(found.goodput), "of the recorded time (ckptctl history)")
    yield from next_line(found.next_command)


def _origin(one: Given) -> str:
    """Where a number is from, with what shows how certain it is."""
    if one.n is None:
        return one.source
    if one.low is None or one.high is None:
        return f"{one.source}, mean of {one.n:,}"
    low, high = duration(one.low, digits=2), duration(one.high, digits=2)
    return f"{one.source}, {one.n:,} times; 95 %: {low} to {high}"


def _row(name: str, value: str, source: str) -> Line:
    return line("  ", padded(name, 18), padded(value, 12, right=True), "  ", source, hang=34)
