"""Whether the time of a search grows faster than the line that is searched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice

TIMES_LONGER = 16
MOST_GROWTH = TIMES_LONGER * 5
"""Linear time grows 16 times and quadratic time 256 times: the limit is far from both."""
TOO_SHORT_S = 0.002
"""What the longer input may cost without a closer look."""
N_LOOKS = 5
"""How often an excess must be measured in a row: one busy moment is no growth."""

Search = Callable[[str], object]


def seconds(search: Search, line: str, n_times: int = 4) -> float:
    """CPU time of one search: the best of several, so that a busy machine changes little."""
    durations_s = []
    for _ in range(n_times):
        began_s = time.process_time()
        search(line)
        durations_s.append(time.process_time() - began_s)
    return min(durations_s)


def growth(search: Search, short: str, long: str) -> float:
    """How many times longer `search` takes on `long`, which is `TIMES_LONGER` times `short`.

    The smallest of several measurements counts.
    """
    smallest = float("inf")
    for _ in range(N_LOOKS):
        # No search takes less than a microsecond, the resolution of the clock.
        smallest = min(smallest, seconds(search, long, 2) / max(seconds(search, short), 1e-6))
        if smallest <= MOST_GROWTH:
            break
    return smallest


def too_slow(search: Search, lines: Callable[[int], Iterable[str]], n_chars: int) -> list[str]:
    """The lines on which a search takes more than linear time.

    `lines` makes the same lines at both lengths: half of `n_chars`, and 16 times as many.
    """
    slow = []
    n_short = n_chars // 2
    for n, long in enumerate(lines(TIMES_LONGER * n_short)):
        if seconds(search, long, 1) < TOO_SHORT_S:
            continue
        short = next(islice(lines(n_short), n, None))
        if (times := growth(search, short, long)) > MOST_GROWTH:
            slow.append(f"{times:.0f} times for {TIMES_LONGER} times as much: {short[:60]!r}")
    return slow
