"""Compare the flight-recorder dumps of all ranks: which collective stalled, and why.

Three observations name a rank. It *never joined* a collective in which other members of the
group wait, and does not wait for any rank itself. It is *behind*: a collective that its
peers completed is still pending there, so its device or its watchdog stopped. Its call
*differs* from those of its peers under the same sequence number. A rank that waits for
another is a consequence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.failures.rank_dumps import DEFAULT_GROUP, Call, Dump
from ckptctl.failures.results import Evidence, Role, StalledCollective
from ckptctl.formatting import verb

# Operations that no member can complete before every member has started them.
_SYMMETRIC = ("all_reduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "barrier")
_SAME_SHAPE = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast", "reduce")
_MAX_REPORTED = 50


@dataclass(frozen=True, slots=True)
class Stall:
    """What the dumps show together.

    `never_joined`, `behind` and `differing` are ranks. `in_cycle`: ranks that wait for each
    other. `without_dump`: members of the groups without a dump.
    """

    collectives: tuple[StalledCollective, ...]
    never_joined: tuple[int, ...]
    behind: tuple[int, ...]
    differing: tuple[int, ...]
    in_cycle: tuple[int, ...]
    without_dump: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The suspected ranks, in order."""
        return tuple(sorted({*self.never_joined, *self.behind}))


def evidence_of(stall: Stall, file: str) -> Iterator[Evidence]:
    """The evidence from the dumps; `file` is their location."""
    if not stall.collectives and not stall.ranks:
        return
    absent = f"{ranks_listed(stall.never_joined)} never joined" if stall.never_joined else ""
    behind = (
        f"{ranks_listed(stall.behind)} did not complete collectives that others did"
        if stall.behind
        else ""
    )
    if stall.differing:
        found = (
            "mismatch",
            "job-code",
            Role.ROOT,
            stall.differing,
            "ranks called different collectives",
        )
    elif stall.in_cycle:
        found = ("cycle", "job-code", Role.SUSPECT, stall.in_cycle, "ranks wait for each other")
    elif stall.ranks:
        description = "; ".join(filter(None, (absent, behind)))
        found = ("hang", "hang", Role.SUSPECT, stall.ranks, description)
    else:
        found = ("hang", "hang", Role.SUSPECT, (), "collectives did not complete")
    rule, failure, role, ranks, description = found
    yield Evidence(
        rule=f"recorder.{rule}",
        failure=failure,
        role=role,
        description=description,
        file=file,
        line=0,
        text=described(stall.collectives[0]) if stall.collectives else "",
        ranks=ranks,
    )


