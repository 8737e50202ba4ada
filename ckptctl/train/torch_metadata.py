"""Read the metadata of a step for the rank that loads it, in the classes of torch's planners.

A step has one `.metadata`, or one file for each rank where it was saved without collectives. It is
decoded once, and damage raises the finding of `ckptctl verify`. Only the planner uses torch's
classes, of the version that is installed; byte ranges are read from the decoded metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as torch_metadata

from ckptctl.errors import (
    CkptctlError,
    LinkNotFollowed,
    MetadataUnreadable,
    MetadataUnsafe,
    PathEscape,
    PathNotFound,
    StepDamaged,
)
from ckptctl.findings import Finding, Severity
from ckptctl.formats.frameworks.layouts import METADATA, rank_local_rank
from ckptctl.formats.pickles.reading import collector_paused
from ckptctl.formatting import command_line
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.part_files import read_metadata
from ckptctl.model import (
    ByteRange,
    BytesEntry,
    Chunk,
    Chunks,
    Metadata,
    Part,
    PartFormat,
    RangeColumns,
    TensorEntry,
)
from ckptctl.storage.contract import TooLarge
from ckptctl.storage.opening import parent_url

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

_HAS_STRIDES = "strides" in {one.name for one in fields(torch_metadata.TensorProperties)}

_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
"""By torch's encoding, which is `TensorEntry.memory_format`."""


def to_torch(metadata: Metadata, load_id: str) -> torch_metadata.Metadata:
    """The metadata in torch's classes.

    `storage_data` creates its entries on access. A dtype that this torch does not have is
    given as uint8: the planner ignores it, and reading refuses it.

    Cost: a microsecond or two per chunk.
    """
    with collector_paused():
        state: dict[str, Any] = {fqn: _tensor(entry) for fqn, entry in metadata.tensors.items()}
        state |= dict.fromkeys(metadata.bytes_entries, torch_metadata.BytesStorageMetadata())
    values: dict[str, Any] = {
        "planner_data": dict(metadata.planner_paths),
        "storage_data": StorageData(metadata),
        "storage_meta": torch_metadata.StorageMeta(
            metadata.checkpoint_id, metadata.save_id, load_id
        ),
        "version": metadata.version,
    }
    known = {field.name for field in fields(torch_metadata.Metadata)}
    return torch_metadata.Metadata(
        state, **{name: value for name, value in values.items() if name in known}
    )


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name; None if the installed torch lacks it."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _tensor(entry: TensorEntry) -> torch_metadata.TensorStorageMetadata:
    chunk, size = torch_metadata.ChunkStorageMetadata, torch.Size
    chunks = entry.chunks
    # Most chunks of a tensor have the same size.
    sizes: dict[tuple[int, ...], torch.Size] = {}
    return torch_metadata.TensorStorageMetadata(
        torch_metadata.TensorProperties(
            dtype=torch_dtype(entry.dtype) or torch.uint8,
            layout=getattr(torch, entry.layout, torch.strided),
            requires_grad=entry.requires_grad,
            memory_format=_MEMORY_FORMATS[entry.memory_format],
            pin_memory=entry.pin_memory,
            **({"strides": entry.strides} if _HAS_STRIDES else {}),
        ),
        size(entry.shape),
        [
            chunk(
                size(chunks.offsets_of(number)),
                sizes.setdefault(dims := chunks.sizes_of(number), size(dims)),
            )
            for number in range(len(chunks))
        ],
    )


class StorageData(Mapping[torch_metadata.MetadataIndex, "_StorageInfo"]):
    """The position of each chunk and each bytes entry, by torch's index."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._chunks: dict[str, dict[tuple[int, ...], int]] = {}

    def __getitem__(self, index: torch_metadata.MetadataIndex) -> _StorageInfo:
        tensor = self._metadata.tensors.get(index.fqn)
        if tensor is not None:
            return _info(index, tensor.chunks.byte_range_of(self.chunk(index)))
        entry = self._metadata.bytes_entries.get(index.fqn)
        return _info(index, None if entry is None else entry.byte_range)

    def __iter__(self) -> Iterator[torch_metadata.MetadataIndex]:
        for fqn, tensor in self._metadata.tensors.items():
            for number in range(len(tensor.chunks)):
                offsets = tensor.chunks.offsets_of(number)
                yield torch_metadata.MetadataIndex(fqn, offsets, number)
        yield from map(torch_metadata.MetadataIndex, self._metadata.bytes_entries)

    def __len__(self) -> int:
        metadata = self._metadata
        n_chunks = sum(len(tensor.chunks) for tensor in metadata.tensors.values())
        return n_chunks + len(metadata.bytes_entries)

    def chunk(self, index: torch_metadata.MetadataIndex) -> int:
        """The number of the chunk of an index; raises `KeyError`."""
        chunks = self._metadata.tensors[index.fqn].chunks
        offsets, hint = tuple(index.offset or ()), index.index
        if hint is not None and 0 <= hint < len(chunks) and chunks.offsets_of(hint) == offsets:
            return hint
        if index.fqn not in self._chunks:
            self._chunks[index.fqn] = {
                chunks.offsets_of(number): number for number in reversed(range(len(chunks)))
            }
        if offsets not in self._chunks[index.fqn]:
            raise KeyError(index)
        return self._chunks[index.fqn][offsets]


def _info(index: torch_metadata.MetadataIndex, found: ByteRange | None) -> _StorageInfo:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    if found is None:
        raise KeyError(index)
    info = _StorageInfo(found.file, found.offset, found.length)
    if found.transforms:
        info.transform_descriptors = list(found.transforms)
    return info


class RefusedMetadata(torch_metadata.Metadata):
    """Metadata that could not be read, and raises the error on access.

    DCP turns any error of `read_metadata` into an `AssertionError`, which loses its class;
    an error that is raised later reaches all ranks unchanged.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data"):
            self.refuse()
        return super().__getattribute__(name)

    def refuse(self) -> NoReturn:
        """Raise the error."""
        raise self.error


