"""A shard of the step before is a warning, and no kind of training is mistaken for one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from zlib import crc32

import pytest
from storage.faulty import FaultyStore

import ckptctl
from ckptctl import Level, Report, Severity, Verdict
from ckptctl.errors import StorageUnavailable
from ckptctl.formats.archive.writing import tensor_frame
from ckptctl.formats.dcp.writing import metadata_bytes
from ckptctl.formats.frameworks.layouts import step_name
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.predecessor import FEW
from ckptctl.model import ByteRange, Chunk, Chunks, TensorEntry
from ckptctl.options import Requirements
from ckptctl.selection.roots import neighbours_of
from ckptctl.storage.contract import StoreKind
from ckptctl.storage.local import LocalStore

ROWS, RANKS = 8, 4
ZEROS = "zeros"

WEIGHTS = tuple(f"model.layers.{n}.weight" for n in range(4))
MOMENTS = tuple(f"optimizer.state.layers.{n}.weight.exp_avg" for n in range(4))
ADAM = (*WEIGHTS, *MOMENTS)

Version = Callable[[str, int, int], object]
"""Which values a chunk has: of a tensor, on a rank, at a step. Equal answers, equal values."""


def save(
    root: Path, number: int, version: Version, fqns: Sequence[str] = ADAM, whole: Sequence[str] = ()
) -> Path:
    """A step of four ranks, each with some rows of every tensor; `whole` ones lie on rank 0."""
    step = root / f"step_{number}"
    step.mkdir(parents=True)
    files = {f"__{rank}_0.distcp": bytearray() for rank in range(RANKS)}
    entries = []
    for fqn in (*fqns, *whole):
        ranks = 1 if fqn in whole else RANKS
        chunks = []
        for rank in range(ranks):
            name = f"__{rank}_0.distcp"
            values = version(fqn, rank, number)
            n_data = ROWS * 8 * 4
            data = (
                bytes(n_data)
                if values == ZEROS
                else Random(repr((fqn, rank, values))).randbytes(n_data)
            )
            frame = tensor_frame("float32", (ROWS, 8))
            record = frame.between(()) + data + frame.between((crc32(data),))
            chunks.append(
                Chunk((ROWS * rank, 0), (ROWS, 8), ByteRange(name, len(files[name]), len(record)))
            )
            files[name] += record
        entries.append(TensorEntry(fqn, "float32", (ROWS * ranks, 8), Chunks.of(2, chunks)))
    paths = {entry.fqn: (entry.fqn,) for entry in entries}
    made = metadata_bytes(entries, paths, checkpoint_id=f"step_{number}", save_id="1")
    for name, data in {**files, ".metadata": made}.items():
        (step / name).write_bytes(data)
        os.utime(step / name, (1.7e9, 1.7e9))
    return step


def moving(fqn: str, rank: int, number: int) -> object:
    return number


def stale(step: Path, file: str = "__1_0.distcp") -> Path:
    """The step with a shard of the step before, which is ten steps older."""
    older = step.with_name(f"step_{int(step.name[5:]) - 10}")
    shutil.copy2(older / file, step / file)
    return step


def warned(step: Path, level: Level = Level.STRUCTURE) -> list[tuple[str, str]]:
    report = ckptctl.verify(str(step), level=level)
    assert (report.verdict, report.exit_code) == (Verdict.COMPLETE, 0)
    return [(f.code, f.where) for f in report.with_severity(Severity.WARNING)]


TOLD = [("shard.stale", "__1_0.distcp")]


def test_a_shard_of_the_step_before_is_suspected(tmp_path):
    save(tmp_path, 10, moving)
    step = save(tmp_path, 20, moving)
    assert warned(step) == []
    stale(step)
    assert warned(step) == warned(step, Level.CONTENT) == TOLD
    assert warned(step, Level.LISTING) == []
    report = ckptctl.verify(str(step), level=Level.STRUCTURE)
    (finding,) = report.with_severity(Severity.WARNING)
    assert "8 records were compared" in finding.message
    assert "is equal to the same file in step_10" in finding.message
    assert finding.expected == "other elements than in step_10, as in 3 other shard files"
    assert finding.next_command == f"ckptctl diff {tmp_path}/step_10 {step} --values"


def test_pick_and_scan_tell_it_and_take_the_step_all_the_same(tmp_path):
    save(tmp_path, 10, moving)
    stale(save(tmp_path, 20, moving))
    chosen = ckptctl.pick(str(tmp_path))
    assert chosen.chosen is not None
    told = [finding.code for finding in chosen.chosen.with_severity(Severity.WARNING)]
    assert (chosen.step, told) == (20, ["shard.stale"])
    scanned = ckptctl.scan(str(tmp_path)).reports[0]
    assert [finding.code for finding in scanned.with_severity(Severity.WARNING)] == told


def test_most_shards_of_the_step_before_are_suspected_too(tmp_path):
    save(tmp_path, 10, moving)
    step = save(tmp_path, 20, moving)
    for rank in (0, 2, 3):
        stale(step, f"__{rank}_0.distcp")
    assert warned(step) == [("shard.stale", f"__{rank}_0.distcp") for rank in (0, 2, 3)]


def test_weights_alone_are_suspected_where_a_third_step_shows_that_they_moved(tmp_path):
    save(tmp_path, 10, moving, WEIGHTS)
    step = stale(save(tmp_path, 20, moving, WEIGHTS))
    assert warned(step) == []  # rank 1 may hold what is never trained
    save(tmp_path, 0, moving, WEIGHTS)
    assert warned(step) == TOLD


def frozen_everywhere(fqn: str, rank: int, number: int) -> object:
    return number if "layers.0" in fqn else 1


def frozen_from_now_on(fqn: str, rank: int, number: int) -> object:
    return min(number, 10) if "layers.0" not in fqn else number


def expert_without_tokens(fqn: str, rank: int, number: int) -> object:
    """Everything on rank 1 is unchanged, and never had a gradient."""
    return number if rank != 1 else ZEROS if "exp_avg" in fqn else 1


def expert_without_tokens_in_weights(fqn: str, rank: int, number: int) -> object:
    return number if rank != 1 else 1


def rows_without_gradient(fqn: str, rank: int, number: int) -> object:
    return number if rank != 1 or "layers.3" in fqn else 1


def lost_in_bfloat16(fqn: str, rank: int, number: int) -> object:
    """Small updates change some chunks of some weights; the moments move."""
    return number if "exp_avg" in fqn or (rank + int(fqn.split(".")[2])) % 2 else 1


def lost_in_bfloat16_of_weights_alone(fqn: str, rank: int, number: int) -> object:
    """Rank 1 is unchanged from step 10 on, and so is another chunk of every tensor."""
    n = int(fqn.split(".")[2])
    return min(number, 10) if rank == 1 or rank == (n % 3 + 2) % 4 else number


def first_update(fqn: str, rank: int, number: int) -> object:
    """Moments are zero at the step before, and weights have not changed: a warm-up from 0."""
    return 1 if "exp_avg" not in fqn else ZEROS if number <= 10 else number


def saved_twice(fqn: str, rank: int, number: int) -> object:
    return 1


@pytest.mark.parametrize(
    ("version", "fqns"),
    [
        (moving, ADAM),
        (moving, WEIGHTS),
        (frozen_everywhere, ADAM),
        (frozen_from_now_on, ADAM),
        (expert_without_tokens, ADAM),
        (expert_without_tokens_in_weights, WEIGHTS),
        (rows_without_gradient, ADAM),
        (lost_in_bfloat16, ADAM),
        (lost_in_bfloat16_of_weights_alone, WEIGHTS),
        (first_update, ADAM),
        (saved_twice, ADAM),
        (moving, ADAM[:2]),
    ],
)
def test_training_draws_nothing(version, fqns, tmp_path):
    steps = [save(tmp_path, number, version, fqns) for number in (0, 10, 20)]
    assert [warned(step) for step in steps] == [[], [], []]


def test_a_stage_of_a_pipeline_that_is_frozen_draws_nothing(tmp_path):
    stage = ("model.stage.0.weight", "model.stage.1.weight", "model.stage.2.weight")

    def version(fqn: str, rank: int, number: int) -> object:
        return 1 if fqn in stage else number

    steps = [save(tmp_path, number, version, whole=stage) for number in (0, 10, 20)]
    assert [warned(step) for step in steps] == [[], [], []]


def test_a_step_that_is_cut_in_another_way_is_not_compared(tmp_path):
    save(tmp_path, 10, moving, [fqn.replace("layers", "blocks") for fqn in ADAM])
    assert warned(save(tmp_path, 20, moving)) == []


@pytest.mark.parametrize("damage", ["metadata", "records", "gone", "a file"])
def test_a_step_before_that_is_damaged_says_nothing_and_the_one_before_it_may(damage, tmp_path):
    save(tmp_path, 0, moving)
    older = save(tmp_path, 10, moving)
    step = stale(save(tmp_path, 20, moving))
    if damage == "metadata":
        (older / ".metadata").write_bytes(b"\x80\x04no pickle")
    elif damage == "records":
        for path in older.glob("*.distcp"):
            path.write_bytes(bytes(path.stat().st_size))
    else:
        shutil.rmtree(older)
        if damage == "a file":
            older.write_bytes(b"")
    assert warned(step) == []


def test_on_an_object_store_it_costs_a_few_short_reads_for_each_shard_file(tmp_path):
    save(tmp_path, 10, moving)
    save(tmp_path, 20, moving)
    named = step_name("step_20")
    assert named is not None

    def counts(older: Sequence[str]) -> Mapping[str, int]:
        store = FaultyStore(LocalStore(str(tmp_path)), kind=StoreKind.OBJECT)
        steps = [one for name in older if (one := step_name(name))]
        step = OpenStep(store, named)
        beside = neighbours_of(lambda: steps, 20)
        inspect_step(step, Requirements(), level=Level.STRUCTURE, neighbours=beside)
        return store.calls

    alone, compared = counts([]), counts(["step_10"])
    assert compared["read"] - alone["read"] == 1
    assert compared["span"] - alone["span"] <= FEW * RANKS


def test_a_storage_that_fails_at_the_older_step_says_nothing_of_this_one(tmp_path):
    save(tmp_path, 10, moving)
    stale(save(tmp_path, 20, moving))
    named, older = step_name("step_20"), step_name("step_10")
    assert named is not None
    assert older is not None

    def report(path: str) -> Report:
        store = FaultyStore(LocalStore(str(tmp_path)))
        store.fail("read", StorageUnavailable("no answer"), path=path)
        step = OpenStep(store, named)
        beside = neighbours_of(lambda: [older], 20)
        return inspect_step(step, Requirements(), level=Level.STRUCTURE, neighbours=beside).report

    assert report("step_10/.metadata").verdict is Verdict.COMPLETE
    assert report("step_20/.metadata").verdict is Verdict.UNKNOWN


@pytest.mark.torch
def test_each_shard_of_a_real_run_is_told_when_it_is_of_the_step_before(checkpoints, copy_of):
    root = copy_of(checkpoints / "run_fsdp4")
    told = []
    for rank in range(4):
        name = f"__{rank}_0.distcp"
        step = root / "step_500"
        sound = (step / name).read_bytes()
        shutil.copy2(root / "step_400" / name, step / name)
        report = ckptctl.verify(str(step), level=Level.STRUCTURE)
        told += [f.code for f in report.findings if f.code in ("state.mixed", "shard.stale")]
        (step / name).write_bytes(sound)
    # Ranks 1 to 3 hold the optimizer's counts, which disagree; rank 0 holds none.
    assert told == ["shard.stale", "state.mixed", "state.mixed", "state.mixed"]
