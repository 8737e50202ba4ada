"""What do several damaged steps have in common: a writer, a node, a time?

One damaged step is an accident. Two or more that the same rank, the same node or the
same hour wrote point at something that will damage the next one too. What each of them
suffers from is in its report.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from ckptctl.errors import StorageError
from ckptctl.findings import Report, Severity
from ckptctl.formats.bounded_json import read_json
from ckptctl.formats.layouts import OWN_FOLDER, shard_rank
from ckptctl.gate.results import Check, Outcome
from ckptctl.storage.contract import Store

_MAX_RECORD = 1 << 20


def check_damage(store: Store, reports: Sequence[Report], next_command: str) -> Check | None:
    """What the damaged ones of `reports` share; None where fewer than two are damaged."""
    damaged = [one for one in reports if one.damaged]
    if len(damaged) < 2:
        return None
    steps = ", ".join(str(one.number) for one in damaged)
    shared = _writers(damaged, ranks_per_node(store)) + _times(damaged, reports)
    words = f"steps {steps} are damaged: "
    words += "; ".join(shared) if shared else "they share no writer and no time"
    return Check("damage", Outcome.WARNING, words, next_command=next_command)


def ranks_per_node(store: Store) -> int | None:
    """How many ranks each node had by the newest resume on record; None where there is none."""
    folder = f"{OWN_FOLDER}/attempts"
    try:
        names = [one.path for one in store.list_dir(folder)]
        newest = max(name for name in names if name.endswith(".resume.json"))
        record = read_json(store, newest, max_bytes=_MAX_RECORD)
    except (StorageError, ValueError):
        return None
    cluster = record.get("cluster") if isinstance(record, dict) else None
    ranks = cluster.get("local_world_size") if isinstance(cluster, dict) else None
    return ranks if isinstance(ranks, int) and ranks > 0 else None


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
