"""Steps whose layout a test chooses: real records of torch, in slices of its choice."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.formats.dcp.writing import metadata_bytes
from ckptctl.model import ByteRange, BytesEntry, Chunk, Chunks, TensorEntry

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The slices between cuts along each dimension; none is empty unless the tensor is."""
    spans = []
    for n, at in zip(shape, cuts, strict=True):
        edges = sorted({0, n, *(c for c in at if 0 < c < n)})
        spans.append([*pairwise(edges)] or [(0, n)])
    return [(tuple(a for a, _ in each), tuple(b - a for a, b in each)) for each in product(*spans)]


def record(value: object) -> bytes:
    import torch

    saved = io.BytesIO()
    torch.save(value, saved)
    return saved.getvalue()


def write_step(
    step: Path,
    tensors: Mapping[str, tuple[torch.Tensor, Sequence[Box]]],
    others: Mapping[str, object] | None = None,
    *,
    n_files: int = 2,
    transposed: bool = False,
) -> None:
    """Write a step: each tensor in its slices, which go to the shard files in turn."""
    files = [bytearray() for _ in range(n_files)]
    entries: list[TensorEntry | BytesEntry] = []
    turn = 0

    def put(data: bytes) -> tuple[str, int, int]:
        nonlocal turn
        number = turn % n_files
        turn += 1
        start = len(files[number])
        files[number].extend(data)
        return f"__{number}_0.distcp", start, len(data)

    for fqn, value in (others or {}).items():
        entries.append(BytesEntry(fqn, ByteRange(*put(record(value)))))
    for fqn, (tensor, boxes) in tensors.items():
        chunks = []
        for offsets, sizes in boxes:
            part = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            part = part.clone()
            if transposed and part.dim() > 1:
                part = part.transpose(0, -1).clone().transpose(0, -1)
            chunks.append(Chunk(offsets, sizes, ByteRange(*put(record(part)))))
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            TensorEntry(fqn, dtype, tuple(tensor.shape), Chunks.of(tensor.dim(), chunks))
        )
    step.mkdir(parents=True)
    for number, data in enumerate(files):
        (step / f"__{number}_0.distcp").write_bytes(data)
    paths = {entry.fqn: tuple(entry.fqn.split(".")) for entry in entries}
    data = metadata_bytes(entries, paths, checkpoint_id=str(step), save_id="made")
    (step / ".metadata").write_bytes(data)


def read_step(step: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a step, put together from what `torch.load` reads of each record."""
    import torch

    found = {}
    for fqn, entry in decode_metadata((step / ".metadata").read_bytes()).tensors.items():
        dtype = getattr(torch, entry.dtype)
        whole = torch.empty(entry.shape, dtype=dtype)
        for chunk in entry.chunks:
            assert chunk.byte_range is not None
            place = chunk.byte_range
            data = (step / place.file).read_bytes()[place.offset : place.end]
            part = torch.load(io.BytesIO(data), weights_only=True)
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            octets(whole)[box] = octets(part)
        found[fqn] = whole
    return found


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, as a last dimension: of dtypes that torch cannot compare, too."""
    import torch

    return tensor.unsqueeze(-1).view(torch.uint8)
