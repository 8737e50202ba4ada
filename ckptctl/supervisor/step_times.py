"""Collect the step times of the ranks of this node from their heartbeats, and name slow ranks.

Off the training path: the ranks count, the supervisor divides. A window is a minute, as the
reports of NVRx are; the present time of a rank is that of its last window.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.failures.slow_ranks import SlowRank, slow_among
from ckptctl.formats.own.heartbeats import Heartbeat
from ckptctl.formats.own.supervision import SlowRankDocument

WINDOW_S = 60.0
"""Source: `report_time_interval` of the straggler detector of NVRx."""

MIN_STEPS = 5
"""Fewer steps in a window show nothing."""

_MOST_NAMED = 8
"""Of one attempt in the state: it holds a thousand attempts."""


class StepTimes:
    """The step times of the ranks in one attempt after the other."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the attempt before."""
        self._counted: dict[int, tuple[int, int, int]] = {}
        self._present: dict[int, float] = {}
        self._best: dict[int, float] = {}
        self._nodes: dict[int, str] = {}
        self._next_s = float("-inf")

    def take(self, beats: Mapping[int, Heartbeat], now_s: float) -> None:
        """Take the counts of the ranks, and close the window where it is over."""
        if now_s >= self._next_s:
            self.close(beats)
            self._next_s = now_s + WINDOW_S

    def close(self, beats: Mapping[int, Heartbeat]) -> None:
        """Close the window; every rank in it is compared over the same time."""
        for rank, beat in beats.items():
            steps, work_ms = beat.get("steps", 0), beat.get("work_ms", 0)
            pid, steps_before, ms_before = self._counted.get(rank, (beat["pid"], 0, 0))
            if pid != beat["pid"]:
                steps_before = ms_before = 0
            n_steps, ms = steps - steps_before, work_ms - ms_before
            if n_steps >= MIN_STEPS and ms > 0:
                time_ms = ms / n_steps
                self._present[rank] = time_ms
                self._best[rank] = min(time_ms, self._best.get(rank, time_ms))
                self._nodes[rank] = beat["node"]
                self._counted[rank] = beat["pid"], steps, work_ms
            elif rank not in self._counted or pid != beat["pid"]:
                self._counted[rank] = beat["pid"], 0, 0

    def slow(self) -> tuple[SlowRank, ...]:
        """The ranks that were slow when the last windows were closed."""
        return slow_among(self._present, self._best, self._nodes, "heartbeats")

    def documents(self) -> list[SlowRankDocument]:
        """The slow ranks as the state keeps them."""
        return [
            {
                "rank": each.rank or 0,
                "node": each.node,
                "relative_percent": _percent(each.relative),
                "individual_percent": _percent(each.individual),
            }
            for each in self.slow()[:_MOST_NAMED]
        ]


def _percent(score: float | None) -> int | None:
    return None if score is None else int(100 * score)
