"""A damaged step is refused by `dcp.load` with the Reader, with the finding that says why."""

from __future__ import annotations

import datetime
import io
import pickle
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import pytest
from damage import flip

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402

from ckptctl.errors import CkptctlError, PathNotFound, RecordUnsafe, StepDamaged  # noqa: E402
from ckptctl.train import Reader  # noqa: E402

pytestmark = pytest.mark.torch

LARGE = 100_000
"""Elements whose bytes are not read with the frame of their record."""


def state() -> dict[str, Any]:
    return {
        "large": torch.arange(LARGE, dtype=torch.float32),
        "small": torch.arange(100, dtype=torch.float32),
        "lr": 0.25,
    }


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A sound step of one long record, a short one and a pickled number."""
    path = tmp_path / "run" / "step_100"
    dcp.save(state(), checkpoint_id=path, no_dist=True)
    return path


def refused(step: Path, wanted: dict[str, Any] | None = None, **options: Any) -> CkptctlError:
    """The error with which the step does not load, as it comes out of torch's."""
    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            wanted if wanted is not None else state(),
            storage_reader=Reader(step, **options),
            no_dist=True,
        )
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, CkptctlError)
    assert str(error) in str(caught.value)
    return error


def place_of(step: Path, fqn: str) -> Any:
    """Where the record of an entry lies, by torch's own metadata."""
    found = torch_metadata(step).storage_data
    return next(info for index, info in found.items() if index.fqn == fqn)


def torch_metadata(step: Path) -> Any:
    return pickle.loads((step / ".metadata").read_bytes())


def shard(step: Path) -> Path:
    return step / "__0_0.distcp"


# What is wrong with the bytes


