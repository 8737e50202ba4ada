"""List the tensors of files without metadata: rank files by their pickles, safetensors by headers.

Nothing in a pickle is run, and no elements are read. A rank file states what that rank saved: of
a DTensor its part, and the shape of the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import msgspec

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe, RecordUnreadable
from ckptctl.formats.archive.directory import RecordDirectory, read_member
from ckptctl.formats.archive.safetensors import SUFFIX
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.state_keys import (
    Leaf,
    StateMap,
    entries_of,
    kinds_in_file,
    kinds_of,
    leaves_of,
)
from ckptctl.formats.pickles.shards import decode_shards
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.sidecars import (
    FileReads,
    steps_counted,
    tensors_in_header,
    value_in_file,
)
from ckptctl.model import DTYPE_SIZES, FileInfo, PartFormat
from ckptctl.records.reads import read_headers
from ckptctl.storage.contract import Store

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
    `MAX_TENSORS` are listed. Storage errors pass through. Cost: see `leaves_in`; none for a
    header that was read.
    """
    held: list[HeldTensor] = []
    unlisted: list[str] = []
    for part in parts:
        layout = part.opened.step.layout
        for path, read in _files_of(part):
            leaves = read() if len(held) < MAX_TENSORS else None
            if leaves is None:
                unlisted.append(path)
            else:
                held += _rows(path, leaves, layout, mapped)
    return held, unlisted


def _files_of(part: OpenPart) -> Iterator[tuple[str, Callable[[], list[Leaf] | None]]]:
    """The files of a part with tensors, by their paths in the step, and what reads them."""
    sizes = {file.path: file.size for file in part.part.files}
    is_of_archives = part.part.format is PartFormat.RANK_FILES
    for name in part.metadata[0].bytes_entries if is_of_archives else ():
        yield part.in_step(name), partial(leaves_in, part.store, part.in_store(name), sizes[name])
    for held in part.safetensors:
        for name, header in held.headers.items():
            yield held.in_step(name), partial(_leaves_in_header, header)


def copied_weights(opened: OpenStep, contents: Mapping[str, object]) -> frozenset[str]:
    """Those of some decoded files that count steps and hold weights of which others are the source.

    A copy of the best weights keeps the count of its own step. It has no optimizer, and all of its
    tensors are in files that count no steps, or in the metadata. Cost: none without a file of
    weights that counts steps; else the pickles of the files that are not among `contents`.
    """
    counting = {path for path, content in contents.items() if steps_counted(content) is not None}
    copies = {}
    for path in counting:
        leaves = [*leaves_of(contents[path])]
        is_optimizer = any(kind.names == ("optimizer",) for kind in kinds_of(leaves))
        if (tensors := tensor_names(leaves)) and not is_optimizer:
            copies[path] = tensors
    if not copies:
        return frozenset()
    others = [leaf for path in contents.keys() - counting for leaf in leaves_of(contents[path])]
    for part in opened.parts:
        others += (leaf for metadata in part.metadata for _, leaf in entries_of(metadata))
        for path, read in _files_of(part):
            others += [] if path in contents else read() or ()
    there = tensor_names(others)
    return frozenset(path for path, tensors in copies.items() if are_held(tensors, there))


def leaves_at(opened: OpenStep, path: str) -> Sequence[Leaf]:
    """The entries of a file of a step; none where it is not there or damaged. Cost: `leaves_in`."""
    size = next((file.size for file in opened.files if file.path == path), 0)
    return (leaves_in(opened.store, opened.in_store(path), size) if size else None) or ()


def leaves_in(store: Store, path: str, size: int) -> list[Leaf] | None:
    """The entries of a file of `torch.save` or safetensors; None where it is damaged.

    Storage errors pass through. Cost: three short reads and one of the pickle, or one or two for
    a header.
    """
    if path.endswith(SUFFIX):
        headers = read_headers(store, "", [FileInfo(path, size)])
        return next((_leaves_in_header(header) for _, header in headers), None)
    reads = FileReads(store, path, MAX_PICKLE_BYTES)
    try:
        return [*leaves_of(value_in_file(reads, size, _state_in))]
    except (MetadataUnreadable, MetadataUnsafe, RecordUnreadable):
        return None


def _leaves_in_header(header: bytes) -> list[Leaf] | None:
    tensors = tensors_in_header(header)
    return None if tensors is None else [*leaves_of(tensors)]


def _state_in(directory: RecordDirectory, reads: FileReads) -> object:
    pickle = read_member(directory, "data.pkl", reads)
    if pickle is None:
        raise RecordUnreadable(f"it has no pickle of at most {MAX_PICKLE_BYTES:,} bytes")
    return decode_shards(pickle)


