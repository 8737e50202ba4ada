"""The package has no error of types: `make test` checks them beside its tests."""

import subprocess
import sys

import pytest
from command_line import REPOSITORY

pytest.importorskip("mypy")


def test_mypy_finds_no_error_in_the_package() -> None:
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
