"""The root that tests of steps start from."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def root(checkpoints: Path, copy_of: Callable[[Path], Path]) -> Path:
    """A private copy of a run of 4 FSDP2 ranks: steps 100 to 500."""
    return copy_of(checkpoints / "run_fsdp4")
