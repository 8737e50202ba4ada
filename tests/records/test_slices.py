"""The bytes of a box of elements: all of them, none twice, in pieces that are not too long."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.train.boxes import Box, Cut, row_major

ITEM = 2


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(1, s - o)) for s, o in zip(shape, offsets, strict=True))
    return Box(shape, offsets, lengths)


def numbers(box: Box) -> list[int]:
    """The numbers of the elements of a box in its tensor, in row-major order."""
    steps = row_major(box.shape)
    dims = [range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)]
    return [
        sum(i * step for i, step in zip(at, steps, strict=True)) for at in itertools.product(*dims)
    ]


def numbers_in(box: Box, cut: Cut) -> list[int]:
    offsets = tuple(o + at for o, at in zip(box.offsets, cut.at, strict=True))
    return numbers(Box(box.shape, offsets, cut.sizes))


@given(boxes(), st.integers(ITEM, 300), st.integers(0, 60))
def test_cuts_hold_each_element_of_the_box_once_and_in_order(box: Box, most: int, skip: int):
    cuts = list(box.cuts(ITEM, most=most, skip=skip))
    assert [number for cut in cuts for number in numbers_in(box, cut)] == numbers(box)


@given(boxes(), st.integers(ITEM, 300), st.integers(0, 60))
def test_a_cut_is_no_longer_than_allowed_and_reads_through_no_longer_gap(
    box: Box, most: int, skip: int
):
    for cut in box.cuts(ITEM, most=most, skip=skip):
        inside = numbers_in(box, cut)
        assert (cut.start, cut.length) == (
            inside[0] * ITEM,
            (inside[-1] - inside[0] + 1) * ITEM,
        )
        assert cut.length <= most
        assert cut.dense == (len(inside) * ITEM == cut.length)
        gaps = [(after - before - 1) * ITEM for before, after in itertools.pairwise(inside)]
        assert max(gaps, default=0) <= skip


@given(boxes())
def test_a_flattened_box_has_the_same_elements_in_the_same_order(box: Box):
    flat = box.flattened()
    assert numbers(flat) == numbers(box)
    assert flat.is_whole == box.is_whole
    assert prod(flat.shape) == prod(box.shape)


@pytest.mark.parametrize(
    ("box", "flat"),
    [
        (Box((4, 6, 8), (0, 0, 0), (4, 6, 8)), Box((192,), (0,), (192,))),
        (Box((4, 6, 8), (1, 0, 0), (2, 6, 8)), Box((192,), (48,), (96,))),
        (Box((4, 6, 8), (1, 2, 0), (2, 3, 8)), Box((4, 48), (1, 16), (2, 24))),
        (Box((), (), ()), Box((), (), ())),
    ],
)
def test_a_slice_along_the_first_dimension_is_one_row(box: Box, flat: Box):
    assert box.flattened() == flat


def test_a_row_is_cut_in_full_pieces_and_a_rest():
    cuts = list(Box((10,), (2,), (5,)).cuts(4, most=8, skip=0))
    assert [(cut.start, cut.length) for cut in cuts] == [(8, 8), (16, 8), (24, 4)]


def test_an_empty_box_is_no_cut():
    assert list(Box((4, 0), (0, 0), (4, 0)).cuts(4, most=8, skip=0)) == []


def test_rows_that_lie_far_apart_are_read_one_by_one():
    box = Box((3, 1000), (0, 0), (3, 2))
    assert len(list(box.cuts(1, most=4096, skip=998))) == 1
    assert len(list(box.cuts(1, most=4096, skip=997))) == 3


def test_few_cuts_are_made_of_a_large_box():
    cuts: Iterator[Cut] = Box((1 << 30,), (0,), (1 << 30,)).cuts(4, most=1 << 20, skip=0)
    assert len(list(itertools.islice(cuts, 5000))) == 4096
