"""Chunks that fill their tensor, and chunks that do not: every code, exact in numbers."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_parts import Box, metadata, tensor

from ckptctl.findings import Finding
from ckptctl.inspection.coverage import check_coverage, check_part_coverage
from ckptctl.model import Chunks, RangeColumns, TensorEntry

patient = settings(deadline=None)  # a busy machine is no fault


def check(shape: tuple[int, ...], *boxes: Box, replicas_ok: bool = False) -> list[Finding]:
    return list(check_coverage(tensor("w", shape, *boxes), replicas_ok=replicas_ok))


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [((), ())]),
        ((0,), []),
        ((0,), [((0,), (0,))]),
        ((4, 0), [((0, 0), (4, 0))]),
        ((1,), [((0,), (1,))]),
        ((8, 4), [((0, 0), (8, 4))]),
        # Shards along the first dimension, in any order.
        ((8, 4), [((4, 0), (4, 4)), ((0, 0), (4, 4))]),
        # A rank with nothing to hold writes an empty chunk at the end, or at its place.
        ((3, 4), [((0, 0), (2, 4)), ((2, 0), (1, 4)), ((3, 0), (0, 4))]),
        # A mesh of two by two, and strides of FSDP under TP.
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]),
        ((8,), [((0,), (2,)), ((4,), (2,)), ((2,), (2,)), ((6,), (2,))]),
        # A pinwheel: no line across the tensor separates the chunks.
        (
            (3, 3),
            [
                ((0, 0), (1, 2)),
                ((0, 2), (2, 1)),
                ((2, 1), (1, 2)),
                ((1, 0), (2, 1)),
                ((1, 1), (1, 1)),
            ],
        ),
        ((2, 2, 2), [((i, j, k), (1, 1, 1)) for i, j, k in product(range(2), repeat=3)]),
    ],
)
def test_chunks_that_fill_a_tensor_draw_no_finding(shape, boxes):
    assert check(shape, *boxes) == []


def test_a_lost_rank_is_a_gap_and_the_message_counts_it():
    (finding,) = check((8, 4), ((0, 0), (4, 4)))
    assert finding.code == "coverage.gap"
    assert finding.where == "w"
    assert finding.message == "16 of 32 elements are in no chunk"
    assert finding.found == "no chunk for the 4 x 4 elements at (4, 0)"


def test_a_chunk_that_is_there_twice_is_an_overlap():
    (finding,) = check((8, 4), ((0, 0), (4, 4)), ((4, 0), (4, 4)), ((4, 0), (4, 4)))
    assert finding.code == "coverage.overlap"
    assert finding.message == "16 of 32 elements are in more than one chunk"
    assert finding.found == "chunks at (4, 0) and (4, 0)"


def test_a_shifted_chunk_overlaps_and_leaves_a_gap():
    overlap, gap = check((8, 4), ((0, 0), (4, 4)), ((3, 0), (4, 4)))
    assert overlap.message == "4 of 32 elements are in more than one chunk"
    assert overlap.found == "chunks at (0, 0) and (3, 0)"
    assert gap.message == "4 of 32 elements are in no chunk"
    assert gap.found == "no chunk for the 1 x 4 elements at (7, 0)"


def test_a_gap_and_an_overlap_of_one_size_do_not_make_up_for_each_other():
    assert codes(check((4,), ((0,), (2,)), ((1,), (2,)))) == ["coverage.overlap", "coverage.gap"]


@pytest.mark.parametrize("box", [((6, 0), (4, 4)), ((0, 2), (8, 3)), ((9, 0), (0, 4))])
def test_a_chunk_that_sticks_out_is_told_apart_from_the_gap_that_it_leaves(box):
    sound: list[Box] = [((0, 0), (8, 4))]
    (finding,) = check((8, 4), *sound, box)
    assert finding.code == "coverage.outside"
    assert finding.message == "1 chunk of 2 extends beyond the tensor"
    assert finding.expected == "offsets and sizes within 8 x 4"
    assert codes(check((8, 4), box))[:2] == ["coverage.outside", "coverage.gap"]


def test_sizes_below_zero_do_not_cancel():
    entry = tensor("w", (8,), ((0,), (10,)), ((10,), (-2,)))
    assert codes(list(check_coverage(entry))) == ["coverage.outside", "coverage.gap"]


@pytest.mark.parametrize(
    ("shape", "boxes", "code"),
    [
        ((), [], "coverage.gap"),
        ((), [((), ()), ((), ())], "coverage.overlap"),
        ((1,), [], "coverage.gap"),
        ((1,), [((1,), (0,))], "coverage.gap"),
    ],
)
def test_the_smallest_tensors_need_exactly_one_chunk(shape, boxes, code):
    (finding,) = check(shape, *boxes)
    assert finding.code == code
    assert finding.message.startswith("1 of 1 elements")


def test_replicas_are_an_overlap_unless_the_caller_knows_of_them():
    boxes: list[Box] = [((0,), (4,)), ((4,), (4,)), ((0,), (4,))]
    assert codes(check((8,), *boxes)) == ["coverage.overlap"]
    assert check((8,), *boxes, replicas_ok=True) == []
    assert codes(check((8,), *boxes[1:2] * 2, replicas_ok=True)) == ["coverage.gap"]
    # A replica is the same slice: one that differs in a row is an overlap.
    assert codes(check((8,), *boxes[:2], ((0,), (3,)), replicas_ok=True)) == ["coverage.overlap"]


def test_the_metadata_of_several_ranks_fill_a_tensor_together():
    halves = [tensor("w", (8,), ((at,), (4,))) for at in (0, 4)]
    copies = [tensor("b", (2,), ((0,), (2,))) for _ in range(2)]
    own = [tensor("rng", (n,), ((0,), (n,))) for n in (5, 7)]
    ranks = [metadata(halves[r], copies[r], own[r], rank=r) for r in range(2)]
    assert list(check_part_coverage(ranks)) == []
    (finding,) = check_part_coverage(ranks[:1], "pp0")
    assert (finding.code, finding.where) == ("coverage.gap", "pp0/w")


def test_a_rank_lost_from_many_tensors_is_told_one_by_one_and_then_in_sum():
    tensors = [tensor(f"layer.{i}", (8,), ((0,), (4,))) for i in range(100)]
    findings = list(check_part_coverage([metadata(*tensors)]))
    assert len(findings) == 21
    assert findings[-1].where == "layer.20, layer.21, layer.22 and 77 more"
    assert findings[-1].message == "part of a tensor is in no chunk: the same in 80 more places"


def columns(shape: tuple[int, ...], boxes: list[Box]) -> TensorEntry:
    """A tensor of many chunks, without an object for each."""
    n = len(boxes)
    offsets = array("q", [x for at, _ in boxes for x in at])
    sizes = array("q", [x for _, size in boxes for x in size])
    files, places = array("i", [0] * n), array("q", range(n))
    chunks = Chunks(
        len(shape), offsets, sizes, RangeColumns(files, places, array("q", [1] * n), ["f"])
    )
    return TensorEntry("w", "float32", shape, chunks)


def test_a_mesh_of_a_hundred_thousand_chunks_is_counted_exactly():
    side = 316
    boxes: list[Box] = [((8 * i, 8 * j), (8, 8)) for i, j in product(range(side), repeat=2)]
    shape = (8 * side, 8 * side)
    assert list(check_coverage(columns(shape, boxes))) == []
    n_elements = prod(shape)
    (gap,) = check_coverage(columns(shape, boxes[:-1]))
    assert gap.message == f"64 of {n_elements:,} elements are in no chunk"
    (overlap,) = check_coverage(columns(shape, [*boxes, ((4, 4), (8, 8))]))
    assert overlap.message == f"64 of {n_elements:,} elements are in more than one chunk"


def test_chunks_too_entangled_to_be_counted_are_still_told_to_be_unsound():
    # Diagonal steps: each slab of the first dimension meets all others.
    n = 1_000
    boxes: list[Box] = [((i, 2 * i), (n, 1)) for i in range(n)]
    codes_found = codes(list(check_coverage(columns((2 * n, 2 * n), boxes))))
    assert codes_found == ["coverage.gap"]
    twice = [*boxes, ((0, 0), (2 * n, 2 * n))]
    assert codes(list(check_coverage(columns((2 * n, 2 * n), twice)))) == ["coverage.overlap"]


Shape = tuple[int, ...]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """A small tensor of 1 to 4 dimensions, cut again and again across one of its chunks."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 12))):
        index = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        offsets, sizes = boxes[index]
        if sizes[dim] < 2:
            continue
        at = draw(st.integers(1, sizes[dim] - 1))
        boxes[index] = (offsets, _with(sizes, dim, at))
        rest = _with(sizes, dim, sizes[dim] - at)
        boxes.append((_with(offsets, dim, offsets[dim] + at), rest))
    return shape, draw(st.permutations(boxes))


