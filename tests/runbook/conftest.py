"""The root on which runbooks run."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def root(checkpoints: Path, tmp_path: Path) -> Path:
    """A run with the steps 100 to 500, all whole, saved by 4 ranks."""
    return Path(shutil.copytree(checkpoints / "run_fsdp4", tmp_path / "run"))
