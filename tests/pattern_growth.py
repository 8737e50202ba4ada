"""Whether the time of a search grows faster than the line that is searched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice

MOST_GROWTH = 9.0
"""Four times the length takes four times as long; quadratic time would be sixteen times."""
TOO_SHORT_S = 0.001
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

    `lines` makes the same lines at both lengths: `n_chars`, and four times as many.
    """
    slow = []
    for n, long in enumerate(lines(4 * n_chars)):
        once = seconds(search, long, 1)
        if once < TOO_SHORT_S:
            continue
        short = next(islice(lines(n_chars), n, None))
        first = seconds(search, short)
        # The best of several searches is no slower than one of them.
        if once > MOST_GROWTH * first and (best := seconds(search, long)) > MOST_GROWTH * first:
            slow.append(f"{first:.4f} s, {best:.4f} s for four times as much: {short[:60]!r}")
    return slow