@dataclass(frozen=True, slots=True)
class RankLocal:
    """The metadata of a step that was saved without collectives, by rank."""

    url: str
    by_rank: Mapping[int, Metadata]

    def seen_by(self, rank: int | None) -> Metadata:
        """The chunks of all ranks in one metadata; of shared names, the entry of `rank`.

        Raises `StepDamaged` without a rank, because the values differ by rank.
        """
        if rank is None:
            message = "the step was saved without collectives and has one metadata file per rank"
            raise StepDamaged(self.url, Finding("metadata.missing", METADATA, message))
        own = [self.by_rank[rank]] if rank in self.by_rank else []
        others = [metadata for other, metadata in self.by_rank.items() if other != rank]
        return _joined([*own, *others])


def read_step_metadata(opened: OpenStep) -> Metadata | RankLocal:
    """The metadata of a step.

    Raises `StepDamaged` if none can be read, `PathNotFound` if the folder does not exist.
    Other storage errors are passed on. Cost: one read; without a `.metadata`, also a
    listing and all metadata files.
    """
    try:
        return opened.metadata
    except LinkNotFollowed:
        raise
    except (PathNotFound, PathEscape, TooLarge, MetadataUnreadable, MetadataUnsafe) as error:
        return _inspected(opened, error)


def _inspected(opened: OpenStep, error: CkptctlError) -> RankLocal:
    files = opened.files
    paths = [file.path for file in files]
    has_metadata = any(path == METADATA or rank_local_rank(path) is not None for path in paths)
    if not has_metadata and any(path.endswith(".safetensors") for path in paths):
        message = (
            "its tensors are in safetensors files, without DCP metadata; torch's "
            "HuggingFaceStorageReader loads them"
        )
        raise StepDamaged(opened.url, Finding("format.unsupported", "", message)) from error
    part = Part("", PartFormat.DCP, tuple(files))
    by_rank: dict[int, Metadata] = {}
    for found in read_metadata(OpenPart(opened, part)):
        if isinstance(found, Metadata) and found.rank is not None:
            by_rank[found.rank] = found
        elif isinstance(found, Finding) and found.severity is Severity.FAULT:
            command = found.next_command or command_line("pick", parent_url(opened.url))
            raise StepDamaged(opened.url, replace(found, next_command=command)) from error
    if not by_rank:
        message = f"it changed while it was read ({error.message}): another process writes there"
        raise StepDamaged(opened.url, Finding("step.changed", METADATA, message)) from error
    return RankLocal(opened.url, by_rank)


def _joined(metadatas: Sequence[Metadata]) -> Metadata:
    """One metadata made of several; of two chunks with equal offsets the first counts."""
    tensors: dict[str, list[TensorEntry]] = {}
    bytes_entries: dict[str, BytesEntry] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for metadata in metadatas:
        for fqn, tensor in metadata.tensors.items():
            tensors.setdefault(fqn, []).append(tensor)
        for fqn, entry in metadata.bytes_entries.items():
            bytes_entries.setdefault(fqn, entry)
        paths = {**metadata.planner_paths, **paths}
    return replace(
        metadatas[0],
        tensors={fqn: _joined_tensor(alike) for fqn, alike in tensors.items()},
        bytes_entries=bytes_entries,
        file_names=sorted({name for metadata in metadatas for name in metadata.file_names}),
        planner_paths=paths,
        rank=None,
    )


def joined_parts(parts: Sequence[tuple[str, Metadata]]) -> Metadata:
    """The metadata of the parts of a step, by their paths, as one: each name begins with a path."""
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, BytesEntry] = {}
    for part, metadata in parts:
        inside = [f"{part}/{file}" for file in metadata.file_names]
        for fqn, tensor in metadata.tensors.items():
            chunks, name = tensor.chunks, f"{part}.{fqn}"
            names = inside
            if chunks.file_names != metadata.file_names:
                names = [f"{part}/{file}" for file in chunks.file_names]
            columns = (chunks.files, chunks.starts, chunks.lengths, names, chunks.transforms)
            moved = Chunks(chunks.n_dims, chunks.offsets, chunks.sizes, RangeColumns(*columns))
            path = (part, *(tensor.path or (fqn,)))
            tensors[name] = replace(tensor, fqn=name, path=path, chunks=moved)
        for fqn, entry in metadata.bytes_entries.items():
            where, name = entry.byte_range, f"{part}.{fqn}"
            where = None if where is None else replace(where, file=f"{part}/{where.file}")
            path = (part, *(entry.path or (fqn,)))
            values[name] = replace(entry, fqn=name, path=path, byte_range=where)
    files = [f"{part}/{file}" for part, metadata in parts for file in metadata.file_names]
    paths = {name: one.path for name, one in tensors.items()}
    paths |= {name: one.path for name, one in values.items()}
    return replace(
        parts[0][1],
        tensors=tensors,
        bytes_entries=values,
        file_names=files,
        planner_paths=paths,
        strays=(),
    )


def _joined_tensor(tensors: Sequence[TensorEntry]) -> TensorEntry:
    first = tensors[0]
    chunks: dict[tuple[int, ...], Chunk] = {}
    for tensor in tensors:
        # A rank may have saved its own tensor of any shape under a name that all ranks use.
        if (tensor.shape, tensor.dtype) == (first.shape, first.dtype):
            for chunk in tensor.chunks:
                chunks.setdefault(chunk.offsets, chunk)
    return replace(first, chunks=Chunks.of(len(first.shape), list(chunks.values())))
