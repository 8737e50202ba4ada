"""Decode runs of pickled objects of one form at once, without interpreting each opcode.

A chunk of a tensor is some twenty opcodes, a key with its byte range some
thirty, and a step of 256 ranks holds half a million of each: most of a minute.
But a pickler writes every chunk alike. From the second one on, its class and
the names of its fields are references into the memo, which are the same bytes
each time; only numbers and names differ. So:

- *Learn.* After the machine has interpreted such an object, a pattern with
  holes for the references is matched against the next. What the references
  stand for is looked up in the memo. If it is what the shape needs, the
  pattern is compiled again with those very bytes in place of the holes.
- *Take.* That pattern is matched as often as it fits, one object right behind
  the other, within a window of 64 KiB. Between its _literal bytes are the parts
  that differ, and each distinct part is decoded once. The objects become a
  `StubRun`: columns, and the place in the bytes where they are.
- *Never differ.* A shape takes an object only when each of its bytes is
  accounted for. Whatever does not fit (another field, a longer name, a frame
  that begins in the middle) is left to the machine, and the shape is tried
  again behind it. A run stands on the stack for all its values and counts in
  the memo for all its slots; when the pickle refers to one of them, the bytes
  of the run are interpreted after all.

`PartDecoders` decodes names, sizes and numbers: in half a million objects most of them come again
and again, so each is decoded when it is first met and looked up from then on.

There are four shapes. A *chunk* is a `ChunkStorageMetadata` with its two sizes. A *tensor entry*
is a name, its `TensorStorageMetadata` and all of its chunks; taking it whole matters where
tensors are many and ranks are few. On the stack stands what the machine would have made, but
for the chunks, which are one `ChunkRun`. A tensor whose chunks do not fit into a window is
left to the machine, and its chunks to the shape of chunks.

A *byte range* is a `MetadataIndex`, the key, and the `_StorageInfo` that it leads to. Each rank
sent its own results to the coordinator, so names and files are written anew for each rank, and
referred to by what follows them: a run records in which slots of the memo they are.

Megatron-Core keeps the save plans of all ranks beside the metadata: a `WriteItem`, an *item of a
plan*, for every chunk, larger than all the rest. Nothing in it is needed to state what a
checkpoint holds, so a `StubRun` of them has no columns. That each reference leads to something that
is there is checked, as it is for any other.

Source: CPython 3.14 `Modules/_pickle.c`, `save_reduce` and `store_tuple_elements`.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import accumulate, compress, islice, takewhile
from operator import itemgetter, lt
from typing import Generic, TypeVar

from ckptctl.formats.dcp.metadata import (
    CHUNK,
    INDEX,
    NO_HINT,
    PROPERTIES,
    STORAGE_INFO,
    TENSOR,
    WRITE_DATA,
    WRITE_ITEM,
    Dims,
    Span,
    packed,
    unpacked,
)
from ckptctl.formats.pickles.reading import Machine
from ckptctl.formats.pickles.stubs import (
    MAX_DIMS,
    SIZE,
    Function,
    Malformed,
    Rows,
    Stub,
    StubRun,
    checked_dims,
)

MIN_WINDOW, MAX_WINDOW = 1_024, 65_536
"""How many bytes are matched at once. A window that fits only to some point is followed
by a smaller one: a file made to disappoint then costs little more than without shapes."""

MAX_LEARNED = 8
"""How many sets of references one shape is compiled for; torch needs one."""

NEW = r"\)\x81\x94\}\x94\("
"""EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK: an object, and its state begins."""

SET = "ub"
"""SETITEMS BUILD: the state ends, and is given to the object."""

Row = tuple[bytes, ...]
Hole = Callable[[str], str]
"""The pattern for the reference that a hole is named after."""

Holes = Mapping[str, bytes]
"""The reference that each hole stands for, by its name."""

Test = Callable[[object], bool]


def _is_class(kind: str) -> Test:
    return lambda value: isinstance(value, Function) and value.name == kind


def _is_text(text: str) -> Test:
    return lambda value: value == text


def _size_pattern(hole: Hole) -> str:
    """The pattern of a `torch.Size`: made here, or referred to."""
    return rf"(?:{hole('Size')}{DIMS}\x85\x94R\x94|{REFERENCE})"


def _slice_pattern(hole: Hole, group: str = "?:") -> str:
    """The pattern of where a chunk begins and its size; with "" for `group`, each is a group."""
    return f"({group}{_size_pattern(hole)}){hole('sizes')}({group}{_size_pattern(hole)})"


def _key_pattern(hole: Hole, group: str = "?:") -> str:
    """The pattern of the hint and the offset in a key; an entry of bytes has no offset."""
    return f"({group}{INT}|N)(?:{hole('offset')}({group}{_size_pattern(hole)}))?"


def _span_pattern(hole: Hole, group: str = "?:") -> str:
    """The pattern of where a record begins, and of its length."""
    return f"({group}{INT}){hole('length')}({group}{INT})"


@dataclass(frozen=True, slots=True)
class Window:
    """Objects of one shape, one behind the other, from `start` to `end`.

    `rows` has one row for each, of the parts that differ; `first_slot` is the memo
    slot that the first object fills.
    """

    data: bytes
    pattern: re.Pattern[bytes]
    rows: list[Row]
    start: int
    end: int
    first_slot: int

    def first(self, n_rows: int) -> Window:
        """Its first `n_rows` objects, at least one."""
        if n_rows == len(self.rows):
            return self
        end = next(islice(self.matches(), n_rows - 1, None)).end()
        return replace(self, rows=self.rows[:n_rows], end=end)

    def without_rows(self) -> Window:
        """Where the objects are, and nothing else."""
        return replace(self, rows=[])

    def matches(self) -> Iterator[re.Match[bytes]]:
        """Where each object is, and its parts."""
        return self.pattern.finditer(self.data, self.start, self.end)

    def find_rows(self, n_slots: Iterable[int]) -> Rows:
        """Where each object is; `n_slots` are how many slots of the memo each fills."""
        spans = [match.span() for match in self.matches()]
        starts, ends = zip(*spans, strict=True)
        first_slots = array("q", accumulate(n_slots, initial=self.first_slot))
        return Rows(array("q", starts), array("q", ends), first_slots)


def _literal(references: Holes) -> Hole:
    """Holes that match what was learned; one that is not known yet matches nothing."""

    def hole(name: str) -> str:
        return re.escape(references[name]).decode("latin-1") if references[name] else "(?!)"

    return hole


class FastPathShape:
    """One shape in one reading: what was learned of it so far.

    `template` is the pattern of one object, its groups the parts that differ;
    `expects` states for each hole in it what the reference must stand for. `push`
    makes a `StubRun` of a window, pushes it, and returns how many rows are in it. `begins`
    are the opcodes that an object of the shape can begin with.
    """

    def __init__(
        self,
        template: Callable[[Hole], str],
        expects: Mapping[str, Test],
        push: Callable[[Machine, Window, Holes], int],
        begins: tuple[bytes, ...] = (b"h", b"j"),
    ) -> None:
        self._begins = begins
        self._template = template
        self._expects = expects
        self._push = push
        self._generic = _compiled(template(_open_holes()))
        self._learned: dict[Row, re.Pattern[bytes]] = {}
        self._references: Row = (b"",) * len(expects)
        self._n_bytes = MAX_WINDOW

    def take(self, machine: Machine) -> None:
        """Take as many objects of the shape as follow, or none."""
        while machine.data[machine.pos : machine.pos + 1] in self._begins:
            window = self._window(machine)
            if window is None and self._learn(machine):
                window = self._window(machine)
            if window is None:
                return
            holes = dict(zip(self._expects, self._references, strict=True))
            n_rows = self._push(machine, window, holes)
            fits = n_rows == len(window.rows)
            self._n_bytes = (
                min(2 * self._n_bytes, MAX_WINDOW) if fits else max(self._n_bytes // 2, MIN_WINDOW)
            )
            if not n_rows:
                return

    def _window(self, machine: Machine) -> Window | None:
        pattern = self._learned.get(self._references)
        if pattern is None:
            return None
        start, end = machine.pos, min(machine.pos + self._n_bytes, machine.end)
        rows: list[Row] = pattern.findall(machine.data, start, end)
        rest = rows[-1][-1]
        if rest:
            rows.pop()
            end -= len(rest)
        if not rows:
            return None
        return Window(machine.data, pattern, rows, start, end, machine.memo.n_slots)

    def _learn(self, machine: Machine) -> bool:
        """Take over the references of the object that follows; False where that is no news.

        An object may lack some of them: no offset, for a bytes entry. Those that
        are known from before are kept.
        """
        match = self._generic.match(machine.data, machine.pos, machine.pos + MAX_WINDOW)
        if match is None or match[match.re.groups] is not None:
            return False
        references = tuple(
            match[name] or known
            for name, known in zip(self._expects, self._references, strict=True)
        )
        if references == self._references:
            return False
        if references not in self._learned:
            if len(self._learned) == MAX_LEARNED or not self._is_meant(references, machine):
                return False
            holes = _literal(dict(zip(self._expects, references, strict=True)))
            self._learned[references] = _compiled(self._template(holes))
        self._references = references
        return True

    def _is_meant(self, references: Row, machine: Machine) -> bool:
        n_slots = machine.memo.n_slots
        return all(
            not reference
            or (_slot_of(reference) < n_slots and test(machine.recall(_slot_of(reference))))
            for reference, test in zip(references, self._expects.values(), strict=True)
        )


def _compiled(template: str) -> re.Pattern[bytes]:
    # The last alternative eats what does not fit: `findall` never skips a byte.
    return re.compile(f"{template}|(.+)".encode("latin-1"), re.DOTALL)


def _open_holes() -> Hole:
    """Holes that match any reference, the same one wherever a name comes again."""
    seen: set[str] = set()

    def hole(name: str) -> str:
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>{REFERENCE})"

    return hole


REFERENCE = r"(?:h.|j.{4})"
"""BINGET or LONG_BINGET."""

REFERENCE_BYTES = 5
"""The length of a reference at most."""

INT = (
    r"(?:K.|M..|J...[\x00-\x7f]"
    r"|\x8a(?:\x05.{4}|\x06.{5}|\x07.{6}|\x08.{7})[\x00-\x7f])"
)
"""An integer from 0 to 2**63: BININT1, BININT2, BININT or LONG1."""

TEXT = rf"(?:{REFERENCE}|\x8c.[^\x94]*\x94)"
"""A string that is referred to, or SHORT_BINUNICODE and MEMOIZE."""

DIMS = rf"(?:\)|{INT}(?:\x85|{INT}(?:\x86|{INT}\x87))\x94|\({INT}{{4,{MAX_DIMS}}}t\x94)"
"""A tuple of integers; all but the empty one are memoized."""

MAX_KNOWN = 262_144
"""How many parts of one kind are remembered: more than 16,384 ranks have places in tensors."""

_BINGET, _LONG1, _MARK, _EMPTY_TUPLE = 0x68, 0x8A, 0x28, 0x29
NEW_TEXT = 0x8C
"""SHORT_BINUNICODE: a text begins with it that is written here."""

_INT_BYTES = {0x4B: 1, 0x4D: 2, 0x4A: 4}

ChunkSlice = tuple[bytes, bytes, int]
"""Where a chunk begins, its size, both `packed`, and the memo slots that they fill."""

Key = tuple[int, bytes | None, int]
"""The hint and the `packed` offset in a key, and the memo slots that the offset fills."""

Meaning = TypeVar("Meaning")


class FormMismatch(Exception):
    """A part that has the form of its kind but is none."""


class Known(dict[bytes, Meaning], Generic[Meaning]):
    """What parts mean; at most `MAX_KNOWN` of them are remembered."""

    def __init__(self, decode: Callable[[bytes], Meaning]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, part: bytes) -> Meaning:
        meaning = self._decode(part)
        if len(self) >= MAX_KNOWN:
            self.clear()
        self[part] = meaning
        return meaning

    def extend(self, column: list[Meaning], parts: Sequence[bytes]) -> None:
        """Add to `column` what the parts behind it mean, up to one that is unfit."""
        # What was appended before the exception stays in the list.
        try:
            column.extend(map(self.__getitem__, islice(parts, len(column), None)))
        except FormMismatch:
            return

    def column(self, parts: Sequence[bytes]) -> list[Meaning]:
        """What the parts mean, up to one that is unfit."""
        column: list[Meaning] = []
        self.extend(column, parts)
        return column


class PartDecoders:
    """The parts of one reading."""

    # The decoders refer to the machine and not to the parts: no cycle keeps either in memory.
    def __init__(self, machine: Machine) -> None:
        sizes = Known(partial(_size, machine))
        self.sizes = sizes
        self.slices = Known(partial(_slice, _groups(_slice_pattern), sizes))
        self.keys = Known(partial(_key, _groups(_key_pattern), sizes))
        self.spans = Known(partial(_span, _groups(_span_pattern)))
        self.texts = Known(partial(_text, machine))
        self.slots = Known(_slot_read)
        self.referred = partial(_referred, machine)


def _text(machine: Machine, part: bytes) -> str:
    if _is_new_text(part):
        return _new_text(part)
    text = _referred(machine, part)
    if not isinstance(text, str):
        raise FormMismatch
    return text


def _size(machine: Machine, part: bytes) -> bytes:
    if not _is_new_size(part):
        return packed(_checked(_referred(machine, part)))
    return packed(_dims_of(part, _reference_bytes(part)))


Groups = Callable[[bytes], Row]


@cache
def _groups(pattern: Callable[[Hole, str], str]) -> Groups:
    """Splits a part; its references were compared when the object was matched."""
    compiled = re.compile(pattern(lambda _: REFERENCE, "").encode("latin-1"), re.DOTALL)

    def split(part: bytes) -> Row:
        match = compiled.fullmatch(part)
        if match is None:
            raise FormMismatch
        return match.groups(b"")

    return split


def _slice(split: Groups, sizes: Known[bytes], part: bytes) -> ChunkSlice:
    offset, size = split(part)
    return sizes[offset], sizes[size], _n_size_slots(offset) + _n_size_slots(size)


def _key(split: Groups, sizes: Known[bytes], part: bytes) -> Key:
    hint, offset = split(part)
    return (
        NO_HINT if hint == b"N" else _int(hint),
        sizes[offset] if offset else None,
        _n_size_slots(offset),
    )


def _span(split: Groups, part: bytes) -> Span:
    start, length = split(part)
    return _int(start), _int(length), ()


def _referred(machine: Machine, reference: bytes) -> object:
    """What the memo holds for the argument of BINGET or LONG_BINGET."""
    slot = _slot_of(reference)
    if slot >= machine.memo.n_slots:
        raise FormMismatch
    return machine.recall(slot)


def _slot_of(reference: bytes) -> int:
    return int.from_bytes(reference[1:], "little")


def _is_new_text(part: bytes) -> bool:
    return part[0] == NEW_TEXT


def _is_new_size(part: bytes) -> bool:
    """Whether a size is made here, and not referred to or missing."""
    return len(part) > REFERENCE_BYTES


def _n_size_slots(part: bytes) -> int:
    """How many slots of the memo a size fills: three, or two without a dimension.

    One that is referred to, or missing, fills none.
    """
    if not _is_new_size(part):
        return 0
    return 2 if part[_reference_bytes(part)] == _EMPTY_TUPLE else 3


def _reference_bytes(part: bytes) -> int:
    return 2 if part[0] == _BINGET else REFERENCE_BYTES


def _slot_read(part: bytes) -> int:
    """The memo slot that a part reads: -1 for a text or a size that is made here, or missing."""
    if part and _is_new_text(part):
        _new_text(part)
        return -1
    return _slot_of(part) if part and not _is_new_size(part) else -1


def _new_text(part: bytes) -> str:
    # The pattern ends a text at the first byte that can be MEMOIZE; the length decides.
    if part[1] != len(part) - 3:
        raise FormMismatch
    try:
        return str(part[2:-1], "utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise FormMismatch from None


def _checked(value: object) -> Dims:
    if not isinstance(value, tuple):
        raise FormMismatch
    try:
        return checked_dims(value, "a size")
    except Malformed:
        raise FormMismatch from None


def _int(part: bytes) -> int:
    return int.from_bytes(part[2 if part[0] == _LONG1 else 1 :], "little")


def _dims_of(part: bytes, position: int = 0) -> Dims:
    """The integers of a tuple that is written from `position` on."""
    dims: list[int] = []
    if part[position] == _MARK:
        position += 1
    while part[position] == _LONG1 or part[position] in _INT_BYTES:
        is_long = part[position] == _LONG1
        begin = position + (2 if is_long else 1)
        position = begin + (part[position + 1] if is_long else _INT_BYTES[part[position]])
        dims.append(int.from_bytes(part[begin:position], "little"))
    return tuple(dims)


# Chunks, and entries of tensors

CHUNK_EXPECTS = {
    CHUNK: _is_class(CHUNK),
    "offsets": _is_text("offsets"),
    "Size": lambda value: value is SIZE,
    "sizes": _is_text("sizes"),
}

_OBJECT_SLOTS = 2
"""An object and its state: a chunk, the data of a tensor, its properties, a key."""


class ChunkRun(StubRun):
    """Chunks: where each begins, its size, and the memo slots of both."""

    __slots__ = ("slices",)

    slices: list[ChunkSlice]

    def known_at(self, slot: int) -> Dims | None:
        """One of the sizes, where both of its row were made there."""
        first_slots = list(accumulate(_n_chunk_slots(self.slices), initial=self.first_slot))
        row = bisect_right(first_slots, slot) - 1
        offset, size, n_slots = self.slices[row]
        n_each = 3 if offset else 2
        if n_slots != 2 * n_each:
            return None
        end_slot = first_slots[row + 1]
        if slot == end_slot - 1:
            return unpacked(size)
        return unpacked(offset) if slot == end_slot - 1 - n_each else None


def _chunk_pattern(hole: Hole, sizes: str) -> str:
    """The pattern of a chunk; `sizes` is that of both."""
    return f"{hole(CHUNK)}{NEW}{hole('offsets')}{sizes}{SET}"


def _chunk_template(hole: Hole) -> str:
    return _chunk_pattern(hole, f"({_slice_pattern(hole)})")


def _push_chunks(parts: PartDecoders, machine: Machine, window: Window, _: Holes) -> int:
    slices = parts.slices.column([row[0] for row in window.rows])
    if not slices:
        return 0
    window = window.first(len(slices))
    place = window.without_rows()
    run = _run_of(slices, window.first_slot, lambda _: place)
    return len(slices) if machine.push_run(run, window.end, run.n_slots) else 0


def _run_of(slices: list[ChunkSlice], first_slot: int, find: Callable[[int], Window]) -> ChunkRun:
    n_slots = _OBJECT_SLOTS * len(slices) + sum(map(_SLOTS_OF_SIZES, slices))
    run = ChunkRun(
        CHUNK, first_slot, n_slots, lambda: find(first_slot).find_rows(_n_chunk_slots(slices))
    )
    run.slices = slices
    return run


_SLOTS_OF_SIZES = itemgetter(2)


def _n_chunk_slots(slices: Iterable[ChunkSlice]) -> Iterator[int]:
    """How many slots of the memo each chunk fills."""
    return (_OBJECT_SLOTS + chunk[2] for chunk in slices)


_TENSOR_EXPECTS = {
    TENSOR: _is_class(TENSOR),
    "properties": _is_text("properties"),
    PROPERTIES: _is_class(PROPERTIES),
    "size": _is_text("size"),
    "chunks": _is_text("chunks"),
    **CHUNK_EXPECTS,
}


def _tensor_template(hole: Hole) -> str:
    # EMPTY_TUPLE NEWOBJ MEMOIZE MARK, five or six properties, TUPLE MEMOIZE BUILD.
    made_here = (
        rf"{hole(PROPERTIES)}\)\x81\x94\(({REFERENCE})({REFERENCE})([\x88\x89])({REFERENCE})"
        rf"([\x88\x89])((?:N|{REFERENCE}|{DIMS})?)t\x94b"
    )
    head = (
        f"({TEXT}){hole(TENSOR)}{NEW}{hole('properties')}(?:{made_here}|({REFERENCE}))"
        f"{hole('size')}({_size_pattern(hole)}){hole('chunks')}"
    )
    # EMPTY_LIST MEMOIZE, then batches of chunks with APPENDS, or one chunk with APPEND.
    # A hole that comes again refers to its first place.
    chunk, each, one = (_chunk_pattern(hole, _slice_pattern(hole)) for _ in range(3))
    several = rf"\((?:{each})+e|{one}a"
    return rf"{head}\]\x94((?:(?=\(?{chunk})(?:{several})+)?){SET}"


class TensorRun(StubRun):
    """Entries of tensors. They are on the stack themselves; the memo reads its slots from here."""

    __slots__ = ("entries", "first_slots")

    entries: list[_MemoEntry]
    first_slots: array[int]

    def known_at(self, slot: int) -> object:
        """What is on the stack or in it, the name, or the run of chunks that fills the slot."""
        row = bisect_right(self.first_slots, slot) - 1
        entry, position = self.entries[row], slot - self.first_slots[row]
        return entry.head[position] if position < len(entry.head) else entry.chunks


@dataclass(frozen=True, slots=True)
class _MemoEntry:
    """One entry: what its first slots in the memo hold, None where only a replay decides."""

    name: str
    tensor: Stub
    head: list[object]
    chunks: ChunkRun | None

    @property
    def n_slots(self) -> int:
        """How many slots of the memo it fills."""
        return len(self.head) + (self.chunks.n_slots if self.chunks else 0)


class _TensorDecoder:
    """Makes entries of rows; what recurs in them is made once."""

    def __init__(self, parts: PartDecoders) -> None:
        self._parts = parts
        self._properties: dict[Row, Stub] = {}

    def push(self, machine: Machine, window: Window, holes: Holes) -> int:
        """Push the entries of a window, up to one that is unfit."""
        place = window.without_rows()
        # What is between the chunks of a list (MARK, APPENDS, APPEND) is no part of any.
        pattern = _compiled_chunks(*(holes[name] for name in CHUNK_EXPECTS))
        entries: list[_MemoEntry] = []
        first_slots = array("q", [window.first_slot])
        for number, row in enumerate(window.rows):
            chunks_at = partial(_chunks_at, place, number, pattern)
            try:
                entries.append(self._entry(row, first_slots[-1], pattern, chunks_at))
            except FormMismatch:
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
        n_texts = sum(_is_new_text(row[0]) for row in window.rows[: len(entries)])
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
    ) -> _MemoEntry:
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
        head: list[object] = [name, tensor, state] if _is_new_text(fqn) else [tensor, state]
        if not properties:
            head.append(its_properties)
            if made_here[-1][:1] not in (b"", b"N", b"h", b"j", b")"):  # a tuple of its own
                head.append(_dims_of(made_here[-1]))
            head.append(None)
        if n_slots := _n_size_slots(size):
            head += [*[None] * (n_slots - 1), shape]
        head.append(chunk_list)
        if not chunks:
            return _MemoEntry(name, tensor, head, None)
        parts: list[bytes] = pattern.findall(chunks)
        slices = self._parts.slices.column(parts)
        if len(slices) < len(parts):
            raise FormMismatch
        run = _run_of(slices, first_slot + len(head), chunks_at)
        chunk_list.append(run)
        return _MemoEntry(name, tensor, head, run)

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
                state.append(None if strides == b"N" else _dims_of(strides))
            self._properties[parts] = Stub(PROPERTIES)
            self._properties[parts].build(tuple(state))
        return self._properties[parts]


_TRUE = b"\x88"
_CHUNKS = 10
"""The group of `_tensor_template` that has the chunks."""


@lru_cache(maxsize=16)
def _compiled_chunks(*references: bytes) -> re.Pattern[bytes]:
    template = _chunk_template(_literal(dict(zip(CHUNK_EXPECTS, references, strict=True))))
    return re.compile(template.encode("latin-1"), re.DOTALL)


def _chunks_at(place: Window, number: int, pattern: re.Pattern[bytes], first_slot: int) -> Window:
    """The chunks of entry `number`."""
    start, end = next(islice(place.matches(), number, None)).span(_CHUNKS)
    return Window(place.data, pattern, [], start, end, first_slot)


# Byte ranges, and items of plans

_RANGE_EXPECTS = {
    INDEX: _is_class(INDEX),
    "fqn": _is_text("fqn"),
    "index": _is_text("index"),
    "offset": _is_text("offset"),
    "Size": lambda value: value is SIZE,
    STORAGE_INFO: _is_class(STORAGE_INFO),
    "relative_path": _is_text("relative_path"),
    "start": _is_text("offset"),
    "length": _is_text("length"),
}
_RANGE_SLOTS = 4
"""Each of the two objects, and the state of each."""

_FQN = 2
"""The slot of a row that its name fills: those before are of the key and its state."""


class StorageRun(StubRun):
    """Keys and byte ranges in columns, one row for each.

    `texts` are the names and files that later rows refer to, by their slots in the memo.
    """

    __slots__ = ("files", "fqns", "keys", "spans", "texts")

    fqns: list[str]
    keys: list[Key]
    files: list[str]
    spans: list[Span]
    texts: dict[int, str]

    def known_at(self, slot: int) -> str | None:
        """A name or a file that was written in one of the rows."""
        return self.texts.get(slot)


def _range_template(hole: Hole) -> str:
    return (
        f"{hole(INDEX)}{NEW}{hole('fqn')}({TEXT}){hole('index')}({_key_pattern(hole)}){SET}"
        f"{hole(STORAGE_INFO)}{NEW}{hole('relative_path')}({TEXT})"
        f"{hole('start')}({_span_pattern(hole)}){SET}"
    )


def _push_ranges(parts: PartDecoders, machine: Machine, window: Window, _: Holes) -> int:
    read = _RangeRows(parts, window)
    fqns, files = read.texts(read.fqn_parts), read.texts(read.file_parts)
    n_rows = min(len(fqns), len(files))
    if not n_rows:
        return 0
    window = window.first(n_rows)
    place = window.without_rows()
    run = StorageRun(
        INDEX,
        window.first_slot,
        read.first_slots[n_rows] - window.first_slot,
        lambda: place.find_rows(_n_range_slots(m.groups(b"")) for m in place.matches()),
        in_pairs=True,
    )
    run.fqns, run.keys, run.files = fqns[:n_rows], read.keys[:n_rows], files[:n_rows]
    run.spans = parts.spans.column(read.span_parts[:n_rows])
    run.texts = read.texts_to_keep(fqns, files)
    n_texts = sum(read.new_fqns[:n_rows]) + sum(read.new_files[:n_rows])
    return n_rows if machine.push_run(run, window.end, run.n_slots - n_texts) else 0


class _RangeRows:
    """The parts of the rows of a window, and their slots in the memo, up to a row that is unfit.

    Row n fills the slots from `first_slots[n]` up to `first_slots[n + 1]`; the third of them
    holds its name and the last its file, where these are written in it.
    """

    def __init__(self, parts: PartDecoders, window: Window) -> None:
        self._known = parts.texts
        self.fqn_parts, key_parts, self.file_parts, self.span_parts, _ = zip(
            *window.rows, strict=True
        )
        self.keys = parts.keys.column(key_parts)
        self.new_fqns = [part[0] == NEW_TEXT for part in self.fqn_parts]
        self.new_files = [part[0] == NEW_TEXT for part in self.file_parts]
        rows = zip(self.keys, self.new_fqns, self.new_files, strict=False)
        n_slots = [_RANGE_SLOTS + key[2] + new_fqn + new_file for key, new_fqn, new_file in rows]
        self.first_slots = list(accumulate(n_slots, initial=window.first_slot))

    def texts(self, parts: Sequence[bytes]) -> list[str]:
        """What the names or files mean, some of which refer to earlier rows."""
        parts = parts[: len(self.first_slots) - 1]
        texts = self._known.column(parts)
        while len(texts) < len(parts) and self._find(parts[len(texts)], len(texts)):
            self._known.extend(texts, parts)
        return texts

    def _find(self, part: bytes, row: int) -> bool:
        """Find out what a reference means to a text in a row before `row`."""
        slot = _slot_of(part)
        at = bisect_right(self.first_slots, slot) - 1
        if _is_new_text(part) or not 0 <= at < row:
            return False
        if self.new_fqns[at] and slot == self.first_slots[at] + _FQN:
            written = self.fqn_parts[at]
        elif self.new_files[at] and slot == self.first_slots[at + 1] - 1:
            written = self.file_parts[at]
        else:
            return False
        self._known[part] = self._known[written]
        return True

    def texts_to_keep(self, fqns: Sequence[str], files: Sequence[str]) -> dict[int, str]:
        """Texts that later rows may refer to, by slot; none that most rows write anew."""
        kept = {}
        n_rows = min(len(fqns), len(files))
        if 2 * sum(self.new_fqns) < n_rows:
            for row in compress(range(n_rows), self.new_fqns):
                kept[self.first_slots[row] + _FQN] = fqns[row]
        if 2 * sum(self.new_files) < n_rows:
            for row in compress(range(n_rows), self.new_files):
                kept[self.first_slots[row + 1] - 1] = files[row]
        return kept


def _n_range_slots(row: Row) -> int:
    fqn, key, file, *_ = row
    offset = _groups(_key_pattern)(key)[1]
    return _RANGE_SLOTS + _is_new_text(fqn) + _n_size_slots(offset) + _is_new_text(file)


_PLAN_EXPECTS = {
    WRITE_ITEM: _is_class(WRITE_ITEM),
    "index": _is_text("index"),
    INDEX: _is_class(INDEX),
    "fqn": _is_text("fqn"),
    "hint": _is_text("index"),
    "offset": _is_text("offset"),
    "type": _is_text("type"),
    "bytes_io_data": _is_text("bytes_io_data"),
    "tensor_data": _is_text("tensor_data"),
    WRITE_DATA: _is_class(WRITE_DATA),
    "chunk": _is_text("chunk"),
    **CHUNK_EXPECTS,
    "properties": _is_text("properties"),
    PROPERTIES: _is_class(PROPERTIES),
    "size": _is_text("size"),
}


def _plan_template(hole: Hole) -> str:
    key = (
        f"{hole(INDEX)}{NEW}{hole('fqn')}({TEXT}){hole('hint')}(?:{INT}|N)"
        f"(?:{hole('offset')}({_size_pattern(hole)}))?{SET}"
    )
    # EMPTY_TUPLE NEWOBJ MEMOIZE MARK, the five or six properties, TUPLE MEMOIZE BUILD.
    made_here = (
        rf"{hole(PROPERTIES)}\)\x81\x94\(({REFERENCE})({REFERENCE})[\x88\x89]"
        rf"({REFERENCE})[\x88\x89]N?t\x94b"
    )
    chunk = _chunk_pattern(hole, _slice_pattern(hole, ""))
    data = (
        f"{hole(WRITE_DATA)}{NEW}{hole('chunk')}(?:{chunk}|({REFERENCE}))"
        f"{hole('properties')}(?:{made_here}|({REFERENCE}))"
        f"{hole('size')}({_size_pattern(hole)}){SET}"
    )
    return (
        f"{hole(WRITE_ITEM)}{NEW}{hole('index')}{key}{hole('type')}({REFERENCE})"
        f"{hole('bytes_io_data')}N{hole('tensor_data')}(?:N|{data}){SET}"
    )


def _push_plans(parts: PartDecoders, machine: Machine, window: Window, _: Holes) -> int:
    n_slots = list(map(_n_plan_slots, window.rows))
    first_slots = accumulate(n_slots, initial=window.first_slot)
    # The highest memo slot that each row reads, up to a row that is unfit.
    columns: list[list[int]] = []
    for read_parts in list(zip(*window.rows, strict=True))[:-1]:
        columns.append(parts.slots.column(read_parts))
    n_rows = sum(takewhile(bool, map(lt, map(max, *columns), first_slots)))
    if not n_rows:
        return 0
    fqns = [row[0] for row in window.rows[:n_rows]]
    window = window.first(n_rows).without_rows()
    run = StubRun(
        WRITE_ITEM,
        window.first_slot,
        sum(n_slots[:n_rows]),
        partial(window.find_rows, n_slots[:n_rows]),
    )
    n_containers = run.n_slots - sum(map(_is_new_text, fqns))
    return n_rows if machine.push_run(run, window.end, n_containers) else 0


def _n_plan_slots(row: Row) -> int:
    fqn, offset, _, slice_offsets, slice_sizes, _, dtype, _, _, _, size, _ = row
    n_slots = 2 * _OBJECT_SLOTS + _is_new_text(fqn)
    for part in (offset, slice_offsets, slice_sizes, size):
        n_slots += _n_size_slots(part)
    for has_object in (size, slice_sizes, dtype):
        n_slots += _OBJECT_SLOTS if has_object else 0
    return n_slots


def fast_path_shapes(machine: Machine) -> Mapping[str, FastPathShape]:
    """The shapes of metadata in one reading, by the object after which each is tried."""
    parts = PartDecoders(machine)
    tensors = _TensorDecoder(parts).push
    return {
        TENSOR: FastPathShape(_tensor_template, _TENSOR_EXPECTS, tensors, (b"h", b"j", b"\x8c")),
        CHUNK: FastPathShape(_chunk_template, CHUNK_EXPECTS, partial(_push_chunks, parts)),
        STORAGE_INFO: FastPathShape(_range_template, _RANGE_EXPECTS, partial(_push_ranges, parts)),
        WRITE_ITEM: FastPathShape(_plan_template, _PLAN_EXPECTS, partial(_push_plans, parts)),
    }
