"""Ray Train on two workers: killed in a save, resumed rightly and wrongly, and its console."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from live_frameworks import record, seal_by_watch, version_of
from test_frameworks_live import PAGES

import ckptctl
from ckptctl.loss.verdict import LossVerdict

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]


def test_a_save_in_which_the_workers_were_killed_is_not_chosen(run_job, tmp_path):
    root = tmp_path / "ray" / "run"
    done = run_job("ray", root, "--kill-at", 36, launcher=())
    folders = sorted(path.name for path in root.glob("checkpoint_2*"))
    assert len(folders) == 3, done.stdout
    chosen = ckptctl.pick(str(root))
    assert (chosen.step, Path(chosen.path).name) == (24, folders[1])
    assert [(one.code, one.where) for one in chosen.findings] == [("root.further", folders[2])]


def test_a_resume_of_ray_train_is_told_from_a_wrong_one(run_job, tmp_path):
    assert version_of("ray") in PAGES.read_text()
    root = tmp_path / "ray" / "run"
    killed = run_job("ray", root, "--kill-at", 44, launcher=())
    chosen = ckptctl.pick(str(root))
    assert (chosen.step, chosen.absent) == (36, ("scheduler", "rng", "dataloader")), killed.stdout
    seal_by_watch(root)
    assert ckptctl.pick(str(root), require_seal=True).step == 36
    record("ray", sealed="by watch")
    for name, options, wanted in (
        ("right", (), LossVerdict.CONTINUOUS),
        ("wrong", ("--wrong",), LossVerdict.DISCONTINUOUS),
    ):
        copied = shutil.copytree(root, tmp_path / name / "run")
        resumed = run_job("ray", copied, *options, launcher=())
        assert resumed.returncode == 0, resumed.stdout
        consoles = [tmp_path / f"killed-{name}.log", tmp_path / f"resumed-{name}.log"]
        for path, done in zip(consoles, (killed, resumed), strict=True):
            path.write_text(done.stdout)
        report = ckptctl.check_loss(list(map(str, consoles)))
        assert report.verdict is wanted, report.message
        record("ray", **{name: report.verdict.value}, log="–")
