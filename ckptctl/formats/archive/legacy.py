"""Frame a file of `torch.save` from before torch 1.6, which is no archive.

It is five pickles (a magic number, the version of the format, facts about the machine, the
object, the keys of its storages) and then, for each storage, the number of its elements and
the elements. The object states how long each storage is, so the length of the file is
known; there are no checksums.

Source: torch 2.13 `torch/serialization.py` (`_legacy_save`, `_legacy_load`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptctl.errors import MetadataUnreadable, RecordUnreadable
from ckptctl.formats.pickles.policy import Named
from ckptctl.formats.pickles.reading import PickleRead, read_pickle_at
from ckptctl.formats.pickles.stubs import Malformed
from ckptctl.formats.pickles.values import (
    TOLERANT,
    Storage,
    checked_value,
    legacy_storage,
    unknown_in,
)
from ckptctl.model import DTYPE_SIZES

FORMAT_VERSION = 1001
MAX_PICKLES = 64 << 20
"""The longest beginning of a file that is read; a million entries take about as much."""

_COUNT_BYTES = 8
"""In front of the elements of each storage: how many there are."""


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """The object, with stubs for its tensors, and where the storages begin.

    `unknown` are the globals in it that nothing is known of.
    """

    value: object
    start: int
    unknown: tuple[str, ...]


def read_legacy(head: bytes, length: int) -> LegacyFile | None:
    """What a file of `length` bytes holds, by its beginning; None if `head` is too short.

    Raises `RecordUnreadable` for a damaged file, and for one that is shorter or longer than
    its storages. Nothing in it runs.
    """
    storages: dict[str, Storage] = {}

    def persistent(persistent_id: object) -> object:
        match persistent_id:
            case ("module", Named() as cls, *_):  # with its source
                return cls
        storage = legacy_storage(persistent_id)
        if storages.setdefault(storage.key, storage) != storage:
            raise Malformed("a storage has two lengths")
        return storage

    grammar = replace(TOLERANT, persistent=persistent)
    reads: list[PickleRead] = []
    fault: MetadataUnreadable | None = None
    while len(reads) < 5 and fault is None:
        reads.append(read_pickle_at(head, reads[-1].end if reads else 0, grammar))
        fault = reads[-1].fault
    if fault is not None and len(head) < min(length, MAX_PICKLES):
        return None
    unknown = unknown_in(reads, grammar)
    if fault is not None:
        raise RecordUnreadable(fault.message) from fault
    _, version, _, held, keys = (read.value for read in reads)
    at = reads[-1].end
    value = checked_value(held, len(head))
    if version != FORMAT_VERSION:
        raise RecordUnreadable(f"its format has the version {version!r}, not {FORMAT_VERSION}")
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise RecordUnreadable("the keys of its storages are not those that its object names")
    needed = at + sum(_COUNT_BYTES + _n_bytes(storage) for storage in storages.values())
    if needed != length:
        raise RecordUnreadable(f"it has {length:,} bytes, and its tensors end at byte {needed:,}")
    return LegacyFile(value, at, unknown)


def _n_bytes(storage: Storage) -> int:
    return storage.size * DTYPE_SIZES.get(storage.dtype or "", 1)
