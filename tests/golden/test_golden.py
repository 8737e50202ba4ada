"""What the commands answer for every sound, damaged and odd root is as it was frozen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import run_program

ANSWERS = Path(__file__).resolve().parent / "answers.tsv"
TABLE = Path(__file__).resolve().parent / "table.py"


def test_every_refusal_names_the_next_command() -> None:
    rows = [line.split("\t") for line in ANSWERS.read_text().splitlines()]
    refusals = [row for row in rows if int(row[2]) not in (0, 3)]
    assert len(refusals) > 100
    assert [row for row in refusals if row[-1] == "-"] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("checkpoints", "dcp_versions", "framework_roots")
def test_every_answer_is_as_frozen() -> None:
    done = run_program(sys.executable, str(TABLE), "--check")
    assert done.returncode == 0, f"{done.stdout[-8000:]}{done.stderr[-2000:]}"
