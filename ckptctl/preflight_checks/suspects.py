"""Find what several damaged steps have in common: a writer, a node, a time.

One damaged step is an accident. Two or more that the same rank, the same node or the
same hour wrote point at something that will damage the next one too. What each of them
suffers from is in its report.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterator, Sequence

from ckptctl.errors import StorageError
from ckptctl.findings import EXIT_NONE_USABLE, Report, Severity
from ckptctl.formats.bounded_json import read_json
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, shard_rank
from ckptctl.preflight_checks.results import Check, Outcome
from ckptctl.storage.contract import Store

_MAX_RECORD = 1 << 20
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
    return Check("damage", Outcome.WARNING, words, next_command=next_command)


def ranks_per_node(store: Store) -> int | None:
    """How many ranks each node had by the newest resume on record; None where there is none."""
    for record in _resumes(store):
        cluster = record.get("cluster")
        ranks = cluster.get("local_world_size") if isinstance(cluster, dict) else None
        return ranks if isinstance(ranks, int) and ranks > 0 else None
    return None


def check_writers(store: Store, chosen: Report | None) -> Check | None:
    """Whether every rank of the attempt that wrote the chosen step left a shard file.

    The attempt is the newest on record that resumed from an older step; its ranks leave a
    file each, since each has random numbers of its own to save. None where no record or a
    seal says how many ranks wrote: a step that was cut anew is sealed with its own number.
    """
    if chosen is None or chosen.number is None or not chosen.ranks:
        return None
    if chosen.world_size is not None and chosen.world_size.source == "seal":
        return None
    for record in _resumes(store):
        step, wrote = record.get("step"), record.get("world_size")
        if not isinstance(wrote, int) or (isinstance(step, int) and step >= chosen.number):
            continue
        there = {rank for _, ranks in chosen.ranks for rank in ranks}
        missing = sorted(set(range(min(wrote, _MOST_RANKS))) - there)
        if not missing:
            return Check("writers", Outcome.OK, f"shard files of all {wrote} ranks that wrote it")
        shown = ", ".join(map(str, missing[:8]))
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return Check(
            "writers",
            Outcome.FAILED,
            f"step {chosen.number}: {wrote} ranks wrote it by the record of the resume before it, "
            f"but there is no shard file of rank {shown}{more}; --saved-world-size "
            f"{len(there)} states that this is right",
            EXIT_NONE_USABLE,
            f"ckptctl show {shlex.quote(chosen.url)}",
        )
    return None


def _resumes(store: Store) -> Iterator[dict[str, object]]:
    """The records of the newest resumes, newest first; none where they cannot be read."""
    folder = f"{OWN_FOLDER}/attempts"
    try:
        names = [one.path for one in store.list_dir(folder) if one.path.endswith(".resume.json")]
        for name in sorted(names, reverse=True)[:_MOST_RECORDS]:
            record = read_json(store, name, max_bytes=_MAX_RECORD)
            if isinstance(record, dict):
                yield record
    except (StorageError, ValueError):
        return


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
    at = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return at.strftime("%Y-%m-%d %H:%M UTC")
