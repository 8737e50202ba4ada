"""The fast path changes the time that decoding takes, and never its answer.

Whatever a save can leave, and whatever becomes of it when bytes of it are
changed, is decoded twice, with it and without: the same metadata, or
the same refusal at the same byte.
"""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_metadata import Layout, Shard, dumped

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.dcp.fast_path import fast_path_shapes
from ckptctl.formats.dcp.metadata import GRAMMAR, SMALL, decode_metadata, shapes_that_pay
from ckptctl.formats.pickles.reading import Machine, Shape, Shapes, read_pickle
from ckptctl.model import Metadata

pytestmark = pytest.mark.torch

STEADY = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=250
)


def content(decoded: Metadata) -> dict[str, object]:
    """All that metadata says, comparable."""
    said = {name: getattr(decoded, name) for name in Metadata.__slots__ if name != "tensors"}
    for fqn, entry in decoded.tensors.items():
        fields = {name: getattr(entry, name) for name in entry.__slots__ if name != "chunks"}
        said[f"tensor {fqn}"] = (fields, list(entry.chunks))
    return said


def outcome(data: bytes, shapes: Shapes | None) -> object:
    try:
        return content(decode_metadata(data, shapes=shapes))
    except (MetadataUnsafe, MetadataUnreadable) as error:
        return type(error).__name__, error.message


def assert_shapes_change_nothing(data: bytes) -> object:
    with_shapes, without = outcome(data, fast_path_shapes), outcome(data, None)
    assert with_shapes == without
    return with_shapes


def n_interpreted(data: bytes) -> int:
    """How many objects that have a shape were read opcode by opcode."""
    tries = []

    class Counted:
        def __init__(self, shape: Shape) -> None:
            self.shape = shape

        def take(self, machine: Machine) -> None:
            tries.append(machine.pos)
            self.shape.take(machine)

    def counted(machine: Machine) -> dict[str, Shape]:
        return {kind: Counted(shape) for kind, shape in fast_path_shapes(machine).items()}

    read_pickle(data, GRAMMAR, counted)
    return len(tries)


