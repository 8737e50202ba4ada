"""What torchrun reports about ranks that it ended itself is no cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment

import ckptctl

DIES = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.torch
def test_a_rank_that_was_killed_beats_those_that_torchrun_stopped_because_of_it(tmp_path: Path):
    script, log = tmp_path / "dies.py", tmp_path / "job.log"
    script.write_text(DIES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with log.open("wb") as out:
        done = subprocess.run(
            [*launch, "3", script], stdout=out, stderr=subprocess.STDOUT, env=clean_environment()
        )
    assert done.returncode == 1
    assert "Signal 15 (SIGTERM) received" in log.read_text()
    found = ckptctl.classify([str(log)])
    assert found.domain.value == "unknown"
    assert found.evidence[0].rule == "stop.sigkill"


REPORT = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/opt/app/train.py", line 9, in main
[rank{rank}]: {error}
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_03:12:{second}
  host      : node{rank}
  rank      : {rank} (local_rank: 0)
  exitcode  : 1 (pid: 71)
============================================================
"""


@pytest.mark.parametrize("timed", [True, False])
def test_each_launcher_knows_only_its_own_ranks(tmp_path: Path, timed: bool):
    for rank, second, error in ((0, 50, "KeyError: 'b'"), (8, 44, "ZeroDivisionError: a")):
        text = REPORT.format(rank=rank, second=second, error=error)
        lines = [line for line in text.splitlines(True) if timed or "time " not in line]
        (tmp_path / f"node{rank}.log").write_text("".join(lines))
    answer = ckptctl.classify(str(tmp_path))
    assert (answer.rank == 8) is timed
