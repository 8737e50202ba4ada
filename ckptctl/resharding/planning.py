"""Plan a new step: which rank's file holds which slice, where, and from which records.

Pure: from a `Source` and a `Wanted` layout to a `Plan` that places every byte before
any is read. The size of each record is known exactly, because the frame around the
elements has a known length (`formats.archive.writing`).
"""

from __future__ import annotations

import hashlib
import heapq
import re
import shlex
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from ckptctl.errors import OptionError, UsageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.writing import tensor_frame
from ckptctl.formats.dcp.writing import metadata_bytes
from ckptctl.formats.frameworks.layouts import METADATA
from ckptctl.formatting import command_line, counted, inside, some_of
from ckptctl.model import ByteRange, BytesEntry, Chunk, Chunks, TensorEntry
from ckptctl.records.slices import Dims, TensorSlice
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """The layout of the new step."""

    mesh: Mesh
    rules: tuple[ShardRule, ...] = ()
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

    Raises `UsageError` for rules that do not fit. Cost: no read; time linear in the number of
    chunks, some 10 µs each.
    """
    shapes = {
        tensor.entry.fqn: tensor.entry.shape for part in source.parts for tensor in part.tensors
    }
    check_rules(wanted.rules, shapes, source.url)
    findings = [*_per_rank(source, wanted.mesh.world_size)]
    parts = tuple(_part(part, wanted, one_writer(source)) for part in source.parts)
    findings += _not_alike(source, wanted)
    return Plan(source, wanted, parts, source.files, tuple(findings))


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


def _per_rank(source: Source, n_ranks: int) -> Iterator[Finding]:
    """The findings for state that exists once per rank, for another number of ranks."""
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
    slices = [_slices_for(tensor, wanted, alone) for tensor in tensors]
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
    return not wanted.only_model or entry.kind == "model"


def _slices_for(tensor: SourceTensor, wanted: Wanted, alone: bool) -> tuple[RankSlice, ...]:
    """The slices of a tensor in the new step."""
    entry, n_ranks = tensor.entry, wanted.mesh.world_size
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


# How tensors are divided among the ranks of a device mesh
#
# Tensors are sharded as FSDP2 and `torch.chunk` shard them: into pieces of equal size, rounded up,
# so that the last ranks may hold less or nothing. With a mesh, tensor parallelism shards first, and
# FSDP2 shards each piece.
#
# Source: torch 2.13 `torch/distributed/tensor/placement_types.py` (`Shard`, `_StridedShard`),
# `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`.


SHARDING = ("dp", "fsdp")
"""Mesh dimensions that shard every sharded tensor, along dimension 0 unless a rule differs."""

BY_RULE = ("tp", "ep")
"""Mesh dimensions that shard only the tensors that `--shard` names."""

REPLICATING = ("rep", "replicate")
"""Mesh dimensions along which every rank holds the same."""

MAX_RANKS = 1 << 20
_DIMENSION = re.compile(r"(?P<name>[a-z]+)=(?P<size>[0-9]{1,7})")


class RankSlice(NamedTuple):
    """A slice of a tensor, and the ranks that hold it, in ascending order."""

    elements: TensorSlice
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The arrangement of ranks: name and size of each dimension, the last varying fastest."""

    dims: tuple[tuple[str, int], ...]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return prod(size for _, size in self.dims)

    @property
    def shards_by_rule(self) -> bool:
        """Whether a dimension of the mesh shards only what `--shard` names."""
        return any(name in BY_RULE for name, _ in self.dims)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dims)


@dataclass(frozen=True, slots=True)
class ShardRule:
    """Shard the tensors whose FQN matches `pattern` along dimension `dim`."""

    pattern: str
    dim: int

    def fits(self, fqn: str) -> bool:
        """Whether the rule applies to a tensor; a pattern may omit leading and trailing names."""
        return fnmatchcase(f".{fqn}.", f"*.{self.pattern}.*")


def check_world_size(n_ranks: int | None) -> None:
    """Raise `UsageError` for a `--world-size` that no job has."""
    if n_ranks is not None and not 1 <= n_ranks <= MAX_RANKS:
        bound = "at least 1 is required" if n_ranks < 1 else f"at most {MAX_RANKS:,} are possible"
        raise OptionError("--world-size", f"is {n_ranks:,}; {bound}")


def parse_mesh(text: str) -> Mesh:
    """The mesh in `dp=4,tp=2`; raises `UsageError`."""
    dims = []
    for word in text.split(","):
        match = _DIMENSION.fullmatch(word.strip())
        if match is None or not int(match["size"]):
            raise _no_mesh(text, f"{word!r} is not a dimension")
        if match["name"] not in (*SHARDING, *BY_RULE, *REPLICATING):
            known = ", ".join((*SHARDING, *BY_RULE, *REPLICATING))
            raise _no_mesh(text, f"{match['name']!r} is none of {known}")
        dims.append((match["name"], int(match["size"])))
    mesh = Mesh(tuple(dims))
    if mesh.world_size > MAX_RANKS:
        raise _no_mesh(text, f"it has more than {MAX_RANKS:,} ranks")
    return mesh


