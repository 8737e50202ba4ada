"""The bytes of a slice: all of them, none twice, in pieces of bounded size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.records.slices import ByteSlice, TensorSlice, byte_slices, flattened, row_major

ITEM = 2


Case = tuple[tuple[int, ...], TensorSlice]
"""The shape of a tensor, and a slice of it."""


@st.composite
def slices(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, s - o)) for s, o in zip(shape, offsets, strict=True))
    return shape, TensorSlice(offsets, sizes)


def numbers(shape: tuple[int, ...], wanted: TensorSlice) -> list[int]:
    """The numbers of the elements of a slice in its tensor, in row-major order."""
    steps = row_major(shape)
    dims = [range(at, end) for at, end in zip(wanted.offsets, wanted.ends, strict=True)]
    return [
        sum(i * step for i, step in zip(at, steps, strict=True)) for at in itertools.product(*dims)
    ]


@given(slices(), st.integers(ITEM, 300), st.integers(0, 60))
def test_pieces_hold_each_element_of_the_slice_once_and_in_order(case, most, skip):
    shape, wanted = case
    pieces = list(byte_slices(shape, wanted, ITEM, most=most, skip=skip))
    assert [n for piece in pieces for n in numbers(shape, piece.elements)] == numbers(shape, wanted)


@given(slices(), st.integers(ITEM, 300), st.integers(0, 60))
def test_a_piece_is_no_longer_than_allowed_and_includes_no_longer_gap(case, most, skip):
    shape, wanted = case
    for piece in byte_slices(shape, wanted, ITEM, most=most, skip=skip):
        inside = numbers(shape, piece.elements)
        assert (piece.start, piece.length) == (
            inside[0] * ITEM,
            (inside[-1] - inside[0] + 1) * ITEM,
        )
        assert piece.length <= most
        assert piece.contiguous == (len(inside) * ITEM == piece.length)
        gaps = [(after - before - 1) * ITEM for before, after in itertools.pairwise(inside)]
        assert max(gaps, default=0) <= skip


@given(slices())
def test_a_flattened_slice_has_the_same_elements_in_the_same_order(case):
    shape, wanted = case
    flat_shape, flat = flattened(shape, wanted)
    assert numbers(flat_shape, flat) == numbers(shape, wanted)
    assert (flat.sizes == flat_shape) == (wanted.sizes == shape)
    assert prod(flat_shape) == prod(shape)


@pytest.mark.parametrize(
    ("shape", "wanted", "flat_shape", "flat"),
    [
        ((4, 6, 8), ((0, 0, 0), (4, 6, 8)), (192,), ((0,), (192,))),
        ((4, 6, 8), ((1, 0, 0), (2, 6, 8)), (192,), ((48,), (96,))),
        ((4, 6, 8), ((1, 2, 0), (2, 3, 8)), (4, 48), ((1, 16), (2, 24))),
        ((), ((), ()), (), ((), ())),
    ],
)
def test_a_slice_along_the_first_dimension_is_one_row(shape, wanted, flat_shape, flat):
    assert flattened(shape, TensorSlice(*wanted)) == (flat_shape, TensorSlice(*flat))


@given(slices(), st.data())
def test_the_overlap_of_two_slices_is_what_both_hold(case, data):
    shape, one = case
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, s - o)) for s, o in zip(shape, offsets, strict=True))
    other = TensorSlice(offsets, sizes)
    common = one.overlap(other)
    both = [n for n in numbers(shape, one) if n in numbers(shape, other)]
    assert both == ([] if common is None else numbers(shape, common))
    assert one.contains(other) == (common == other)
    if common is not None:
        assert common.relative_to(one).moved(one.offsets) == common


def test_a_row_is_divided_into_full_pieces_and_a_rest():
    pieces = byte_slices((10,), TensorSlice((2,), (5,)), 4, most=8, skip=0)
    assert [(piece.start, piece.length) for piece in pieces] == [(8, 8), (16, 8), (24, 4)]


def test_an_empty_slice_has_no_pieces():
    assert list(byte_slices((4, 0), TensorSlice((0, 0), (4, 0)), 4, most=8, skip=0)) == []


def test_rows_that_lie_far_apart_are_read_one_by_one():
    wanted = TensorSlice((0, 0), (3, 2))
    assert len(list(byte_slices((3, 1000), wanted, 1, most=4096, skip=998))) == 1
    assert len(list(byte_slices((3, 1000), wanted, 1, most=4096, skip=997))) == 3


def test_a_large_slice_has_few_pieces():
    shape = (1 << 30,)
    pieces: Iterator[ByteSlice] = byte_slices(
        shape, TensorSlice.whole(shape), 4, most=1 << 20, skip=0
    )
    assert len(list(itertools.islice(pieces, 5000))) == 4096
