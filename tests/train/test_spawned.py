"""Started by `mp.spawn`, spread by DDP, saved beside the training: exact all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = Path(__file__).with_name("spawned_job.py")


def test_a_job_of_ddp_with_scaler_and_average_goes_on_to_the_last_bit(tmp_path):
    lives = ["whole:12", "cut:6", "cut:12"]
    done = subprocess.run(
        [sys.executable, JOB, tmp_path, *lives],
        env=clean_environment(
            PYTHONPATH=str(JOB.parent.parent.parent), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"
        ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    whole, first, second = map(json.loads, done.stdout.splitlines())
    assert (first["path"], second["path"]) == (None, str(tmp_path / "cut" / "step_6"))
    assert first["losses"] + second["losses"] == whole["losses"]
    assert {"grad_scaler", "extra average"} <= set(second["restored"])
