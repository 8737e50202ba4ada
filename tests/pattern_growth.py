"""Whether the time of a search grows faster than the line that is searched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

MOST_GROWTH = 9.0
"""Four times the length takes four times as long; quadratic time would be sixteen times."""
TOO_SHORT_S = 0.004
"""What the longest line may cost without a closer look."""

Search = Callable[[str], object]


def seconds(search: Search, line: str, n_times: int = 4) -> float:
    """CPU time of one search: the best of several, so that a busy machine changes little."""
    taken = []
    for _ in range(n_times):
        began = time.process_time()
        search(line)
        taken.append(time.process_time() - began)
    return min(taken)


def too_slow(search: Search, lines: Callable[[int], Iterable[str]], n_chars: int) -> list[str]:
    """The lines on which a search takes more than linear time.

    `lines` makes the same lines at each length; `n_chars` is the shortest of three.
    """
    slow = []
    for one, two, four in zip(*(lines(n * n_chars) for n in (1, 2, 4)), strict=True):
        if seconds(search, four, 1) < TOO_SHORT_S:
            continue
        first, second, longest = (seconds(search, line) for line in (one, two, four))
        if longest > MOST_GROWTH * first:
            slow.append(f"{first:.4f} s, {second:.4f} s, {longest:.4f} s: {one[:60]!r}")
    return slow
