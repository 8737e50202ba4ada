"""Read the files of a rank-file step as entries that can be compared.

Each file of `torch.save` is decoded without running it. Its tensors become entries whose
elements stay where they are, of a DTensor the part that the rank saved; plain values become
records of their own. What is neither, such as a NumPy array, is one entry for each file, with
the checksum of the pickle that holds it: it is equal where all of the pickle is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ckptctl.errors import UsageError
from ckptctl.formats.archive.state_file import Leaf, NotPlain, pickled_value
from ckptctl.formats.frameworks.layouts import step_name
from ckptctl.formats.frameworks.scattered import is_scattered
from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.shards import decode_shards
from ckptctl.formats.pickles.values import ShardStub, TensorStub
from ckptctl.inspection.open_step import OpenPart
from ckptctl.model import FileInfo, Step
from ckptctl.resharding.flat_files import OpenFlat, flat_part, open_flat, storage_of
from ckptctl.resharding.importing import read_safetensors
from ckptctl.resharding.reading import SourceFiles
from ckptctl.resharding.sources import SourcePart

OTHER_VALUES = "(values that are not plain)"


class ReadFile(NamedTuple):
    """The entries of a file, under a name that is that of the same file in another step."""

    name: str
    part: SourcePart
    files: SourceFiles


def read_archives(step: Step, part: OpenPart) -> Iterator[ReadFile]:
    """The entries of each file of `torch.save` in a rank-file part, and of its safetensors.

    Raises `SourceDamaged` for a damaged file, and `UsageError` for one that cannot be read. Cost:
    three short reads for each file, and two for each storage.
    """
    for file in part.part.files:
        if part.metadata and file.path in part.metadata[0].bytes_entries:
            there = file.at(part.in_store(file.path))
            yield ReadFile(_name(step, file), *_entries(part, there))
    for held in part.safetensors:
        read = read_safetensors(part.store, held.folder, step.url, held.part, under="")
        yield ReadFile(held.part.path or "safetensors", read.part, read.files)


def _name(step: Step, file: FileInfo) -> str:
    """The path of a file without the number of the step."""
    if is_scattered(step.name):
        return re.sub(r"iter_[0-9]+_|(?:[^/]*-)?ba[0-9]+-", "", file.path)
    *folders, name = file.path.split("/")
    return "/".join((*(one for one in folders if step_name(one) is None), name))


def _entries(part: OpenPart, file: FileInfo) -> tuple[SourcePart, SourceFiles]:
    opened = open_flat(part.store, file, part.url, decode_shards)
    leaves: dict[str, Leaf] = {}
    is_all = True
    for leaf in _leaves((), opened.state):
        is_all &= leaf.fqn not in leaves and _can_be_compared(leaf, opened)
        if leaf.fqn not in leaves and _can_be_compared(leaf, opened):
            leaves[leaf.fqn] = leaf
    if not is_all:
        crc = opened.members["data.pkl"].crc
        leaves[OTHER_VALUES] = Leaf((OTHER_VALUES,), f"in a pickle with the CRC-32 {crc:08x}")
    try:
        return flat_part(tuple(leaves.values()), opened, part.store, part.url)
    except NotPlain as error:
        raise UsageError(f"{part.url}: {error}") from error


def _leaves(path: tuple[str | int, ...], value: object) -> Iterator[Leaf]:
    if isinstance(value, ShardStub):
        yield Leaf(path, value.local)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, key if isinstance(key, int) else str(key)), item)
    elif isinstance(value, Opaque) and isinstance(value.state, dict):
        yield from _leaves(path, value.state)
    elif isinstance(value, (list, tuple)) and not _is_plain(value):
        for number, item in enumerate(value):
            yield from _leaves((*path, number), item)
    else:
        yield Leaf(path, value)


def _is_plain(value: object) -> bool:
    try:
        pickled_value(Leaf((), value))
    except NotPlain:
        return False
    return True


def _can_be_compared(leaf: Leaf, opened: OpenFlat) -> bool:
    if not isinstance(leaf.value, TensorStub):
        return _is_plain(leaf.value)
    try:
        storage_of(leaf.fqn, leaf.value, opened.members)
    except NotPlain:
        return False
    return True
