"""Numbers for a person to decide by: ranks, saves, and what damaged steps have in common.

Compares the ranks with those that saved, and the saves with how often the job fails. Neither stops
a job. That a format cannot be loaded at another world size is `pick`'s finding.

One damaged step is an accident. Two or more that the same rank, the same node or the same hour
wrote point at something that will damage the next one too.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.distributed.launcher import Cluster
from ckptctl.errors import OwnFileUnreadable, PathNotFound, StorageError
from ckptctl.findings import EXIT_NONE_USABLE, Report, Severity
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, shard_rank
from ckptctl.formatting import command_line, counted, duration, percent, size, some_of
from ckptctl.goodput.estimating import Cadence, cadence_of, daly_interval
from ckptctl.goodput.measuring import Measured
from ckptctl.inspection.rank_files import check_world_size
from ckptctl.model import Part
from ckptctl.preflight_checks.results import Capacity, Check, CheckOutcome, Sized
from ckptctl.storage.contract import Store

if TYPE_CHECKING:
    from ckptctl.formats.own.ledger import ResumeReport


def ranks_in(cluster: Cluster) -> tuple[int, str] | None:
    """How many ranks the job will have by the environment, and its source; None if unknown.

    Processes of torchrun know it. A batch script, and what it starts on each node, know
    the nodes and the GPUs of one: a rank for each GPU.
    """
    if cluster.launcher == "torchrun" and cluster.world_size:
        return cluster.world_size, "torchrun"
    if cluster.nodes and cluster.gpus_per_node:
        source = f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs"
        return cluster.nodes * cluster.gpus_per_node, source
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
    seen: Measured,
) -> Iterator[Sized]:
    """What a load of the chosen step means at each of `sizes`. Pure."""
    saved = chosen.world_size
    for n_ranks in sizes:
        found = list(check_world_size(parts, chosen.state, saved, n_ranks, chosen.url))
        fixed = next((one for one in found if one.code == "world-size.fixed"), None)
        lost = tuple(
            kind for one in found if one.code == "state.lost" for kind in one.where.split(", ")
        )
        share = n_ranks / saved.size if saved else None
        step_s = seen.step_s / share if seen.step_s and share else None
        made = Sized(
            world_size=n_ranks,
            loads=fixed is None,
            lost=lost,
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
    words.append(f"loses {', '.join(made.lost)}" if made.lost else "loses nothing")
    if made.step_s is not None and seen.step_s is not None and made.share != 1:
        words.append(_pace(made.step_s, seen.step_s))
    return "; ".join(words)


def _pace(step_s: float, before_s: float) -> str:
    now, before = (duration(1000 * each, digits=3) for each in (step_s, before_s))
    return f"1,000 steps take about {now} instead of {before}"


def check_sizes(sizes: Sequence[Sized]) -> Iterator[Check]:
    """One line for each number of ranks."""
    for one in sizes:
        well = one.loads and not one.lost
        outcome = CheckOutcome.OK if well else CheckOutcome.WARNING
        yield Check(f"size {one.world_size}", outcome, one.message)


def check_capacity(
    world_size: int | None, source: str, chosen: Report | None, seen: Measured
) -> Check | None:
    """As saved, reshard on load, or wait: what each would mean. None where there is no step."""
    if chosen is None:
        return None
    saved = chosen.world_size
    if saved is None or world_size is None:
        by = "the number of ranks is unknown" if saved is None else counted(saved.size, "rank")
        return Check("capacity", CheckOutcome.OK, f"saved by {by}; compare with --world-size N")
    if world_size == saved.size:
        return Check(
            "capacity", CheckOutcome.OK, f"{counted(world_size, 'rank')}{source}, as saved"
        )
    if saved.at_least and world_size > saved.size:
        words = f"{counted(world_size, 'rank')}{source}, saved by {saved.size} or more"
        return Check("capacity", CheckOutcome.OK, words)
    words = f"{counted(world_size, 'rank')}{source}, saved by {saved.size}: reshard on load"
    lost = [one for one in chosen.findings if one.code == "state.lost"]
    if lost:
        words += f", lose {', '.join(sorted({one.where or one.message for one in lost}))}"
    return Check("capacity", CheckOutcome.WARNING, words + _speed(world_size, saved.size, seen))


def _speed(world_size: int, saved: int, seen: Measured) -> str:
    share = world_size / saved
    words = f"; {percent(share, 0)} of the ranks"
    if seen.step_s is not None:
        words += f", so {_pace(seen.step_s / share, seen.step_s)}"
    if share < 1:
        words += f"; or wait for {saved - world_size} more"
    return words


def check_cadence(root: str, mtbf_s: float | None, seen: Measured) -> Check:
    """How often is saved, against how often it fails and what would be best."""
    if seen.interval_s is None:
        return Check("cadence", CheckOutcome.OK, seen.why_unknown)
    words = f"a save every {duration(seen.interval_s, digits=3)}"
    if mtbf_s is None:
        loses = duration(seen.interval_s / 2, digits=3)
        return Check("cadence", CheckOutcome.OK, f"{words}: a failure loses {loses} on average")
    words += f", a failure every {duration(mtbf_s, digits=3)}"
    best_s = daly_interval(seen.save_s, mtbf_s) if seen.save_s else None
    advice = "" if best_s is None else f"; best is every {duration(best_s, digits=3)}"
    command = command_line("cost", root, "--mtbf", f"{mtbf_s:g}")
    cadence = cadence_of(seen.interval_s, seen.save_s, mtbf_s)
    if cadence is Cadence.ABOVE_MTBF:
        words += f": most work is repeated{advice}"
        return Check("cadence", CheckOutcome.WARNING, words, next_command=command)
    if cadence is Cadence.LONGER_THAN_BEST:
        return Check("cadence", CheckOutcome.WARNING, words + advice, next_command=command)
    return Check("cadence", CheckOutcome.OK, words)


_ATTEMPTS = f"{OWN_FOLDER}/attempts"
_MOST_RECORDS = 20
_MOST_RANKS = 1 << 20


def check_damage(store: Store, reports: Sequence[Report], next_command: str) -> Check | None:
    """What the damaged ones of `reports` share; None where fewer than two are damaged."""
    damaged = [one for one in reports if one.damaged]
    if len(damaged) < 2:
        return None
    steps = ", ".join(str(one.number) for one in damaged)
    shared = _writers(damaged, ranks_per_node(store)) + _times(damaged, reports)
    words = f"steps {steps} are damaged: "
    words += "; ".join(shared) if shared else "they have no writer and no time in common"
    return Check("damage", CheckOutcome.WARNING, words, next_command=next_command)


def ranks_per_node(store: Store) -> int | None:
    """How many ranks each node had by the newest resume on record; None where there is none."""
    for _, record in _resumes(store):
        if record is None:
            continue
        ranks = (record.cluster or {}).get("local_world_size")
        return ranks if isinstance(ranks, int) and ranks > 0 else None
    return None


def check_writers(store: Store, chosen: Report | None) -> Check | None:
    """Whether every rank of the attempt that wrote the chosen step left a shard file.

    The attempt is the newest on record that resumed from an older step; its ranks leave a
    file each, since each has random numbers of its own to save. None where no record or a
    seal states how many ranks wrote: a resharded step is sealed with its own number.
    """
    if chosen is None or chosen.number is None or not chosen.ranks:
        return None
    if chosen.world_size is not None and chosen.world_size.source == "seal":
        return None
    for name, record in _resumes(store):
        if record is None:
            # It may be the report of the attempt that wrote the step; an older one is not.
            return Check(
                "writers",
                CheckOutcome.WARNING,
                f"{name} cannot be read, so how many ranks wrote step {chosen.number} is not "
                "known; --saved-world-size N checks that each left a shard file",
                next_command=command_line("show", chosen.url),
            )
        step, wrote = record.step, record.world_size or 0
        if step is not None and step >= chosen.number:
            continue
        there = {rank for _, ranks in chosen.ranks for rank in ranks}
        missing = sorted(set(range(min(wrote, _MOST_RANKS))) - there)
        if not missing:
            return Check(
                "writers", CheckOutcome.OK, f"shard files of all {wrote} ranks that wrote it"
            )
        return Check(
            "writers",
            CheckOutcome.FAILED,
            f"step {chosen.number}: {wrote} ranks wrote it by the record of the resume before it, "
            f"but there is no shard file of rank {some_of(missing, 8)}; --saved-world-size "
            f"{len(there)} states that this is right",
            EXIT_NONE_USABLE,
            command_line("show", chosen.url),
        )
    return None


def _resumes(store: Store) -> Iterator[tuple[str, ResumeReport | None]]:
    """The newest resume reports, newest first, by path; None for one that cannot be read."""
    try:
        entries = store.list_dir(_ATTEMPTS)
    except PathNotFound:
        return
    except StorageError:
        yield _ATTEMPTS, None
        return
    from ckptctl.formats.own.ledger import REPORT_SUFFIX, read_report  # few roots have one

    names = sorted(one.path for one in entries if one.path.endswith(REPORT_SUFFIX))
    for name in reversed(names[-_MOST_RECORDS:]):
        record = None
        with suppress(StorageError, OwnFileUnreadable):
            record = read_report(store, name)
        yield name, record if record is not None and record.world_size is not None else None


def _writers(damaged: Sequence[Report], per_node: int | None) -> list[str]:
    ranks = [_ranks_of(one) for one in damaged]
    if not all(ranks):
        return []
    common = set.intersection(*ranks)
    if common:
        return [f"all have damage in files of rank {', '.join(map(str, sorted(common)))}"]
    if per_node is None:
        return []
    nodes = set.intersection(*({rank // per_node for rank in each} for each in ranks))
    return [
        f"all have damage in files of node {node} (ranks {node * per_node} to "
        f"{(node + 1) * per_node - 1})"
        for node in sorted(nodes)
    ]


def _ranks_of(report: Report) -> set[int]:
    words = [
        word.strip(" :,").rsplit("/", 1)[-1]
        for one in report.with_severity(Severity.FAULT)
        for word in one.where.split(",")
    ]
    return {rank for word in words if (rank := shard_rank(word)) is not None}


def _times(damaged: Sequence[Report], reports: Sequence[Report]) -> list[str]:
    times = [one.written_s for one in damaged if one.written_s is not None]
    if len(times) < len(damaged):
        return []
    first, last = min(times), max(times)
    between = [
        one
        for one in reports
        if one.usable and one.written_s is not None and first < one.written_s < last
    ]
    if between:
        return []
    if _utc(first) == _utc(last):
        return [f"all were written at {_utc(first)}, and no good one then"]
    return [f"all were written between {_utc(first)} and {_utc(last)}, and no good one then"]


def _utc(seconds: float) -> str:
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return at.strftime("%Y-%m-%d %H:%M UTC")
