"""The fast path for chunks.

A `ChunkStorageMetadata` with its two sizes; see `fast_path_shapes` for how it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ckptctl.formats.fast_path import (
    NEW,
    SET,
    FastPathShape,
    Hole,
    Row,
    Window,
    is_class,
    is_size,
    is_text,
    size_pattern,
)
from ckptctl.formats.fast_path_parts import Dims, Parts, n_size_slots, n_size_slots_of
from ckptctl.formats.metadata_grammar import CHUNK
from ckptctl.formats.pickle_machine import Machine
from ckptctl.formats.pickle_memo import Run

EXPECTS = {
    CHUNK: is_class(CHUNK),
    "offsets": is_text("offsets"),
    "Size": is_size,
    "sizes": is_text("sizes"),
}

_OWN_SLOTS = 2
"""The object and its state."""


class ChunkRun(Run):
    """Chunks in columns: where each begins, and its size, in elements."""

    __slots__ = ("offsets", "sizes")

    offsets: list[Dims]
    sizes: list[Dims]

    def known_at(self, slot: int) -> Dims | None:
        """One of the sizes, where both of its row were made there."""
        row = self.row_of(slot)
        first_slot, end_slot = self.rows.first_slots[row : row + 2]
        n_each = 3 if self.offsets[row] else 2
        if end_slot - first_slot != _OWN_SLOTS + 2 * n_each:
            return None
        if slot == end_slot - 1:
            return self.sizes[row]
        return self.offsets[row] if slot == end_slot - 1 - n_each else None


def chunk_shape(parts: Parts) -> FastPathShape:
    """The shape of chunks, for one reading."""

    def push(machine: Machine, window: Window, holes: Mapping[str, bytes]) -> int:
        return _push(parts, machine, window, holes["Size"])

    return FastPathShape(chunk_template, EXPECTS, push)


def chunk_template(hole: Hole, group: str = "") -> str:
    """The pattern of a chunk; with `?:` for a `group` its two sizes are no groups."""
    return (
        f"{hole(CHUNK)}{NEW}{hole('offsets')}({group}{size_pattern(hole)})"
        f"{hole('sizes')}({group}{size_pattern(hole)}){SET}"
    )


def _push(parts: Parts, machine: Machine, window: Window, size_reference: bytes) -> int:
    offsets, sizes = chunk_columns(parts, window.rows)
    if not offsets:
        return 0
    window = window.first(len(offsets))
    find_rows = partial(window.without_rows().find_rows, partial(n_chunk_slots, size_reference))
    n_slots = sum_of_chunk_slots(window.rows, size_reference)
    run = ChunkRun(CHUNK, window.first_slot, n_slots, find_rows)
    run.offsets, run.sizes = offsets, sizes
    return len(offsets) if machine.push_run(run, window.end, n_containers=n_slots) else 0


def chunk_columns(parts: Parts, rows: Sequence[Row]) -> tuple[list[Dims], list[Dims]]:
    """Where the chunks of rows begin and their sizes, up to one that is unfit."""
    offset_parts, size_parts, *_ = zip(*rows, strict=True)
    offsets: list[Dims] = []
    sizes: list[Dims] = []
    parts.sizes.extend(offsets, offset_parts)
    parts.sizes.extend(sizes, size_parts)
    n_rows = min(len(offsets), len(sizes))
    return offsets[:n_rows], sizes[:n_rows]


def n_chunk_slots(size_reference: bytes, row: Row) -> int:
    """How many slots of the memo a chunk fills."""
    offset, size, *_ = row
    return _OWN_SLOTS + n_size_slots(offset, size_reference) + n_size_slots(size, size_reference)


def sum_of_chunk_slots(rows: Sequence[Row], size_reference: bytes) -> int:
    """How many slots of the memo chunks fill together."""
    offsets, sizes, *_ = zip(*rows, strict=True)
    n_slots = _OWN_SLOTS * len(rows)
    return n_slots + sum(n_size_slots_of(parts, size_reference) for parts in (offsets, sizes))
