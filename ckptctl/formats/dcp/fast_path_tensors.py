"""The fast path for tensor entries and for chunks.

A chunk is a `ChunkStorageMetadata` with its two sizes. A tensor entry is a name, its
`TensorStorageMetadata` and all of its chunks; taking it whole matters where tensors are
many and ranks are few. On the stack stands what the machine would have made, but for the
chunks, which are one `ChunkRun`. A tensor whose chunks do not fit into a window is left
to the machine, and its chunks to the shape of chunks.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, islice
from operator import itemgetter

from ckptctl.formats.dcp.chunk_table import unpacked
from ckptctl.formats.dcp.fast_path import (
    DIMS,
    NEW,
    REFERENCE,
    SET,
    TEXT,
    ChunkSlice,
    Dims,
    FastPathShape,
    Hole,
    Parts,
    Row,
    Unfit,
    Window,
    dims_of,
    is_class,
    is_new_text,
    is_size,
    is_text,
    literal,
    n_size_slots,
    size_pattern,
    slice_pattern,
)
from ckptctl.formats.dcp.grammar import CHUNK, PROPERTIES, TENSOR
from ckptctl.formats.pickles.machine import Machine
from ckptctl.formats.pickles.stubs import Run, Stub

CHUNK_EXPECTS = {
    CHUNK: is_class(CHUNK),
    "offsets": is_text("offsets"),
    "Size": is_size,
    "sizes": is_text("sizes"),
}

_OWN_SLOTS = 2
"""The object and its state."""


class ChunkRun(Run):
    """Chunks: where each begins, its size, and the memo slots of both."""

    __slots__ = ("slices",)

    slices: list[ChunkSlice]

    def known_at(self, slot: int) -> Dims | None:
        """One of the sizes, where both of its row were made there."""
        first_slots = list(accumulate(_n_slots(self.slices), initial=self.first_slot))
        row = bisect_right(first_slots, slot) - 1
        offset, size, n_slots = self.slices[row]
        n_each = 3 if offset else 2
        if n_slots != 2 * n_each:
            return None
        end_slot = first_slots[row + 1]
        if slot == end_slot - 1:
            return unpacked(size)
        return unpacked(offset) if slot == end_slot - 1 - n_each else None


def chunk_shape(parts: Parts) -> FastPathShape:
    """The shape of chunks, for one reading."""

    def push(machine: Machine, window: Window, _: Mapping[str, bytes]) -> int:
        return _push(parts, machine, window)

    return FastPathShape(_chunk_template, CHUNK_EXPECTS, push)


def chunk_pattern(hole: Hole, sizes: str) -> str:
    """The pattern of a chunk; `sizes` is that of both."""
    return f"{hole(CHUNK)}{NEW}{hole('offsets')}{sizes}{SET}"


def _chunk_template(hole: Hole) -> str:
    return chunk_pattern(hole, f"({slice_pattern(hole)})")


def _push(parts: Parts, machine: Machine, window: Window) -> int:
    slices = parts.slices.column([row[0] for row in window.rows])
    if not slices:
        return 0
    window = window.first(len(slices))
    place = window.without_rows()
    run = _run_of(slices, window.first_slot, lambda _: place)
    return len(slices) if machine.push_run(run, window.end, run.n_slots) else 0


def _run_of(slices: list[ChunkSlice], first_slot: int, find: Callable[[int], Window]) -> ChunkRun:
    n_slots = _OWN_SLOTS * len(slices) + sum(map(_SLOTS_OF_SIZES, slices))
    run = ChunkRun(CHUNK, first_slot, n_slots, lambda: find(first_slot).find_rows(_n_slots(slices)))
    run.slices = slices
    return run


_SLOTS_OF_SIZES = itemgetter(2)


def _n_slots(slices: Iterable[ChunkSlice]) -> Iterator[int]:
    """How many slots of the memo each chunk fills."""
    return (_OWN_SLOTS + one[2] for one in slices)


_EXPECTS = {
    TENSOR: is_class(TENSOR),
    "properties": is_text("properties"),
    PROPERTIES: is_class(PROPERTIES),
    "size": is_text("size"),
    "chunks": is_text("chunks"),
    **CHUNK_EXPECTS,
}


def tensor_shape(parts: Parts) -> FastPathShape:
    """The shape of the entries of tensors, for one reading."""
    return FastPathShape(_template, _EXPECTS, _Reader(parts).push, begins=(b"h", b"j", b"\x8c"))


def _template(hole: Hole) -> str:
    # EMPTY_TUPLE NEWOBJ MEMOIZE MARK, five or six properties, TUPLE MEMOIZE BUILD.
    made_here = (
        rf"{hole(PROPERTIES)}\)\x81\x94\(({REFERENCE})({REFERENCE})([\x88\x89])({REFERENCE})"
        rf"([\x88\x89])((?:N|{REFERENCE}|{DIMS})?)t\x94b"
    )
    head = (
        f"({TEXT}){hole(TENSOR)}{NEW}{hole('properties')}(?:{made_here}|({REFERENCE}))"
        f"{hole('size')}({size_pattern(hole)}){hole('chunks')}"
    )
    # EMPTY_LIST MEMOIZE, then batches of chunks with APPENDS, or one chunk with APPEND.
    # A hole that comes again refers to its first place.
    chunk, each, one = (chunk_pattern(hole, slice_pattern(hole)) for _ in range(3))
    several = rf"\((?:{each})+e|{one}a"
    return rf"{head}\]\x94((?:(?=\(?{chunk})(?:{several})+)?){SET}"


class TensorRun(Run):
    """Entries of tensors. They are on the stack themselves; the memo reads its slots from here."""

    __slots__ = ("entries", "first_slots")

    entries: list[_Entry]
    first_slots: array[int]

    def known_at(self, slot: int) -> object:
        """What is on the stack or in it, the name, or the run of chunks that fills the slot."""
        row = bisect_right(self.first_slots, slot) - 1
        entry, position = self.entries[row], slot - self.first_slots[row]
        return entry.head[position] if position < len(entry.head) else entry.chunks


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry: what its first slots in the memo hold, None where only a replay decides."""

    name: str
    tensor: Stub
    head: list[object]
    chunks: ChunkRun | None

    @property
    def n_slots(self) -> int:
        """How many slots of the memo it fills."""
        return len(self.head) + (self.chunks.n_slots if self.chunks else 0)


