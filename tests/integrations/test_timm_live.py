"""timm's checkpoints on two ranks: killed in an epoch, resumed rightly and wrongly."""

from __future__ import annotations

import shutil

import pytest
from live_frameworks import record, seal_by_watch, version_of
from test_frameworks_live import PAGES

import ckptctl
from ckptctl.loss.verdict import LossVerdict

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]


def test_a_resume_of_timm_is_told_from_a_wrong_one(run_job, tmp_path):
    assert version_of("timm") in PAGES.read_text()
    root = tmp_path / "run"
    killed = run_job("timm", root, "--kill-at", 47)
    chosen = ckptctl.pick(str(root))
    assert (chosen.step, chosen.path) == (4, str(root / "checkpoint-4.pth.tar")), killed.stdout
    assert chosen.findings == ()
    seal_by_watch(root)
    assert ckptctl.pick(str(root), require_seal=True).step == 4
    verdicts = {}
    for name, options in {"right": [], "wrong": ["--wrong"]}.items():
        copied = shutil.copytree(root, tmp_path / name)
        resumed = run_job("timm", copied, *options)
        assert resumed.returncode == 0, resumed.stdout
        consoles = [tmp_path / f"killed-{name}.log", tmp_path / f"resumed-{name}.log"]
        for path, done in zip(consoles, (killed, resumed), strict=True):
            path.write_text(done.stdout)
        verdicts[name] = ckptctl.check_loss(list(map(str, consoles))).verdict
    assert verdicts == {"right": LossVerdict.CONTINUOUS, "wrong": LossVerdict.DISCONTINUOUS}
    facts = {name: verdict.value for name, verdict in verdicts.items()}
    record("timm", sealed="by watch", log="–", **facts)
