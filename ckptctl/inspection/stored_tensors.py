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
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.state_keys import StateMap, kinds_in_file, leaves_of
from ckptctl.formats.pickles.shards import decode_shards
from ckptctl.inspection.open_step import OpenPart
from ckptctl.inspection.sidecars import FileReads, tensors_in_header, value_in_file
from ckptctl.model import DTYPE_SIZES, FileInfo, PartFormat

_File = tuple[str, Callable[[], object | None]]
"""A file by its path in the step, and what reads its state: None if it is damaged."""

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


def held_tensors(
    parts: Iterable[OpenPart], mapped: StateMap = ()
) -> tuple[list[HeldTensor], list[str]]:
    """The tensors in the files of all parts without metadata, and the files not listed.

    Those are files that are damaged or whose pickle is too long, and all that follow once
    `MAX_TENSORS` are listed. Storage errors pass through. Cost: three short reads and one of
    the pickle for each rank file, one or two for each safetensors file whose header was not read.
    """
    held: list[HeldTensor] = []
    unlisted: list[str] = []
    for part in parts:
        for file, read in (*_archives(part), *_headers(part)):
            state = read() if len(held) < MAX_TENSORS else None
            if state is None:
                unlisted.append(file)
            else:
                held += _rows(file, state, part.opened.step.layout, mapped)
    return held, unlisted


def _archives(part: OpenPart) -> Iterator[_File]:
    is_rank_files = part.part.format is PartFormat.RANK_FILES
    archives = part.metadata[0].bytes_entries if is_rank_files else {}
    for file in part.part.files:
        if file.path in archives:
            yield part.in_step(file.path), partial(_in_archive, part, file)


def _headers(part: OpenPart) -> Iterator[_File]:
    for held in part.safetensors:
        for path, header in held.headers.items():
            yield held.in_step(path), partial(tensors_in_header, header)


def _in_archive(part: OpenPart, file: FileInfo) -> object | None:
    reads = FileReads(part.store, part.in_store(file.path), MAX_PICKLE_BYTES)
    try:
        return value_in_file(reads, file.size, _state_in)
    except (MetadataUnreadable, MetadataUnsafe, RecordUnreadable):
        return None


def _state_in(directory: RecordDirectory, reads: FileReads) -> object:
    pickle = read_member(directory, "data.pkl", reads)
    if pickle is None:
        raise RecordUnreadable(f"it has no pickle of at most {MAX_PICKLE_BYTES:,} bytes")
    return decode_shards(pickle)


def _rows(file: str, state: object, layout: str, mapped: StateMap) -> Iterator[HeldTensor]:
    leaves = [*leaves_of(state)]
    kinds = kinds_in_file(leaves, kind_of_file(layout, file), mapped, file)
    for leaf, kind in zip(leaves, kinds, strict=True):
        if leaf.shape is None:
            continue
        shape, whole = (leaf.shape, None) if leaf.local is None else (leaf.local, leaf.shape)
        n_bytes = prod(shape) * DTYPE_SIZES.get(leaf.dtype, 1)
        fqn = ".".join(map(str, leaf.path))
        yield HeldTensor(file, fqn, leaf.dtype, shape, whole, n_bytes, kind.names[0])
