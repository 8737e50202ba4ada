"""Read the metadata of a step for the rank that loads it.

A step has one `.metadata`, or one file per rank if it was saved without collectives. It is
decoded once, and damage raises the finding of `ckptctl verify`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl.errors import (
    CkptctlError,
    MetadataUnreadable,
    MetadataUnsafe,
    PathEscape,
    PathNotFound,
    StepDamaged,
)
from ckptctl.findings import Finding, Severity
from ckptctl.formats.frameworks.layouts import METADATA, rank_local_rank
from ckptctl.inspection.metadata_files import read_metadata
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.model import (
    BytesEntry,
    Chunk,
    Chunks,
    FileInfo,
    Metadata,
    Part,
    PartFormat,
    TensorEntry,
)
from ckptctl.storage.contract import TooLarge
from ckptctl.storage.opening import parent_url


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
    except (PathNotFound, PathEscape, TooLarge, MetadataUnreadable, MetadataUnsafe) as error:
        return _inspected(opened, error)


def _inspected(opened: OpenStep, error: CkptctlError) -> RankLocal:
    files = opened.files
    if any(file.path.endswith(".safetensors") for file in files) and not _has_metadata(files):
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
            command = found.next_command or f"ckptctl pick {shlex.quote(parent_url(opened.url))}"
            raise StepDamaged(opened.url, replace(found, next_command=command)) from error
    if not by_rank:
        message = f"it changed while it was read ({error.message}): another process writes there"
        raise StepDamaged(opened.url, Finding("step.changed", METADATA, message)) from error
    return RankLocal(opened.url, by_rank)


def _has_metadata(files: Sequence[FileInfo]) -> bool:
    return any(f.path == METADATA or rank_local_rank(f.path) is not None for f in files)


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


def _joined_tensor(tensors: Sequence[TensorEntry]) -> TensorEntry:
    first = tensors[0]
    chunks: dict[tuple[int, ...], Chunk] = {}
    for tensor in tensors:
        # A rank may have saved its own tensor of any shape under a name that all ranks use.
        if (tensor.shape, tensor.dtype) == (first.shape, first.dtype):
            for chunk in tensor.chunks:
                chunks.setdefault(chunk.offsets, chunk)
    return replace(first, chunks=Chunks.of(len(first.shape), list(chunks.values())))