class _Reader:
    """Makes entries of rows; what recurs in them is made once."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._properties: dict[Row, Stub] = {}

    def push(self, machine: Machine, window: Window, holes: Mapping[str, bytes]) -> int:
        """Push the entries of a window, up to one that is unfit."""
        place = window.without_rows()
        # What is between the chunks of a list (MARK, APPENDS, APPEND) is no part of any.
        pattern = _compiled(*(holes[name] for name in CHUNK_EXPECTS))
        entries: list[_Entry] = []
        first_slots = array("q", [window.first_slot])
        for number, row in enumerate(window.rows):
            chunks_at = partial(_chunks_at, place, number, pattern)
            try:
                entries.append(self._entry(row, first_slots[-1], pattern, chunks_at))
            except Unfit:
                break
            first_slots.append(first_slots[-1] + entries[-1].n_slots)
        if not entries:
            return 0
        end = window.first(len(entries)).end
        place = replace(place, end=end)
        n_slots = first_slots[-1] - window.first_slot
        n_each = [entry.n_slots for entry in entries]
        run = TensorRun(TENSOR, window.first_slot, n_slots, partial(place.find_rows, n_each))
        run.entries, run.first_slots = entries, first_slots
        n_texts = sum(is_new_text(row[0]) for row in window.rows[: len(entries)])
        values = [value for entry in entries for value in (entry.name, entry.tensor)]
        if not machine.push_run(run, end, n_slots - n_texts, values):
            return 0
        machine.taken.update(id(entry.tensor.state) for entry in entries)
        return len(entries)

    def _entry(
        self,
        row: Row,
        first_slot: int,
        pattern: re.Pattern[bytes],
        chunks_at: Callable[[int], Window],
    ) -> _Entry:
        fqn, *made_here, properties, size, chunks, _ = row
        name, shape = self._parts.texts[fqn], unpacked(self._parts.sizes[size])
        tensor, chunk_list = Stub(TENSOR), list[object]()
        its_properties = (
            self._parts.referred(properties)
            if properties
            else self._properties_made_of(tuple(made_here))
        )
        state = {"properties": its_properties, "size": shape, "chunks": chunk_list}
        tensor.build(state)
        head: list[object] = [name, tensor, state] if is_new_text(fqn) else [tensor, state]
        if not properties:
            head += [its_properties, *_strides_made_of(made_here[-1]), None]
        if n_slots := n_size_slots(size):
            head += [*[None] * (n_slots - 1), shape]
        head.append(chunk_list)
        if not chunks:
            return _Entry(name, tensor, head, None)
        parts: list[bytes] = pattern.findall(chunks)
        slices = self._parts.slices.column(parts)
        if len(slices) < len(parts):
            raise Unfit
        run = _run_of(slices, first_slot + len(head), chunks_at)
        chunk_list.append(run)
        return _Entry(name, tensor, head, run)

    def _properties_made_of(self, parts: Row) -> Stub:
        if parts not in self._properties:
            dtype, layout, requires_grad, memory_format, pin_memory, strides = parts
            state: list[object] = [
                self._parts.referred(dtype),
                self._parts.referred(layout),
                requires_grad == _TRUE,
                self._parts.referred(memory_format),
                pin_memory == _TRUE,
            ]
            if strides[:1] in (b"h", b"j"):
                state.append(self._parts.referred(strides))
            elif strides:
                state.append(None if strides == b"N" else dims_of(strides))
            self._properties[parts] = Stub(PROPERTIES)
            self._properties[parts].build(tuple(state))
        return self._properties[parts]


_TRUE = b"\x88"
_CHUNKS = 10
"""The group of `_template` that has the chunks."""


def _strides_made_of(part: bytes) -> tuple[Dims, ...]:
    """The strides, if they are a tuple that is put into the memo."""
    return () if part[:1] in (b"", b"N", b"h", b"j", b")") else (dims_of(part),)


@lru_cache(maxsize=16)
def _compiled(*references: bytes) -> re.Pattern[bytes]:
    template = _chunk_template(literal(dict(zip(CHUNK_EXPECTS, references, strict=True))))
    return re.compile(template.encode("latin-1"), re.DOTALL)


def _chunks_at(place: Window, number: int, pattern: re.Pattern[bytes], first_slot: int) -> Window:
    """The chunks of entry `number`."""
    start, end = next(islice(place.matches(), number, None)).span(_CHUNKS)
    return Window(place.data, pattern, [], start, end, first_slot)
