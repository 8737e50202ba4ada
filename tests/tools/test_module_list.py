"""The architecture lists every module."""

import runpy
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "reference.py"


def test_the_architecture_lists_every_module_with_its_first_line():
    tool = runpy.run_path(str(TOOL))
    text = tool["ARCHITECTURE"].read_text()
    assert tool["renewed"](text) == text, "run: make generate"
