"""A new step is made of one save alone, and the source is left as it is."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import flip
from made_saves import LONG_AGO_S
from made_saves import write as write_file
from made_steps import grid, write_step

import ckptctl
from ckptctl.storage.contract import OpenFile
from ckptctl.storage.local import LocalStore

pytestmark = pytest.mark.torch

Written = ckptctl.Reshard | ckptctl.Converted


def made(step: Path, value: float = 0.0, n_rows: int = 64) -> Path:
    import torch

    weight = torch.arange(n_rows * 8, dtype=torch.float32).reshape(n_rows, 8) + value
    bias = torch.full((8,), value)
    tensors = {
        "model.w": (weight, grid((n_rows, 8), [[n_rows // 2], []])),
        "model.b": (bias, [((0,), (8,))]),
    }
    write_step(step, tensors, {"step": 400})
    for path in step.iterdir():
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))  # what is written later has another time
    return step


def resharded(step: Path, target: Path, **options: object) -> Written:
    return ckptctl.reshard(str(step), str(target / step.name), world_size=3, **options)  # type: ignore[arg-type]


def as_file(step: Path, target: Path, **options: object) -> Written:
    return ckptctl.convert(str(step), str(target / "model.safetensors"), **options)  # type: ignore[arg-type]


def as_flat(step: Path, target: Path, **options: object) -> Written:
    return ckptctl.convert(str(step), str(target / "model.pt"), **options)  # type: ignore[arg-type]


WAYS = pytest.mark.parametrize("write", [resharded, as_file, as_flat])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "new").mkdir()
    return tmp_path / "new"


@WAYS
def test_nothing_is_written_into_the_source(tmp_path, write: Callable[..., Written]):
    step = made(tmp_path / "run" / "step_400")
    (tmp_path / "link").symlink_to(step)
    held = sorted(path.name for path in step.rglob("*"))
    for inside in (step, tmp_path / "link"):
        with pytest.raises(ckptctl.UsageError, match="inside the step"):
            write(step, inside)
    assert sorted(path.name for path in step.rglob("*")) == held


@WAYS
def test_a_save_over_the_source_meanwhile_is_noticed(tmp_path, target, write):
    step = made(tmp_path / "run" / "step_400")
    later = made(tmp_path / "later" / "step_400", value=5.0)

    def save_over(*_: int) -> None:
        for path in later.glob("__*"):
            shutil.copyfile(path, step / path.name)

    answer = write(step, target, on_progress=save_over)
    assert (answer.written, answer.exit_code) == (False, 26)
    assert "step.changed" in [finding.code for finding in answer.report.findings]
    assert [path.name for path in target.iterdir()] == [".ckptctl"]


@WAYS
def test_a_source_that_ends_before_what_was_listed_is_a_change(
    tmp_path, target, write, monkeypatch
):
    """A save that writes over a file truncates it first."""
    step = made(tmp_path / "run" / "step_400", n_rows=1 << 16)
    open_file = LocalStore.open_file

    def truncated(store: LocalStore, path: str) -> OpenFile:
        for shard in step.glob("__*"):
            os.truncate(shard, 512)
        return open_file(store, path)

    monkeypatch.setattr(LocalStore, "open_file", truncated)
    answer = write(step, target)
    assert (answer.written, answer.exit_code) == (False, 26)
    assert "step.changed" in [finding.code for finding in answer.report.findings]


@pytest.mark.parametrize(("is_written_to", "code"), [(False, 21), (True, 26)])
def test_damage_in_a_source_that_was_written_to_meanwhile_is_a_change(
    tmp_path, target, is_written_to, code
):
    step = made(tmp_path / "run" / "step_400", n_rows=1 << 18)
    shard = step / "__1_0.distcp"
    # Two ranks get a part of this record each: only the comparison behind the copy finds it.
    flip(shard, shard.read_bytes().index(struct.pack("<f", 170.0)))

    def write_to(*_: int) -> None:
        if is_written_to:
            (step / "__0_0.distcp").touch()

    answer = resharded(step, target, on_progress=write_to)
    assert (answer.written, answer.exit_code) == (False, code)


@WAYS
def test_a_valid_shard_of_another_save_does_not_pass_the_seal_of_the_source(
    tmp_path, target, write
):
    step = made(tmp_path / "run" / "step_400")
    ckptctl.seal(str(step))
    other = made(tmp_path / "other" / "step_400", value=5.0)
    shutil.copyfile(other / "__1_0.distcp", step / "__1_0.distcp")
    answer = write(step, target)
    assert (answer.written, answer.exit_code) == (False, 21)
    assert "seal.digest" in [finding.code for finding in answer.report.findings]


def test_a_damaged_sidecar_does_not_pass_the_seal_of_the_source(tmp_path, target):
    step = made(tmp_path / "run" / "step_400")
    sidecar = step / "trainer_state.json"
    write_file(sidecar, {"global_step": 400, "loss": [1.25] * 50})
    ckptctl.seal(str(step))
    data = bytearray(sidecar.read_bytes())
    data[-10] ^= 1
    sidecar.write_bytes(data)
    answer = resharded(step, target)
    assert (answer.written, answer.exit_code) == (False, 21)


def test_a_sealed_step_that_nobody_wrote_to_is_read_once(tmp_path, target):
    step = made(tmp_path / "run" / "step_400")
    ckptctl.seal(str(step))
    planned = ckptctl.reshard(str(step), str(target / step.name), world_size=3, apply=False)
    assert planned.report.level.value == "structure"
    os.utime(step / "__0_0.distcp")
    planned = ckptctl.reshard(str(step), str(target / step.name), world_size=3, apply=False)
    assert planned.report.level.value == "content"


def test_more_ranks_than_there_can_be_are_refused(tmp_path, target):
    step = made(tmp_path / "run" / "step_400")
    with pytest.raises(ckptctl.UsageError, match="at most 1,048,576"):
        ckptctl.reshard(str(step), str(target / "step_400"), world_size=3_000_000, apply=False)
    model = as_file(step, target)
    with pytest.raises(ckptctl.UsageError, match="at most 1,048,576"):
        ckptctl.convert(
            model.target, str(target / "step_1"), world_size=3_000_000, accept_unverifiable=True
        )


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_a_name_that_a_header_of_safetensors_cannot_have_is_refused(tmp_path, target, name):
    import torch

    whole = (torch.ones(8), [((0,), (8,))])
    write_step(tmp_path / "step_1", {name: whole, "b": whole})
    with pytest.raises(ckptctl.UsageError, match=r"cannot be the name .* safetensors"):
        as_file(tmp_path / "step_1", target)
    assert as_flat(tmp_path / "step_1", target).written
