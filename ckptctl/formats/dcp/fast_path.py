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
  `Run`: columns, and the place in the bytes where they are.
- *Never differ.* A shape takes an object only when each of its bytes is
  accounted for. Whatever does not fit (another field, a longer name, a frame
  that begins in the middle) is left to the machine, and the shape is tried
  again behind it. A run stands on the stack for all its values and counts in
  the memo for all its slots; when the pickle refers to one of them, the bytes
  of the run are interpreted after all.

The machine interprets the parts, too: in half a million objects most of them come again and again,
so each is interpreted when it is first met and looked up in `Parts` from then on.

There are three shapes. A *chunk* is a `ChunkStorageMetadata` with its two sizes.

A *byte range* is a `MetadataIndex`, the key, and the `_StorageInfo` that it leads to. Each rank
sent its own results to the coordinator, so names and files are written anew for each rank, and
referred to by what follows them: a run records in which slots of the memo they are.

Megatron-Core keeps the save plans of all ranks beside the metadata: a `WriteItem`, an *item of a
plan*, for every chunk, larger than all the rest. Nothing in it is needed to state what a
checkpoint holds, so a `Run` of them has no columns. That each reference leads to something that
is there is checked, as it is for any other.

Source: CPython 3.14 `Modules/_pickle.c`, `save_reduce` and `store_tuple_elements`.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, compress, islice, takewhile
from operator import itemgetter, lt
from typing import Generic, TypeVar

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.dcp.metadata import (
    CHUNK,
    INDEX,
    NO_HINT,
    PROPERTIES,
    STORAGE_INFO,
    WRITE_DATA,
    WRITE_ITEM,
    Span,
    packed,
)
from ckptctl.formats.pickles.reading import Machine
from ckptctl.formats.pickles.stubs import (
    MAX_DIMS,
    SIZE,
    Function,
    Malformed,
    Memo,
    Rows,
    Run,
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


def _is_size(value: object) -> bool:
    return value is SIZE


def _size_pattern(hole: Hole) -> str:
    """The pattern of a `torch.Size`: made here, or referred to."""
    return rf"(?:{hole('Size')}{DIMS}\x85\x94R\x94|{REFERENCE})"


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

    def parts(self) -> Iterator[Row]:
        """The rows, matched again."""
        return (match.groups(b"") for match in self.matches())

    def find_rows(self, n_slots: Iterable[int]) -> Rows:
        """Where each object is; `n_slots` are how many slots of the memo each fills."""
        spans = [match.span() for match in self.matches()]
        starts, ends = zip(*spans, strict=True)
        first_slots = array("q", accumulate(n_slots, initial=self.first_slot))
        return Rows(self.data, array("q", starts), array("q", ends), first_slots)


def _literal(references: Holes) -> Hole:
    """Holes that match what was learned; one that is not known yet matches nothing."""

    def hole(name: str) -> str:
        return re.escape(references[name]).decode("latin-1") if references[name] else "(?!)"

    return hole


class FastPathShape:
    """One shape in one reading: what was learned of it so far.

    `template` is the pattern of one object, its groups the parts that differ;
    `expects` states for each hole in it what the reference must stand for. `push`
    makes a `Run` of a window, pushes it, and returns how many rows are in it.
    """

    def __init__(
        self,
        template: Callable[[Hole], str],
        expects: Mapping[str, Test],
        push: Callable[[Machine, Window], int],
    ) -> None:
        self._template = template
        self._expects = expects
        self._push = push
        self._generic = _compiled(template(_open_holes()))
        self._learned: dict[Row, re.Pattern[bytes]] = {}
        self._references: Row = (b"",) * len(expects)
        self._n_bytes = MAX_WINDOW

    def take(self, machine: Machine) -> None:
        """Take as many objects of the shape as follow, or none."""
        while machine.data[machine.pos : machine.pos + 1] in _REFERENCES:
            window = self._window(machine)
            if window is None and self._learn(machine):
                window = self._window(machine)
            if window is None:
                return
            n_rows = self._push(machine, window)
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

_REFERENCES = (b"h", b"j")
"""Their opcodes. An object begins with a reference to its class."""

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

NEW_TEXT = b"\x8c"
"""SHORT_BINUNICODE: a text begins with it that is written here."""

ChunkSlice = tuple[bytes, bytes, int]
"""Where a chunk begins, its size, both `packed`, and the memo slots that they fill."""

Key = tuple[int, bytes | None, int]
"""The hint and the `packed` offset in a key, and the memo slots that the offset fills."""

Meaning = TypeVar("Meaning")


class Unfit(Malformed):
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
        except Malformed:
            return

    def column(self, parts: Sequence[bytes]) -> list[Meaning]:
        """What the parts mean, up to one that is unfit."""
        column: list[Meaning] = []
        self.extend(column, parts)
        return column


class Parts:
    """The parts of one reading."""

    # The decoders refer to the machine and not to the parts: no cycle keeps either in memory.
    def __init__(self, machine: Machine) -> None:
        self.slices = Known(partial(_slice, machine))
        self.keys = Known(partial(_key, machine))
        self.spans = Known(partial(_span, machine))
        self.texts = Known(partial(_text, machine))
        self.reads = Known(_slot_read)
        self.fills = Known(partial(_n_filled, machine))


def _interpreted(machine: Machine, part: bytes) -> tuple[list[object], int]:
    """What the machine makes of a part: the values, and how many slots of the memo they fill."""
    # The pattern ends a text at the first byte that can be MEMOIZE; the length decides.
    if part[:1] == NEW_TEXT and part[1] != len(part) - 3:
        raise Unfit
    memo = Memo(machine.memo, machine.memo.n_slots)
    inner = Machine(part + _STOP, machine.grammar, machine.opcodes, memo)
    try:
        inner.step_to_stop()
    except (MetadataUnreadable, MetadataUnsafe):
        raise Unfit from None
    return inner.stack, memo.n_slots - memo.first


_STOP = b"."


def _slice(machine: Machine, part: bytes) -> ChunkSlice:
    match _interpreted(machine, part):
        case [tuple(offset), _, tuple(size)], n_slots:
            return _packed(offset), _packed(size), n_slots
    raise Unfit


def _key(machine: Machine, part: bytes) -> Key:
    match _interpreted(machine, part):
        case [None | int() as hint, *rest], n_slots:
            offset = _packed(rest[1]) if rest else None
            return NO_HINT if hint is None else hint, offset, n_slots
    raise Unfit


def _span(machine: Machine, part: bytes) -> Span:
    match _interpreted(machine, part):
        case [int(start), _, int(length)], _:
            return start, length, ()
    raise Unfit


def _text(machine: Machine, part: bytes) -> str:
    match _interpreted(machine, part):
        case [str(text)], _:
            return text
    raise Unfit


def _packed(dims: object) -> bytes:
    if not isinstance(dims, tuple):
        raise Unfit
    return packed(checked_dims(dims, "a size"))


def _slot_of(reference: bytes) -> int:
    return int.from_bytes(reference[1:], "little")


def _is_reference(part: bytes) -> bool:
    """Whether a part is only a reference; a size that is made here begins with one."""
    return part[:1] in _REFERENCES and len(part) <= REFERENCE_BYTES


def _is_new_text(part: bytes) -> bool:
    return part[:1] == NEW_TEXT


def _slot_read(part: bytes) -> int:
    """The memo slot that a part reads: -1 for a text or a size that is made here, or missing."""
    return _slot_of(part) if _is_reference(part) else -1


def _n_filled(machine: Machine, part: bytes) -> int:
    """How many slots of the memo a text or a size fills; one that is missing fills none."""
    if not part or _is_reference(part):
        return 0
    return _interpreted(machine, part)[1]


# Chunks

CHUNK_EXPECTS = {
    CHUNK: _is_class(CHUNK),
    "offsets": _is_text("offsets"),
    "Size": _is_size,
    "sizes": _is_text("sizes"),
}

_CHUNK_SLOTS = 2
"""The object and its state."""


class ChunkRun(Run):
    """Chunks: where each begins, its size, and the memo slots of both."""

    __slots__ = ("slices",)

    slices: list[ChunkSlice]


def _chunk_pattern(hole: Hole, sizes: str) -> str:
    """The pattern of a chunk; `sizes` is that of both."""
    return f"{hole(CHUNK)}{NEW}{hole('offsets')}{sizes}{SET}"


def _chunk_template(hole: Hole) -> str:
    sizes = f"{_size_pattern(hole)}{hole('sizes')}{_size_pattern(hole)}"
    return _chunk_pattern(hole, f"({sizes})")


def _push_chunks(parts: Parts, machine: Machine, window: Window) -> int:
    slices = parts.slices.column([row[0] for row in window.rows])
    if not slices:
        return 0
    window = window.first(len(slices)).without_rows()
    n_slots = _CHUNK_SLOTS * len(slices) + sum(map(_SLOTS_OF_SIZES, slices))
    run = ChunkRun(
        CHUNK, window.first_slot, n_slots, lambda: window.find_rows(_n_chunk_slots(slices))
    )
    run.slices = slices
    return len(slices) if machine.push_run(run, window.end, n_slots) else 0


_SLOTS_OF_SIZES = itemgetter(2)


def _n_chunk_slots(slices: Iterable[ChunkSlice]) -> Iterator[int]:
    """How many slots of the memo each chunk fills."""
    return (_CHUNK_SLOTS + one[2] for one in slices)


# Byte ranges, and items of plans

_RANGE_EXPECTS = {
    INDEX: _is_class(INDEX),
    "fqn": _is_text("fqn"),
    "index": _is_text("index"),
    "offset": _is_text("offset"),
    "Size": _is_size,
    STORAGE_INFO: _is_class(STORAGE_INFO),
    "relative_path": _is_text("relative_path"),
    "start": _is_text("offset"),
    "length": _is_text("length"),
}
_RANGE_SLOTS = 4
"""Each of the two objects, and the state of each."""

_FQN = 2
"""The slot of a row that its name fills: those before are of the key and its state."""


class StorageRun(Run):
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
    # An entry of bytes has no offset.
    key = f"(?:{INT}|N)(?:{hole('offset')}{_size_pattern(hole)})?"
    return (
        f"{hole(INDEX)}{NEW}{hole('fqn')}({TEXT}){hole('index')}({key}){SET}"
        f"{hole(STORAGE_INFO)}{NEW}{hole('relative_path')}({TEXT})"
        f"{hole('start')}({INT}{hole('length')}{INT}){SET}"
    )


def _push_ranges(parts: Parts, machine: Machine, window: Window) -> int:
    read = _RangeRows(parts, window)
    fqns, files = read.texts(read.fqn_parts), read.texts(read.file_parts)
    n_rows = min(len(fqns), len(files))
    if not n_rows:
        return 0
    window = window.first(n_rows)
    run = StorageRun(
        INDEX,
        window.first_slot,
        read.first_slots[n_rows] - window.first_slot,
        partial(_find_range_rows, parts, window.without_rows()),
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

    def __init__(self, parts: Parts, window: Window) -> None:
        self._known = parts.texts
        self.fqn_parts, key_parts, self.file_parts, self.span_parts, _ = zip(
            *window.rows, strict=True
        )
        self.keys = parts.keys.column(key_parts)
        self.new_fqns = list(map(_is_new_text, self.fqn_parts))
        self.new_files = list(map(_is_new_text, self.file_parts))
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


def _find_range_rows(parts: Parts, window: Window) -> Rows:
    return window.find_rows(
        _RANGE_SLOTS + _is_new_text(fqn) + parts.keys[key][2] + _is_new_text(file)
        for fqn, key, file, *_ in window.parts()
    )


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


_OBJECT_SLOTS = 2
"""An object and its state: the data of a tensor, a chunk, its properties."""

_KEY_SLOTS = 2 * _OBJECT_SLOTS
"""The item and its key."""


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
    sizes = f"({_size_pattern(hole)}){hole('sizes')}({_size_pattern(hole)})"
    chunk = _chunk_pattern(hole, sizes)
    data = (
        f"{hole(WRITE_DATA)}{NEW}{hole('chunk')}(?:{chunk}|({REFERENCE}))"
        f"{hole('properties')}(?:{made_here}|({REFERENCE}))"
        f"{hole('size')}({_size_pattern(hole)}){SET}"
    )
    return (
        f"{hole(WRITE_ITEM)}{NEW}{hole('index')}{key}{hole('type')}({REFERENCE})"
        f"{hole('bytes_io_data')}N{hole('tensor_data')}(?:N|{data}){SET}"
    )


def _push_plans(parts: Parts, machine: Machine, window: Window) -> int:
    columns = list(zip(*window.rows, strict=True))[:-1]
    highest_reads = map(max, *(parts.reads.column(column) for column in columns))
    filled = map(sum, zip(*(parts.fills.column(column) for column in columns), strict=False))
    n_slots = [n + _n_object_slots(row) for n, row in zip(filled, window.rows, strict=False)]
    first_slots = accumulate(n_slots, initial=window.first_slot)
    n_rows = sum(takewhile(bool, map(lt, highest_reads, first_slots)))
    n_rows = min(n_rows, len(n_slots))
    if not n_rows:
        return 0
    fqns = [row[0] for row in window.rows[:n_rows]]
    window = window.first(n_rows).without_rows()
    run = Run(
        WRITE_ITEM,
        window.first_slot,
        sum(n_slots[:n_rows]),
        partial(window.find_rows, n_slots[:n_rows]),
    )
    n_containers = run.n_slots - sum(map(_is_new_text, fqns))
    return n_rows if machine.push_run(run, window.end, n_containers) else 0


def _n_object_slots(row: Row) -> int:
    """The slots of the item, its key, and the data, the chunk and the properties in it."""
    _, _, _, _, slice_sizes, _, dtype, _, _, _, size, _ = row
    return _KEY_SLOTS + _OBJECT_SLOTS * (bool(size) + bool(slice_sizes) + bool(dtype))


def fast_path_shapes(machine: Machine) -> Mapping[str, FastPathShape]:
    """The shapes of metadata in one reading, by the object after which each is tried."""
    parts = Parts(machine)
    return {
        CHUNK: FastPathShape(_chunk_template, CHUNK_EXPECTS, partial(_push_chunks, parts)),
        STORAGE_INFO: FastPathShape(_range_template, _RANGE_EXPECTS, partial(_push_ranges, parts)),
        WRITE_ITEM: FastPathShape(_plan_template, _PLAN_EXPECTS, partial(_push_plans, parts)),
    }
