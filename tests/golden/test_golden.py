"""What the commands answer for every sound, damaged and odd root is as it was frozen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment

TABLE = Path(__file__).resolve().parent / "table.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("checkpoints", "dcp_versions", "framework_roots")
def test_every_answer_is_as_frozen() -> None:
    done = subprocess.run(
        [sys.executable, str(TABLE), "--check"],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}{done.stderr[-2000:]}"
