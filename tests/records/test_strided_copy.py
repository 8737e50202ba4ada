"""Copying a slice between two buffers, whatever their strides."""

from __future__ import annotations

import itertools
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from ckptctl.records.slices import Strided, aligned, copy_strided, position, row_major


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
