"""Every slice of every tensor comes to where it belongs, whatever its strides and dtype."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import planner as planning  # noqa: E402
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402

from ckptctl.records.slices import (  # noqa: E402
    TensorSlice,
    dense_order,
    element_runs,
)
from ckptctl.records.verification import ElementChecksum  # noqa: E402
from ckptctl.storage.contract import spread  # noqa: E402
from ckptctl.train import Reader  # noqa: E402
from ckptctl.train.tensor_copy import TensorSink  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.bool, torch.int64, torch.float16),
)


@st.composite
def placed(draw: st.DrawFn) -> tuple[Any, TensorSlice, Any]:
    """A tensor as a record holds it, a slice of it, and a tensor for the slice."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from(DTYPES))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(1, s - o)) for s, o in zip(shape, offsets, strict=True))
    target = strided(draw, lengths, draw(st.sampled_from((dtype, dtype, torch.complex64))))
    return permuted(shape, order, dtype), TensorSlice(offsets, lengths), target


def permuted(shape: tuple[int, ...], order: list[int], dtype: Any) -> Any:
    """A dense tensor whose dimensions lie in memory in some order."""
    n = 1
    for size in shape:
        n *= size
    values = torch.arange(n).remainder(251).to(torch.uint8).to(dtype)
    back = [order.index(dim) for dim in range(len(shape))]
    return values.reshape([shape[dim] for dim in order]).permute(back)


def strided(draw: st.DrawFn, lengths: tuple[int, ...], dtype: Any) -> Any:
    """A tensor that may be a part of a larger one, with its dimensions in some order."""
    order = draw(st.permutations(range(len(lengths))))
    room = [lengths[dim] + draw(st.integers(0, 2)) for dim in order]
    back = [order.index(dim) for dim in range(len(lengths))]
    whole = torch.zeros(room, dtype=dtype).permute(back)
    return whole[tuple(slice(0, size) for size in lengths)]


def take_all(run: Any, data: bytes, limit: int) -> None:
    """What `byte_pass` does: each piece read to where it wants to be."""
    for piece in run.pieces(limit):
        read = memoryview(bytearray(data[piece.start : piece.start + piece.length]))
        spread(read, piece.into)
        run.take(piece, piece.into[0] if piece.into else read)


@given(placed(), st.integers(16, 200), st.integers(0, 50), st.booleans())
def test_a_slice_of_a_record_is_copied_into_its_tensor_and_the_record_is_verified(
    case: tuple[Any, TensorSlice, Any], limit: int, skip: int, prove: bool
):
    source, wanted, target = case
    stored = source.permute(dense_order(source.shape, source.stride()) or ())
    assert stored.is_contiguous()
    data = b"before" + bytes(stored.reshape(-1).view(torch.uint8).numpy())
    wrong: list[int] = []
    checksum = ElementChecksum(len(data) - 6, zlib.crc32(data[6:]), wrong.append) if prove else None
    order = dense_order(source.shape, source.stride()) or ()
    sink = TensorSink(tuple(source.shape), wanted, order, source.dtype, target)
    for run in element_runs("file", 6, sink, skip=skip, checksum=checksum):
        take_all(run, data, limit)
    there = tuple(slice(o, o + n) for o, n in zip(wanted.offsets, wanted.sizes, strict=True))
    assert torch.equal(target, source[there].to(target.dtype))
    assert wrong == []


@given(placed(), st.integers(16, 200), st.data())
def test_a_changed_byte_anywhere_in_a_record_is_reported(
    case: tuple[Any, TensorSlice, Any], limit: int, data: st.DataObject
):
    source, wanted, target = case
    stored = source.permute(dense_order(source.shape, source.stride()) or ())
    saved = bytes(stored.reshape(-1).view(torch.uint8).numpy())
    changed = bytearray(saved)
    changed[data.draw(st.integers(0, len(saved) - 1))] ^= data.draw(st.integers(1, 255))
    wrong: list[int] = []
    checksum = ElementChecksum(len(saved), zlib.crc32(saved), wrong.append)
    order = dense_order(source.shape, source.stride()) or ()
    sink = TensorSink(tuple(source.shape), wanted, order, source.dtype, target)
    for run in element_runs("file", 0, sink, skip=0, checksum=checksum):
        take_all(run, bytes(changed), limit)
    assert wrong == [zlib.crc32(changed)]


