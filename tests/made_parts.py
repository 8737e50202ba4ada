"""Metadata that a test makes in a line: tensors, their chunks, and where these lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptctl.model import ByteRange, BytesEntry, Chunk, Chunks, FileInfo, Metadata, TensorEntry

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk in elements."""


def tensor(
    fqn: str,
    shape: tuple[int, ...],
    *boxes: Box,
    ranges: Sequence[ByteRange | None] | None = None,
    dtype: str = "float32",
) -> TensorEntry:
    """A tensor in chunks, each in its byte range; without `ranges` in none."""
    places = ranges or [None] * len(boxes)
    chunks = [
        Chunk(offsets, sizes, place) for (offsets, sizes), place in zip(boxes, places, strict=True)
    ]
    return TensorEntry(fqn, dtype, shape, Chunks.of(len(shape), chunks))


def metadata(
    *entries: TensorEntry | BytesEntry,
    strays: Sequence[tuple[str, tuple[int, ...] | None, ByteRange]] = (),
    rank: int | None = None,
) -> Metadata:
    tensors = {e.fqn: e for e in entries if isinstance(e, TensorEntry)}
    others = {e.fqn: e for e in entries if isinstance(e, BytesEntry)}
    names = sorted({name for e in tensors.values() for name in e.chunks.file_names})
    return Metadata(tensors, others, names, tuple(strays), rank=rank)


def listing(sizes: Mapping[str, int]) -> list[FileInfo]:
    return [FileInfo(path, size) for path, size in sizes.items()]
