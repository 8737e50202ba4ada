"""Parse and write the header and the index of safetensors files.

Eight bytes give the length of a JSON object that names each tensor with dtype,
shape and place; the elements follow to the end of the file. DCP's Hugging Face
writer adds where in the global tensor each box begins. The format has no
checksums, and nothing but the header is read here.

Source: safetensors 0.8 `safetensors/src/tensor.rs`; torch 2.13
`torch/distributed/checkpoint/_hf_utils.py` and `hf_storage.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ckptctl.errors import RecordUnreadable
from ckptctl.formats.bounded_json import NotJson, Numbers, decode_json
from ckptctl.model import DTYPE_SIZES, ByteRange, Chunk, Chunks, TensorEntry

PREFIX = 8
"""Bytes in front of the header: its length."""

MAX_HEADER = 100_000_000
"""The longest header in bytes that the safetensors library reads."""

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

_METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_INT64 = 1 << 63
_MAX_DIMS = 64

NAMES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""What the format calls torch's dtypes; it has no others."""

TORCH_NAMES: Mapping[str, str] = {name: dtype for dtype, name in NAMES.items()}
"""The names of the same dtypes in torch; the format has some that torch lacks."""

_BITS: Mapping[str, int] = {
    **{name: 8 * DTYPE_SIZES[dtype] for dtype, name in NAMES.items()},
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits of an element, also of what torch lacks."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: a box of `shape` elements at `offsets` of the global tensor.

    `dtype` is as the format names it (`BF16`). The `n_bytes` of its elements begin
    `start` bytes after the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    n_bytes: int


def header_length(prefix: bytes) -> int:
    """How many bytes of header follow the first eight of a file.

    Raises `RecordUnreadable` where these are not the beginning of a safetensors file.
    """
    if prefix.startswith(b"PK"):
        raise RecordUnreadable(
            "it begins with an archive: the writer puts entries that are no tensors in front of "
            "the header, and nothing can read such a file"
        )
    length = int.from_bytes(prefix[:PREFIX], "little")
    if len(prefix) < PREFIX or not 2 <= length <= MAX_HEADER:
        raise RecordUnreadable(f"its header would be {length:,} bytes long")
    return length


def parse_header(header: bytes) -> tuple[StoredTensor, ...]:
    """The tensors that a header names, in the order in which their elements lie in the file.

    They follow each other without a gap. Raises `RecordUnreadable` for a header
    that is damaged or contradicts itself.
    """
    entries = _objects(header, "its header")
    offsets = _saved_offsets(entries.pop(_METADATA, {}))
    tensors = sorted(
        (_tensor(name, entry, offsets) for name, entry in entries.items()),
        key=lambda tensor: (tensor.start, tensor.n_bytes),
    )
    if offsets is not None and offsets.keys() != entries.keys():
        raise RecordUnreadable("its tensors and the places of them are not the same")
    reached = 0
    for tensor in tensors:
        if tensor.start != reached:
            raise RecordUnreadable(
                f"the elements of {tensor.name!r} begin at byte {tensor.start:,}, "
                f"those before end at {reached:,}"
            )
        reached += tensor.n_bytes
    return tuple(tensors)


def whole_tensor(
    name: str,
    dtype: str,
    slices: Sequence[tuple[StoredTensor, ByteRange | None]],
    path: tuple[str | int, ...] = (),
) -> TensorEntry:
    """The tensor that slices of it make up, with the place of each: it reaches to their ends."""
    ends = [map(sum, zip(piece.offsets, piece.shape, strict=True)) for piece, _ in slices]
    shape = tuple(max(dim) for dim in zip(*ends, strict=True))
    chunks = [Chunk(piece.offsets, piece.shape, place) for piece, place in slices]
    return TensorEntry(name, dtype, shape, Chunks.of(len(shape), chunks), path)


def is_name(name: str) -> bool:
    """Whether a tensor can have this name: text in UTF-8, and not the key of the metadata."""
    return name != _METADATA and not any("\ud800" <= char <= "\udfff" for char in name)


def header_bytes(tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Everything before the elements of tensors: name, dtype as torch has it, shape, bytes."""
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    at = 0
    for name, dtype, shape, n_bytes in tensors:
        place = [at, at + n_bytes]
        entries[name] = {"dtype": NAMES[dtype], "shape": [*shape], "data_offsets": place}
        at += n_bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # elements begin at a multiple of 8
    return len(text).to_bytes(PREFIX, "little") + text


def index_bytes(files: Mapping[str, str], n_bytes: int) -> bytes:
    """The index of a model in several files: the file of each tensor."""
    index = {"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"


class Index(NamedTuple):
    """The file that an index names for each tensor, and their bytes where it states them."""

    files: Mapping[str, str]
    total_size: int | None


def parse_index(data: bytes) -> Index:
    """What an index of safetensors, or of the files of `torch.save` of a model, names.

    Raises `RecordUnreadable` for an index that is damaged.
    """
    # A sum with a bool tensor in it is a float: transformers counts an eighth of a byte for it.
    index = _objects(data, "the index", numbers="finite")
    weights, stated = index.get("weight_map"), index.get("metadata")
    if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
        raise RecordUnreadable("the index names no file for each tensor")
    stated = stated if isinstance(stated, dict) else {}
    n_bytes, groups = stated.get("total_size"), stated.get("param_groups")
    if isinstance(groups, str):  # the index of an optimizer, as ColossalAI writes it
        weights = {**weights, "param_groups": groups}
    return Index(weights, n_bytes if type(n_bytes) is int else None)


def _objects(data: bytes, what: str, *, numbers: Numbers = "integers") -> dict[str, object]:
    """A JSON object without repeated keys."""
    try:
        value = decode_json(data, max_bytes=MAX_HEADER, numbers=numbers, unique_keys=True)
    except NotJson as error:
        raise RecordUnreadable(f"{what} is not JSON as it should be: {error}") from error
    if not isinstance(value, dict):
        raise RecordUnreadable(f"{what} is no JSON object")
    return value


def _saved_offsets(metadata: object) -> Mapping[str, tuple[int, ...]] | None:
    """Where each box begins in its global tensor; None for a file that holds whole tensors."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise RecordUnreadable("its metadata is not made of strings")
    if _SHARDING not in metadata:
        return None
    sharding = _objects(metadata[_SHARDING].encode("utf-8", "replace"), "its sharding")
    return {
        name: _sizes(entry.get(_OFFSETS) if isinstance(entry, dict) else None, name)
        for name, entry in sharding.items()
    }


def _tensor(
    name: str, entry: object, offsets: Mapping[str, tuple[int, ...]] | None
) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise RecordUnreadable(f"{name!r} has not the fields of a tensor")
    dtype = entry["dtype"]
    shape = _sizes(entry["shape"], name)
    place = _sizes(entry["data_offsets"], name)
    origin = (0,) * len(shape) if offsets is None else offsets.get(name, ())
    if not isinstance(dtype, str) or len(place) != 2 or place[0] > place[1]:
        raise RecordUnreadable(f"{name!r} has no dtype or no place")
    if len(origin) != len(shape):
        raise RecordUnreadable(f"{name!r} has {len(shape)} dimensions and {len(origin)} offsets")
    n_bytes = place[1] - place[0]
    n_bits = prod(shape) * _BITS.get(dtype, 0)
    if dtype in _BITS and n_bits != n_bytes * 8:
        raise RecordUnreadable(f"{name!r} takes {n_bytes:,} bytes, its elements {n_bits // 8:,}")
    return StoredTensor(name, dtype, shape, origin, place[0], n_bytes)


def _sizes(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        raise RecordUnreadable(f"{name!r} has no shape or place")
    if not all(type(n) is int and 0 <= n < _INT64 for n in value):
        raise RecordUnreadable(f"{name!r} has a size or an offset that cannot be one")
    return tuple(value)
