"""The measured table of the page on completeness is what is measured."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.mark.torch
def test_the_measured_table_says_what_is_measured(checkpoints: Path) -> None:
    tool = runpy.run_path(str(REPOSITORY / "tools" / "damage_table.py"))
    text = tool["PAGE"].read_text()
    assert tool["renewed"](text, checkpoints / "run_bare4") == text, (
        "run: python tools/damage_table.py"
    )
