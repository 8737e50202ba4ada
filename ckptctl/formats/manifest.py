"""Read `metadata.pkl` of torch_checkpointing: which files of which ranks hold which tensors.

It is a pickle of plain containers, read by the interpreter that runs nothing. torch_checkpointing
writes each item of a save as one file for each rank, by default `ITEM_RANK.pt`, and the
metadata at the first save of a process, for the items that can be resharded.

Source: torch_checkpointing 0.1.1 `metadata_serialization.py`, `distributed_metadata.py`
(`DistributedMetadata`), `checkpoint_layout.py` (`default_torch_layout_info`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

import msgspec

from ckptctl.errors import MetadataUnreadable
from ckptctl.formats.pickles.values import decode_value

MANIFEST = "metadata.pkl"
"""Its name, directly in a step."""

MAX_BYTES = 256 << 20
"""A longer one is not read: a million tensors take about as much."""

MAX_RANKS = 1_000_000


class ShardedTensor(msgspec.Struct, frozen=True):
    """One tensor of an item, and the ranks that hold it or parts of it."""

    fqn: str
    """Its key path, joined by points."""
    n_elements: int
    """Elements of the whole tensor."""
    ranks: frozenset[int]
    """The ranks whose files hold it."""
    n_copies: int
    """How often the mesh holds the whole tensor; 0 where its placement is not understood."""


class ManifestItem(msgspec.Struct, frozen=True):
    """What the save holds under one key, such as `model`."""

    name: str
    files: Mapping[int, str]
    """The file of each rank, relative to the step."""
    tensors: tuple[ShardedTensor, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What a save consists of, as its writer recorded it."""

    world_size: int
    """How many ranks wrote the save."""
    items: tuple[ManifestItem, ...]


def read_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of `metadata.pkl`.

    Raises `MetadataUnreadable` for anything else, and `MetadataUnsafe` as `decode_value` does.
    """
    content = decode_value(data)
    if not isinstance(content, dict) or not isinstance(content.get("metadata"), dict):
        raise MetadataUnreadable("it holds no `metadata`")
    world_size = content.get("world_size")
    if type(world_size) is not int or not 0 < world_size <= MAX_RANKS:
        raise MetadataUnreadable(f"its world size is {world_size!r}")
    items = tuple(_item(str(name), item) for name, item in content["metadata"].items())
    return Manifest(world_size, items)


def _item(name: str, item: object) -> ManifestItem:
    if not isinstance(item, dict):
        raise MetadataUnreadable(f"the item {name!r} is no mapping")
    layouts, tensors = item.get("rank_to_layout_info"), item.get("nested_path_to_metadata")
    if not isinstance(layouts, dict) or not isinstance(tensors, dict):
        raise MetadataUnreadable(f"the item {name!r} lacks its ranks or its tensors")
    files = {
        rank: _path(name, rank, layout) for rank, layout in layouts.items() if type(rank) is int
    }
    return ManifestItem(name, files, tuple(_tensors(tensors)))


def _path(name: str, rank: int, layout: object) -> str:
    path = layout.get("file_path") if isinstance(layout, dict) else None
    if path is None:
        return f"{name}_{rank}.pt"
    parts = str(path).split("/")
    if not isinstance(path, str) or path.startswith("/") or ".." in parts or "" in parts:
        raise MetadataUnreadable(f"the file of rank {rank} of {name!r} leads outside the step")
    return path


def _tensors(tensors: Mapping[object, object]) -> Iterator[ShardedTensor]:
    for key, parts in tensors.items():
        ranks: set[int] = set()
        n_elements = n_copies = 0
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict) or not isinstance(part.get("ranks"), (tuple, list)):
                raise MetadataUnreadable(f"the tensor {key!r} names no ranks")
            ranks.update(rank for rank in part["ranks"] if type(rank) is int)
            n_elements, n_copies = _geometry(part.get("sharding_metadata"))
        # The key is the path of keys as a JSON list of texts and numbers.
        fqn = ".".join(text or number for text, number in _KEY.findall(str(key))) or str(key)
        yield ShardedTensor(fqn, n_elements, frozenset(ranks), n_copies)


_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"|(-?[0-9]+)')


def _geometry(sharding: object) -> tuple[int, int]:
    """Elements of a tensor, and how often the mesh holds it; no copies where it is not known."""
    data = sharding.get("data") if isinstance(sharding, dict) else None
    shape = data.get("global_shape") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(shape, (list, tuple)):
        return 0, 0
    if not all(type(length) is int and length >= 0 for length in shape):
        raise MetadataUnreadable("a global shape is not of numbers")
    mesh = data.get("mesh_spec")
    lengths = mesh.get("mesh_shape") if isinstance(mesh, dict) else None
    placements = data.get("placements")
    if not isinstance(lengths, (list, tuple)) or not isinstance(placements, list):
        return prod(shape), 0
    kinds = [placement.get("type") for placement in placements if isinstance(placement, dict)]
    if len(kinds) != len(lengths) or not all(type(length) is int for length in lengths):
        return prod(shape), 0
    if not set(kinds) <= {"Shard", "Replicate"}:
        return prod(shape), 0
    pairs = zip(kinds, lengths, strict=True)
    return prod(shape), prod(length for kind, length in pairs if kind == "Replicate")
