"""Metadata of torch's own classes, as saves of any layout leave it.

A `Layout` says what the state dict looks like and how it was saved; `dumped`
pickles it as a coordinator does that got the results of the other ranks through
pickle. Needs torch.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shard:
    """One chunk, the rank that wrote it, and the hint in its key; no range if `rank` is None."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int | None = 0
    hint: int | None = None
    start: int = 0
    length: int = 1


@dataclass(frozen=True)
class Layout:
    tensors: dict[str, tuple[tuple[int, ...], tuple[Shard, ...]]] = field(default_factory=dict)
    bytes_entries: tuple[str, ...] = ()
    through_pickle: bool = True
    shares_files: bool = True
    with_plans: bool = False
    shares_offsets: bool = False
    transforms: tuple[str, ...] = ()
    protocol: int = 4
    by_python: bool = False


def dumped(layout: Layout) -> bytes:
    """The bytes of `.metadata`."""
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    results, entries = _saved(layout)
    metadata = Metadata(
        entries,
        {name: tuple(name.split(".")) for name in entries},
        {index: info for sent in results for index, info in sent},
        StorageMeta("step_10", "d0f1", None, []),
        "1.0.0",
    )
    if layout.with_plans:
        metadata.all_local_plans = _plans(metadata, through_pickle=layout.through_pickle)
    file = io.BytesIO()
    pickler = pickle._Pickler if layout.by_python else pickle.Pickler
    pickler(file, layout.protocol).dump(metadata)
    return file.getvalue()


def _saved(layout: Layout) -> tuple[Sequence[list[tuple[object, object]]], dict[str, object]]:
    """What each rank sent to the coordinator, and the entries of the state dict."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    by_rank: dict[int, list[tuple[object, object]]] = {0: []}
    files: dict[int, str] = {}

    def add(rank: int, index: MetadataIndex, start: int, length: int) -> None:
        name = "".join(["__", str(rank), "_0.distcp"])
        file = files.setdefault(rank, name) if layout.shares_files else name
        info = _StorageInfo(file, start, length, list(layout.transforms) or None)
        by_rank.setdefault(rank, []).append((index, info))

    entries: dict[str, object] = {}
    for name in layout.bytes_entries:
        entries[name] = BytesStorageMetadata()
        add(0, MetadataIndex(name), len(entries), 7)
    for name, (shape, shards) in layout.tensors.items():
        chunks = []
        for shard in shards:
            offsets = torch.Size(shard.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(shard.sizes)))
            if shard.rank is not None:
                index = MetadataIndex(name, offsets, shard.hint)
                if layout.shares_offsets:
                    object.__setattr__(index, "offset", offsets)
                add(shard.rank, index, shard.start, shard.length)
        properties = TensorProperties(dtype=torch.bfloat16)
        entries[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    results = [by_rank[rank] for rank in sorted(by_rank)]
    if layout.through_pickle and not layout.shares_offsets:
        results = [pickle.loads(pickle.dumps(sent)) for sent in results]
    return results, entries


def _plans(metadata, *, through_pickle: bool) -> list[object]:
    """The plans of two ranks, as Megatron-Core keeps them: the chunks are those of the entries."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    plans: list[object] = []
    for rank in range(2):
        items = []
        for name, entry in metadata.state_dict_metadata.items():
            name = "".join(list(name)) if through_pickle and rank else name
            if isinstance(entry, BytesStorageMetadata):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            properties = entry.properties
            for number, chunk in enumerate(entry.chunks):
                if rank and number % 3 == 0:
                    properties = TensorProperties(dtype=torch.bfloat16)
                if rank and number % 5 == 0:  # a replica, which the metadata does not list
                    chunk = ChunkStorageMetadata(chunk.offsets, torch.Size(chunk.sizes))
                size = torch.Size(entry.size) if number % 2 else entry.size
                index = MetadataIndex(name, chunk.offsets, number if rank else None)
                data = TensorWriteData(chunk, properties, size)
                items.append(WriteItem(index, WriteItemType.SHARD, None, data))
        plans.append(SavePlan(items, planner_data={}))
    return plans
