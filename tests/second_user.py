"""What another user of this machine does: by processes that become that user, so only as root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

UID = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

_BECOME = f"import os, sys\nos.setgid({UID}), os.setgroups([]), os.setuid({UID})\n"


def give(*paths: Path | str) -> None:
    """Make the other user the owner of files, of links and not of what they lead to."""
    for path in paths:
        os.chown(path, UID, UID, follow_symlinks=False)


def as_second_user(program: str, *words: object) -> str:
    """Run a program of Python as the other user; what it printed."""
    done = subprocess.run(
        [sys.executable, "-ISc", _BECOME + program, *map(str, words)],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def open_to_all(folder: Path, mode: int = 0o1777) -> Path:
    """A folder in which everybody can create files, as in `/tmp`; others can reach it."""
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    return folder
