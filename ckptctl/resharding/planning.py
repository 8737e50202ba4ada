"""Plan a new step: which rank's file holds which slice, where, and from which records.

Pure: from a `Source` and a `Wanted` layout to a `Plan` that places every byte before
any is read. The size of each record is known exactly, because the frame around the
elements has a known length (`formats.archive.writing`).
"""

from __future__ import annotations

import hashlib
import heapq
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ckptctl.errors import OptionError, UsageError
from ckptctl.findings import EXIT_WORLD_SIZE, Finding
from ckptctl.formats.archive.writing import tensor_frame
from ckptctl.formats.dcp.writing import metadata_bytes
from ckptctl.formats.frameworks.layouts import METADATA
from ckptctl.formatting import counted, inside, some_of
from ckptctl.model import ByteRange, BytesEntry, Chunk, Chunks, TensorEntry
from ckptctl.records.slices import TensorSlice
from ckptctl.resharding.mesh import (
    Mesh,
    RankSlice,
    ShardRule,
    check_rules,
    replicated,
    rule_for,
    sharded,
)
from ckptctl.resharding.results import RankShare
from ckptctl.resharding.sources import (
    RankFile,
    Source,
    SourceBytes,
    SourcePart,
    SourceTensor,
)

TINY_BYTES = 1024
"""A tensor of one chunk and up to this many bytes stays whole, because every rank reads it."""


class PerRank(StrEnum):
    """What to do with state that exists once per rank."""

    KEEP = "keep"
    DROP = "drop"
    REFUSE = "refuse"


class PerRankRefused(UsageError, code="state.lost", exit_code=EXIT_WORLD_SIZE):
    """State that exists once per rank cannot be resharded for another world size."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The layout of the new step. `like` gives the slices of tensors by part and FQN."""

    mesh: Mesh
    rules: tuple[ShardRule, ...] = ()
    like: Mapping[tuple[str, str], tuple[RankSlice, ...]] | None = None
    per_rank: PerRank = PerRank.KEEP
    only_model: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """What lies at `start` of a target file: `elements` of a tensor, or a bytes entry."""

    entry: SourceTensor | SourceBytes
    elements: TensorSlice | None
    start: int
    length: int


@dataclass(slots=True)
class TargetFile:
    """One shard file of the new step: its path in the step, and what lies in it in order."""

    path: str
    rank: int
    items: list[Item] = field(default_factory=list)
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One folder of the new step."""

    source: SourcePart
    files: tuple[TargetFile, ...]
    entries: tuple[TensorEntry | BytesEntry, ...]
    paths: Mapping[str, tuple[str | int, ...]]
    n_cut: int
    n_whole: int

    @property
    def metadata_path(self) -> str:
        """The path of the metadata in the step."""
        return inside(self.source.path, METADATA)


@dataclass(frozen=True, slots=True)
class Plan:
    """The new step. `files` are the sidecars that are copied as they are."""

    source: Source
    wanted: Wanted
    parts: tuple[PartPlan, ...]
    files: tuple[RankFile, ...]
    findings: tuple[Finding, ...]

    @property
    def shards(self) -> tuple[TargetFile, ...]:
        """The shard files of all parts."""
        return tuple(file for part in self.parts for file in part.files)

    @property
    def n_bytes(self) -> int:
        """Bytes of the shard files and the sidecars."""
        return sum(file.n_bytes for file in self.shards) + sum(one.file.size for one in self.files)

    @property
    def identity(self) -> str:
        """A digest that is equal for equal plans: the same saves, sharded the same way."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(repr((part.source.path, part.source.digests)).encode())
            digest.update(repr([(file.path, file.n_bytes) for file in part.files]).encode())
            for entry in part.entries:
                if isinstance(entry, TensorEntry):
                    chunks = entry.chunks
                    digest.update(repr((entry.fqn, chunks.file_names)).encode())
                    columns = (chunks.offsets, chunks.sizes, chunks.starts, chunks.lengths)
                    for column in (chunks.files, *columns):
                        digest.update(column)
        digest.update(repr([(one.file.path, one.file.size) for one in self.files]).encode())
        return digest.hexdigest()[:32]


def new_metadata(part: PartPlan, url: str, identity: str) -> bytes:
    """The metadata file of a part of the step that will be at `url`."""
    save_id = str(uuid.UUID(identity))
    return metadata_bytes(part.entries, part.paths, checkpoint_id=url, save_id=save_id)