# Numbers where an encoding changes, and those whose bytes look like opcodes.
NUMBERS = st.sampled_from(
    [0, 1, 2, 0x94, 255, 256, 0x9494, 65_535, 65_536, 2**31 - 1, 2**31, 2**39, 2**40, 2**55, 2**62]
)
NAMES = st.sampled_from(
    [
        "w",
        "layers.0.attention.wq.weight",
        "é—€.weight",
        "x" * 145,
        "x" * 148,
        "x" * 255,
        "y" * 300,
        "b",
    ]
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tensors = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        n_dims = draw(st.integers(0, 5))
        shape = tuple(draw(st.sampled_from([0, 1, 7])) for _ in range(n_dims))
        n_shards = draw(st.sampled_from([0, 1, 2, 3, 12]))
        shards = []
        for number in range(n_shards):
            shards.append(
                Shard(
                    offsets=tuple(draw(NUMBERS) for _ in range(n_dims)),
                    sizes=tuple(draw(NUMBERS) for _ in range(n_dims)),
                    rank=draw(st.sampled_from([None, 0, 1, 2])),
                    hint=draw(st.sampled_from([None, 0, number, number, 300])),
                    start=draw(NUMBERS),
                    length=draw(NUMBERS),
                )
            )
        tensors[name] = (shape, only_one_each(shards))
    return Layout(
        tensors=tensors,
        bytes_entries=tuple(f"extra.{i}" for i in range(draw(st.integers(0, 3)))),
        through_pickle=draw(st.booleans()),
        shares_files=draw(st.booleans()),
        with_plans=draw(st.booleans()),
        shares_offsets=draw(st.sampled_from([False, False, False, True])),
        transforms=draw(st.sampled_from([(), (), ("stream.zstd/1",)])),
        protocol=draw(st.sampled_from([4, 4, 4, 5, 2, 3])),
        by_python=draw(st.booleans()),
    )


def only_one_each(shards: list[Shard]) -> tuple[Shard, ...]:
    """At most one shard an offset: what a planner does before it saves."""
    return tuple({shard.offsets: shard for shard in shards}.values())


@STEADY
@given(layout=layouts())
def test_any_save_is_read_the_same(layout):
    decoded = assert_shapes_change_nothing(dumped(layout))
    assert isinstance(decoded, dict)


@STEADY
@given(layout=layouts(), seed=st.integers(0, 2**32))
def test_any_save_that_was_damaged_is_read_or_refused_the_same(layout, seed):
    data = dumped(layout)
    chance = random.Random(seed)
    for _ in range(10):
        assert_shapes_change_nothing(damaged(data, chance))


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A bit flipped, bytes lost, doubled or moved, or an opcode put in."""
    at, length = chance.randrange(2, len(data)), chance.randrange(1, 90)
    other = chance.randrange(2, len(data))
    opcode = bytes([chance.choice(b"()}]0122abestuRN.\x81\x85\x86\x87\x8c\x93\x94hjKMJ")])
    return chance.choice(
        [
            data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :],
            data[:at] + data[at + length :],
            data[:at] + data[other : other + length] + data[at:],
            data[:at] + opcode + data[at:],
            data[:at] + opcode + data[at + 1 :],
        ]
    )


def test_an_opcode_behind_a_text_changes_what_follows():
    data = dumped(many(4, 6, with_plans=True))
    texts = [n for n, byte in enumerate(data[:-1]) if byte == 0x8C and data[n + 1 :][:1] < b"\x80"]
    for text in texts:
        end = text + 2 + data[text + 1]
        assert_shapes_change_nothing(data[:end] + b"N" + data[end:])


def many(n_ranks: int, n_tensors: int, **how: object) -> Layout:
    """Tensors split over ranks along dimension 0, two shards a rank for every third of them."""
    tensors = {}
    for number in range(n_tensors):
        n_shards = n_ranks * (2 if number % 3 == 0 else 1)
        shards = tuple(
            Shard((50 * i, 0), (50, 8), rank=i * n_ranks // n_shards, hint=i, start=2**30 * i)
            for i in range(n_shards)
        )
        tensors[f"layers.{number}.weight"] = ((50 * n_shards, 8), shards)
    return Layout(tensors, ("step",), **how)


LARGE = {
    "as-torch-saves": many(64, 30),
    "with-frames-of-python": many(64, 30, by_python=True),
    "with-plans": many(64, 20, with_plans=True),
    "with-shared-offsets": many(64, 30, shares_offsets=True),
    "in-one-process": many(64, 30, through_pickle=False),
    "with-a-file-each": many(64, 30, shares_files=False),
    "of-few-ranks": many(4, 500),
}


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("with-plans", "of-few-ranks")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in LARGE
    ],
)
def test_large_saves_are_read_the_same_across_frames_batches_and_windows(name):
    data = dumped(LARGE[name])
    assert len(data) > 4 * 65_536
    decoded = assert_shapes_change_nothing(data)
    assert isinstance(decoded, dict)
    chance = random.Random(name)
    for _ in range(4):
        assert_shapes_change_nothing(damaged(data, chance))


@pytest.mark.parametrize("name", LARGE)
def test_nearly_all_of_a_large_save_is_taken_by_its_shape(name):
    assert n_interpreted(dumped(LARGE[name])) < 0.1 * n_objects(LARGE[name])


def n_objects(layout: Layout) -> int:
    """How many chunks, byte ranges and items of plans there are."""
    n_shards = sum(len(shards) for _, shards in layout.tensors.values())
    return n_shards * (4 if layout.with_plans else 2)


def test_rows_that_refer_to_rows_thousands_deep_are_read_without_shapes():
    decoded = assert_shapes_change_nothing(chained_items(5_000))
    assert isinstance(decoded, dict)


def chained_items(n_items: int) -> bytes:
    """A plan in which each item has the one before it for a chunk, and the last is asked for."""
    import torch
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    items = [WriteItem(MetadataIndex("w", (0,)), WriteItemType.SHARD)]
    for number in range(n_items):
        data = TensorWriteData(items[-1], TensorProperties(), torch.Size((1,)))
        index = MetadataIndex("w", (number,))
        items.append(WriteItem(index, WriteItemType.SHARD, None, data))
    metadata = Metadata({}, {}, {})
    metadata.all_local_plans = [SavePlan(items)]
    metadata.last_item = items[-1]
    return pickle.dumps(metadata)


def test_protocols_without_memoize_are_read_all_the_same():
    layout = many(4, 3, protocol=2)
    assert n_interpreted(dumped(layout)) > n_objects(layout)
    assert_shapes_change_nothing(dumped(layout))


def test_small_metadata_is_read_without_shapes_and_large_metadata_with_them():
    small, large = (Machine(bytes(n), GRAMMAR, {}) for n in (SMALL - 1, SMALL))
    assert shapes_that_pay(small) == {}
    assert shapes_that_pay(large).keys() == fast_path_shapes(large).keys()
