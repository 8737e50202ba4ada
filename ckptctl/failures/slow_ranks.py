"""Name ranks that are slower than the others, or than they were.

The relative score of a rank is the step time of the fastest rank divided by its own, the
individual score its own best step time divided by its present one; 1 is best, and below
`THRESHOLD` a rank is slow. Step times come from heartbeats, or from what NVRx and Megatron print.

Source: nvidia-resiliency-ext d8686d9, `straggler/reporting.py`; Megatron-Bridge 067f987,
`NVRxStragglerDetectionConfig` (threshold 0.7) and `training/nvrx_straggler.py` (the lines of a
report); Megatron-LM core 0.16, `core/timers.py` (the lines of the timers).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.findings import Finding
from ckptctl.formatting import listed
from ckptctl.logs.sources import log_blocks
from ckptctl.model import Fraction
from ckptctl.options import StorageOptions
from ckptctl.outside_numbers import clamped, finite
from ckptctl.storage.logs import MAX_MATCHED, found_below, logs_below

THRESHOLD = 0.7
MAX_RANKS = 1 << 20
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slower than the others, or than it was."""

    rank: int | None
    """The rank; null where the source does not name it."""
    node: str
    """Its node; empty where unknown."""
    relative: Fraction | None
    """The fastest rank's step time divided by its own; null where it was not compared."""
    individual: Fraction | None
    """Its own best step time divided by the present one; null where it was not compared."""
    source: str
    """`heartbeats`, `nvrx` or `megatron`."""


def slow_among(
    present: Mapping[int, float], best: Mapping[int, float], nodes: Mapping[int, str], source: str
) -> tuple[SlowRank, ...]:
    """The slow ranks by their present and best step times, both above 0, in any unit."""
    fastest = min(present.values(), default=0.0)
    scores = {
        rank: (
            min(1.0, fastest / time) if len(present) > 1 else None,
            min(1.0, best[rank] / time) if rank in best else None,
        )
        for rank, time in sorted(present.items())
    }
    return tuple(_slow(scores, nodes, source))


_Scores = Mapping[int, tuple[float | None, float | None]]


def _slow(scores: _Scores, nodes: Mapping[int, str], source: str) -> Iterator[SlowRank]:
    for rank, (relative, individual) in scores.items():
        if any(score is not None and score < THRESHOLD for score in (relative, individual)):
            yield SlowRank(rank, nodes.get(rank, ""), relative, individual, source)


def slow_ranks_finding(slow: Sequence[SlowRank], where: str = "") -> Finding:
    """The finding about the slow ranks of one attempt or of logs."""
    names = [_name(each) for each in slow[:_MOST_NAMED]]
    more = f" and {len(slow) - _MOST_NAMED:,} more" if len(slow) > _MOST_NAMED else ""
    return Finding("rank.slow", where, f"{listed(names)}{more}: below {THRESHOLD:g}")


def _name(slow: SlowRank) -> str:
    who = "a rank that is not named" if slow.rank is None else f"rank {slow.rank}"
    scores = [
        f"{score:.2f} {word}"
        for score, word in ((slow.relative, "of the fastest"), (slow.individual, "of its best"))
        if score is not None
    ]
    on = f" on {slow.node}" if slow.node else ""
    return f"{who}{on} ({', '.join(scores)})"


# What other programs print

_NVRX_HEAD = re.compile(r"GPU (?P<kind>relative|individual) performance")
_NVRX_SCORE = re.compile(
    r"Rank=(?P<rank>\d{1,7}) Node=(?P<node>[\w.-]{1,253}) Score=(?P<score>\d?\.\d+|\d)"
)
_TIMERS_HEAD = re.compile(r"(?P<bounds>\(min, max\) time|times) across ranks \(ms\):")
_TIMER = re.compile(r"^\s*(?P<name>forward-compute|backward-compute):\s*$")
_TIMER_RANK = re.compile(r"^\s*rank\s+(?P<rank>\d{1,7}): (?P<ms>\d{1,12}\.\d+)")
_BOUNDS = re.compile(
    r"(?:forward|backward)-compute \.*: \((?P<low>\d{1,12}\.\d+), (?P<high>\d{1,12}\.\d+)\)"
)
_HINT = re.compile("performance|Rank=|across ranks|-compute")


def slow_in_logs(
    names: Iterable[str], storage: StorageOptions = StorageOptions()
) -> tuple[SlowRank, ...]:
    """The slow ranks by the newest report in these logs, or folders of logs.

    Only timers of computation count: in those of communication the others wait for the slow one.
    Raises the errors of reading a log; a file of another user in a folder that everybody can
    write is one.
    """
    reports = _Reports()
    for name in names:
        for file in logs_below(name, storage):
            found = None if file == name else found_below(name)
            for block in log_blocks(file, storage, found):
                for _, text in block:
                    if reports.in_timer or _HINT.search(text, 0, MAX_MATCHED):
                        reports.take(text[:MAX_MATCHED])
    return reports.slow()


class _Reports:
    """The newest report of each kind in the lines so far."""

    def __init__(self) -> None:
        self._kind = ""
        self._nvrx: dict[str, dict[int, float]] = {"relative": {}, "individual": {}}
        self._nodes: dict[int, str] = {}
        self._timers: dict[str, dict[int, float]] = {}
        self._timer = ""
        self._bounds: list[float] = []

    @property
    def in_timer(self) -> bool:
        """Whether the next line may be the time of a rank."""
        return bool(self._timer)

    def take(self, text: str) -> None:
        if (head := _NVRX_HEAD.search(text)) is not None:
            self._kind = head["kind"]
            self._nvrx[self._kind] = {}
        elif self._kind and (score := _NVRX_SCORE.search(text)) is not None:
            rank = clamped(score["rank"])
            self._nvrx[self._kind][rank] = min(1.0, finite(score["score"]) or 0.0)
            self._nodes[rank] = score["node"]
        elif (head := _TIMERS_HEAD.search(text)) is not None:
            self._timer = ""
            if head["bounds"] == "times":
                self._timers = {}
            else:
                self._bounds = []
        elif (timer := _TIMER.search(text)) is not None:
            self._timer = timer["name"]
        elif self._timer and (of_rank := _TIMER_RANK.search(text)) is not None:
            times = self._timers.setdefault(self._timer, {})
            times[clamped(of_rank["rank"])] = finite(of_rank["ms"]) or 0.0
        elif (bounds := _BOUNDS.search(text)) is not None and (high := finite(bounds["high"])):
            self._bounds.append((finite(bounds["low"]) or 0.0) / high)
        else:
            self._timer = ""

    def slow(self) -> tuple[SlowRank, ...]:
        relative, individual = self._nvrx["relative"], self._nvrx["individual"]
        ranks = sorted(relative.keys() | individual.keys())
        scores = {rank: (relative.get(rank), individual.get(rank)) for rank in ranks}
        found = [*_slow(scores, self._nodes, "nvrx")]
        times: dict[int, float] = {}
        for of_rank in self._timers.values():
            for rank, ms in of_rank.items():
                times[rank] = times.get(rank, 0.0) + ms
        found += slow_among({r: ms for r, ms in times.items() if ms > 0}, {}, {}, "megatron")
        if not times and self._bounds and min(self._bounds) < THRESHOLD:
            found.append(SlowRank(None, "", min(self._bounds), None, "megatron"))
        return tuple(found)
