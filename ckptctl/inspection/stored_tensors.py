"""List the tensors of steps without metadata: rank files by their pickles, safetensors by headers.

Nothing in a pickle is run, and no elements are read. A rank file states what that rank saved: of
a DTensor its part, and the shape of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod
from typing import NamedTuple

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe, RecordUnreadable
from ckptctl.formats.archive.directory import RecordDirectory, read_member
from ckptctl.formats.archive.safetensors import PREFIX, SUFFIX, TORCH_NAMES, parse_header
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.state_keys import Path, kind_of_entry
from ckptctl.formats.pickles.shards import ShardStub, decode_shards, tensors_in
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.inspection.open_step import OpenPart
from ckptctl.inspection.sidecars import FileReads, value_in_file
from ckptctl.model import DTYPE_SIZES, Chunk, Chunks, FileInfo, PartFormat, TensorEntry
from ckptctl.records.reads import read_headers

_File = tuple[str, Callable[[], "list[HeldTensor] | None"]]
"""A file by its path in the step, and what reads its tensors: None if it is damaged."""

MAX_PICKLE_BYTES = 64 << 20
"""The longest pickle that is read; a million entries take about as much."""

MAX_TENSORS = 200_000
"""No further file is opened once so many tensors are listed, which take about 100 MB."""


class HeldTensor(NamedTuple):
    """One tensor in the file at the path `file` below the step.

    `shape` is what the file holds; `whole` is the shape of the tensor that this is a part of,
    None where the file does not state it.
    """

    file: str
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...] | None
    n_bytes: int
    kind: str


def held_tensors(parts: Iterable[OpenPart]) -> tuple[list[HeldTensor], list[str]]:
    """The tensors in the files of all parts without metadata, and the files not listed.

    Those are files that are damaged or whose pickle is too long, and all that follow once
    `MAX_TENSORS` are listed. Storage errors pass through. Cost: three short reads and one of
    the pickle for each rank file, one or two for each safetensors file.
    """
    held: list[HeldTensor] = []
    unlisted: list[str] = []
    for part in parts:
        for file, read in (*_archives(part), *_headers(part)):
            tensors = read() if len(held) < MAX_TENSORS else None
            if tensors is None:
                unlisted.append(file)
            else:
                held += tensors
    return held, unlisted


def _archives(part: OpenPart) -> Iterator[_File]:
    layout = part.opened.step.layout
    is_rank_files = part.part.format is PartFormat.RANK_FILES
    archives = part.metadata[0].bytes_entries if is_rank_files else {}
    for file in part.part.files:
        if file.path in archives:
            yield part.in_step(file.path), partial(_in_archive, part, file, layout)


def _headers(part: OpenPart) -> Iterator[_File]:
    layout = part.opened.step.layout
    for held in part.safetensors:
        for file in held.part.files:
            if file.path.endswith(SUFFIX):
                yield held.in_step(file.path), partial(_in_header, held, file, layout)


def _in_archive(part: OpenPart, file: FileInfo, layout: str) -> list[HeldTensor] | None:
    reads = FileReads(part.store, part.in_store(file.path), MAX_PICKLE_BYTES)
    try:
        state = value_in_file(reads, file.size, _state_in)
    except (MetadataUnreadable, MetadataUnsafe, RecordUnreadable):
        return None
    where = part.in_step(file.path)
    return [_held(where, path, tensor, layout) for path, tensor in tensors_in(state)]


def _state_in(directory: RecordDirectory, reads: FileReads) -> object:
    pickle = read_member(directory, "data.pkl", reads)
    if pickle is None:
        raise RecordUnreadable(f"it has no pickle of at most {MAX_PICKLE_BYTES:,} bytes")
    return decode_shards(pickle)


def _held(file: str, path: Path, tensor: TensorStub | ShardStub, layout: str) -> HeldTensor:
    local, whole = (tensor.local, tensor.shape) if isinstance(tensor, ShardStub) else (tensor, None)
    return _row(file, path, local.dtype, local.shape, whole, layout)


def _in_header(part: OpenPart, file: FileInfo, layout: str) -> list[HeldTensor] | None:
    held: list[HeldTensor] = []
    try:
        for _, header in read_headers(part.store, part.folder, [file]):
            for one in parse_header(header[PREFIX:]):
                dtype = TORCH_NAMES.get(one.dtype, one.dtype)
                where = part.in_step(file.path)
                held.append(_row(where, (one.name,), dtype, one.shape, None, layout))
    except RecordUnreadable:
        return None
    return held


def _row(
    file: str,
    path: Path,
    dtype: str,
    shape: tuple[int, ...],
    whole: tuple[int, ...] | None,
    layout: str,
) -> HeldTensor:
    fqn = ".".join(map(str, path))
    kind = kind_of_file(layout, file)
    if kind is None or len(kind.names) > 1:
        # The file holds several kinds, or its name does not tell: the key does.
        chunks = Chunks.of(len(shape), [Chunk((0,) * len(shape), shape, None)])
        kind = kind_of_entry(path or (fqn,), TensorEntry(fqn, dtype, shape, chunks))
    n_bytes = prod(shape) * DTYPE_SIZES.get(dtype, 1)
    return HeldTensor(file, fqn, dtype, shape, whole, n_bytes, kind.names[0])
