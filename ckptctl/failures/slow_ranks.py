"""Name ranks that are slower than the others, or than they were, by their heartbeats.

The relative score of a rank is the step time of the fastest rank divided by its own, the
individual score its own best step time divided by its present one; 1 is best, and below
`THRESHOLD` a rank is slow.

Source: nvidia-resiliency-ext d8686d9, `straggler/reporting.py`; Megatron-Bridge 067f987,
`NVRxStragglerDetectionConfig` (threshold 0.7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.findings import Finding
from ckptctl.formatting import listed
from ckptctl.model import Fraction

THRESHOLD = 0.7
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slower than the others, or than it was."""

    rank: int
    """The rank."""
    node: str
    """Its node; empty where unknown."""
    relative: Fraction | None
    """The fastest rank's step time divided by its own; null where it was not compared."""
    individual: Fraction | None
    """Its own best step time divided by the present one; null where it was not compared."""


def slow_among(
    present: Mapping[int, float], best: Mapping[int, float], nodes: Mapping[int, str]
) -> Iterator[SlowRank]:
    """The slow ranks by their present and best step times, both above 0, in any unit."""
    fastest = min(present.values(), default=0.0)
    for rank, time in sorted(present.items()):
        relative = min(1.0, fastest / time) if len(present) > 1 else None
        individual = min(1.0, best[rank] / time) if rank in best else None
        if any(score is not None and score < THRESHOLD for score in (relative, individual)):
            yield SlowRank(rank, nodes.get(rank, ""), relative, individual)


def slow_ranks_finding(slow: Sequence[SlowRank], where: str) -> Finding:
    """The finding about the slow ranks of one attempt."""
    names = [_name(each) for each in slow[:_MOST_NAMED]]
    more = f" and {len(slow) - _MOST_NAMED:,} more" if len(slow) > _MOST_NAMED else ""
    return Finding("rank.slow", where, f"{listed(names)}{more}: below {THRESHOLD:g}")


def _name(slow: SlowRank) -> str:
    scores = [
        f"{score:.2f} {word}"
        for score, word in ((slow.relative, "of the fastest"), (slow.individual, "of its best"))
        if score is not None
    ]
    on = f" on {slow.node}" if slow.node else ""
    return f"rank {slow.rank}{on} ({', '.join(scores)})"
