"""Compare the ranks with those that saved, and the saves with how often the job fails.

Numbers for a person to decide by, and no decision: neither stops a job. That a format
cannot be loaded at another world size is `pick`'s finding.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptctl.checks.world_size import check_world_size
from ckptctl.distributed.launcher import Cluster
from ckptctl.findings import Report
from ckptctl.formatting import duration, size
from ckptctl.goodput.measuring import Measured
from ckptctl.goodput.model import Cadence, cadence_of, daly_interval
from ckptctl.model import Part
from ckptctl.preflight_checks.results import Capacity, Check, Outcome, Sized
from ckptctl.resharding.advising import Advice, advice_for
from ckptctl.resharding.sources import Source


def ranks_in(cluster: Cluster) -> tuple[int, str] | None:
    """How many ranks the job will have by the environment, and who says so; None if nobody does.

    Processes of torchrun know it. A batch script, and what it starts on each node, know
    the nodes and the GPUs of one: a rank for each GPU.
    """
    if cluster.launcher == "torchrun" and cluster.world_size:
        return cluster.world_size, "torchrun"
    if cluster.nodes and cluster.gpus_per_node:
        said = f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs"
        return cluster.nodes * cluster.gpus_per_node, said
    return None


def capacity_of(world_size: int | None, chosen: Report | None) -> Capacity:
    """Whether there are as many ranks as saved the step, fewer or more."""
    saved = chosen.world_size if chosen else None
    if world_size is None or saved is None:
        return Capacity.UNKNOWN
    if world_size < saved.size:
        return Capacity.SMALLER
    if saved.at_least:
        return Capacity.UNKNOWN
    return Capacity.AS_SAVED if world_size == saved.size else Capacity.LARGER


def sized(
    sizes: Sequence[int],
    chosen: Report,
    parts: Sequence[Part],
    source: Source | None,
    seen: Measured,
) -> Iterator[Sized]:
    """What a load of the chosen step means at each of `sizes`. Pure.

    `source` is the step as `advice_for` takes it, None where what is read is not counted.
    """
    saved = chosen.world_size
    for n_ranks in sizes:
        found = list(check_world_size(parts, chosen.state, saved, n_ranks, chosen.url))
        fixed = next((one for one in found if one.code == "world-size.fixed"), None)
        lost = tuple(
            kind for one in found if one.code == "state.lost" for kind in one.where.split(", ")
        )
        share = n_ranks / saved.size if saved else None
        step_s = seen.step_s / share if seen.step_s and share else None
        counted = fixed is None and share is not None and share != 1
        made = Sized(
            world_size=n_ranks,
            loads=fixed is None,
            lost=lost,
            resharding=advice_for(source, n_ranks) if source and counted else None,
            rank_bytes=chosen.n_bytes // n_ranks,
            share=share,
            step_s=step_s,
            message=fixed.message if fixed else "",
        )
        yield made if fixed else replace(made, message=_means(made, seen))


def _means(made: Sized, seen: Measured) -> str:
    loads = "reshards on load" if made.share else ("the number of ranks that saved it is unknown")
    words = [
        "as saved" if made.share == 1 else loads,
        f"{size(made.rank_bytes)} of the step per rank if cut evenly",
    ]
    if made.resharding is not None:
        read, needed = made.resharding.stock_bytes, made.resharding.needed_bytes
        words.append(f"stock dcp.load reads {size(read)} for {size(needed)} needed")
    words.append(f"loses {', '.join(made.lost)}" if made.lost else "loses nothing")
    if made.step_s is not None and seen.step_s is not None and made.share != 1:
        words.append(
            f"1,000 steps take about {duration(1000 * made.step_s, digits=3)} instead of "
            f"{duration(1000 * seen.step_s, digits=3)}"
        )
    return "; ".join(words)


def check_sizes(sizes: Sequence[Sized]) -> Iterator[Check]:
    """One line for each number of ranks."""
    for one in sizes:
        well = one.loads and not one.lost
        outcome = Outcome.OK if well else Outcome.WARNING
        yield Check(f"size {one.world_size}", outcome, one.message)


def check_capacity(
    world_size: int | None, source: str, chosen: Report | None, seen: Measured
) -> Check | None:
    """As saved, reshard on load, or wait: what each would mean. None where there is no step."""
    if chosen is None:
        return None
    saved = chosen.world_size
    if saved is None or world_size is None:
        by = "the number of ranks is unknown" if saved is None else _ranks(saved.size)
        return Check("capacity", Outcome.OK, f"saved by {by}; compare with --world-size N")
    if world_size == saved.size:
        return Check("capacity", Outcome.OK, f"{_ranks(world_size)}{source}, as saved")
    if saved.at_least and world_size > saved.size:
        words = f"{_ranks(world_size)}{source}, saved by {saved.size} or more"
        return Check("capacity", Outcome.OK, words)
    words = f"{_ranks(world_size)}{source}, saved by {saved.size}: reshard on load"
    lost = [one for one in chosen.findings if one.code == "state.lost"]
    if lost:
        words += f", lose {', '.join(sorted({one.where or one.message for one in lost}))}"
    return Check("capacity", Outcome.WARNING, words + _speed(world_size, saved.size, seen))


def _speed(world_size: int, saved: int, seen: Measured) -> str:
    share = world_size / saved
    words = f"; {share:.0%} of the ranks"
    if seen.step_s is not None:
        words += (
            f", so 1,000 steps take about {duration(1000 * seen.step_s / share, digits=3)} "
            f"instead of {duration(1000 * seen.step_s, digits=3)}"
        )
    if share < 1:
        words += f"; or wait for {saved - world_size} more"
    return words


def check_resharding(advice: Advice, command: str) -> Check:
    """Whether to reshard before the load."""
    if advice.pays_from == 1:
        return Check("resharding", Outcome.WARNING, advice.message, next_command=command)
    return Check("resharding", Outcome.OK, advice.message)


def check_cadence(root: str, mtbf_s: float | None, seen: Measured) -> Check:
    """How often is saved, against how often it fails and what would be best."""
    if seen.interval_s is None:
        return Check("cadence", Outcome.OK, "fewer than two saves: nothing to measure yet")
    words = f"a save every {duration(seen.interval_s, digits=3)}"
    if mtbf_s is None:
        loses = duration(seen.interval_s / 2, digits=3)
        return Check("cadence", Outcome.OK, f"{words}: a failure loses {loses} on average")
    words += f", a failure every {duration(mtbf_s, digits=3)}"
    best_s = daly_interval(seen.save_s, mtbf_s) if seen.save_s else None
    advice = "" if best_s is None else f"; best is every {duration(best_s, digits=3)}"
    command = f"ckptctl cost {shlex.quote(root)} --mtbf {mtbf_s:g}"
    cadence = cadence_of(seen.interval_s, seen.save_s, mtbf_s)
    if cadence is Cadence.ABOVE_MTBF:
        words += f": most work is repeated{advice}"
        return Check("cadence", Outcome.WARNING, words, next_command=command)
    if cadence is Cadence.LONGER_THAN_BEST:
        return Check("cadence", Outcome.WARNING, words + advice, next_command=command)
    return Check("cadence", Outcome.OK, words)


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"
