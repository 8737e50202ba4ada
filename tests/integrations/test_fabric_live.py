"""Lightning Fabric's sharded load, which leaves the scheduler out: the loss shows it."""

from __future__ import annotations

import shutil

import pytest
from live_frameworks import record, seal_by_watch, version_of
from test_frameworks_live import PAGES

import ckptctl
from ckptctl.loss.verdict import LossVerdict

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]

FABRIC = "lightning.fabric"


def test_a_resume_without_the_scheduler_is_told_from_one_with_it(run_job, tmp_path):
    assert version_of(FABRIC) in PAGES.read_text()
    root = tmp_path / "run"
    killed = run_job(FABRIC, root, "--kill-at", 44)
    chosen = ckptctl.pick(str(root))
    assert (chosen.step, chosen.chosen.layout) == (36, "lightning"), killed.stdout
    assert chosen.chosen.state.scheduler.found
    seal_by_watch(root)
    assert ckptctl.pick(str(root), require_seal=True).step == 36
    verdicts = {}
    for name in ("right", "wrong", "without-scheduler"):
        copied = shutil.copytree(root, tmp_path / name)
        resumed = run_job(FABRIC, copied, *([f"--{name}"] if name != "right" else []))
        assert resumed.returncode == 0, resumed.stdout
        consoles = [tmp_path / f"killed-{name}.log", tmp_path / f"resumed-{name}.log"]
        for path, done in zip(consoles, (killed, resumed), strict=True):
            path.write_text(done.stdout)
        report = ckptctl.check_loss(list(map(str, consoles)))
        verdicts[name] = report.verdict
        assert name != "without-scheduler" or "learning rate of step 37" in report.message
    right, wrong = LossVerdict.CONTINUOUS, LossVerdict.DISCONTINUOUS
    assert verdicts == {"right": right, "wrong": wrong, "without-scheduler": wrong}
    facts = {"right": right.value, "wrong": wrong.value, "sealed": "by watch", "log": "–"}
    record(FABRIC, "Fabric, sharded", **facts)
