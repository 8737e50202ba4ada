"""Which bytes of a record hold the box of elements that is wanted, in pieces of bounded size?

A record holds a chunk in row-major order; a rank that loads at another world size wants
a box of it. Arithmetic only: nothing is read and no tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

Dims = tuple[int, ...]


class Cut(NamedTuple):
    """`length` bytes from byte `start` of the elements on hold a sub-box of the wanted box.

    The sub-box begins at `at` of the wanted box, and has `sizes` elements a dimension.
    `dense`: nothing but the sub-box is in these bytes.
    """

    start: int
    length: int
    at: Dims
    sizes: Dims
    dense: bool


class Box(NamedTuple):
    """A box of a tensor in row-major order: the tensor's `shape`, and where the box lies in it."""

    shape: Dims
    offsets: Dims
    lengths: Dims

    @property
    def is_whole(self) -> bool:
        """It is all of the tensor."""
        return self.lengths == self.shape

    @property
    def first(self) -> int:
        """The number of its first element in the tensor."""
        steps = row_major(self.shape)
        return sum(offset * step for offset, step in zip(self.offsets, steps, strict=True))

    def flattened(self) -> Box:
        """The same elements in the same order, in as few dimensions as that takes.

        A whole tensor, and a slice along its first dimension, become one row.
        """
        dims: list[tuple[int, int, int]] = []
        for size, offset, length in zip(*map(reversed, self), strict=True):
            if dims and dims[-1][0] == dims[-1][2]:
                inner = dims.pop()[0]
                dims.append((size * inner, offset * inner, length * inner))
            else:
                dims.append((size, offset, length))
        shape, offsets, lengths = zip(*reversed(dims), strict=True) if dims else ((), (), ())
        return Box(shape, offsets, lengths)

    def cuts(self, item_bytes: int, *, most: int, skip: int) -> Iterator[Cut]:
        """The box in pieces, in the order of their bytes.

        No piece has more than `most` bytes, which is at least one element. Bytes between
        two rows of the box are read with them where they are at most `skip`.
        """
        if 0 not in self.lengths:
            strides = [step * item_bytes for step in row_major(self.shape)]
            start = self.first * item_bytes
            at = (0,) * len(self.shape)
            yield from _cut(start, at, self.lengths, strides, item_bytes, most, skip)


def row_major(shape: Sequence[int]) -> Dims:
    """The strides of a tensor in row-major order, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _cut(
    start: int,
    at: Dims,
    sizes: Dims,
    strides: Sequence[int],
    item_bytes: int,
    most: int,
    skip: int,
) -> Iterator[Cut]:
    """See `Box.cuts`; `strides` and `start` are in bytes."""
    # Bytes from the first element to the last, by the dimension from which on they vary.
    spans = [item_bytes]
    gaps = [0]
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        gaps.append(stride - spans[-1] if size > 1 else 0)
        spans.append(spans[-1] + (size - 1) * stride)
    if spans[-1] <= most and max(gaps) <= skip:
        yield Cut(start, spans[-1], at, sizes, dense=spans[-1] == prod(sizes) * item_bytes)
        return
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    row, gap = spans[len(sizes) - dim - 1], gaps[len(sizes) - dim]
    n_rows = 1 if gap > skip or row > most else (most - row) // strides[dim] + 1
    for first in range(0, sizes[dim], n_rows):
        there = (*at[:dim], at[dim] + first, *at[dim + 1 :])
        rows = (*sizes[:dim], min(n_rows, sizes[dim] - first), *sizes[dim + 1 :])
        yield from _cut(start + first * strides[dim], there, rows, strides, item_bytes, most, skip)
