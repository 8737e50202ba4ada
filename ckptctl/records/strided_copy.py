"""Copy a slice of elements between two buffers with different strides.

Strides are in bytes, so a row-major record, a transposed one and a range of rows are
all handled alike. `memoryview` copies runs and evenly spaced elements at the speed of
C; Python loops only over the remaining dimensions.
"""

from __future__ import annotations

from itertools import product
from typing import Literal, NamedTuple

from ckptctl.records.slices import Dims, position

_Format = Literal["B", "H", "I", "Q"]
_FORMATS: dict[int, _Format] = {1: "B", 2: "H", 4: "I", 8: "Q"}

ALIGNMENT = 16
"""Buffers have a multiple of this many bytes, so that they can be cast to integers."""


class Strided(NamedTuple):
    """Elements in a buffer: the first begins at byte `first`; `strides` are in bytes."""

    buffer: memoryview
    first: int
    strides: Dims

    def at(self, index: Dims) -> Strided:
        """The same arrangement, beginning at another element."""
        return self._replace(first=self.first + position(index, self.strides))


class _Dim(NamedTuple):
    """One dimension of a copy: elements, and the stride in bytes on either side."""

    size: int
    target: int
    source: int


def aligned(data: bytes) -> memoryview:
    """A buffer of the bytes, padded as `copy_strided` requires."""
    return memoryview(data + bytes(-len(data) % ALIGNMENT))


def copy_strided(target: Strided, source: Strided, sizes: Dims, item_bytes: int) -> None:
    """Copy `sizes` elements of `item_bytes` each from `source` to `target`.

    Strides and first bytes are multiples of `item_bytes`; both buffers have a multiple of
    `ALIGNMENT` bytes.
    """
    target_strides, source_strides = target.strides, source.strides
    if item_bytes == 16:  # no integer is that wide: each element is copied as two
        sizes, item_bytes = (*sizes, 2), 8
        target_strides, source_strides = (*target_strides, 8), (*source_strides, 8)
    dims = _merged(sizes, target_strides, source_strides)
    run = 1
    if dims and dims[-1].target == dims[-1].source == item_bytes:
        run = dims.pop().size
    rows = dims.pop() if dims else _Dim(1, item_bytes, item_bytes)
    for index in product(*(range(dim.size) for dim in dims)):
        t = target.first + sum(at * dim.target for at, dim in zip(index, dims, strict=True))
        s = source.first + sum(at * dim.source for at, dim in zip(index, dims, strict=True))
        into, out = target._replace(first=t), source._replace(first=s)
        if rows.size > run:
            _copy_columns(into, out, rows, run, item_bytes)
        else:
            _copy_rows(into, out, rows, run * item_bytes)


def _merged(sizes: Dims, target: Dims, source: Dims) -> list[_Dim]:
    """The dimensions of a copy; neighbors that are contiguous on both sides become one."""
    dims: list[_Dim] = []
    for size, t, s in zip(sizes, target, source, strict=True):
        if size == 1:
            continue
        if dims and dims[-1].target == size * t and dims[-1].source == size * s:
            dims[-1] = _Dim(dims[-1].size * size, t, s)
        else:
            dims.append(_Dim(size, t, s))
    return dims


def _copy_rows(target: Strided, source: Strided, rows: _Dim, n_bytes: int) -> None:
    """Copy few long rows: each is one run of `n_bytes` on both sides."""
    into, out = target.buffer, source.buffer
    for row in range(rows.size):
        t, s = target.first + row * rows.target, source.first + row * rows.source
        into[t : t + n_bytes] = out[s : s + n_bytes]


def _copy_columns(target: Strided, source: Strided, rows: _Dim, run: int, item_bytes: int) -> None:
    """Copy many short rows, column by column: each column is one slice with a step."""
    into = target.buffer.cast(_FORMATS[item_bytes])
    out = source.buffer.cast(_FORMATS[item_bytes])
    t, s = target.first // item_bytes, source.first // item_bytes
    by, of = rows.target // item_bytes, rows.source // item_bytes
    for column in range(run):
        a, b = t + column, s + column
        into[a : a + (rows.size - 1) * by + 1 : by] = out[b : b + (rows.size - 1) * of + 1 : of]