def test_elements_that_are_not_dense_have_no_order():
    assert dense_order((4, 4), (8, 1)) is None
    assert dense_order((4, 4), (0, 1)) is None
    assert dense_order((4, 1, 4), (4, 77, 1)) == (1, 0, 2)


# The reader, with a plan of one slice


class Slices(planning.LoadPlanner):
    """Loads one slice of each of some tensors."""

    def __init__(self, targets: dict[str, Any]) -> None:
        self.targets = targets
        self.committed: list[Any] = []

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Not called."""

    create_local_plan = create_global_plan = finish_plan = load_bytes = set_up_planner

    def resolve_tensor(self, read_item: Any) -> Any:
        return self.targets[read_item.dest_index.fqn]

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self.committed.append(tensor)


SHAPES = {"long": (150, 7, 130), "short": (6, 3, 2)}
"""Longer than what is read with the frame of a record, and shorter."""

N_ALIKE = 4
"""Of so many records with one frame the first is parsed, and the others are read together."""


def values_of(shape: tuple[int, ...], number: int) -> dict[str, Any]:
    """The tensors of this shape that are saved, by their kind."""
    n = shape[0] * shape[1] * shape[2]
    values = torch.arange(number, number + n, dtype=torch.float32).reshape(shape)
    return {"rows": values, "turned": values.permute(2, 0, 1), "halves": values.to(torch.bfloat16)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = tmp_path_factory.mktemp("slices") / "step_1"
    state = {
        f"{kind} {length} {number}": tensor
        for length, shape in SHAPES.items()
        for number in range(N_ALIKE)
        for kind, tensor in values_of(shape, number).items()
    }
    dcp.save(state, checkpoint_id=step, no_dist=True)
    return step


@pytest.mark.parametrize("verify", ["whole", "always"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_reader_gives_any_slice_and_reads_little_more(
    saved: Path, verify: Any, data: st.DataObject
):
    kind = data.draw(st.sampled_from(["rows", "turned", "halves"]))
    length, shape = data.draw(st.sampled_from(sorted(SHAPES.items())))
    sources = {f"{kind} {length} {n}": values_of(shape, n)[kind] for n in range(N_ALIKE)}
    size = next(iter(sources.values())).shape
    targets, wanted, items = {}, {}, []
    for fqn, source in sources.items():
        offsets = tuple(data.draw(st.integers(0, n - 1)) for n in size)
        lengths = tuple(
            data.draw(st.integers(1, n - o)) for n, o in zip(size, offsets, strict=True)
        )
        if data.draw(st.booleans()):  # whole rows, as of most tensors that are sharded anew
            offsets, lengths = (offsets[0], 0, 0), (lengths[0], *size[1:])
        there = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        wanted[fqn] = source[there]
        dtype = data.draw(st.sampled_from([source.dtype, source.dtype, torch.float64]))
        targets[fqn] = strided(data.draw, lengths, dtype)
        index = MetadataIndex(fqn, (0, 0, 0), 0)
        items.append(
            planning.ReadItem(
                planning.LoadItemType.TENSOR,
                dest_index=index,
                dest_offsets=torch.Size((0, 0, 0)),
                storage_index=index,
                storage_offsets=torch.Size(offsets),
                lengths=torch.Size(lengths),
            )
        )
    planner = Slices(targets)
    reader = Reader(saved, verify=verify)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    plan = reader.prepare_local_plan(planning.LoadPlan(items))
    reader.read_data(plan, planner).wait()
    for fqn, target in targets.items():
        assert torch.equal(target, wanted[fqn].to(target.dtype))
    assert len(planner.committed) == N_ALIKE
    n_each = source.numel() * source.element_size()
    all_proven = verify == "always" or length == "short"
    n_proven = sum(n_each for one in wanted.values() if all_proven or one.shape == size)
    assert reader.loaded.n_proven == n_proven
    assert reader.loaded.n_records == N_ALIKE
    # Other records lie between those that are read, and are read with them if they are short.
    assert reader.loaded.n_read <= N_ALIKE * (n_each + 8192)
