"""Name the rank that keeps its peers from going on, from the evidence of all nodes.

When one rank stops, its peers block in the next collective, and all heartbeats end at the same
time: the oldest heartbeat names nobody, and a rank that waits in a collective is never named.
The kinds of evidence are tried in the order of how much they prove; the first that sets some
ranks apart from the others decides. Where ranks of the job were not seen, only what a process
shows by itself counts: any of the unseen ones may be at fault.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ckptctl.failures.rank_dumps import Dump
from ckptctl.failures.stalled_collectives import compare_dumps, ranks_listed
from ckptctl.formatting import counted
from ckptctl.supervisor.evidence import STUCK, RankEvidence, Stack

_COLLECTIVES = re.compile(r"torch/distributed/(?!checkpoint/)")
"""A save calls collectives too, by files of the folder above; what it writes is no collective."""
_OF_LIBRARIES = re.compile(r"^<|/(?:site|dist)-packages/|/lib/python3\.\d+/")
_INNERMOST = 12
"""How many calls are searched for one of a collective: those of a caller are no evidence."""
_OF_STORAGE = re.compile(r"nfs|rpc_|fuse|lustre|ptlrpc|cl_sync|ll_|ceph|gpfs|cifs|smb")
"""Functions of the kernel in which a process waits for a storage of the network."""


class Named(NamedTuple):
    """The ranks at fault, none where the evidence does not decide, and why."""

    ranks: tuple[int, ...]
    why: str
    hardware: bool = False
    """The evidence speaks against their nodes, and not against the program."""


class _Kind(NamedTuple):
    """The ranks that one kind of evidence sets apart.

    With `alone` it needs no other rank: what unseen ranks do cannot explain it.
    """

    ranks: list[int]
    why: str
    alone: bool = False
    hardware: bool = False


def name_ranks(
    ranks: Sequence[RankEvidence],
    dumps: Sequence[Dump] = (),
    missing: Collection[int] = (),
    unseen: int | None = 0,
) -> Named:
    """The ranks at fault. `missing` are ranks of a node that never reported.

    `unseen` is how many ranks of the job nothing is known of; None where the number of its ranks
    is unknown. A rank that is in question alone is the one, unless it waits in a collective.
    """
    n_all = len(ranks) + len(missing)
    is_all = unseen == 0
    for kind in _kinds(ranks, dumps, missing):
        if kind.ranks and (kind.alone or is_all) and (len(kind.ranks) < n_all or not is_all):
            return _named(ranks, kind)
    if n_all == 1 and is_all and not _in_collective(ranks[0].stack):
        (only,) = ranks
        why = f"no other rank than {only.rank} is in question{_place(only.stack)}"
        return Named((only.rank,), "; ".join([why, *only.stuck]), _by_hardware(only))
    return Named((), f"the rank at fault is undecided: {_undecided(ranks, n_all, unseen)}")


def _named(ranks: Sequence[RankEvidence], kind: _Kind) -> Named:
    named = [evidence for evidence in ranks if evidence.rank in kind.ranks]
    stuck = [process for evidence in named for process in evidence.stuck]
    why = "; ".join([f"{ranks_listed(kind.ranks)} {kind.why}", *stuck])
    hardware = kind.hardware and all(_by_hardware(evidence) for evidence in named)
    return Named(tuple(sorted(kind.ranks)), why, hardware)


def _kinds(
    ranks: Sequence[RankEvidence], dumps: Sequence[Dump], missing: Collection[int]
) -> Iterator[_Kind]:
    """The ranks that each kind of evidence sets apart, the most conclusive kind first."""
    yield _Kind([rank.rank for rank in ranks if not rank.alive], "ended, and others wait", True)
    yield _Kind([rank.rank for rank in ranks if rank.state == "T"], STUCK["T"], True)
    yield _Kind([*missing], "has not reported at all")
    in_kernel = [rank.rank for rank in ranks if rank.state == "D"]
    yield _Kind(in_kernel, STUCK["D"], hardware=True)
    if len(dumps) > 1:
        stall = compare_dumps(dumps)
        if not stall.without_dump:
            yield _Kind([*stall.differing], "called another collective (flight recorder)")
            yield _Kind([*stall.ranks], "did not join a collective (flight recorder)")
    stacks = {rank.rank: rank.stack for rank in ranks if rank.stack is not None}
    silent = [rank.rank for rank in ranks if rank.asked and rank.stack is None]
    if stacks:
        yield _Kind(silent, "does not write its stacks when asked")
    outside = [rank for rank, stack in stacks.items() if not _in_collective(stack)]
    places = {_place(stacks[rank]) for rank in outside}
    # Where most are outside of it, they may all be slow, and the others only first. Of those at
    # several places one can wait for the other, by its device or by a file.
    if len(stacks) == len(ranks) and 0 < len(outside) <= len(stacks) / 2 and len(places) == 1:
        yield _Kind(outside, f"is not in the collective that the others wait in{places.pop()}")
    with_stuck = [rank.rank for rank in ranks if rank.stuck and not _in_collective(rank.stack)]
    yield _Kind(with_stuck, "waits for a process")


def _by_hardware(evidence: RankEvidence) -> bool:
    """Whether a rank waits in the kernel for what belongs to its node."""
    return evidence.state == "D" and not _OF_STORAGE.search(evidence.wait)


def _in_collective(stack: Stack | None) -> bool:
    return any(_COLLECTIVES.search(frame.file) for frame in (stack or ())[:_INNERMOST])


def _place(stack: Stack | None) -> str:
    """Where the program is: its innermost call outside of libraries."""
    if not stack:
        return ""
    own = (frame for frame in stack if not _OF_LIBRARIES.search(frame.file))
    return f": {next(own, stack[0])}"


def _undecided(ranks: Sequence[RankEvidence], n_all: int, unseen: int | None) -> str:
    if unseen is None:
        return "how many ranks the job has is unknown, and others may be at fault"
    if unseen:
        return (
            f"{counted(n_all, 'rank')} of {n_all + unseen} could be seen from here, and one of the "
            "others may be at fault"
        )
    if {rank.state for rank in ranks} == {"D"}:
        return "all ranks wait in the kernel for a device or a storage"
    stacks = {rank.stack for rank in ranks if rank.stack is not None}
    if not stacks:
        return "no rank showed its stacks; install py-spy"
    if any(rank.stack is None for rank in ranks):
        return "not all ranks showed their stacks; install py-spy"
    if all(_in_collective(stack) for stack in stacks):
        return f"all ranks wait in collectives{_place(ranks[0].stack)}"
    if len(stacks) == 1:
        return f"all ranks are at the same place{_place(*stacks)}"
    return f"the ranks are at {len(stacks)} different places"
