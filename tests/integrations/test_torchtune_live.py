"""torchtune's own recipe on two ranks: killed, resumed rightly and wrongly, checked by its log."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from live_frameworks import record, version_of
from test_frameworks_live import PAGES

import ckptctl
from ckptctl.loss.verdict import LossVerdict

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]


def logs(folder: Path) -> list[str]:
    """What torchtune's DiskLogger wrote: a file for each process, named by the time."""
    return sorted(map(str, (folder / "logs").glob("log_*.txt")))


def test_a_resume_of_an_epoch_is_proven_by_the_log(run_job, tmp_path):
    assert version_of("torchtune") in PAGES.read_text()
    done = run_job("torchtune", tmp_path / "killed" / "run", "--kill-at", 44)
    root = tmp_path / "killed" / "run"
    assert ckptctl.pick(str(root)).path == str(root / "epoch_2"), done.stdout
    scanned = ckptctl.scan(str(root), level="content").reports
    assert {one.number: one.state.optimizer.found for one in scanned} == {
        2: True,
        1: False,
        0: False,
    }
    verdicts = {}
    for name, options in {"right": [], "wrong": ["--wrong"]}.items():
        shutil.copytree(root.parent, tmp_path / name)
        done = run_job("torchtune", tmp_path / name / "run", *options)
        assert done.returncode == 0, done.stdout
        report = ckptctl.check_loss(logs(tmp_path / name), resume_step=36)
        verdicts[name] = report.verdict
    assert verdicts == {"right": LossVerdict.CONTINUOUS, "wrong": LossVerdict.DISCONTINUOUS}
    record("torchtune", **{name: verdict.value for name, verdict in verdicts.items()})
