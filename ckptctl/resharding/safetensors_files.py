"""Read a folder of safetensors as the source of a step.

The files hold whole tensors, or the slices that DCP's Hugging Face writer puts into
each shard. Headers give the position of the elements; no checksum verifies them, so a
file that is written to in the meantime is detected by its size and time. Whether the
files are complete is checked in `checks.without_metadata`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptctl.errors import RecordUnreadable, UsageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.safetensors import (
    INDEX_SUFFIX,
    MAX_HEADER,
    NAMES,
    PREFIX,
    SUFFIX,
    StoredTensor,
    parse_header,
    parse_index,
)
from ckptctl.formats.frameworks.state_keys import entry_kinds
from ckptctl.model import ByteRange, Chunks, FileInfo, Metadata, Part, RangeColumns, TensorEntry
from ckptctl.records.reads import read_headers
from ckptctl.records.slices import TensorSlice, row_major
from ckptctl.resharding.reading import Damage, Opened, SourceFiles
from ckptctl.resharding.sources import SourceChunk, SourcePart, SourceTensor
from ckptctl.storage.contract import Store

_DTYPES = {name: dtype for dtype, name in NAMES.items()}


class SafetensorsPart(NamedTuple):
    """One folder of safetensors. `unnamed` are files that its index does not name."""

    part: SourcePart
    files: SourceFiles
    unnamed: tuple[str, ...]


def read_safetensors(
    store: Store, folder: str, url: str, part: Part, *, under: str
) -> SafetensorsPart:
    """The tensors in a folder's files, or in those that its index names.

    `folder` is where the part is in the store. Tensors are put below the key `under`,
    if it is not empty. Raises `UsageError` for dtypes that torch has no tensor of, and
    where several indexes compete. Cost: as for `inspect_safetensors`.
    """
    files = [file for file in part.files if file.path.endswith(SUFFIX)]
    named = _named(store, folder, url, part)
    held = [file for file in files if named is None or file.path in named]
    unnamed = tuple(file.path for file in files if file not in held)
    boxes: dict[str, list[tuple[StoredTensor, ByteRange]]] = defaultdict(list)
    digest = hashlib.sha256(url.encode())
    for file, header in read_headers(store, folder, held):
        digest.update(repr((file.path, file.size, file.mtime_s, file.identity)).encode() + header)
        for tensor in parse_header(header[PREFIX:]):
            place = ByteRange(file.path, len(header) + tensor.start, tensor.n_bytes)
            boxes[tensor.name].append((tensor, place))
    source = _part(part.path, boxes, under, digest.hexdigest())
    return SafetensorsPart(source, _Files(store, folder, url, part.path, held), unnamed)


def _named(store: Store, folder: str, url: str, part: Part) -> frozenset[str] | None:
    """The files that the index of a folder names; None if there is no index."""
    indexes = [file.path for file in part.files if file.path.endswith(INDEX_SUFFIX)]
    if not indexes:
        return None
    if len(indexes) > 1:
        raise UsageError(
            f"{url} holds {len(indexes)} indexes, {' and '.join(sorted(indexes)[:2])}: each "
            "describes a separate model; give the path of one of them instead of the folder"
        )
    path = f"{folder}/{indexes[0]}" if folder else indexes[0]
    return frozenset(parse_index(store.read(path, limit=MAX_HEADER)).files.values())


class _Files(SourceFiles):
    """The elements in the files of a folder, which only a seal can verify."""

    def __init__(
        self, store: Store, folder: str, url: str, part_path: str, held: Sequence[FileInfo]
    ) -> None:
        super().__init__(store, folder, url, part_path)
        self._folder = folder
        self._held = held

    def in_store(self, name: str) -> str:
        """See `SourceFiles.in_store`."""
        return f"{self._folder}/{name}" if self._folder else name

    def opened(self, tensor: SourceTensor, number: int, held_limit: int) -> Opened:  # noqa: ARG002
        """See `SourceFiles.opened`: elements are row-major, and have no frame."""
        chunk = tensor.chunks[number]
        strides = row_major(chunk.elements.sizes, tensor.item_bytes)
        return Opened(chunk.record.offset, chunk.record.length, None, 0, strides, True)

    def check_unchanged(self) -> None:
        """See `SourceFiles.check_unchanged`."""
        there = {file.path: file for file in self.store.list_dir(self._folder)}
        for file in self._held:
            now = there.get(self.in_store(file.path))
            if now is None or _stamp(now) != _stamp(file):
                where = self.where(file.path)
                raise Damage(
                    Finding(
                        "step.changed",
                        where,
                        f"{where} changed after the copy began",
                        expected=f"{file.size:,} bytes, unchanged",
                        found="no file" if now is None else f"{now.size:,} bytes, rewritten",
                        next_command="ckptctl explain step.changed",
                    )
                )


def _stamp(file: FileInfo) -> tuple[object, ...]:
    return file.size, file.mtime_s, file.identity


def _part(
    path: str,
    boxes: Mapping[str, Sequence[tuple[StoredTensor, ByteRange]]],
    under: str,
    digest: str,
) -> SourcePart:
    entries = {}
    for name, held in boxes.items():
        first = held[0][0]
        dtype = _DTYPES.get(first.dtype)
        if dtype is None:
            raise UsageError(f"{name} is of dtype {first.dtype}, which torch does not support")
        ends = [map(sum, zip(box.offsets, box.shape, strict=True)) for box, _ in held]
        shape = tuple(max(dim) for dim in zip(*ends, strict=True))
        fqn, keys = (f"{under}.{name}", (under, name)) if under else (name, (name,))
        chunks = Chunks(len(shape), array("q"), array("q"), RangeColumns.missing(0))
        entries[name] = TensorEntry(fqn, dtype, shape, chunks, keys)
    kinds = entry_kinds(Metadata({e.fqn: e for e in entries.values()}, {}, ()), path)
    tensors = []
    for name, entry in entries.items():
        chunks_of = [
            SourceChunk(TensorSlice(box.offsets, box.shape), place)
            for box, place in sorted(boxes[name], key=lambda each: each[0].offsets)
            if 0 not in box.shape or 0 in entry.shape
        ]
        kept = tuple(chunks_of[:1] if 0 in entry.shape else chunks_of)
        kind = kinds[entry.fqn]
        tensors.append(SourceTensor(entry, kept, kind.names[0], kind.rank, len(boxes[name])))
    paths = {entry.fqn: entry.path for entry in entries.values()}
    return SourcePart(path, tuple(tensors), (), paths, (digest,))


def files_of_index(store: Store, index: FileInfo, url: str) -> tuple[FileInfo, ...]:
    """The existing files that an index names, and the index itself.

    Raises `RecordUnreadable` for an index that is damaged.
    """
    if index.size > MAX_HEADER:
        raise RecordUnreadable(f"{url} takes {index.size:,} bytes, which is too large for an index")
    named = {*parse_index(store.read(index.path, limit=MAX_HEADER)).files.values()}
    return tuple(file for file in store.list_dir() if file.path in named or file.path == index.path)