def plan(source: Source, wanted: Wanted) -> Plan:
    """Plan `source` in the layout `wanted`.

    Raises `UsageError` for rules that do not fit, and `PerRankRefused`. Cost: no read;
    time linear in the number of chunks, some 10 µs each.
    """
    shapes = {
        tensor.entry.fqn: tensor.entry.shape for part in source.parts for tensor in part.tensors
    }
    check_rules(wanted.rules, shapes, source.url)
    findings = [*_per_rank(source, wanted)]
    parts = tuple(_part(part, wanted, one_writer(source)) for part in source.parts)
    dropped = wanted.per_rank is PerRank.DROP
    files = tuple(one for one in source.files if not (dropped and one.rank is not None))
    findings += _not_alike(source, wanted)
    return Plan(source, wanted, parts, files, tuple(findings))


def shares(plan: Plan) -> Iterator[RankShare]:
    """What each target file holds, and the reads that this takes."""
    for file in plan.shards:
        n_reads = n_bytes = 0
        for item in file.items:
            if isinstance(item.entry, SourceBytes) or item.elements is None:
                n_reads += 1
                n_bytes += item.length
                continue
            for overlap in item.entry.overlaps(item.elements):
                n_reads += 1
                n_bytes += overlap.elements.n_elements * item.entry.item_bytes
        yield RankShare(file.rank, file.path, len(file.items), file.n_bytes, n_reads, n_bytes)


def one_writer(source: Source) -> bool:
    """Whether one rank saved every tensor whole, so that nothing shows what was sharded."""
    saved = source.report.world_size
    alone = saved is None or saved.size == 1
    return alone and all(t.n_cut == 1 for part in source.parts for t in part.tensors)


def _per_rank(source: Source, wanted: Wanted) -> Iterator[Finding]:
    """The findings for state that exists once per rank, for another number of ranks."""
    ranks: dict[str, set[str]] = {}
    for part in source.parts:
        entries: tuple[SourceTensor | SourceBytes, ...] = (*part.tensors, *part.bytes_entries)
        for entry in entries:
            if entry.rank is not None:
                ranks.setdefault(entry.kind, set()).add(entry.rank)
    for one in source.files:
        if one.rank is not None and one.kind is not None:
            ranks.setdefault(one.kind, set()).add(one.rank)
    n_ranks = wanted.mesh.world_size
    for kind, found in sorted(ranks.items()):
        if len(found) == n_ranks and wanted.per_rank is not PerRank.DROP:
            continue
        counts = f"{kind} exists once per rank, for {counted(len(found), 'rank')}"
        if wanted.per_rank is PerRank.REFUSE:
            raise PerRankRefused(
                f"{source.url}: {counts}, and cannot be resharded for {n_ranks}",
                next_command="ckptctl explain state.lost",
            )
        action = "left out" if wanted.per_rank is PerRank.DROP else "copied unchanged"
        yield Finding(
            "state.lost",
            kind,
            f"{counts}: it cannot be resharded for {n_ranks}, and is {action}",
            expected=f"{kind} for {counted(n_ranks, 'rank')}",
            found=f"{kind} for {counted(len(found), 'rank')}",
            next_command="ckptctl explain state.lost",
        )


def _not_alike(source: Source, wanted: Wanted) -> Iterator[Finding]:
    """The findings for values that several ranks saved, of which one is kept."""
    for part in source.parts:
        if part.several:
            names = some_of(part.several)
            yield Finding(
                "state.lost",
                part.path,
                f"each rank saved its own {names}; that of the first rank is kept",
                expected=f"one value for each of {wanted.mesh.world_size} ranks",
                found="the value of the first rank",
                next_command="ckptctl explain state.lost",
            )