@pytest.mark.parametrize("fqn", ["large", "small", "lr"])
def test_a_changed_byte_is_refused_and_the_record_named(step: Path, fqn: str):
    info = place_of(step, fqn)
    flip(shard(step), info.offset + info.length // 2 if fqn != "lr" else info.offset + 70)
    error = refused(step)
    assert isinstance(error, StepDamaged)
    assert (error.code, error.exit_code) == ("record.crc", 21)
    assert error.finding.where == "__0_0.distcp"
    assert f"the record of {fqn}, bytes {info.offset:,} to" in error.message
    assert error.next_command == f"ckptctl verify {step} --level content"


def test_any_changed_byte_of_elements_is_refused(step: Path):
    info = place_of(step, "large")
    for at in random.Random(7).sample(range(info.offset + 1000, info.offset + 400_000), 20):
        flip(shard(step), at)
        assert refused(step).code == "record.crc"
        flip(shard(step), at)


def test_no_changed_bit_anywhere_in_a_file_is_loaded_as_something_else(step: Path):
    """Padding and fields that no reader looks at may change: they harm nothing."""
    data = shard(step).read_bytes()
    chance = random.Random(11)
    n_refused = 0
    for at in chance.sample(range(len(data) - 6000, len(data)), 150):
        changed = bytearray(data)
        changed[at] ^= 1 << chance.randrange(8)
        shard(step).write_bytes(changed)
        wanted = {"large": torch.zeros(LARGE), "small": torch.zeros(100), "lr": None}
        try:
            dcp.load(wanted, storage_reader=Reader(step), no_dist=True)
        except CheckpointException as caught:
            ((error, _),) = caught.failures.values()
            assert isinstance(error, StepDamaged)
            n_refused += 1
        else:
            assert wanted["lr"] == 0.25
            assert torch.equal(wanted["large"], state()["large"])
            assert torch.equal(wanted["small"], state()["small"])
    assert n_refused > 75


def test_a_changed_byte_of_a_checksum_is_refused(step: Path):
    info = place_of(step, "large")
    end = info.offset + info.length
    tail = shard(step).read_bytes()[end - 600 : end]
    entry = tail.index(b"PK\1\2", tail.index(b"PK\1\2") + 1)
    flip(shard(step), end - 600 + entry + 16)
    assert refused(step).code in ("record.framing", "record.crc")


def test_a_damaged_frame_is_refused(step: Path):
    info = place_of(step, "large")
    flip(shard(step), info.offset + info.length - 10)
    error = refused(step)
    assert (error.code, error.exit_code) == ("record.framing", 21)


def test_two_records_in_each_others_place_are_refused(step: Path):
    metadata = torch_metadata(step)
    large, small = place_of(step, "large"), place_of(step, "small")
    for index in metadata.storage_data:
        if index.fqn in ("large", "small"):
            metadata.storage_data[index] = small if index.fqn == "large" else large
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    error = refused(step)
    assert (error.code, error.exit_code) == ("record.mismatch", 21)
    assert "its metadata has" in error.message


def test_a_slice_of_a_damaged_record_is_refused_where_every_record_is_proven(step: Path):
    info = place_of(step, "large")
    flip(shard(step), info.offset + info.length - 2000)
    metadata = Reader(step).read_metadata()
    whole = metadata.state_dict_metadata["large"]

    class First(dcp.DefaultLoadPlanner):
        """Wants the first ten elements of `large`."""

        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            (item,) = plan.items
            short = {"lengths": torch.Size([10])}
            plan.items[0] = type(item)(**{**vars(item), **short})
            return plan

        def transform_tensor(self, read_item: Any, tensor: Any) -> Any:
            return super().transform_tensor(read_item, tensor)

    assert whole.size == torch.Size([LARGE])
    wanted = {"large": torch.zeros(LARGE)}
    reader = Reader(step)
    dcp.load(wanted, storage_reader=reader, planner=First(), no_dist=True)
    assert wanted["large"][:10].tolist() == list(range(10))
    assert (reader.loaded.n_needed, reader.loaded.n_proven) == (40, 0)
    with pytest.raises(CheckpointException, match="does not match the checksum"):
        dcp.load(
            {"large": torch.zeros(LARGE)},
            storage_reader=Reader(step, verify="always"),
            planner=First(),
            no_dist=True,
        )


# Records that are read together with those beside them

N_NEIGHBOURS = 12


@pytest.fixture
def neighbours(tmp_path: Path) -> Path:
    """A sound step whose records have one dtype and one shape, as those of an optimizer's state."""
    path = tmp_path / "run" / "step_100"
    tensors = {f"{n:02}": torch.arange(50.0).view(25, 2) + n for n in range(N_NEIGHBOURS)}
    dcp.save(tensors, checkpoint_id=path, no_dist=True)
    return path


def directory_entry(record: bytes, member: bytes) -> int:
    """Where the directory of a record names a member."""
    return record.rindex(b"PK\1\2", 0, record.rindex(member))


DAMAGE: dict[str, tuple[Callable[[bytes], int], set[str]]] = {
    "first element": (lambda record: record.index(b"FB", record.index(b"data/0")) + 64, {"crc"}),
    "last element": (
        lambda record: record.index(b"PK\7\x08", record.index(b"data/0")) - 1,
        {"crc"},
    ),
    "checksum": (lambda record: directory_entry(record, b"data/0") + 16, {"crc", "framing"}),
    "pickle": (lambda record: record.index(b"FloatStorage") + 1, {"crc"}),
    "first header": (lambda record: 0, {"framing"}),
    "directory": (lambda record: directory_entry(record, b"data/0"), {"framing"}),
    "id of the save": (lambda record: record.rindex(b"PK\7\x08") - 1, {"crc"}),
    "end": (lambda record: len(record) - 10, {"framing"}),
}


@pytest.mark.parametrize("where", DAMAGE)
@pytest.mark.parametrize("number", [1, N_NEIGHBOURS - 1])
def test_damage_to_a_record_that_is_read_with_its_neighbours_is_refused(
    neighbours: Path, where: str, number: int
):
    find, codes = DAMAGE[where]
    info = place_of(neighbours, f"{number:02}")
    record = shard(neighbours).read_bytes()[info.offset : info.offset + info.length]
    flip(shard(neighbours), info.offset + find(record))
    error = refused(neighbours, {f"{n:02}": torch.zeros(25, 2) for n in range(N_NEIGHBOURS)})
    assert isinstance(error, StepDamaged)
    assert error.code.removeprefix("record.") in codes
    assert f"the record of {number:02}, bytes {info.offset:,} to" in error.message


def test_a_neighbour_of_another_shape_or_dtype_than_its_metadata_is_refused(neighbours: Path):
    data = shard(neighbours).read_bytes()
    for fqn, other in (("03", torch.zeros(2, 25)), ("04", torch.zeros(25, 2, dtype=torch.int32))):
        dcp.save({fqn: other}, checkpoint_id=neighbours.parent / f"other_{fqn}", no_dist=True)
        record = shard(neighbours.parent / f"other_{fqn}").read_bytes()
        info = place_of(neighbours, fqn)
        assert len(record) == info.length
        shard(neighbours).write_bytes(
            data[: info.offset] + record + data[info.offset + info.length :]
        )
        error = refused(neighbours, {f"{n:02}": torch.zeros(25, 2) for n in range(N_NEIGHBOURS)})
        assert error.code == "record.mismatch"


def test_a_neighbour_that_is_sound_and_differs_from_the_others_is_loaded(neighbours: Path):
    """As one that another version of torch wrote: here, one without any checksum of its own."""
    saved = torch.arange(50.0).view(25, 2) * 3
    torch.save(saved, other := io.BytesIO(), pickle_protocol=3)
    data, info = shard(neighbours).read_bytes(), place_of(neighbours, "05")
    record = other.getvalue()
    assert len(record) == info.length
    assert record[:500] != data[info.offset : info.offset + 500]
    shard(neighbours).write_bytes(data[: info.offset] + record + data[info.offset + info.length :])
    wanted = {f"{n:02}": torch.zeros(25, 2) for n in range(N_NEIGHBOURS)}
    dcp.load(wanted, storage_reader=Reader(neighbours), no_dist=True)
    assert torch.equal(wanted["05"], saved)
    assert torch.equal(wanted["06"], torch.arange(50.0).view(25, 2) + 6)


# What is not there


def test_a_shard_file_that_is_cut_short_is_refused(step: Path):
    data = shard(step).read_bytes()
    shard(step).write_bytes(data[: len(data) // 2])
    error = refused(step)
    assert (error.code, error.exit_code) == ("shard.truncated", 20)
    assert error.finding.expected == f"{len(data):,} bytes"


def test_a_missing_shard_file_is_refused(step: Path):
    shard(step).unlink()
    error = refused(step)
    assert (error.code, error.exit_code) == ("shard.missing", 20)


def test_a_step_without_metadata_is_refused(step: Path):
    (step / ".metadata").unlink()
    error = refused(step)
    assert (error.code, error.exit_code) == ("metadata.missing", 20)
    assert error.next_command == f"ckptctl pick {step.parent}"


def test_a_step_that_is_not_there_is_no_damage(step: Path):
    assert isinstance(refused(step.parent / "step_200"), PathNotFound)


def test_metadata_that_is_cut_short_is_refused(step: Path):
    data = (step / ".metadata").read_bytes()
    (step / ".metadata").write_bytes(data[:-1])
    error = refused(step)
    assert (error.code, error.exit_code) == ("metadata.unreadable", 21)


def test_damaged_metadata_is_never_replaced_by_that_of_one_rank(step: Path):
    data = (step / ".metadata").read_bytes()
    (step / "__0.metadata").write_bytes(data)
    (step / ".metadata").write_bytes(data[: len(data) // 2])
    assert refused(step).code == "metadata.unreadable"


def test_the_error_of_metadata_comes_out_of_read_metadata_as_it_is(step: Path):
    (step / ".metadata").write_bytes(b"")
    with pytest.raises(StepDamaged, match=r"\.metadata cannot be decoded"):
        Reader(step).read_metadata()


def test_a_tensor_with_a_chunk_too_few_is_refused_before_anything_is_read(step: Path):
    metadata = torch_metadata(step)
    metadata.state_dict_metadata["large"].chunks[0].sizes = torch.Size([LARGE - 1])
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    wanted = {"large": torch.full((LARGE,), -1.0)}
    error = refused(step, wanted)
    assert (error.code, error.exit_code) == ("coverage.gap", 20)
    assert bool((wanted["large"] == -1).all())


def test_an_entry_without_a_byte_range_is_refused(step: Path):
    metadata = torch_metadata(step)
    del metadata.storage_data[MetadataIndex("small", (0,), 0)]
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    error = refused(step)
    assert (error.code, error.exit_code) == ("range.missing", 20)


# What asks for more than to be read


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.trace,)


def test_code_in_metadata_does_not_run(step: Path, tmp_path: Path):
    trace = tmp_path / "trace"
    metadata = torch_metadata(step)
    metadata.planner_data = Evil(trace)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    error = refused(step)
    assert (error.code, error.exit_code) == ("metadata.unsafe", 25)
    assert not trace.exists()


def test_code_in_an_entry_does_not_run(step: Path, tmp_path: Path):
    trace = tmp_path / "trace"
    step = step.parent / "step_200"
    dcp.save({"lr": Evil(trace)}, checkpoint_id=step, no_dist=True)
    error = refused(step, {"lr": None})
    assert isinstance(error, RecordUnsafe)
    assert (error.code, error.exit_code) == ("record.unsafe", 25)
    assert "entry lr asks for getattr" in error.message
    assert not trace.exists()


def test_code_in_the_record_of_a_tensor_does_not_run(step: Path, tmp_path: Path):
    trace = tmp_path / "trace"
    record = io.BytesIO()
    torch.save([Evil(trace), torch.zeros(100)], record)
    metadata = torch_metadata(step)
    info = place_of(step, "small")
    info.offset, info.length = 0, len(record.getvalue())
    metadata.storage_data[MetadataIndex("small", (0,), 0)] = info
    info.relative_path = "__1_0.distcp"
    (step / "__1_0.distcp").write_bytes(record.getvalue())
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    error = refused(step)
    assert (error.code, error.exit_code) == ("record.unsafe", 25)
    assert not trace.exists()


def test_a_path_that_leads_out_of_the_step_is_not_followed(step: Path, tmp_path: Path):
    outside = tmp_path / "outside.distcp"
    shard(step).rename(outside)
    metadata = torch_metadata(step)
    for info in metadata.storage_data.values():
        info.relative_path = str(outside)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    error = refused(step)
    assert (error.code, error.exit_code) == ("path.escape", 25)


def test_a_link_is_not_followed(step: Path, tmp_path: Path):
    outside = tmp_path / "outside.distcp"
    shard(step).rename(outside)
    shard(step).symlink_to(outside)
    error = refused(step)
    assert (error.code, error.exit_code) == ("step.linked", 2)


# What it cannot read


def test_records_in_safetensors_form_are_named_for_what_they_are(checkpoints: Path):
    step = checkpoints / "safetensors_2" / "step_100"
    (fqn, tensor), *_ = Reader(step).read_metadata().state_dict_metadata.items()
    error = refused(step, {fqn: torch.zeros(tensor.size)})
    assert (error.code, error.exit_code) == ("format.unsupported", 22)


def test_a_folder_of_safetensors_is_named_for_what_it_is(checkpoints: Path):
    error = refused(checkpoints / "hf_2" / "step_100")
    assert (error.code, error.exit_code) == ("format.unsupported", 22)
    assert "HuggingFaceStorageReader" in error.message


# What an entry may hold


@dataclass
class Settings:
    """A class of a program's own."""

    width: int


def test_a_type_of_a_programs_own_is_loaded_where_it_is_said_to_be_safe(tmp_path: Path):
    step = tmp_path / "step_100"
    dcp.save({"settings": Settings(7)}, checkpoint_id=step, no_dist=True)
    error = refused(step, {"settings": None})
    assert isinstance(error, RecordUnsafe)
    assert "safe_types=[test_reader_damage.Settings]" in error.message
    wanted: dict[str, Any] = {"settings": None}
    dcp.load(wanted, storage_reader=Reader(step, safe_types=[Settings]), no_dist=True)
    assert wanted == {"settings": Settings(7)}


def test_what_a_program_calls_safe_by_itself_stays_so(step: Path):
    before = set(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([range, Settings])
    try:
        dcp.load(state(), storage_reader=Reader(step), no_dist=True)
        assert set(torch.serialization.get_safe_globals()) == {*before, range, Settings}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(before))


PLAIN_VALUES = {
    "numbers": [1, 2.5, -(10**30), True, None, 3 + 4j],
    "texts": ("a", b"bytes", bytearray(b"more")),
    "sets": {frozenset({1, 2}), "x"},
    "ordered": OrderedDict(a=1),
    "counted": Counter("hello"),
    "ranges": [range(3, 9, 2), slice(1, None)],
    "time": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    "span": datetime.timedelta(seconds=3),
    "path": PurePosixPath("a/b"),
    "generator": random.Random(3).getstate(),
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "exact": [Decimal("0.1"), Fraction(1, 3), UUID(int=7)],
    "nothing": [b"", "", bytearray(), frozenset(), set()],
}


@pytest.mark.parametrize("name", PLAIN_VALUES)
def test_a_plain_value_is_loaded_as_it_was(name: str, tmp_path: Path):
    saved = PLAIN_VALUES[name]
    dcp.save({"value": (saved,)}, checkpoint_id=tmp_path / "step_1", no_dist=True)
    wanted: dict[str, Any] = {"value": None}
    dcp.load(wanted, storage_reader=Reader(tmp_path / "step_1"), no_dist=True)
    (loaded,) = wanted["value"]
    assert loaded == saved
    assert type(loaded) is type(saved)


def test_arrays_and_numbers_of_numpy_are_loaded_as_they_were(tmp_path: Path):
    numpy = pytest.importorskip("numpy")
    saved = {
        "state": numpy.random.RandomState(3).get_state(legacy=False),
        "number": numpy.float64(0.1),
        "flags": numpy.array([True, False]),
        "halves": numpy.ones((2, 3), dtype=numpy.float16).T,
        "nothing": numpy.zeros((0, 3)),
        "texts": numpy.array(["a", "größer"]),
        "rows": numpy.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        "day": numpy.datetime64("2026-01-01"),
    }
    dcp.save({"numpy": (saved,)}, checkpoint_id=tmp_path / "step_1", no_dist=True)
    wanted: dict[str, Any] = {"numpy": None}
    dcp.load(wanted, storage_reader=Reader(tmp_path / "step_1"), no_dist=True)
    (loaded,) = wanted["numpy"]
    numpy.testing.assert_equal(loaded, saved)
    assert loaded["halves"].dtype == numpy.float16
    assert type(loaded["number"]) is numpy.float64


def test_an_array_of_objects_is_not_loaded(tmp_path: Path):
    numpy = pytest.importorskip("numpy")
    saved = numpy.array([1, "a"], dtype=object)
    dcp.save({"array": saved}, checkpoint_id=tmp_path / "step_1", no_dist=True)
    error = refused(tmp_path / "step_1", {"array": None})
    assert isinstance(error, RecordUnsafe)
    assert "asks for numpy.dtype" in error.message


def test_errors_survive_the_way_to_other_ranks(step: Path):
    shard(step).unlink()
    error = refused(step)
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is StepDamaged
    assert (str(arrived), arrived.code, arrived.exit_code, arrived.finding) == (
        str(error),
        error.code,
        error.exit_code,
        error.finding,
    )
