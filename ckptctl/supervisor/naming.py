"""Name the rank that keeps its peers from going on, from the evidence of one node.

When one rank stops, its peers block in the next collective, and all heartbeats end at the same
time: the oldest heartbeat names nobody. The kinds of evidence are tried in the order of how
much they prove; the first that sets some ranks apart from the others decides.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ckptctl.failures.rank_dumps import Dump
from ckptctl.failures.stalled_collectives import compare_dumps, ranks_listed
from ckptctl.supervisor.evidence import STUCK, RankEvidence, Stack

_IN_COLLECTIVE = "torch/distributed/"
_OF_LIBRARIES = re.compile(r"^<|/(?:site|dist)-packages/|/lib/python3\.\d+/")
_INNERMOST = 12
"""How many calls are searched for one of a collective: those of a caller are no evidence."""


class Named(NamedTuple):
    """The ranks at fault, none where the evidence does not decide, and why."""

    ranks: tuple[int, ...]
    why: str


def name_ranks(
    ranks: Sequence[RankEvidence], dumps: Sequence[Dump] = (), missing: Collection[int] = ()
) -> Named:
    """The ranks at fault. `missing` are ranks of this node that never reported.

    A rank that is in question alone is the one.
    """
    n_all = len(ranks) + len(missing)
    for found, why in _apart(ranks, dumps, missing):
        if found and (len(found) < n_all or n_all == 1):
            stuck = [each for one in ranks if one.rank in found for each in one.stuck]
            return Named(tuple(sorted(found)), "; ".join([f"{ranks_listed(found)} {why}", *stuck]))
    if n_all == 1:
        (only,) = ranks
        why = f"no other rank than {only.rank} is in question{_place(only.stack)}"
        return Named((only.rank,), "; ".join([why, *only.stuck]))
    return Named((), f"the rank at fault is undecided: {_undecided(ranks)}")


def _apart(
    ranks: Sequence[RankEvidence], dumps: Sequence[Dump], missing: Collection[int]
) -> Iterator[tuple[list[int], str]]:
    """Ranks that one kind of evidence sets apart, the most conclusive kind first."""
    yield [each.rank for each in ranks if not each.alive], "ended, and the others wait"
    yield [each.rank for each in ranks if each.state == "T"], STUCK["T"]
    yield [*missing], "has not reported at all"
    yield [each.rank for each in ranks if each.state == "D"], STUCK["D"]
    if len(dumps) > 1:
        stall = compare_dumps(dumps)
        yield [*stall.differing], "called another collective (flight recorder)"
        yield [*stall.ranks], "did not join a collective (flight recorder)"
    silent = [each.rank for each in ranks if each.asked and each.stack is None]
    if any(each.stack is not None for each in ranks):
        yield silent, "does not write its stacks when asked"
    stacks = {each.rank: each.stack for each in ranks if each.stack is not None}
    outside = [rank for rank, stack in stacks.items() if not _in_collective(stack)]
    # Where most are outside of it, they may all be slow, and the others only first.
    if 0 < len(outside) <= len(stacks) / 2:
        place = _place(stacks[outside[0]])
        yield outside, f"is not in the collective that the others wait in{place}"
    places = defaultdict(list)
    for rank, stack in stacks.items():
        places[stack].append(rank)
    most = max(places.values(), key=len, default=[])
    if len(most) > len(stacks) / 2:
        odd = [rank for rank in stacks if rank not in most]
        place = _place(stacks[odd[0]]) if odd else ""
        yield odd, f"is at another place than the others{place}"
    yield [each.rank for each in ranks if each.stuck], "waits for a process"


def _in_collective(stack: Stack) -> bool:
    return any(_IN_COLLECTIVE in frame.file for frame in stack[:_INNERMOST])


def _place(stack: Stack | None) -> str:
    """Where the program is: its innermost call outside of libraries."""
    if not stack:
        return ""
    own = (frame for frame in stack if not _OF_LIBRARIES.search(frame.file))
    return f": {next(own, stack[0])}"


def _undecided(ranks: Sequence[RankEvidence]) -> str:
    states = {each.state for each in ranks}
    if states == {"D"}:
        return "all ranks of this node wait in the kernel for a device or a storage"
    stacks = {each.stack for each in ranks if each.stack is not None}
    if len(stacks) == 1 and all(each.stack is not None for each in ranks):
        return f"all ranks of this node are at the same place{_place(*stacks)}"
    if not stacks:
        return "no rank of this node showed its stacks; install py-spy"
    return f"the ranks of this node are at {len(stacks)} different places"
