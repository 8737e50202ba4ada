"""The fast path for items of a plan.

Megatron-Core keeps the save plans of all ranks beside the metadata: a
`WriteItem` for every chunk, larger than all the rest. Nothing in it is needed
to know what a checkpoint holds, so a `Run` of them has no columns. That each
reference leads to something that is there is checked, as it is for any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate, takewhile
from operator import lt

from ckptctl.formats.fast_path import (
    NEW,
    SET,
    FastPathShape,
    Hole,
    Row,
    Window,
    is_class,
    is_text,
    size_pattern,
)
from ckptctl.formats.fast_path_chunks import EXPECTS as CHUNK_EXPECTS
from ckptctl.formats.fast_path_chunks import chunk_template
from ckptctl.formats.fast_path_parts import INT, REFERENCE, TEXT, Parts, is_new_text, n_size_slots
from ckptctl.formats.metadata_grammar import INDEX, PROPERTIES, WRITE_DATA, WRITE_ITEM
from ckptctl.formats.pickle_machine import Machine
from ckptctl.formats.pickle_memo import Run

_EXPECTS = {
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
        return _push(parts, machine, window, holes["Size"])

    return FastPathShape(_template, _EXPECTS, push)


def _template(hole: Hole) -> str:
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


def _push(parts: Parts, machine: Machine, window: Window, size_reference: bytes) -> int:
    n_slots = [_n_slots(size_reference, row) for row in window.rows]
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
        partial(window.find_rows, partial(_n_slots, size_reference)),
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


def _n_slots(size_reference: bytes, row: Row) -> int:
    fqn, offset, _, box_offsets, box_sizes, _, dtype, _, _, _, size, _ = row
    n_slots = _KEY_SLOTS + is_new_text(fqn)
    for part in (offset, box_offsets, box_sizes, size):
        n_slots += n_size_slots(part, size_reference)
    for has_object in (size, box_sizes, dtype):
        n_slots += _OBJECT_SLOTS if has_object else 0
    return n_slots
