"""What `Writer` saves is what torch would have saved, and what stock torch loads."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash
from command_line import clean_environment
from services.counting_proxy import CountingProxy, Fault
from services.plugin import S3Server

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from oldest_torch import not_with_oldest  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import AlreadyExists, PathNotFound, SaveFailed, UsageError  # noqa: E402
from ckptctl.findings import Severity, Verdict  # noqa: E402
from ckptctl.formats import digests  # noqa: E402
from ckptctl.formats.archive.writing import WRITABLE  # noqa: E402
from ckptctl.storage.objects import PART_BYTES  # noqa: E402
from ckptctl.train import Reader, Writer  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

HERE = Path(__file__).parent
WRITERS = ("torch", "ours")


def every_dtype() -> dict[str, Any]:
    state = {}
    for name in filter(partial(hasattr, torch), sorted(WRITABLE)):
        data = torch.arange(96, dtype=torch.uint8) % (2 if name == "bool" else 251)
        state[name] = data.view(getattr(torch, name))
    return state


def every_form() -> dict[str, Any]:
    """Tensors that lie in memory in every way, and what is no tensor."""
    torch.manual_seed(0)
    base, images = torch.randn(64, 48), torch.randn(2, 3, 8, 8)
    long = torch.randn(3000, 1000)  # more than passes through the buffer at once
    channels_last = images.to(memory_format=torch.channels_last)
    return {
        "plain": base,
        "parameter": torch.nn.Parameter(base[::3]),
        "scalar": torch.tensor(3.5),
        "transposed": base.t(),
        "rows": base[3:20],
        "column": base[:, 1],
        "part": base[3:20, 5:30],
        "one row": base[2:3, :5],
        "every second, transposed": base[::2].t(),
        "repeated": base[:1].expand(7, 48),
        "channels last": channels_last,
        "part of channels last": channels_last[:, :, ::2],
        "permuted": torch.randn(4, 5, 6, 7).permute(2, 0, 3, 1)[1:, :, 3:],
        "long": long,
        "long, transposed": long.t(),
        "long, every second": long[:, ::2],
        "long, one row": long.view(1, -1)[:, ::2],
        "float8": base.to(torch.float8_e4m3fn)[::2],
        "conjugated": torch.randn(4, 4, dtype=torch.complex64).conj(),
        "negated": torch.randn(4, 4, dtype=torch.complex64).conj().imag,
        "quantized": torch.quantize_per_tensor(base, 0.1, 0, torch.qint8)[::2],
        "number": 0.1,
        "bytes": b"abc",
        "nested": {"list": [1, {"x": torch.ones(3)}], "tuple": (1, "two")},
    }


def empty() -> dict[str, Any]:
    return {
        "empty": torch.empty(0, 4),
        "empty view": torch.randn(8, 4)[:0],
        "empty, permuted": torch.empty(4, 0, 3).permute(2, 0, 1),
        "beside": torch.ones(2),
    }


def saved(state: dict[str, Any], path: Path, **options: Any) -> Writer:
    writer = Writer(path, **options)
    dcp.save(state, storage_writer=writer)
    return writer


def shards(step: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in step.glob("*.distcp")}


def stock_load(step: Path) -> dict[str, Any]:
    """Every tensor of a step, as stock torch reads its records."""
    loaded = {}
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        with (step / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            record = io.BytesIO(file.read(info.length))
        loaded[index.fqn] = torch.load(record, weights_only=False)
    return loaded


def check_same(found: Any, wanted: Any) -> None:
    """Both have the same bits."""
    assert type(found) is type(wanted) or isinstance(wanted, torch.nn.Parameter)
    if not isinstance(wanted, torch.Tensor):
        assert found == wanted
        return
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if wanted.is_quantized:
        assert torch.equal(found, wanted)
        return
    found, wanted = (one.detach().resolve_conj().resolve_neg() for one in (found, wanted))
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, wanted))
    assert torch.equal(one, other)


def verified(step: Path) -> Any:
    return ckptctl.verify(str(step), level=ckptctl.Level.CONTENT, grace_s=0)


# The files


@not_with_oldest("writes records of another form")
@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
@pytest.mark.parametrize("state", [every_dtype, every_form])
def test_the_files_are_byte_for_byte_those_of_torch(tmp_path: Path, state: Any, options: Any):
    made = state()
    dcp.save(made, storage_writer=dcp.FileSystemWriter(tmp_path / "torch", **options))
    writer = saved(made, tmp_path / "ours", **options)
    ours, theirs = shards(tmp_path / "ours"), shards(tmp_path / "torch")
    assert [name for name in theirs if ours.get(name) != theirs[name]] == []
    assert ours.keys() == theirs.keys() == writer.written.keys() - {".metadata"}
    metadata = [pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in WRITERS]
    for part in ("state_dict_metadata", "planner_data", "version"):
        assert getattr(metadata[0], part) == getattr(metadata[1], part)
    assert dict(metadata[0].storage_data) == dict(metadata[1].storage_data)
    assert verified(tmp_path / "ours").verdict is Verdict.COMPLETE


@pytest.mark.parametrize("state", [every_dtype, every_form, empty])
def test_stock_torch_loads_every_bit(tmp_path: Path, state: Any):
    made = state()
    saved(made, tmp_path / "step_1")
    flat = {**made, **{f"nested.{k}": v for k, v in made.get("nested", {}).items()}}
    flat |= {"nested.list.0": 1, "nested.list.1.x": torch.ones(3)}
    loaded = stock_load(tmp_path / "step_1")
    for fqn, value in loaded.items():
        check_same(value, flat[fqn])
    assert len(loaded) >= len(made)
    assert verified(tmp_path / "step_1").verdict is Verdict.COMPLETE


def test_dcp_load_and_reader_put_back_what_was_saved(tmp_path: Path):
    made = {name: value for name, value in every_form().items() if name != "quantized"}
    saved(made, tmp_path / "step_1", thread_count=2)
    for reader in (dcp.FileSystemReader(tmp_path / "step_1"), Reader(tmp_path / "step_1")):
        state = {
            name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
            for name, value in every_form().items()
            if name != "quantized"
        }
        state |= {"number": 0.0, "bytes": b""}
        dcp.load(state, storage_reader=reader)
        for name in made.keys() - {"nested"}:
            check_same(state[name], made[name].resolve_neg() if name == "negated" else made[name])


def test_views_of_one_storage_are_saved_without_the_rest_of_it(tmp_path: Path):
    storage = torch.randn(1 << 20)
    saved({"a": storage[:10], "b": storage[5:15], "c": storage[::4096]}, tmp_path / "step_1")
    assert (tmp_path / "step_1" / "__0_0.distcp").stat().st_size < 10_000


def test_the_digests_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(digests, "BLOCK_BYTES", 1 << 16)
    writer = saved(every_form(), tmp_path / "step_1", thread_count=2)
    assert len(writer.written) == 3
    for name, written in writer.written.items():
        data = (tmp_path / "step_1" / name).read_bytes()
        blocks = [data[at : at + (1 << 16)] for at in range(0, len(data), 1 << 16)]
        expected = [xxhash.xxh3_128(block).hexdigest() for block in blocks]
        assert written.size == len(data)
        assert written.digests.whole == xxhash.xxh3_128(data).hexdigest()
        assert list(written.digests.by_block) == expected


@pytest.mark.slow
def test_four_ranks_write_what_torch_writes_and_other_ranks_load_it(tmp_path: Path):
    """DTensors in even, uneven and empty shards, replicas, 2-D meshes, and a value of each rank."""
    script = HERE / "writer_ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for way in ("dtensors", "sharded_tensors", "rank_local"):
        ours, theirs = shards(tmp_path / way / "ours"), shards(tmp_path / way / "torch")
        assert ours.keys() == theirs.keys()
        assert len(ours) >= 2
        if way != "dtensors":  # an empty record differs in its last digits, which torch makes up
            assert ours == theirs
        report = verified(tmp_path / way / "ours")
        assert (report.verdict, report.with_severity(Severity.FAULT)) == (Verdict.COMPLETE, ())


# What may go wrong


def test_a_checkpoint_is_not_written_over(tmp_path: Path):
    saved({"a": torch.ones(3)}, tmp_path / "step_1")
    before = shards(tmp_path / "step_1")
    with pytest.raises(CheckpointException) as caught:
        saved({"a": torch.zeros(3)}, tmp_path / "step_1")
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, AlreadyExists)
    assert "holds a checkpoint already; it is not written over" in str(error)
    assert shards(tmp_path / "step_1") == before


def test_a_folder_that_is_not_mounted_is_not_made(tmp_path: Path):
    with pytest.raises(CheckpointException) as caught:
        saved({"a": torch.ones(3)}, tmp_path / "run" / "step_1")
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, PathNotFound)
    assert error.next_command == f"mkdir {tmp_path / 'run'}"
    (tmp_path / "run").mkdir()
    saved({"a": torch.ones(3)}, tmp_path / "run" / "step_1")
    with pytest.raises(CheckpointException) as caught:
        saved({"a": torch.ones(3)}, tmp_path / "gone" / "run" / "step_1")
    ((error, _),) = caught.value.failures.values()
    assert "check that its file system is mounted" in str(error)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("path", ["..", "/", "s3://bucket"])
def test_a_path_without_a_name_is_refused(path: str):
    with pytest.raises(CheckpointException) as caught:
        saved({"a": torch.ones(3)}, Path(path) if "://" not in path else path)  # type: ignore[arg-type]
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, (UsageError, PathNotFound))


def test_a_tensor_that_changes_its_shape_while_it_is_saved_fails_the_save(tmp_path: Path):
    class Planner(dcp.DefaultSavePlanner):
        asked = 0

        def resolve_data(self, write_item: Any) -> Any:
            self.asked += 1
            return super().resolve_data(write_item)[: 100 // self.asked]

    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            {"a": torch.ones(100)},
            storage_writer=Writer(tmp_path / "step_1"),
            planner=Planner(),
        )
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, SaveFailed)


@pytest.mark.slow
def test_a_save_that_is_killed_anywhere_leaves_no_step_that_looks_whole(tmp_path: Path):
    """Before each of its calls that change a file, and in the middle of each write."""
    done = subprocess.run(
        [sys.executable, str(HERE / "killed_writer.py"), str(tmp_path)],
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    n_killed = int(done.stdout)
    assert n_killed > 15
    for number in range(1, n_killed + 2):
        step = tmp_path / f"run-{number}" / "step_1"
        is_whole = (step / ".metadata").exists()
        if is_whole:
            assert verified(step).verdict is Verdict.COMPLETE
            check_same(stock_load(step)["long"], torch.arange(300_000))
        elif step.exists():
            assert verified(step).verdict is Verdict.INCOMPLETE
        picked = ckptctl.pick(str(step.parent), grace_s=0, allow_fresh=True)
        assert (picked.chosen is not None) is is_whole
    assert is_whole


def test_memory_does_not_grow_with_what_is_saved(tmp_path: Path):
    code = """
