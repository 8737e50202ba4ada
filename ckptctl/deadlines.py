"""Bound the time that a reader of outside data takes, by the amount of data that it reads.

Patterns take linear time and lines have a bounded length, so a reader never reaches its deadline.
It is the net below them: a reader that is slower than any log explains stops, and its result
states what was not read.
"""

from __future__ import annotations

import math
import time

BASE_S = 20.0
"""Seconds of the processor that any input may take."""
BYTES_PER_S = 100_000
"""More bytes add time at this rate; the shortest rows are read ten times as fast."""
_CHECK_S = 0.01


class Deadline:
    """When a reader has to stop.

    The budget is processor time of this thread, `base_s` and a second for each `bytes_per_s`
    bytes that were read: a slow storage, a pipe that pauses and a busy machine use up none of it.
    `limit_s` are seconds of the clock on the wall after which it passes in any case.
    """

    def __init__(
        self,
        limit_s: float | None = None,
        *,
        base_s: float = BASE_S,
        bytes_per_s: float = BYTES_PER_S,
    ) -> None:
        self._until_s = math.inf if limit_s is None else time.monotonic() + limit_s
        self._checks_at_s = -math.inf
        self._began_s = time.thread_time()
        self._budget_s = base_s
        self._bytes_per_s = bytes_per_s
        self.reached = False
        """Whether a reader found that it has passed, and stopped."""

    def extend(self, n_bytes: int) -> None:
        """Add the time for bytes that were read."""
        self._budget_s += n_bytes / self._bytes_per_s

    def passed(self) -> bool:
        """Whether the reader has to stop now; true from then on."""
        now_s = time.monotonic()
        if not self.reached and now_s >= self._checks_at_s:
            # The processor time costs a system call, and lines are read in microseconds.
            self._checks_at_s = min(now_s + _CHECK_S, self._until_s)
            used_s = time.thread_time() - self._began_s
            self.reached = used_s > self._budget_s or now_s >= self._until_s
        return self.reached
