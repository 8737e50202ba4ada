"""Checkpoints for tests, made or unpacked once for all workers and later runs: read them only."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / ".cache"
FIXTURES = REPOSITORY / "fixtures"


def checkpoints() -> Path:
    """Every variant that `fixtures/make.py` writes, as `NAME/step_N`, with real torch.

    Made once by the torch that is installed (20 s), then kept for
    later runs until that torch or the sources below `fixtures/` change. An
    environment without torch takes those of CKPTCTL_TEST_CHECKPOINTS.
    """
    if made := os.environ.get("CKPTCTL_TEST_CHECKPOINTS"):
        return Path(made)
    digest = hashlib.sha256(version("torch").encode())
    for source in sorted(FIXTURES.rglob("*.py")):
        digest.update(source.read_bytes())

    def make(folder: Path) -> None:
        command = [sys.executable, str(FIXTURES / "make.py"), "--out", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ChildProcessError(f"{command} ended with {done.returncode}\n{done.stderr}")

    return made_once(f"checkpoints-{digest.hexdigest()[:16]}", make)


def unpacked(name: str) -> Path:
    """The folder `name` of `fixtures/{name}.tar.xz`."""
    archive = FIXTURES / f"{name}.tar.xz"

    def unpack(folder: Path) -> None:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")

    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return made_once(f"{name}-{digest[:16]}", unpack) / name


def made_once(name: str, make: Callable[[Path], None], folder: Path = CACHE) -> Path:
    """The folder `name` below `folder`, made by `make` unless another run or worker did.

    It is made aside and renamed when whole: a run that was killed leaves
    nothing that the next one would take for finished. `make clean` removes
    what older sources left.
    """
    target = folder / name
    folder.mkdir(exist_ok=True)
    with _locked(folder / f"{name}.lock"):
        if not target.is_dir():
            aside = folder / f"{name}.part"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            make(aside)
            aside.rename(target)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the system releases when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