def _part(part: SourcePart, wanted: Wanted, alone: bool) -> PartPlan:
    n_ranks = wanted.mesh.world_size
    tensors = [t for t in part.tensors if _goes_along(t, wanted)]
    others = [b for b in part.bytes_entries if _goes_along(b, wanted)]
    slices = [slices_for(part, tensor, wanted, alone) for tensor in tensors]
    files = tuple(TargetFile(inside(part.path, f"__{r}_0.distcp"), r) for r in range(n_ranks))
    owners = _Owners(n_ranks)
    placed = [
        [owners.fixed(one, _n_bytes(tensor, one)) for one in own]
        for tensor, own in zip(tensors, slices, strict=True)
    ]
    for n, tensor in sorted(enumerate(tensors), key=lambda each: -each[1].n_bytes):
        for at, one in enumerate(slices[n]):
            if placed[n][at] is None:
                placed[n][at] = owners.lightest(one.ranks, _n_bytes(tensor, one))
    entries: list[TensorEntry | BytesEntry] = []
    everyone = tuple(range(n_ranks))
    # As torch does, entries that are no tensors come first.
    for other in others:
        file = files[owners.lightest(everyone, other.record.length)]
        length, transforms = other.record.length, other.record.transforms
        record = ByteRange(_name(file), file.n_bytes, length, transforms)
        entries.append(BytesEntry(other.fqn, record))
        _append(file, other, None, length)
    for tensor, own, ranks in zip(tensors, slices, placed, strict=True):
        chunks = []
        for one, rank in zip(own, ranks, strict=True):
            file = files[rank or 0]
            length = tensor_frame(tensor.entry.dtype, one.elements.sizes).n_bytes
            record = ByteRange(_name(file), file.n_bytes, length)
            chunks.append(Chunk(*one.elements, record))
            _append(file, tensor, one.elements, length)
        columns = Chunks.of(len(tensor.entry.shape), chunks)
        entries.append(replace(tensor.entry, chunks=columns))
    known = {entry.fqn for entry in entries}
    paths = {fqn: path for fqn, path in part.paths.items() if fqn in known}
    n_cut = sum(len(own) > 1 for own in slices)
    return PartPlan(part, files, tuple(entries), paths, n_cut, len(slices) - n_cut)


def _goes_along(entry: SourceTensor | SourceBytes, wanted: Wanted) -> bool:
    if wanted.only_model and entry.kind != "model":
        return False
    return not (wanted.per_rank is PerRank.DROP and entry.rank is not None)


def slices_for(
    part: SourcePart, tensor: SourceTensor, wanted: Wanted, alone: bool
) -> tuple[RankSlice, ...]:
    """The slices of a tensor in the new step."""
    entry, n_ranks = tensor.entry, wanted.mesh.world_size
    if wanted.like is not None:
        like = wanted.like.get((part.path, entry.fqn))
        if not like:
            return replicated(entry.shape, n_ranks)
        shape = tuple(map(max, zip(*(one.elements.ends for one in like), strict=True)))
        if shape != entry.shape:
            raise OptionError(
                "--like",
                f": {entry.fqn} is {shape} there and {entry.shape} in this step: the models differ",
                next_command="ckptctl reshard --help",
            )
        return like
    rule = rule_for(entry.fqn, wanted.rules)
    if not entry.shape or 0 in entry.shape or not (rule or _is_cut(tensor, alone)):
        return replicated(entry.shape, n_ranks)
    return sharded(entry.shape, wanted.mesh, rule.dim if rule else None)


def _is_cut(tensor: SourceTensor, alone: bool) -> bool:
    """Whether a tensor is sharded: its writer sharded it, or was a single rank."""
    if tensor.n_cut > 1:
        return True
    of_model = tensor.kind in ("model", "optimizer")
    return alone and of_model and tensor.n_bytes > TINY_BYTES


def _n_bytes(tensor: SourceTensor, one: RankSlice) -> int:
    return one.elements.n_elements * tensor.item_bytes


class _Owners:
    """Assign slices to ranks: a slice that several ranks hold goes to the lightest of them."""

    def __init__(self, n_ranks: int) -> None:
        self._loads = [0] * n_ranks
        self._heap: list[tuple[int, int]] | None = None

    def fixed(self, one: RankSlice, n_bytes: int) -> int | None:
        """The only rank that holds a slice; None if several do."""
        if len(one.ranks) > 1:
            return None
        self._loads[one.ranks[0]] += n_bytes
        return one.ranks[0]

    def lightest(self, ranks: Sequence[int], n_bytes: int) -> int:
        """The rank among `ranks` that has the least to write so far."""
        if len(ranks) == len(self._loads):
            rank = self._lightest_of_all()
        else:
            rank = min(ranks, key=self._loads.__getitem__)
        self._loads[rank] += n_bytes + 1
        if self._heap is not None:
            heapq.heappush(self._heap, (self._loads[rank], rank))
        return rank

    def _lightest_of_all(self) -> int:
        if self._heap is None:
            self._heap = [(load, rank) for rank, load in enumerate(self._loads)]
            heapq.heapify(self._heap)
        while True:
            load, rank = heapq.heappop(self._heap)
            # A rank whose load has grown since is in the heap again, with its current load.
            if load == self._loads[rank]:
                return rank


def _name(file: TargetFile) -> str:
    return file.path.rpartition("/")[2]


def _append(
    file: TargetFile, entry: SourceTensor | SourceBytes, elements: TensorSlice | None, length: int
) -> None:
    file.items.append(Item(entry, elements, file.n_bytes, length))
    file.n_bytes += length
