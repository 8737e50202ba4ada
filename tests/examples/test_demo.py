"""Does the demonstration show what it says, from nothing?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "examples" / "demo" / "run.py"
INSTALLED = shutil.which("ckptctl", path=os.path.dirname(sys.executable))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="ckptctl is not installed beside this Python")
def test_a_job_killed_in_the_middle_of_a_save_resumes_from_the_step_before(tmp_path: Path):
    done = subprocess.run([sys.executable, RUN], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    resumed, loss = done.stdout.splitlines()[-2:]
    assert resumed == "resumed from: demo/checkpoints/step_60"
    assert loss.startswith("loss at step 80: 0.")
    (half,) = (tmp_path / "demo" / "checkpoints" / ".ckptctl" / "aside").glob("step_80.*")
    assert (half / "__1_0.distcp").stat().st_size < 300_000
    assert not (half / ".metadata").exists()