def checksums_in(opened: OpenStep, path: str) -> object:
    """The checksums of the pickle and the tensors of a `torch.save` file; None where it has none.

    Raises `StorageError`. Cost: two short reads.
    """
    size = next((file.size for file in opened.files if file.path == path), 0)
    reads = FileReads(opened.store, opened.in_store(path))
    try:
        return value_in_file(reads, size, _checksums) if not path.endswith(SUFFIX) else None
    except RecordUnreadable:
        return None


def _checksums(directory: RecordDirectory, _: FileReads) -> object:
    # The pickle has the plain values: a rank's place in the data, its random numbers.
    state = [m for m in directory.members if m.name.startswith("data/") or m.name == "data.pkl"]
    if not (directory.has_crcs and len(state) > 1):
        return None
    return frozenset((member.name, member.size, member.crc) for member in state)


def _rows(file: str, leaves: Sequence[Leaf], layout: str, mapped: StateMap) -> Iterator[HeldTensor]:
    kinds = kinds_in_file(leaves, kind_of_file(layout, file), mapped, file)
    for leaf, kind in zip(leaves, kinds, strict=True):
        if leaf.shape is None:
            continue
        shape, whole = (leaf.shape, None) if leaf.local is None else (leaf.local, leaf.shape)
        n_bytes = prod(shape) * DTYPE_SIZES.get(leaf.dtype, 1)
        fqn = ".".join(map(str, leaf.path))
        yield HeldTensor(file, fqn, leaf.dtype, shape, whole, n_bytes, kind.names[0])


class TensorSize(msgspec.Struct):
    """The elements of one tensor in the files of a step."""

    n_files: int = 0
    n_elements: int = 0
    largest: int = 0
    n_whole: int | None = None
    """Elements of the whole tensor, where the files state it."""

    @property
    def is_part(self) -> bool:
        """The files hold parts of a tensor whose size they state."""
        return self.n_whole is not None and self.largest < self.n_whole

    @property
    def lacks_parts(self) -> bool:
        """The parts that exist are fewer elements than the whole tensor."""
        return self.n_whole is not None and self.n_elements < self.n_whole


TensorSizes = Mapping[tuple[str, str], TensorSize]
"""The sizes of tensors over the files of one kind, by FQN and kind."""


def tensor_sizes(
    opened: OpenStep, kinds: Collection[str], kind_of: Callable[[str], str]
) -> TensorSizes:
    """The size of each tensor over the files of each of `kinds`, which `kind_of` gives of a path.

    None where one of the files cannot be decoded: what is not known of every file would look
    smaller than it is. Raises `StorageError`.
    """
    sizes: dict[tuple[str, str], TensorSize] = defaultdict(TensorSize)
    tensors, unlisted = opened.tensors_in_files
    for tensor in () if unlisted else tensors:
        kind = kind_of(tensor.file)
        if kind in kinds:
            size = sizes[tensor.fqn, kind]
            n_elements = prod(tensor.shape)
            size.n_files += 1
            size.n_elements += n_elements
            size.largest = max(size.largest, n_elements)
            if tensor.whole is not None:
                size.n_whole = prod(tensor.whole)
    return sizes


def split_tensors(now: TensorSizes, then: TensorSizes) -> list[tuple[str, str]]:
    """The tensors that are split over the ranks: of more ranks each has less of them.

    A tensor that each rank holds whole shows nothing of how many there must be.
    """
    return [name for name, size in now.items() if name in then and is_split(size, then[name])]


def is_split(now: TensorSize, then: TensorSize) -> bool:
    """Whether two steps hold a tensor in files of another number, each with another part of it."""
    return now.n_files != then.n_files and now.largest != then.largest


TensorNames = Mapping[tuple[str, tuple[int, ...]], Collection[str]]
"""Tensors by the last word of their name and their shape, with the words before it: an average has
others in front. Empty for a name of two words, of which the first is that of the whole."""


def tensor_names(leaves: Iterable[Leaf]) -> TensorNames:
    """The tensors of several elements among the entries of files, by name and shape."""
    held: dict[tuple[str, tuple[int, ...]], set[str]] = defaultdict(set)
    for leaf in leaves:
        if leaf.shape and prod(leaf.shape) > 1:
            *before, word = ".".join(map(str, leaf.path)).split(".")
            held[word, leaf.shape].add(before[-1] if len(before) > 1 else "")
    return held


def are_held(tensors: TensorNames, here: TensorNames) -> bool:
    """Whether each of some tensors is among others, under a name that ends with the same words."""
    return all(
        key in here and (not word or not {"", word}.isdisjoint(here[key]))
        for key, words in tensors.items()
        for word in words
    )
