"""Plan a new step: which rank's file holds which slice, where, and from which records.

Pure: from a `Source` and a `TargetLayout` to a `Plan` that places every byte before
any is read. The size of each record is known exactly, because the frame around the
elements has a known length (`formats.archive.writing`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ckptctl.errors import OptionError
from ckptctl.findings import Finding
from ckptctl.formats.archive.writing import tensor_frame
from ckptctl.formats.frameworks.layouts import METADATA
from ckptctl.formatting import counted, inside, some_of
from ckptctl.model import ByteRange, BytesEntry, Chunk, Chunks, TensorEntry
from ckptctl.records.slices import Dims, TensorSlice
from ckptctl.resharding.results import RankShare
from ckptctl.resharding.sources import RankFile, Source, SourceBytes, SourcePart, SourceTensor

TINY_BYTES = 1024
"""A tensor of one chunk and up to this many bytes stays whole, because every rank reads it."""


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """The layout of the new step."""

    world_size: int
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

    @property
    def metadata_path(self) -> str:
        """The path of the metadata in the step."""
        return inside(self.source.path, METADATA)


@dataclass(frozen=True, slots=True)
class Plan:
    """The new step. `files` are the sidecars that are copied as they are."""

    source: Source
    wanted: TargetLayout
    parts: tuple[PartPlan, ...]
    files: tuple[RankFile, ...]
    findings: tuple[Finding, ...]

    @property
    def shards(self) -> tuple[TargetFile, ...]:
        """The shard files of all parts."""
        return tuple(file for part in self.parts for file in part.files)

    @property
    def n_cut(self) -> int:
        """Tensors in several chunks."""
        return sum(part.n_cut for part in self.parts)

    @property
    def n_tensors(self) -> int:
        """Tensors of all parts."""
        return sum(isinstance(entry, TensorEntry) for part in self.parts for entry in part.entries)

    @property
    def n_values(self) -> int:
        """Entries that are no tensors."""
        return sum(len(part.entries) for part in self.parts) - self.n_tensors

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


def plan(source: Source, wanted: TargetLayout) -> Plan:
    """Plan `source` in the layout `wanted`.

    Cost: no read; time linear in the number of chunks, some 10 µs each.
    """
    # Where one rank saved every tensor whole, nothing shows what was sharded.
    saved = source.report.world_size
    alone = (saved is None or saved.size == 1) and all(
        tensor.n_cut == 1 for part in source.parts for tensor in part.tensors
    )
    parts = tuple(_part(part, wanted, alone) for part in source.parts)
    findings = tuple(_notes(source, wanted.world_size))
    return Plan(source, wanted, parts, source.files, findings)


def shares(plan: Plan) -> Iterator[RankShare]:
    """What each target file holds, and the reads that this takes."""
    for file in plan.shards:
        n_reads = n_bytes = 0
        for item in file.items:
            if isinstance(item.entry, SourceBytes) or item.elements is None:
                n_reads += 1
                n_bytes += item.length
                continue
            for _, common in item.entry.overlaps(item.elements):
                n_reads += 1
                n_bytes += common.n_elements * item.entry.item_bytes
        yield RankShare(file.rank, file.path, len(file.items), file.n_bytes, n_reads, n_bytes)


def _notes(source: Source, n_ranks: int) -> Iterator[Finding]:
    """The findings for state of each rank, of which one is kept, or as many as there were."""
    ranks: dict[str, set[str]] = {}
    for part in source.parts:
        for entry in part.entries:
            if entry.rank is not None:
                ranks.setdefault(entry.kind, set()).add(entry.rank)
    for sidecar in source.files:
        if sidecar.rank is not None and sidecar.kind is not None:
            ranks.setdefault(sidecar.kind, set()).add(sidecar.rank)
    for kind, saved in sorted(ranks.items()):
        if len(saved) == n_ranks:
            continue
        saved_for = counted(len(saved), "rank")
        yield Finding(
            "state.lost",
            kind,
            f"{kind} exists once per rank, for {saved_for}: it cannot be resharded for {n_ranks}, "
            "and is copied unchanged",
            expected=f"{kind} for {counted(n_ranks, 'rank')}",
            found=f"{kind} for {saved_for}",
            next_command="ckptctl explain state.lost",
        )
    for part in source.parts:
        if part.several:
            yield Finding(
                "state.lost",
                part.path,
                f"each rank saved its own {some_of(part.several)}; that of the first rank is kept",
                expected=f"one value for each of {n_ranks} ranks",
                found="the value of the first rank",
                next_command="ckptctl explain state.lost",
            )


def _part(part: SourcePart, wanted: TargetLayout, alone: bool) -> PartPlan:
    n_ranks = wanted.world_size
    tensors = [t for t in part.tensors if _goes_along(t, wanted)]
    others = [b for b in part.bytes_entries if _goes_along(b, wanted)]
    files = tuple(TargetFile(inside(part.path, f"__{r}_0.distcp"), r) for r in range(n_ranks))
    loads = [0] * n_ranks
    slices: list[Sequence[TensorSlice]] = []
    for tensor in tensors:
        if not _is_sharded(tensor, alone):
            slices.append((TensorSlice.whole(tensor.entry.shape),))
            continue
        slices.append(sharded(tensor.entry.shape, n_ranks))
        for rank, elements in enumerate(slices[-1]):
            loads[rank] += elements.n_elements * tensor.item_bytes
    lightest = LightestRank(loads)
    # What every rank holds is written by one of them, the largest first.
    writers: dict[int, int] = {}
    for n, tensor in sorted(enumerate(tensors), key=lambda numbered: -numbered[1].n_bytes):
        if not _is_sharded(tensor, alone):
            writers[n] = lightest.give(tensor.n_bytes)
    entries: list[TensorEntry | BytesEntry] = []
    # As torch does, entries that are no tensors come first.
    for other in others:
        file = files[lightest.give(other.record.length)]
        entries.append(BytesEntry(other.fqn, _append(file, other, None, other.record.length)))
    for n, (tensor, own) in enumerate(zip(tensors, slices, strict=True)):
        chunks = []
        for rank, elements in enumerate(own, writers.get(n, 0)):
            length = tensor_frame(tensor.entry.dtype, elements.sizes).n_bytes
            chunks.append(Chunk(*elements, _append(files[rank], tensor, elements, length)))
        columns = Chunks.of(len(tensor.entry.shape), chunks)
        entries.append(replace(tensor.entry, chunks=columns))
    known = {entry.fqn for entry in entries}
    paths = {fqn: path for fqn, path in part.paths.items() if fqn in known}
    n_cut = sum(len(own) > 1 for own in slices)
    return PartPlan(part, files, tuple(entries), paths, n_cut)


def _goes_along(entry: SourceTensor | SourceBytes, wanted: TargetLayout) -> bool:
    return not wanted.only_model or entry.kind == "model"


def _is_sharded(tensor: SourceTensor, alone: bool) -> bool:
    """Whether a tensor becomes slices: its writer sharded it, or was a single rank."""
    if not tensor.entry.shape or 0 in tensor.entry.shape:
        return False
    of_model = tensor.kind in ("model", "optimizer")
    return tensor.n_cut > 1 or (alone and of_model and tensor.n_bytes > TINY_BYTES)


class LightestRank:
    """The rank that has the least to write so far."""

    def __init__(self, loads: Sequence[int]) -> None:
        self._heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def give(self, n_bytes: int) -> int:
        """Give it more to write, and return it."""
        load, rank = self._heap[0]
        heapq.heapreplace(self._heap, (load + n_bytes + 1, rank))
        return rank


def _append(
    file: TargetFile, entry: SourceTensor | SourceBytes, elements: TensorSlice | None, length: int
) -> ByteRange:
    """Where a record of this length is placed in a file, behind those that are there."""
    transforms = entry.record.transforms if isinstance(entry, SourceBytes) else ()
    place = ByteRange(file.path.rpartition("/")[2], file.n_bytes, length, transforms)
    file.items.append(Item(entry, elements, file.n_bytes, length))
    file.n_bytes += length
    return place


MAX_RANKS = 1 << 20


def check_world_size(n_ranks: int | None) -> None:
    """Raise `UsageError` for a `--world-size` that no job has."""
    if n_ranks is not None and not 1 <= n_ranks <= MAX_RANKS:
        bound = "at least 1 is required" if n_ranks < 1 else f"at most {MAX_RANKS:,} are possible"
        raise OptionError("--world-size", f"is {n_ranks:,}; {bound}")


@lru_cache(maxsize=65_536)
def sharded(shape: Dims, n_ranks: int) -> tuple[TensorSlice, ...]:
    """The slices of a tensor that is sharded along dimension 0, by rank; none is empty.

    They are those of FSDP2 and `torch.chunk`: of equal size, rounded up, so that the last ranks
    may hold less or nothing. Source: torch 2.13 `torch/distributed/tensor/placement_types.py`
    (`Shard`), `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`.
    """
    length, rest = -(-shape[0] // n_ranks), (0,) * (len(shape) - 1)
    return tuple(
        TensorSlice((start, *rest), (min(length, shape[0] - start), *shape[1:]))
        for start in range(0, shape[0], length)
    )
