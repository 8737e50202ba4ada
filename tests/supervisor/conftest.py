"""What a supervised job saves to, and a step that it can copy there."""

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty root."""
    (tmp_path / "ckpt").mkdir()
    return tmp_path / "ckpt"


@pytest.fixture
def source(framework_roots: Path) -> Path:
    """A small step of real training."""
    return framework_roots / "kempnerforge" / "checkpoints" / "step_30"