@st.composite
def grids(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """A small tensor of 1 to 4 dimensions, cut from end to end."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    rows = []
    for n in shape:
        inner = draw(st.sets(st.integers(1, n - 1), max_size=2)) if n > 1 else set()
        rows.append(list(pairwise([0, *sorted(inner), n])))
    cells = [tuple(zip(*cell, strict=True)) for cell in product(*rows)]
    boxes: list[Box] = [
        (begins, tuple(end - at for at, end in zip(begins, ends, strict=True)))
        for begins, ends in cells
    ]
    return shape, draw(st.permutations(boxes))


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])


def counted_one_by_one(shape: Shape, boxes: list[Box]) -> list[tuple[str, int]]:
    """What is to be found, from how often each single element is in a chunk."""
    times = np.zeros(shape, dtype=int)
    for offsets, sizes in boxes:
        where = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
        times[where] += 1
    expected = [("coverage.overlap", int((times > 1).sum()))]
    expected.append(("coverage.gap", int((times == 0).sum())))
    return [(code, number) for code, number in expected if number]


def found(shape: Shape, boxes: list[Box]) -> list[tuple[str, int]]:
    return [(f.code, int(f.message.split()[0].replace(",", ""))) for f in check(shape, *boxes)]


@patient
@given(tilings() | grids())
def test_any_exact_tiling_is_sound(tiling):
    shape, boxes = tiling
    assert check(shape, *boxes) == []


@patient
@given(tilings() | grids(), st.data())
def test_one_chunk_dropped_from_a_tiling_is_a_gap_of_its_size(tiling, data):
    shape, boxes = tiling
    index = data.draw(st.integers(0, len(boxes) - 1))
    (dropped,) = boxes[index : index + 1]
    rest = boxes[:index] + boxes[index + 1 :]
    assert found(shape, rest) == [("coverage.gap", prod(dropped[1]))]


@patient
@given(tilings() | grids(), st.data())
def test_one_chunk_doubled_in_a_tiling_is_an_overlap_of_its_size(tiling, data):
    shape, boxes = tiling
    doubled = data.draw(st.sampled_from(boxes))
    assert found(shape, [*boxes, doubled]) == [("coverage.overlap", prod(doubled[1]))]
    assert check(shape, *boxes, doubled, replicas_ok=True) == []


@patient
@given(tilings() | grids(), st.data())
def test_chunks_moved_about_are_counted_as_one_by_one(tiling, data):
    shape, boxes = tiling
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(boxes) - 1))
        sizes = boxes[index][1]
        offsets = tuple(
            data.draw(st.integers(0, n - size)) for n, size in zip(shape, sizes, strict=True)
        )
        boxes[index] = (offsets, sizes)
    assert found(shape, boxes) == counted_one_by_one(shape, boxes)


@patient
@given(st.data())
def test_any_chunks_at_all_are_counted_as_one_by_one(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = []
    for _ in range(data.draw(st.integers(0, 6))):
        offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
        sizes = tuple(
            data.draw(st.integers(0, n - at)) for n, at in zip(shape, offsets, strict=True)
        )
        boxes.append((offsets, sizes))
    assert found(shape, boxes) == counted_one_by_one(shape, boxes)


def test_a_bounded_time_is_spent_on_chunks_cut_along_very_many_dimensions():
    # No real tensor is cut along 16 dimensions. This one is sound, but proving it takes too long.
    n_dims = 16
    cuts = random.Random(1)
    boxes: list[Box] = [((0,) * n_dims, (1_000,) * n_dims)]
    while len(boxes) < 1_000:
        offsets, sizes = boxes.pop(0)
        dim = cuts.choice([dim for dim in range(n_dims) if sizes[dim] > 1])
        at = cuts.randrange(1, sizes[dim])
        boxes.append((offsets, _with(sizes, dim, at)))
        rest = _with(sizes, dim, sizes[dim] - at)
        boxes.append((_with(offsets, dim, offsets[dim] + at), rest))
    (finding,) = check((1_000,) * n_dims, *boxes)
    assert finding.code == "format.unsupported"
