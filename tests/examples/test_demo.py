"""The demonstration runs from an empty folder, and shows what it claims."""

from __future__ import annotations

import os
import shutil
import signal
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


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="ckptctl is not installed beside this Python")
def test_a_demonstration_that_is_interrupted_ends_its_job_without_a_traceback(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, RUN],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        while "saved step" not in demo.stdout.readline():
            assert demo.poll() is None
        os.kill(demo.pid, signal.SIGINT)
        rest, errors = demo.communicate()  # ends when no rank holds the streams any more
    assert demo.returncode == 130
    assert "Traceback" not in errors
    assert rest.endswith("\nstopped by Ctrl-C\n")