def ranks_listed(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    return f"{verb(len(ranks), 'rank', 'ranks')} {ranges_of(ranks)}"


def described(stalled: StalledCollective) -> str:
    """A stalled collective in one line: group, operation, number, shape, ranks."""
    parts = {
        "joined": stalled.joined,
        "missing": stalled.missing,
        "different": stalled.differing,
        "behind": stalled.behind,
        "no dump": stalled.without_dump,
    }
    ranks = "; ".join(f"{name}: {ranges_of(ranks)}" for name, ranks in parts.items() if ranks)
    shape = f" {stalled.shape}" if stalled.shape else ""
    types = f" {stalled.types}" if stalled.types else ""
    frame = f"; called at {stalled.frame}" if stalled.frame else ""
    return (
        f"{stalled.description or 'process group'} ({stalled.group}) {stalled.operation} "
        f"#{stalled.sequence:,}{shape}{types}; {ranks}{frame}"
    )


def ranges_of(ranks: Collection[int]) -> str:
    """Ranks as a list with ranges: `0-3, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


@dataclass(frozen=True, slots=True)
class _Group:
    """A process group: its members, and the calls of each member with a dump.

    `enqueued` are the last numbers that members without a call here state.
    """

    name: str
    description: str
    members: tuple[int, ...]
    calls: Mapping[int, Mapping[int, Call]]
    enqueued: Mapping[int, int]

    def last(self, rank: int) -> int:
        """The last sequence number that the rank reached, -1 for none."""
        return max(self.calls[rank], default=-1)

    def pending(self, rank: int, sequence: int) -> bool:
        call = self.calls[rank].get(sequence)
        return call is not None and not call.done

    def completed(self, rank: int, sequence: int) -> bool:
        """Whether the rank reached the collective, and it is no longer pending there.

        Dumps of pending calls only omit completed ones.
        """
        return self.last(rank) >= sequence and not self.pending(rank, sequence)

    def never_reached(self, rank: int, sequence: int) -> bool:
        """Whether the rank did not reach the collective, also by what it states itself."""
        return max(self.last(rank), self.enqueued.get(rank, -1)) < sequence


def compare_dumps(dumps: Sequence[Dump]) -> Stall:
    """Compare the dumps, one per rank; of several for one rank the last counts.

    Cost: linear in the recorded calls.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    groups = [*_groups(by_rank)]
    stalled = [found for group in groups if (found := _stalled(group)) is not None]
    waits = _waits(stalled, groups, by_rank)
    differing = {rank for each in stalled for rank in each.differing}
    awaited = {rank for others in waits.values() for rank in others}
    never_joined = {rank for rank in awaited if rank in by_rank and not waits.get(rank)}
    in_cycle = _cycle(waits) if not (never_joined or differing) else set()
    behind = {rank for each in stalled for rank in each.behind} - differing - in_cycle
    members = {rank for group in groups for rank in group.members}
    members |= {*range(max(by_rank, default=-1) + 1)}
    return Stall(
        collectives=tuple(sorted(stalled, key=_explains_little)[:_MAX_REPORTED]),
        never_joined=tuple(sorted(never_joined)),
        behind=tuple(sorted(behind)),
        differing=tuple(sorted(differing)),
        in_cycle=tuple(sorted(in_cycle)),
        without_dump=tuple(sorted(members - by_rank.keys())),
    )


def _explains_little(stalled: StalledCollective) -> tuple[int, int]:
    """A sort key: collectives that name ranks first, then the largest groups."""
    kind = 0 if stalled.differing else 1 if stalled.missing else 2 if stalled.behind else 3
    return kind, -len(stalled.joined)


def _groups(dumps: Mapping[int, Dump]) -> Iterator[_Group]:
    members: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    calls: dict[str, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    described: dict[str, str] = {}
    for rank, dump in dumps.items():
        for name, ranks in dump.members.items():
            members[name].add(ranks)
        for call in dump.calls:
            described[call.group] = call.description
            # Parts of a coalesced operation share a number: the last one is the whole.
            collectives = calls[call.group][rank]
            if call.pair is None:
                collectives[call.sequence] = call
    uncounted = {name for dump in dumps.values() for name in dump.uncounted}
    for name, by_rank in calls.items():
        if name in uncounted:
            by_rank = {rank: {} for rank in by_rank}
        # `split_group` gives the same name to groups of different ranks. Gloo's recorder of
        # torch 2.13 lists no members.
        listed = members[name] or {tuple(sorted(_recorded(described[name], by_rank, dumps)))}
        for ranks in sorted(listed):
            inside = {rank: by_rank.get(rank, {}) for rank in ranks if rank in dumps}
            enqueued = {
                rank: dumps[rank].enqueued[name] for rank in inside if name in dumps[rank].enqueued
            }
            yield _Group(name, described[name], ranks, inside, enqueued)


def _recorded(
    description: str, by_rank: Mapping[int, object], dumps: Mapping[int, Dump]
) -> Sequence[int]:
    return range(max(dumps) + 1) if description == DEFAULT_GROUP else [*by_rank]


def _stalled(group: _Group) -> StalledCollective | None:
    """The first pending collective of the group that not all members joined alike.

    If all joined alike, the last one that is pending on every member.
    """
    sequences = sorted(
        {
            sequence
            for rank, calls in group.calls.items()
            for sequence in calls
            if group.pending(rank, sequence)
        }
    )
    found = None
    for sequence in sequences:
        found = _collective(group, sequence)
        if found.missing or found.differing:
            return found
    return found


def _collective(group: _Group, sequence: int) -> StalledCollective:
    calls = {rank: each[sequence] for rank, each in group.calls.items() if sequence in each}
    differing = _differing(calls, len(group.members))
    first = next((call for rank, call in calls.items() if rank not in differing), None)
    first = first or next(iter(calls.values()))
    return StalledCollective(
        group=group.name,
        description=group.description,
        operation=first.operation,
        sequence=sequence,
        shape=f"{first.inputs} -> {first.outputs}".strip(" ->"),
        types=first.types,
        frame=first.frame,
        joined=tuple(rank for rank in sorted(group.calls) if group.last(rank) >= sequence),
        missing=tuple(rank for rank in sorted(group.calls) if group.never_reached(rank, sequence)),
        differing=differing,
        behind=tuple(_behind(group)),
        without_dump=tuple(sorted({*group.members} - group.calls.keys())),
    )


def _differing(calls: Mapping[int, Call], n_members: int) -> tuple[int, ...]:
    """The ranks whose call differs from the majority; all ranks if there is no majority."""
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, call in calls.items():
        same_shape = call.operation in _SAME_SHAPE
        shape = (call.inputs, call.outputs, call.types) if same_shape else ()
        kind = (call.operation, *shape)
        kinds[kind].append(rank)
    if len(kinds) > 1:
        most = max(map(len, kinds.values()))
        fewer = [ranks for ranks in kinds.values() if len(ranks) < most]
        lists = fewer if len(fewer) == len(kinds) - 1 else [*kinds.values()]
        return tuple(sorted(rank for ranks in lists for rank in ranks))
    uneven = sum(call.n_in for call in calls.values()) != sum(c.n_out for c in calls.values())
    exchanges = all(call.operation.startswith("all_to_all") for call in calls.values())
    return tuple(sorted(calls)) if exchanges and len(calls) == n_members and uneven else ()


def _behind(group: _Group) -> Iterator[int]:
    for rank, calls in group.calls.items():
        for sequence, call in calls.items():
            if call.done or not call.operation.lstrip("_").startswith(_SYMMETRIC):
                continue
            peers = (peer for peer in group.calls if peer != rank)
            if any(group.completed(peer, sequence) for peer in peers):
                yield rank
                break


def _waits(
    stalled: Sequence[StalledCollective], groups: Sequence[_Group], dumps: Mapping[int, Dump]
) -> Mapping[int, set[int]]:
    """For each waiting rank, the ranks that it waits for."""
    waits: dict[int, set[int]] = defaultdict(set)
    for each in stalled:
        for rank in each.joined:
            waits[rank] |= {*each.missing, *each.without_dump} - {rank}
    members = {(group.name, rank): group.members for group in groups for rank in group.calls}
    # Each rank counts its own point-to-point operations, so the numbers of two ranks
    # cannot be compared; how many are pending can.
    pending = Counter(
        (rank, sender, receiver)
        for rank, dump in dumps.items()
        for call in dump.calls
        if not call.done
        for sender, receiver in _ends(call, members.get((call.group, rank), ()))
    )
    for (rank, sender, receiver), n_pending in pending.items():
        peer = receiver if rank == sender else sender
        if n_pending > pending[(peer, sender, receiver)]:
            waits[rank].add(peer)
    return waits


def _ends(call: Call, members: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The sender and the receiver of a point-to-point operation, as ranks of the job."""
    if call.pair is not None and max(call.pair) < len(members):
        yield members[call.pair[0]], members[call.pair[1]]


def _cycle(waits: Mapping[int, set[int]]) -> set[int]:
    """The ranks that wait for each other, directly or through others."""
    left = {rank: {*others} for rank, others in waits.items() if others}
    while True:
        ended = [rank for rank, others in left.items() if not others & left.keys()]
        if not ended:
            return {*left}
        for rank in ended:
            del left[rank]
