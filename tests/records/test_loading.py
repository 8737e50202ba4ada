"""The record engine fills memory with slices of tensors, however their records hold them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as dcp  # noqa: E402

from ckptctl.errors import RecordUnreadable  # noqa: E402
from ckptctl.formats.dcp.metadata import decode_metadata  # noqa: E402
from ckptctl.formats.pickles.values import TensorStub  # noqa: E402
from ckptctl.model import DTYPE_SIZES, Metadata  # noqa: E402
from ckptctl.records.loading import Caller, MemoryTarget, SliceLoads  # noqa: E402
from ckptctl.records.opening import Unfit  # noqa: E402
from ckptctl.records.ranges import Ranges  # noqa: E402
from ckptctl.records.reads import RecordSource  # noqa: E402
from ckptctl.records.slices import Strided, TensorSlice, row_major  # noqa: E402
from ckptctl.storage.opening import open_store  # noqa: E402

pytestmark = pytest.mark.torch

LONG, SHORT = (150, 7, 130), (6, 3, 2)
"""Longer than what is read with the frame of a record, and shorter."""


class Everything(Caller):
    """A caller that has every dtype, and keeps the values."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}

    def item_bytes(self, stub: TensorStub) -> int:
        return DTYPE_SIZES[stub.dtype]

    def take_value(self, number: int, data: bytes) -> None:
        self.values[number] = data

    def damage(self, number: int, error: RecordUnreadable | Unfit) -> Exception:
        return RecordUnreadable(f"record {number}, {error.code}: {error.message}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    state = {}
    for shape in (LONG, SHORT):
        for number in range(3):
            n = shape[0] * shape[1] * shape[2]
            values = torch.arange(number, number + n, dtype=torch.float32).reshape(shape)
            kinds = {"rows": values, "turned": values.permute(2, 0, 1), "wide": values.to(complex)}
            state |= {f"{kind}.{len(values)}.{number}": one for kind, one in kinds.items()}
    step = tmp_path_factory.mktemp("loading") / "step_1"
    dcp.save({**state, "number": 7}, checkpoint_id=step, no_dist=True)
    return step, state


def first_ranges(ranges: Ranges) -> dict[str, int]:
    pairs = zip(ranges.entries, ranges.first_range, strict=True)
    return {entry.fqn: number for entry, number in pairs}


def source_of(step: Path) -> tuple[RecordSource, Metadata]:
    metadata = decode_metadata((step / ".metadata").read_bytes())
    return RecordSource(open_store(str(step.parent)), step.name, Ranges([metadata])), metadata


@pytest.mark.parametrize("prove", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_slices_are_read_into_memory_in_row_major_order(saved, seed, prove):
    step, state = saved
    chance = random.Random(seed)
    source, _ = source_of(step)
    numbers, wanted, expected = first_ranges(source.ranges), {}, {}
    for name, tensor in state.items():
        offsets = tuple(chance.choice((0, chance.randrange(size))) for size in tensor.shape)
        sizes = tuple(
            chance.choice((1, size - at)) for size, at in zip(tensor.shape, offsets, strict=True)
        )
        there = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
        expected[name] = tensor[there].numpy().tobytes()
        memory = memoryview(bytearray(len(expected[name])))
        there = Strided(memory, 0, row_major(sizes, tensor.itemsize))
        target = MemoryTarget(TensorSlice(offsets, sizes), tensor.itemsize, there)
        wanted[numbers[name]] = [target]
    caller = Everything()
    loads = SliceLoads(source, caller, prove_slices=prove)
    loads.load({**wanted, numbers["number"]: []})
    for name, elements in expected.items():
        (target,) = wanted[numbers[name]]
        assert bytes(target.there.buffer) == elements, name
    assert loads.counts.n_needed == sum(map(len, expected.values()))
    assert [*caller.values] == [numbers["number"]]


def test_a_changed_byte_of_a_record_that_is_read_whole_is_reported(saved, tmp_path):
    step = tmp_path / "step_1"
    step.mkdir()
    for file in saved[0].iterdir():
        (step / file.name).write_bytes(file.read_bytes())
    source, metadata = source_of(step)
    numbers = first_ranges(source.ranges)
    for name in ("rows.150.0", "rows.150.1", "turned.150.2"):
        place = metadata.tensors[name].chunks.byte_range_of(0)
        data = bytearray((step / place.file).read_bytes())
        middle = place.offset + place.length // 2
        data[middle] ^= 0xFF
        (step / place.file).write_bytes(data)
        shape = metadata.tensors[name].shape
        elements = TensorSlice.whole(shape)
        memory = memoryview(bytearray(4 * elements.n_elements))
        target = MemoryTarget(elements, 4, Strided(memory, 0, row_major(shape, 4)))
        with pytest.raises(RecordUnreadable, match=r"record.crc"):
            SliceLoads(source, Everything()).load({numbers[name]: [target]})
        data[middle] ^= 0xFF
        (step / place.file).write_bytes(data)