def _no_mesh(text: str, why: str) -> UsageError:
    return OptionError(
        "--mesh", f"{text!r}: {why}; write it as dp=4,tp=2", instead="--mesh dp=4,tp=2"
    )


def parse_rules(given: Sequence[str]) -> tuple[ShardRule, ...]:
    """The rules in `--shard`, each `PATTERN=DIM`; raises `UsageError`."""
    rules = []
    for text in given:
        pattern, _, dim = text.rpartition("=")
        if not pattern or not dim.isdecimal() or len(dim) > 2:
            raise OptionError(
                "--shard",
                f"{text!r} is not PATTERN=DIM, with the dimension counted from 0",
                instead="--shard 'layers.*.wq.weight=1'",
            )
        rules.append(ShardRule(pattern, int(dim)))
    return tuple(rules)


def rule_for(fqn: str, rules: Sequence[ShardRule]) -> ShardRule | None:
    """The rule for a tensor: the last that fits, None if none does."""
    return next((rule for rule in reversed(rules) if rule.fits(fqn)), None)


def chunked(n: int, n_parts: int) -> tuple[tuple[int, int], ...]:
    """Start and length of each part that `torch.chunk` makes of `n` elements; some are empty."""
    each = -(-n // n_parts)
    return tuple((min(p * each, n), max(0, min(each, n - p * each))) for p in range(n_parts))


@lru_cache(maxsize=65_536)
def sharded(shape: Dims, mesh: Mesh, dim: int | None) -> tuple[RankSlice, ...]:
    """The slices of a sharded tensor, in the order of their first ranks; none is empty.

    `dim` is the dimension that a rule names. If the mesh has `tp` or `ep`, these shard
    along it and FSDP2 shards each piece along dimension 0; otherwise FSDP2 shards along it.
    """
    by_rule, others = (dim, 0) if mesh.shards_by_rule else (None, dim or 0)
    ranks_of: dict[TensorSlice, list[int]] = {}
    for rank, place in enumerate(product(*(range(size) for _, size in mesh.dims))):
        offsets, sizes = [0] * len(shape), [*shape]
        for names, along in ((BY_RULE, by_rule), (SHARDING, others)):
            for (name, size), at in zip(mesh.dims, place, strict=True):
                if name in names and along is not None and along < len(shape):
                    start, length = chunked(sizes[along], size)[at]
                    offsets[along] += start
                    sizes[along] = length
        ranks_of.setdefault(TensorSlice(tuple(offsets), tuple(sizes)), []).append(rank)
    return tuple(
        RankSlice(elements, tuple(ranks))
        for elements, ranks in ranks_of.items()
        if elements.n_elements
    )


def replicated(shape: Dims, world_size: int) -> tuple[RankSlice, ...]:
    """The one slice of a tensor that every rank holds; it may have no elements."""
    return (RankSlice(TensorSlice.whole(shape), tuple(range(world_size))),)


def check_rules(rules: Sequence[ShardRule], shapes: Mapping[str, Dims], url: str) -> None:
    """Raise `UsageError` for a rule that fits no tensor, or names a dimension that one lacks.

    `shapes` are those of the tensors of the step at `url`.
    """
    for rule in rules:
        fitting = {fqn: shape for fqn, shape in shapes.items() if rule.fits(fqn)}
        if not fitting:
            raise OptionError(
                "--shard",
                f"'{rule.pattern}={rule.dim}' matches no tensor of the step; names are as "
                "ckptctl show lists them, and * matches anything",
                next_command=command_line("show", url, "--tensors"),
            )
        short = [fqn for fqn, shape in fitting.items() if shape and len(shape) <= rule.dim]
        if short:
            n_dims = len(fitting[short[0]])
            raise OptionError(
                "--shard",
                f"'{rule.pattern}={rule.dim}': {short[0]} has {n_dims} dimensions, counted from 0",
                instead=f"--shard {shlex.quote(f'{rule.pattern}={n_dims - 1}')}",
            )


def check_mesh(mesh: Mesh, rules: Sequence[ShardRule], shapes: Mapping[str, Dims]) -> None:
    """Raise `UsageError` if a mesh dimension shards nothing because no rule applies to it."""
    idle = [f"{name}={size}" for name, size in mesh.dims if name in BY_RULE and size > 1]
    if not idle or rules:
        return
    largest = max(shapes, key=lambda fqn: (len(shapes[fqn]) > 1, prod(shapes[fqn])), default="w")
    words = ("*" if word.isdecimal() else word for word in largest.split("."))
    rule = f"{'.'.join(words)}=0"
    copies = ",".join(f"{'rep' if name in BY_RULE else name}={size}" for name, size in mesh.dims)
    raise OptionError(
        "--mesh",
        f"{mesh}: no tensor is sharded along {' and '.join(idle)}; --shard PATTERN=DIM "
        "names the tensors and the dimension; for ranks that hold copies, use "
        f"--mesh {copies}",
        instead=f"--shard {shlex.quote(rule)}",
    )
