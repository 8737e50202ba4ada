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
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice

from ckptctl.data_classes import dataclass, replace
from ckptctl.formats.dcp.fast_path import (
    DIMS,
    NEW,
    REFERENCE,
    SET,
    TEXT,
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
    n_size_slots_of,
    size_pattern,
)
from ckptctl.formats.dcp.grammar import CHUNK, PROPERTIES, TENSOR
from ckptctl.formats.pickles.machine import Machine
from ckptctl.formats.pickles.stubs import Rows, Run, Stub

CHUNK_EXPECTS = {
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

    return FastPathShape(chunk_template, CHUNK_EXPECTS, push)


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
    chunk = chunk_template(hole, "?:")
    several = rf"\((?:{chunk_template(hole, '?:')})+e|{chunk_template(hole, '?:')}a"
    return rf"{head}\]\x94((?:(?=\(?{chunk})(?:{several})+)?){SET}"


class TensorRun(Run):
    """Entries of tensors. They are on the stack themselves; the memo asks here for its slots."""

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
    """One entry: what its first slots in the memo hold, None where only a replay can tell."""

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
        entries: list[_Entry] = []
        first_slots = array("q", [window.first_slot])
        for number, row in enumerate(window.rows):
            find_chunks = partial(_find_chunks, place, number, holes)
            try:
                entries.append(self._entry(row, first_slots[-1], holes, find_chunks))
            except Unfit:
                break
            first_slots.append(first_slots[-1] + entries[-1].n_slots)
        if not entries:
            return 0
        end = window.first(len(entries)).end
        place = replace(place, end=end)
        n_slots = first_slots[-1] - window.first_slot
        run = TensorRun(TENSOR, window.first_slot, n_slots, partial(_find_rows, place, first_slots))
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
        holes: Mapping[str, bytes],
        find_chunks: Callable[[int], Rows],
    ) -> _Entry:
        fqn, *made_here, properties, size, chunks, _ = row
        name, shape = self._parts.texts[fqn], self._parts.sizes[size]
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
        if n_slots := n_size_slots(size, holes["Size"]):
            head += [*[None] * (n_slots - 1), shape]
        head.append(chunk_list)
        run = self._chunks(chunks, first_slot + len(head), holes, find_chunks) if chunks else None
        if run is not None:
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

    def _chunks(
        self,
        chunks: bytes,
        first_slot: int,
        holes: Mapping[str, bytes],
        find_chunks: Callable[[int], Rows],
    ) -> ChunkRun:
        rows: list[Row] = _chunk_pattern(holes).findall(chunks)
        offsets, sizes = chunk_columns(self._parts, rows)
        if len(offsets) < len(rows):
            raise Unfit
        n_slots = sum_of_chunk_slots(rows, holes["Size"])
        run = ChunkRun(CHUNK, first_slot, n_slots, partial(find_chunks, first_slot))
        run.offsets, run.sizes = offsets, sizes
        return run


_TRUE = b"\x88"
_CHUNKS = 10
"""The group of `_template` that has the chunks."""


def _strides_made_of(part: bytes) -> tuple[Dims, ...]:
    """The strides, if they are a tuple that is put into the memo."""
    return () if part[:1] in (b"", b"N", b"h", b"j", b")") else (dims_of(part),)


def _chunk_pattern(holes: Mapping[str, bytes]) -> re.Pattern[bytes]:
    # What is between the chunks of a list (MARK, APPENDS, APPEND) is no part of any.
    return _compiled(*(holes[name] for name in CHUNK_EXPECTS))


@lru_cache(maxsize=16)
def _compiled(*references: bytes) -> re.Pattern[bytes]:
    template = chunk_template(literal(dict(zip(CHUNK_EXPECTS, references, strict=True))))
    return re.compile(template.encode("latin-1"), re.DOTALL)


def _find_rows(place: Window, first_slots: array[int]) -> Rows:
    spans = [match.span() for match in place.matches()]
    starts, ends = zip(*spans, strict=True)
    return Rows(array("q", starts), array("q", ends), first_slots)


def _find_chunks(place: Window, number: int, holes: Mapping[str, bytes], first_slot: int) -> Rows:
    """Where the chunks of entry `number` are."""
    start, end = next(islice(place.matches(), number, None)).span(_CHUNKS)
    window = Window(place.data, _chunk_pattern(holes), [], start, end, first_slot)
    return window.find_rows(partial(n_chunk_slots, holes["Size"]))
