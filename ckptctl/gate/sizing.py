"""Are there enough ranks, and are saves frequent enough for how often the job fails?

Numbers for a person to decide by, and no decision: neither stops a job. That a format
cannot be loaded at another world size is `pick`'s finding.
"""

from __future__ import annotations

import shlex

from ckptctl.cost.durations import duration
from ckptctl.cost.measuring import Measured
from ckptctl.cost.model import daly_interval
from ckptctl.findings import Report
from ckptctl.gate.results import Check, Outcome
from ckptctl.resharding.advising import Advice
from ckptctl.train.cluster import Cluster


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


def check_capacity(
    world_size: int | None, source: str, chosen: Report | None, seen: Measured
) -> Check | None:
    """As saved, reshard on load, or wait: what each would mean. None where there is no step."""
    if chosen is None:
        return None
    saved = chosen.world_size
    if saved is None or world_size is None:
        by = "nobody knows how many ranks" if saved is None else _ranks(saved.size)
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


def check_resharding(advice: Advice | None, command: str) -> Check | None:
    """Whether to reshard before the load; None where nothing is known, or nothing changes."""
    if advice is None:
        return None
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
    if seen.interval_s >= mtbf_s:
        words += f": most work is done again{advice}"
        return Check("cadence", Outcome.WARNING, words, next_command=command)
    if best_s is not None and seen.interval_s > 2 * best_s:
        return Check("cadence", Outcome.WARNING, words + advice, next_command=command)
    return Check("cadence", Outcome.OK, words)


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"
