"""Copying a slice between two buffers, whatever their strides."""

from __future__ import annotations

import itertools
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from ckptctl.records.byte_pass import read_run
from ckptctl.records.slices import (
    Strided,
    StridedSink,
    TensorSlice,
    aligned,
    copy_strided,
    element_runs,
    position,
    row_major,
)
from ckptctl.storage.contract import spread


@given(
    st.lists(st.integers(1, 5), max_size=4).map(tuple),
    st.sampled_from((1, 2, 4, 8, 16)),
    st.data(),
)
def test_every_element_is_copied_to_its_index(sizes, item_bytes, data):
    sides = []
    for _ in range(2):
        order = data.draw(st.permutations(range(len(sizes))))
        room = [sizes[dim] + data.draw(st.integers(0, 2)) for dim in order]
        in_order = row_major(room, item_bytes)
        strides = tuple(in_order[order.index(dim)] for dim in range(len(sizes)))
        first = item_bytes * data.draw(st.integers(0, 3))
        n_bytes = first + prod(room) * item_bytes
        sides.append((first, strides, bytes(i % 251 for i in range(n_bytes))))
    (source_at, source_strides, held), (target_at, target_strides, before) = sides
    target = aligned(bytes(len(before)))
    target = memoryview(bytearray(target))
    source = aligned(held)
    copy_strided(
        Strided(target, target_at, target_strides),
        Strided(source, source_at, source_strides),
        sizes,
        item_bytes,
    )
    expected = bytearray(len(target))
    for index in itertools.product(*(range(n) for n in sizes)):
        t = target_at + position(index, target_strides)
        s = source_at + position(index, source_strides)
        expected[t : t + item_bytes] = held[s : s + item_bytes]
    assert bytes(target) == bytes(expected)


class InMemory:
    """An open file whose bytes are in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        spread(self.data[offset : offset + sum(map(len, buffers))], buffers)


@given(
    st.lists(st.integers(1, 6), max_size=4).map(tuple),
    st.sampled_from((1, 4, 16)),
    st.integers(0, 60),
    st.integers(1, 9),
    st.data(),
)
def test_a_slice_of_a_record_is_read_to_its_place_in_a_block(shape, item_bytes, skip, room, data):
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, n - at)) for n, at in zip(shape, offsets, strict=True))
    around = tuple(size + data.draw(st.integers(0, 2)) for size in sizes)
    strides = row_major(around, item_bytes)
    saved = bytes(i % 251 for i in range(prod(shape) * item_bytes))
    block = memoryview(bytearray(aligned(bytes(prod(around) * item_bytes))))
    wanted = TensorSlice(offsets, sizes)
    sink = StridedSink(shape, wanted, item_bytes, Strided(block, 0, strides))
    buffer = memoryview(bytearray(16 * room))
    file = InMemory(b"frame" + saved)
    for run in element_runs("file", 5, sink, skip=skip, checksum=None):
        for _ in read_run(file, run, buffer):
            pass
    expected = bytearray(len(block))
    for index in itertools.product(*(range(n) for n in sizes)):
        there = [at + first for at, first in zip(index, offsets, strict=True)]
        s = position(there, row_major(shape, item_bytes))
        t = position(index, strides)
        expected[t : t + item_bytes] = saved[s : s + item_bytes]
    assert bytes(block) == bytes(expected)
