"""A short form of the drill: does the runbook end where it should, on a real job?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment

RUN = Path(__file__).resolve().parents[2] / "examples" / "drill" / "run.py"


@pytest.mark.torch
@pytest.mark.slow
def test_a_job_that_was_killed_and_whose_newest_step_is_damaged_goes_on_as_if_nothing_was(tmp_path):
    drill = [sys.executable, RUN, "--ranks", "2", "--only", "flipped-bit"]
    done = subprocess.run(
        drill, cwd=tmp_path, capture_output=True, text=True, env=clean_environment()
    )
    log = tmp_path / "drill" / "flipped-bit" / "runbook.log"
    assert done.returncode == 0, done.stdout + (log.read_text() if log.exists() else "")
    assert done.stdout.splitlines()[-1].endswith("every one ended where it should")
