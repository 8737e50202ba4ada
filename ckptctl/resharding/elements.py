"""How are elements of a box moved from one arrangement of memory into another?

Arrangements are strides in bytes, so that a row-major record, a transposed one and a
band of rows are all the same to this. `memoryview` copies runs and evenly spaced
elements at the speed of C; loops in Python go over the rest. Nothing is read or
written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal

Dims = tuple[int, ...]

_Format = Literal["B", "H", "I", "Q"]
_FORMATS: dict[int, _Format] = {1: "B", 2: "H", 4: "I", 8: "Q"}

ALIGNED = 16
"""Buffers are whole multiples of this, so that their bytes can be taken for numbers."""


def row_major(sizes: Sequence[int], itemsize: int) -> Dims:
    """The strides in bytes of a box whose last dimension varies fastest."""
    strides = [itemsize] * len(sizes)
    for at in range(len(sizes) - 2, -1, -1):
        strides[at] = strides[at + 1] * sizes[at + 1]
    return tuple(strides)


def move(
    target: memoryview,
    target_at: int,
    target_strides: Dims,
    source: memoryview,
    source_at: int,
    source_strides: Dims,
    sizes: Dims,
    itemsize: int,
) -> None:
    """Copy a box of `sizes` elements; both begin at a byte, and have strides in bytes.

    Strides and beginnings are multiples of `itemsize`, and both buffers have a multiple
    of `ALIGNED` bytes.
    """
    if itemsize == 16:
        sizes, itemsize = (*sizes, 2), 8
        target_strides, source_strides = (*target_strides, 8), (*source_strides, 8)
    dims = _joined(sizes, target_strides, source_strides)
    run = 1
    if dims and dims[-1][1] == dims[-1][2] == itemsize:
        run = dims.pop()[0]
    rows, by, of = dims.pop() if dims else (1, itemsize, itemsize)
    for places in product(*(range(n) for n, _, _ in dims)):
        t = target_at + sum(p * dim[1] for p, dim in zip(places, dims, strict=True))
        s = source_at + sum(p * dim[2] for p, dim in zip(places, dims, strict=True))
        if rows > run:
            _columns(target, t, by, source, s, of, rows, run, itemsize)
        else:
            n = run * itemsize
            for row in range(rows):
                a, b = t + row * by, s + row * of
                target[a : a + n] = source[b : b + n]


def _joined(sizes: Dims, target: Dims, source: Dims) -> list[tuple[int, int, int]]:
    """Size and both strides of each dimension; those that lie seamlessly become one."""
    dims: list[tuple[int, int, int]] = []
    for size, t, s in zip(sizes, target, source, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * t and dims[-1][2] == size * s:
            dims[-1] = (dims[-1][0] * size, t, s)
        else:
            dims.append((size, t, s))
    return dims


def _columns(
    target: memoryview,
    target_at: int,
    by: int,
    source: memoryview,
    source_at: int,
    of: int,
    rows: int,
    run: int,
    itemsize: int,
) -> None:
    """Copy a tall box column by column: each is one slice with a step."""
    into, out = target.cast(_FORMATS[itemsize]), source.cast(_FORMATS[itemsize])
    by, of = by // itemsize, of // itemsize
    for column in range(run):
        a, b = target_at // itemsize + column, source_at // itemsize + column
        into[a : a + (rows - 1) * by + 1 : by] = out[b : b + (rows - 1) * of + 1 : of]


def slabs(sizes: Dims, itemsize: int, limit: int) -> Iterator[tuple[Dims, Dims]]:
    """Offsets and sizes of boxes of at most `limit` bytes, one after the other in row-major order.

    `limit` is at least one element.
    """
    inner = itemsize
    at = len(sizes)
    while at > 0 and inner * sizes[at - 1] <= limit:
        at -= 1
        inner *= sizes[at]
    if at == 0:
        yield (0,) * len(sizes), sizes
        return
    step = max(1, limit // inner)
    for places in product(*(range(n) for n in sizes[: at - 1])):
        for start in range(0, sizes[at - 1], step):
            n = min(step, sizes[at - 1] - start)
            offsets = (*places, start, *(0 for _ in sizes[at:]))
            yield offsets, (*(1 for _ in places), n, *sizes[at:])
