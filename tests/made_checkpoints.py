"""The name under which the checkpoints are cached that real torch wrote for the tests."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"


def name_of_checkpoints() -> str:
    """A name of their own for each torch, and for each state of the sources that made them."""
    digest = hashlib.sha256(version("torch").encode())
    for source in sorted(FIXTURES.rglob("*.py")):
        digest.update(source.read_bytes())
    return f"checkpoints-{digest.hexdigest()[:16]}"
