"""The fast path for byte ranges and for items of a plan.

A byte range is a `MetadataIndex`, the key, and the `_StorageInfo` that it leads to. Each
rank sent its own results to the coordinator, so names and files are written anew for each
rank, and referred to by what follows them: a run records in which slots of the memo they are.

Megatron-Core keeps the save plans of all ranks beside the metadata: a `WriteItem` for
every chunk, larger than all the rest. Nothing in it is needed to state what a checkpoint
holds, so a `Run` of them has no columns. That each reference leads to something that is
there is checked, as it is for any other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, compress, takewhile
from operator import lt

from ckptctl.formats.dcp.chunk_table import Span
from ckptctl.formats.dcp.fast_path import (
    INT,
    NEW,
    NEW_TEXT,
    REFERENCE,
    SET,
    TEXT,
    FastPathShape,
    Hole,
    Key,
    Parts,
    Row,
    Window,
    is_class,
    is_new_text,
    is_size,
    is_text,
    key_pattern,
    n_key_slots,
    n_size_slots,
    size_pattern,
    slice_pattern,
    slot_of,
    span_pattern,
)
from ckptctl.formats.dcp.fast_path_tensors import CHUNK_EXPECTS, chunk_pattern
from ckptctl.formats.dcp.grammar import INDEX, PROPERTIES, STORAGE_INFO, WRITE_DATA, WRITE_ITEM
from ckptctl.formats.pickles.machine import Machine
from ckptctl.formats.pickles.stubs import Rows, Run

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


def storage_shape(parts: Parts) -> FastPathShape:
    """The shape of byte ranges with their keys, for one reading."""

    def push(machine: Machine, window: Window, _: Mapping[str, bytes]) -> int:
        return _push(parts, machine, window)

    return FastPathShape(_template, _EXPECTS, push)


def _template(hole: Hole) -> str:
    return (
        f"{hole(INDEX)}{NEW}{hole('fqn')}({TEXT}){hole('index')}({key_pattern(hole)}){SET}"
        f"{hole(STORAGE_INFO)}{NEW}{hole('relative_path')}({TEXT})"
        f"{hole('start')}({span_pattern(hole)}){SET}"
    )


def _push(parts: Parts, machine: Machine, window: Window) -> int:
    read = _Rows(parts, window)
    fqns, files = read.texts(read.fqn_parts), read.texts(read.file_parts)
    n_rows = min(len(fqns), len(files))
    if not n_rows:
        return 0
    window = window.first(n_rows)
    run = StorageRun(
        INDEX,
        window.first_slot,
        read.first_slots[n_rows] - window.first_slot,
        partial(_find_rows, window.without_rows()),
        in_pairs=True,
    )
    run.fqns, run.keys, run.files = fqns[:n_rows], read.keys[:n_rows], files[:n_rows]
    run.spans = parts.spans.column(read.span_parts[:n_rows])
    run.texts = read.texts_to_keep(fqns, files)
    n_texts = sum(read.new_fqns[:n_rows]) + sum(read.new_files[:n_rows])
    return n_rows if machine.push_run(run, window.end, run.n_slots - n_texts) else 0


class _Rows:
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
        self.new_fqns = [part[0] == NEW_TEXT for part in self.fqn_parts]
        self.new_files = [part[0] == NEW_TEXT for part in self.file_parts]
        rows = zip(self.keys, self.new_fqns, self.new_files, strict=False)
        n_slots = [_OWN_SLOTS + key[2] + new_fqn + new_file for key, new_fqn, new_file in rows]
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
        slot = slot_of(part)
        at = bisect_right(self.first_slots, slot) - 1
        if is_new_text(part) or not 0 <= at < row:
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


def _find_rows(window: Window) -> Rows:
    return window.find_rows(map(_n_slots, window.parts()))


def _n_slots(row: Row) -> int:
    fqn, key, file, *_ = row
    return _OWN_SLOTS + is_new_text(fqn) + n_key_slots(key) + is_new_text(file)


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

    def push(machine: Machine, window: Window, _: Mapping[str, bytes]) -> int:
        return _push_plans(parts, machine, window)

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
    chunk = chunk_pattern(hole, slice_pattern(hole, ""))
    data = (
        f"{hole(WRITE_DATA)}{NEW}{hole('chunk')}(?:{chunk}|({REFERENCE}))"
        f"{hole('properties')}(?:{made_here}|({REFERENCE}))"
        f"{hole('size')}({size_pattern(hole)}){SET}"
    )
    return (
        f"{hole(WRITE_ITEM)}{NEW}{hole('index')}{key}{hole('type')}({REFERENCE})"
        f"{hole('bytes_io_data')}N{hole('tensor_data')}(?:N|{data}){SET}"
    )


def _push_plans(parts: Parts, machine: Machine, window: Window) -> int:
    n_slots = list(map(_n_plan_slots, window.rows))
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
        partial(window.find_rows, n_slots[:n_rows]),
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


def _n_plan_slots(row: Row) -> int:
    fqn, offset, _, slice_offsets, slice_sizes, _, dtype, _, _, _, size, _ = row
    n_slots = _KEY_SLOTS + is_new_text(fqn)
    for part in (offset, slice_offsets, slice_sizes, size):
        n_slots += n_size_slots(part)
    for has_object in (size, slice_sizes, dtype):
        n_slots += _OBJECT_SLOTS if has_object else 0
    return n_slots
