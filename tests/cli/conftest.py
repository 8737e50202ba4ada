"""How a test here runs the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from next_commands import run_and_follow


@pytest.fixture
def ckptctl(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `ckptctl` in a process of its own, in the test's folder, and follow its `next:`."""
    return partial(run_and_follow, cwd=tmp_path)


@pytest.fixture
def sound_root(framework_roots: Path, tmp_path: Path) -> Path:
    """A private copy of a root with steps 10, 20 and 30, all of them whole."""
    return Path(
        shutil.copytree(
            framework_roots / "kempnerforge" / "checkpoints", tmp_path / "run", symlinks=True
        )
    )


@pytest.fixture
def broken_root(sound_root: Path) -> Path:
    """The root after the newest step has lost a shard file, and the one before is cut short."""
    (sound_root / "step_30" / "__1_0.distcp").unlink()
    cut = sound_root / "step_20" / "__0_0.distcp"
    os.truncate(cut, 1000)
    month_ago_s = time.time() - 30 * 86400
    os.utime(cut, (month_ago_s, month_ago_s))  # else its age changes while a test looks
    return sound_root
