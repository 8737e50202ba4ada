"""Choose the records of a subset, and the share of each process.

Records are counted by their bytes, in the order in which they lie in the files, and
the answer for one step is always the same. Nothing is read here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ckptctl.checks.content import Choose
from ckptctl.errors import UsageError

_SHARE = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")


def parse_subset(text: str | None) -> Choose | None:
    """`3/7`, the third of seven parts, or `10%`, spread over all files; None for everything.

    Seven parts of a step hold each record once. Raises `UsageError` for other words.
    """
    if text is None:
        return None
    part = _SHARE.fullmatch(text)
    if part and 1 <= int(part[1]) <= int(part[2]):
        number, of = int(part[1]), int(part[2])
        return lambda lengths: share(lengths, number, of)
    percent = _PERCENT.fullmatch(text)
    if percent and 0 < float(percent[1]) <= 100:
        fraction = float(percent[1]) / 100
        return lambda lengths: _spread(lengths, fraction)
    raise UsageError(
        f"--subset is a part of several (3/7) or of all bytes (10%), not {text!r}",
        instead="--subset 1/7",
    )


def share(lengths: Sequence[int], number: int, of: int) -> Collection[int]:
    """The records whose middle lies in part `number` of `of` equal parts of all bytes."""
    total = sum(lengths)
    chosen = []
    before = 0
    for place, length in enumerate(lengths):
        middle = 2 * before + length
        if total and min(of - 1, middle * of // (2 * total)) == number - 1:
            chosen.append(place)
        before += length
    return chosen


def _spread(lengths: Sequence[int], part: float) -> Collection[int]:
    """As many records as come to `part` of the bytes, evenly over all of them, the first always."""
    chosen = []
    passed = taken = 0
    for place, length in enumerate(lengths):
        if taken <= passed * part:
            chosen.append(place)
            taken += length
        passed += length
    return chosen
