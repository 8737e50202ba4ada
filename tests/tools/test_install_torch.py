"""The set-up refuses CUDA, whatever package index it is given.

Real pip in a real virtual environment, and a folder of wheels instead of an
index: wheels of nothing but a name and their requirements.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tools" / "install_torch.py"

pytestmark = pytest.mark.slow


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of a virtual environment with pip and nothing else."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def test_an_index_that_serves_cuda_is_refused_and_nothing_is_installed(python, tmp_path):
    _wheel(tmp_path, "torch", _pinned_version(), requires="nvidia-cublas")
    _wheel(tmp_path, "nvidia-cublas", "13.0")
    done = _install(python, tmp_path)
    assert done.returncode == 1
    assert "would bring CUDA (nvidia-cublas)" in done.stderr
    assert "ALLOW_CUDA=1 make demo" in done.stderr
    assert "torch" not in _installed(python)


def test_a_cpu_build_is_installed_and_a_second_run_has_nothing_to_do(python, tmp_path):
    _wheel(tmp_path, "torch", f"{_pinned_version()}+cpu")
    done = _install(python, tmp_path)
    assert (done.returncode, done.stdout) == (0, f"installing torch=={_pinned_version()} (CPU)\n")
    assert "torch" in _installed(python)
    again = _install(python, tmp_path)
    assert (again.returncode, again.stdout) == (0, "")


def test_cuda_can_be_asked_for(python, tmp_path):
    _wheel(tmp_path, "torch", _pinned_version(), requires="nvidia-cublas")
    _wheel(tmp_path, "nvidia-cublas", "13.0")
    done = _install(python, tmp_path, ALLOW_CUDA="1")
    assert done.stdout == f"installing torch=={_pinned_version()} (CUDA)\n"
    assert {"torch", "nvidia-cublas"} <= _installed(python)


def _pinned_version() -> str:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    (version,) = (x.removeprefix("torch==") for x in lines if x.startswith("torch=="))
    return version


def _install(python: Path, wheels: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": os.environ["PATH"],
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        **variables,
    }
    return subprocess.run([python, SCRIPT], env=env, capture_output=True, text=True)


def _installed(python: Path) -> set[str]:
    command = [python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.partition("==")[0] for line in listed.splitlines()}


def _wheel(folder: Path, name: str, version: str, requires: str | None = None) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if requires:
        metadata += f"Requires-Dist: {requires}\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", tags)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
