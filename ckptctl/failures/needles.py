"""Which rules may have something to say on which lines of a block of a log?

Hundreds of needles are looked for, and nearly every line holds none of them. So a block
is searched as one text: the words in it, each once, say which needles it can hold at
all, and these few are looked for. A line that is named here may still say nothing: the
patterns of the rules are the question of `matching`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckptctl.failures.rules import RULES

# What seems to hold a needle on line after line of healthy logs. All patterns want `inf` as
# a word, or `infinity`; the others are columns of Megatron-LM's line of a step.
_ONLY_SEEMS = {
    b"inf": b"info",
    b"nan": b"number of nan iterations:",
    b"batch size": b"global batch size:",
    b"sample": b"consumed samples:",
}
_FRAMES = (b"traceback (most recent", b"root cause (first")


@dataclass(frozen=True, slots=True)
class Hits:
    """What is on the lines of a block, by their index in it.

    `rules`: those of which the line holds a needle; none where it only seems to. `frames`:
    lines that may be the head of what frames others. `losses`: lines that speak of a loss.
    """

    rules: Mapping[int, frozenset[int]]
    frames: frozenset[int]
    losses: frozenset[int]


def _by_needle() -> Mapping[bytes, frozenset[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for number, rule in enumerate(RULES):
        for needle in rule.needles:
            found[needle].add(number)
    return {needle.encode(): frozenset(numbers) for needle, numbers in found.items()}


def _by_word(needles: Mapping[bytes, frozenset[int]]) -> Mapping[bytes, tuple[bytes, ...]]:
    """The needles by the longest run of letters in each; `b""` for those without letters."""
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for needle in needles:
        found[max(re.findall(b"[a-z]*", needle), key=len)].append(needle)
    return {word: tuple(each) for word, each in found.items()}


_NEEDLES = _by_needle()
_BY_WORD = _by_word(_NEEDLES)
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_ONLY_LETTERS = bytes(byte if byte in _LETTERS else 32 for byte in range(256))


def find_needles(texts: Sequence[str]) -> Hits:
    """What `matching` has to look at in these lines; no text has a line end in it.

    Cost: what it takes to find the words of the block, and a search for each needle whose
    word is there.
    """
    block = "\n".join(texts).lower().encode("utf-8", "surrogatepass")
    ends = tuple(accumulate(len(line) + 1 for line in block.split(b"\n")))
    words = b" ".join({*block.translate(_ONLY_LETTERS).split()})
    rules: dict[int, frozenset[int]] = defaultdict(frozenset)
    for word, needles in _BY_WORD.items():
        if word not in words:
            continue
        for needle in needles:
            for line in _lines_with(needle, block, ends):
                only_seems = needle in _ONLY_SEEMS and _only_seems(needle, block, line, ends)
                rules[line] |= frozenset() if only_seems else _NEEDLES[needle]
    return Hits(
        rules,
        frozenset(line for frame in _FRAMES for line in _lines_with(frame, block, ends)),
        frozenset(_lines_with(b"loss", block, ends)),
    )


def _lines_with(needle: bytes, block: bytes, ends: Sequence[int]) -> Iterator[int]:
    at = block.find(needle)
    while at >= 0:
        line = bisect_right(ends, at)
        yield line
        at = block.find(needle, ends[line])


def _only_seems(needle: bytes, block: bytes, line: int, ends: Sequence[int]) -> bool:
    within = (ends[line - 1] if line else 0, ends[line])
    return block.count(needle, *within) == block.count(_ONLY_SEEMS[needle], *within)
