"""A slow rank of a real job under `ckptctl run` is named in its history."""

from __future__ import annotations

import sys

import pytest
from command_line import run_ckptctl, validated

pytestmark = pytest.mark.slow

RANK = """
import sys, time
from ckptctl.train import heartbeat
rank = int(__import__("os").environ["RANK"])
heartbeat("first-step")
for step in range(1, 16):
    time.sleep(0.3)
    own_s = 0.28 if rank == 2 else 0.1
    heartbeat("step", step=step, work_s=own_s if sys.argv[1] == "own" else None)
"""
LAUNCHER = """
import os, subprocess, sys
ranks = [
    subprocess.Popen(
        [sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": str(n), "WORLD_SIZE": "4"}
    )
    for n in range(4)
]
sys.exit(max(each.wait() for each in ranks))
"""


@pytest.mark.parametrize(("times", "slow"), [("own", [2]), ("waiting", [])])
def test_the_rank_whose_own_work_takes_longer_is_named(tmp_path, times, slow):
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    job = [sys.executable, tmp_path / "launcher.py", tmp_path / "rank.py", times]
    done = run_ckptctl("run", "--root", tmp_path / "ckpt", "--", *job)
    assert done.returncode == 0, done.stderr
    found = run_ckptctl("history", tmp_path / "ckpt", "--json")
    document = validated(found.stdout)
    (attempt,) = document["attempts"]
    assert [each["rank"] for each in attempt["slow"]] == slow
    assert [each["code"] for each in document["findings"]] == ["rank.slow"] * len(slow)
    if slow:
        assert attempt["slow"][0]["relative"] < 0.7
        shown = run_ckptctl("history", tmp_path / "ckpt").stdout
        assert "1 slow rank" in shown
        assert "rank 2 on " in shown