import resource, sys, torch, torch.distributed.checkpoint as dcp
from ckptctl.train import Writer
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
def save(n, name):
    base = torch.ones(n, 1 << 18)
    state = {"plain": base, "transposed": base.t(), "every second": base[:, ::2]}
    before = peak()
    dcp.save(state, storage_writer=Writer(f"{sys.argv[1]}/{name}"))
    return peak() - before
save(2, "small")
print(save(128, "large"))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32  # MiB, for 320 MiB that are written


# Beside the training


@pytest.mark.filterwarnings("ignore::UserWarning")
@not_with_oldest("copies no tensor before it writes it beside the training")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_save_beside_the_training_holds_what_was_there_when_it_began(tmp_path: Path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        state = {"a": torch.arange(1 << 20), "step": 3}
        done = dcp.async_save(state, storage_writer=Writer(tmp_path / "step_1"))
        state["a"].zero_()
        done.result()
    finally:
        torch.distributed.destroy_process_group()
    check_same(stock_load(tmp_path / "step_1")["a"], torch.arange(1 << 20))
    assert verified(tmp_path / "step_1").verdict is Verdict.COMPLETE


# Object stores


@pytest.mark.server
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_a_checkpoint_in_a_bucket_is_what_was_saved(s3_moto: S3Server, tmp_path: Path, client: str):
    state = {"long": torch.arange(3 * PART_BYTES // 8 + 5), **every_form()}
    step = f"s3://{s3_moto.bucket}/{tmp_path.name}-{client}/step_1"
    options = {**s3_moto.options, "client": client}
    writer = Writer(step, storage_options=options)
    dcp.save(state, storage_writer=writer)
    prefix = step.removeprefix(f"s3://{s3_moto.bucket}/")
    for name in ("__0_0.distcp", ".metadata"):
        data = s3_moto.client.get_object(Bucket=s3_moto.bucket, Key=f"{prefix}/{name}")
        (tmp_path / name).write_bytes(data["Body"].read())
    saved(state, tmp_path / "local")
    assert shards(tmp_path) == shards(tmp_path / "local")
    assert writer.written["__0_0.distcp"].digests.whole == (
        xxhash.xxh3_128((tmp_path / "__0_0.distcp").read_bytes()).hexdigest()
    )
    loaded = {"long": torch.zeros_like(state["long"])}
    dcp.load(loaded, storage_reader=Reader(step, storage_options=options))
    check_same(loaded["long"], state["long"])
    with pytest.raises(CheckpointException, match="holds a checkpoint already"):
        dcp.save(state, storage_writer=writer)


@pytest.mark.server
def test_an_upload_needs_no_disk_and_sends_lost_parts_again(
    s3_moto: S3Server,
    tmp_path: Path,
    counting_proxy: Callable[[str], CountingProxy],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    proxy = counting_proxy(s3_moto.endpoint)
    for nth in (2, 3):
        proxy.break_request("PUT", Fault.RESET, nth=nth)
    step = f"s3://{s3_moto.bucket}/{tmp_path.name}/step_1"
    options = {**s3_moto.options, "endpoint_url": proxy.url}
    state = {"long": torch.arange(3 * PART_BYTES // 8)}
    dcp.save(state, storage_writer=Writer(step, storage_options=options))
    report = ckptctl.verify(step, level="content", storage_options=s3_moto.options)
    assert report.verdict is Verdict.COMPLETE
    loaded = {"long": torch.zeros_like(state["long"])}
    dcp.load(loaded, storage_reader=Reader(step, storage_options=s3_moto.options))
    check_same(loaded["long"], state["long"])


def test_a_writer_can_be_sent_to_another_process_and_used_again(tmp_path: Path):
    writer = pickle.loads(pickle.dumps(Writer(tmp_path / "step_1")))
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    dcp.save(
        {"a": torch.ones(4)},
        storage_writer=writer,
        checkpoint_id=os.fspath(tmp_path / "step_2"),
    )
    assert stock_load(tmp_path / "step_1")["a"].numel() == 3
    assert stock_load(tmp_path / "step_2")["a"].numel() == 4
    assert writer.checkpoint_id == str(tmp_path / "step_2")
    assert Writer.validate_checkpoint_id(tmp_path)
    assert not Writer.validate_checkpoint_id("s3:/bucket/step_1")


def test_a_number_of_threads_below_one_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="thread_count is 0"):
        Writer(tmp_path, thread_count=0)
