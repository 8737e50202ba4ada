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
