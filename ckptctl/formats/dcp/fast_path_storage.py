"""The fast path for byte ranges and for items of a plan.

A byte range is a `MetadataIndex`, the key, and the `_StorageInfo` that it leads to. Each
rank sent its own results to the coordinator, so names and files are written anew for each
rank, and referred to by what follows them: `MemoTexts` knows where they went.

Megatron-Core keeps the save plans of all ranks beside the metadata: a `WriteItem` for
every chunk, larger than all the rest. Nothing in it is needed to know what a checkpoint
holds, so a `Run` of them has no columns. That each reference leads to something that is
there is checked, as it is for any other.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, takewhile
from operator import lt

from ckptctl.formats.dcp.fast_path import (
    INT,
    NEW,
    REFERENCE,
    REFERENCE_BYTES,
    SET,
    SHORT_BINUNICODE,
    TEXT,
    Dims,
    FastPathShape,
    Hole,
    Known,
    Parts,
    Row,
    Unfit,
    Window,
    is_class,
    is_new_text,
    is_size,
    is_text,
    n_size_slots,
    n_size_slots_of,
    size_pattern,
    slot_of,
)
from ckptctl.formats.dcp.fast_path_tensors import CHUNK_EXPECTS, chunk_template
from ckptctl.formats.dcp.grammar import INDEX, PROPERTIES, STORAGE_INFO, WRITE_DATA, WRITE_ITEM
from ckptctl.formats.pickles.machine import Machine
from ckptctl.formats.pickles.stubs import Run

_EXPECTS = {
    INDEX: is_class(INDEX),
    "fqn": is_text("fqn"),
    "index": is_text("index"),
    "offset": is_text("offset"),
    "Size": is_size,
    STORAGE_INFO: is_class(STORAGE_INFO),
    "relative_path": is_text("relative_path"),
    "start": is_text("offset"),
    "length": is_text("length"),
}
_OWN_SLOTS = 4
"""Each of the two objects, and the state of each."""


class StorageRun(Run):
    """Keys and byte ranges in columns, one row for each; offsets and lengths in bytes."""

    __slots__ = ("files", "find_texts", "fqns", "hints", "lengths", "offsets", "starts", "texts")

    fqns: list[str]
    hints: list[int | None]
    offsets: list[Dims | None]
    files: list[str]
    starts: array[int]
    lengths: array[int]
    texts: MemoTexts | None
    find_texts: Callable[[], MemoTexts]

    def known_at(self, slot: int) -> str | None:
        """A name or a file that was written in one of the rows."""
        if self.texts is None:
            self.texts = self.find_texts()
        return self.texts.at(slot)


class MemoTexts:
    """The texts that the rows of a window put into the memo, up to one that is unfit."""

    __slots__ = ("_rows", "_slots", "_texts")

    def __init__(self, window: Window, size_reference: bytes, known: Known[str]) -> None:
        self._rows = array("q")
        self._slots = array("q")
        self._texts: list[str] = []
        slot = window.first_slot
        # Short runs of ranks make this half of a window's cost: no call for each row.
        for row, (fqn, _, offset, file, *_) in enumerate(window.rows):
            try:
                if fqn[0] == SHORT_BINUNICODE:
                    self._add(row, slot + 2, known[fqn])
                    slot += 1
                if len(offset) > REFERENCE_BYTES:
                    slot += n_size_slots(offset, size_reference)
                slot += _OWN_SLOTS
                if file[0] == SHORT_BINUNICODE:
                    self._add(row, slot, known[file])
                    slot += 1
            except Unfit:
                return

    def _add(self, row: int, slot: int, text: str) -> None:
        self._texts.append(text)
        self._slots.append(slot)
        self._rows.append(row)

    def at(self, slot: int, *, before: int | None = None) -> str | None:
        """The text in a slot of the memo, if it is of a row `before` that one."""
        found = bisect_left(self._slots, slot)
        if found == len(self._slots) or self._slots[found] != slot:
            return None
        if before is not None and self._rows[found] >= before:
            return None
        return self._texts[found]


def storage_shape(parts: Parts) -> FastPathShape:
    """The shape of byte ranges with their keys, for one reading."""

    def push(machine: Machine, window: Window, holes: Mapping[str, bytes]) -> int:
        return _push(parts, machine, window, holes["Size"])

    return FastPathShape(_template, _EXPECTS, push)


def _template(hole: Hole) -> str:
    return (
        f"{hole(INDEX)}{NEW}{hole('fqn')}({TEXT}){hole('index')}({INT}|N)"
        f"(?:{hole('offset')}({size_pattern(hole)}))?{SET}"
        f"{hole(STORAGE_INFO)}{NEW}{hole('relative_path')}({TEXT})"
        f"{hole('start')}({INT}){hole('length')}({INT}){SET}"
    )


def _push(parts: Parts, machine: Machine, window: Window, size_reference: bytes) -> int:
    fqn_parts, hint_parts, offset_parts, file_parts, start_parts, length_parts, _ = zip(
        *window.rows, strict=True
    )
    names = _Names(parts.texts, window, size_reference)
    fqns, files = names.column(fqn_parts), names.column(file_parts)
    offsets: list[Dims | None] = []
    parts.optional_sizes.extend(offsets, offset_parts)
    n_rows = min(len(fqns), len(files), len(offsets))
    if not n_rows:
        return 0
    window = window.first(n_rows)
    n_texts = sum(map(is_new_text, fqn_parts[:n_rows])) + sum(map(is_new_text, file_parts[:n_rows]))
    n_containers = _OWN_SLOTS * n_rows + n_size_slots_of(offset_parts[:n_rows], size_reference)
    place = window.without_rows()
    run = StorageRun(
        INDEX,
        window.first_slot,
        n_containers + n_texts,
        partial(place.find_rows, partial(_n_slots, size_reference)),
        in_pairs=True,
    )
    run.fqns, run.files, run.offsets = fqns[:n_rows], files[:n_rows], offsets[:n_rows]
    run.hints = list(map(parts.optional_ints.__getitem__, hint_parts[:n_rows]))
    run.starts = array("q", map(parts.ints.__getitem__, start_parts[:n_rows]))
    run.lengths = array("q", map(parts.ints.__getitem__, length_parts[:n_rows]))
    run.texts = names.texts
    run.find_texts = partial(_texts_again, place, size_reference, parts.texts)
    return n_rows if machine.push_run(run, window.end, n_containers) else 0


def _n_slots(size_reference: bytes, row: Row) -> int:
    fqn, _, offset, file, *_ = row
    n_texts = is_new_text(fqn) + is_new_text(file)
    return _OWN_SLOTS + n_texts + n_size_slots(offset, size_reference)


def _texts_again(window: Window, size_reference: bytes, known: Known[str]) -> MemoTexts:
    return MemoTexts(window.matched_again(), size_reference, known)


class _Names:
    """The columns of texts of one window, some of which refer to others in it."""

    def __init__(self, known: Known[str], window: Window, size_reference: bytes) -> None:
        self.texts: MemoTexts | None = None
        self._known = known
        self._window = window
        self._size_reference = size_reference

    def column(self, parts: Sequence[bytes]) -> list[str]:
        """What the parts mean, up to one that is unfit."""
        column: list[str] = []
        self._known.extend(column, parts)
        while len(column) < len(parts) and self._define(parts[len(column)], len(column)):
            self._known.extend(column, parts)
        return column

    def _define(self, part: bytes, row: int) -> bool:
        """Find out what a reference means to a text in an earlier row of the window."""
        if is_new_text(part):
            return False
        if self.texts is None:
            self.texts = MemoTexts(self._window, self._size_reference, self._known)
        text = self.texts.at(slot_of(part), before=row)
        if text is None:
            return False
        self._known[part] = text
        return True


_PLAN_EXPECTS = {
    WRITE_ITEM: is_class(WRITE_ITEM),
    "index": is_text("index"),
    INDEX: is_class(INDEX),
    "fqn": is_text("fqn"),
    "hint": is_text("index"),
    "offset": is_text("offset"),
    "type": is_text("type"),
    "bytes_io_data": is_text("bytes_io_data"),
    "tensor_data": is_text("tensor_data"),
    WRITE_DATA: is_class(WRITE_DATA),
    "chunk": is_text("chunk"),
    **CHUNK_EXPECTS,
    "properties": is_text("properties"),
    PROPERTIES: is_class(PROPERTIES),
    "size": is_text("size"),
}


_OBJECT_SLOTS = 2
"""An object and its state: the data of a tensor, a chunk, its properties."""

_KEY_SLOTS = 2 * _OBJECT_SLOTS
"""The item and its key."""


def plan_shape(parts: Parts) -> FastPathShape:
    """The shape of the items of plans, for one reading."""

    def push(machine: Machine, window: Window, holes: Mapping[str, bytes]) -> int:
        return _push_plans(parts, machine, window, holes["Size"])

    return FastPathShape(_plan_template, _PLAN_EXPECTS, push)


def _plan_template(hole: Hole) -> str:
    key = (
        f"{hole(INDEX)}{NEW}{hole('fqn')}({TEXT}){hole('hint')}(?:{INT}|N)"
        f"(?:{hole('offset')}({size_pattern(hole)}))?{SET}"
    )
    # EMPTY_TUPLE NEWOBJ MEMOIZE MARK, the five or six properties, TUPLE MEMOIZE BUILD.
    made_here = (
        rf"{hole(PROPERTIES)}\)\x81\x94\(({REFERENCE})({REFERENCE})[\x88\x89]"
        rf"({REFERENCE})[\x88\x89]N?t\x94b"
    )
    data = (
        f"{hole(WRITE_DATA)}{NEW}{hole('chunk')}(?:{chunk_template(hole)}|({REFERENCE}))"
        f"{hole('properties')}(?:{made_here}|({REFERENCE}))"
        f"{hole('size')}({size_pattern(hole)}){SET}"
    )
    return (
        f"{hole(WRITE_ITEM)}{NEW}{hole('index')}{key}{hole('type')}({REFERENCE})"
        f"{hole('bytes_io_data')}N{hole('tensor_data')}(?:N|{data}){SET}"
    )


def _push_plans(parts: Parts, machine: Machine, window: Window, size_reference: bytes) -> int:
    n_slots = [_n_plan_slots(size_reference, row) for row in window.rows]
    first_slots = accumulate(n_slots, initial=window.first_slot)
    n_rows = sum(takewhile(bool, map(lt, _highest_reads(parts, window), first_slots)))
    if not n_rows:
        return 0
    fqns = [row[0] for row in window.rows[:n_rows]]
    window = window.first(n_rows).without_rows()
    run = Run(
        WRITE_ITEM,
        window.first_slot,
        sum(n_slots[:n_rows]),
        partial(window.find_rows, partial(_n_plan_slots, size_reference)),
    )
    n_containers = run.n_slots - sum(map(is_new_text, fqns))
    return n_rows if machine.push_run(run, window.end, n_containers) else 0


def _highest_reads(parts: Parts, window: Window) -> Iterator[int]:
    """The highest memo slot that each row reads, up to a row that is unfit."""
    columns: list[list[int]] = []
    for read_parts in list(zip(*window.rows, strict=True))[:-1]:
        column: list[int] = []
        parts.slots.extend(column, read_parts)
        columns.append(column)
    return map(max, *columns)


def _n_plan_slots(size_reference: bytes, row: Row) -> int:
    fqn, offset, _, slice_offsets, slice_sizes, _, dtype, _, _, _, size, _ = row
    n_slots = _KEY_SLOTS + is_new_text(fqn)
    for part in (offset, slice_offsets, slice_sizes, size):
        n_slots += n_size_slots(part, size_reference)
    for has_object in (size, slice_sizes, dtype):
        n_slots += _OBJECT_SLOTS if has_object else 0
    return n_slots
