"""`make drill`: a hang, its evidence, a node left out, a smaller world, and the same losses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import run_program
from supervisor.supervised_root import processes_with

RUN = Path(__file__).resolve().parents[2] / "examples" / "drill" / "run.py"


@pytest.mark.torch
@pytest.mark.long
def test_the_drill_of_two_nodes_leads_from_every_fault_to_the_same_losses(tmp_path: Path):
    done = run_program(sys.executable, RUN, cwd=tmp_path, DRILLED_IN=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the job survives 5 of 5 faults" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("of 2 ranks equal those of 4 ranks in every digit")
    assert processes_with(str(tmp_path)) == []
