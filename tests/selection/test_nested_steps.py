"""Folders that are named as steps and hold steps: the stages or trials of an experiment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made_saves import optimizer, weights, whole, write

import ckptctl
from ckptctl import Verdict

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def stages(tmp_path: Path, checkpoints: Path) -> Path:
    """An experiment of two stages, each the root of a run."""
    root = tmp_path / "experiment"
    for stage in ("step1", "step2"):
        for step in ("step_400", "step_500"):
            shutil.copytree(checkpoints / "run_fsdp4" / step, root / stage / step)
    return root


@pytest.mark.parametrize("command", ["pick", "scan", "preflight"])
def test_a_root_of_runs_that_are_named_as_steps_is_a_wrong_path(stages, command):
    with pytest.raises(ckptctl.UsageError) as caught:
        getattr(ckptctl, command)(str(stages))
    assert caught.value.message == f"{stages} holds no steps itself, but step2, step1 in it do"
    assert caught.value.next_command == f"ckptctl scan {stages}/step2"
    assert ckptctl.pick(f"{stages}/step2").step == 500


def test_no_run_is_removed_as_an_old_step(stages):
    before = sorted(stages.rglob("*"))
    pruned = ckptctl.prune(str(stages), 1, unsealed=True, apply=True)
    assert [one.reason for one in pruned.decisions] == ["corrupt: does not count"] * 2
    assert sorted(stages.rglob("*")) == before


def test_a_run_beside_steps_is_passed_over_and_never_removed(stages, checkpoints):
    for step in ("step_300", "step_400", "step_500"):
        shutil.copytree(checkpoints / "run_fsdp4" / step, stages / step)
    (stages / "step2").rename(stages / "step_600")
    assert ckptctl.pick(str(stages)).step == 500
    ckptctl.prune(str(stages), 1, unsealed=True, apply=True)
    assert {path.name for path in stages.iterdir()} == {"step1", "step_600", "step_500"}


@pytest.mark.parametrize(
    "runs",
    [
        ["checkpoint-500/model.safetensors", "checkpoint-1000/model.safetensors"],
        ["checkpoint-500/model.safetensors", "model.safetensors"],
        ["global_step100/mp_rank_00_model_states.pt", "global_step200/mp_rank_00_model_states.pt"],
        ["ckpt/step_100.attempt-1/model.pt"],
        ["lightning_logs/checkpoints/epoch=3-step=40.ckpt/model.pt"],
    ],
)
def test_runs_of_other_frameworks_are_recognized(tmp_path, runs):
    for path in runs:
        write(tmp_path / "step1" / path, weights(1) if path.endswith("rs") else whole(1))
    report = ckptctl.verify(str(tmp_path / "step1"))
    assert "step.nested" in [one.code for one in report.findings]
    assert report.verdict is Verdict.CORRUPT


@pytest.mark.parametrize("folder", ["global_step30", "global_step29"])
def test_the_folder_of_deepspeed_in_a_step_of_transformers_is_a_part_of_it(tmp_path, folder):
    step = tmp_path / "checkpoint-30"
    write(step / folder / "mp_rank_00_model_states.pt", whole(30))
    write(step / folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", optimizer(30))
    write(step / "trainer_state.json", {"global_step": 30})
    report = ckptctl.verify(str(step))
    assert "step.nested" not in [one.code for one in report.findings]
