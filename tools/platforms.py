"""Run tests on every Python and on the oldest, the pinned and the newest torch that are claimed.

    python tools/platforms.py

prints a table. Each platform has an environment of its own below `.cache/platforms`, with the
versions of `constraints.txt` where pip has them. A Python runs the tests of the base package,
on checkpoints that the torch of `.venv` wrote; a torch runs those of reading, writing and
resuming. What this machine or its package index does not have is skipped and named. Ends with 1
where a test failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENTS = REPOSITORY / ".cache" / "platforms"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
BASE = ("checks", "formats", "records", "failures", "loss", "cli")
TORCH = ("test_reader.py", "test_writer.py", "test_loadable.py", "test_checkpointer.py")
FAST = "not torch and not server and not slow and not long"

say = partial(print, flush=True)


class NotHere(Exception):
    """Why a platform cannot be tried."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    platform: str
    result: str
    failed: bool = False


def main() -> int:
    checkpoints = made_checkpoints()
    rows = [
        *(row(f"Python {version}", on_python, version, checkpoints) for version in PYTHONS),
        *(row(f"torch {version}", on_torch, version) for version in torches()),
    ]
    say("\n| platform | result |\n|---|---|")
    for each in rows:
        say(f"| {each.platform} | {each.result} |")
    return int(any(each.failed for each in rows))


def row(platform: str, run: Callable[..., tuple[int, str]], *given: object) -> Row:
    say(f"== {platform}")
    try:
        code, summary = run(*given)
    except NotHere as reason:
        say(f"skipped: {reason}")
        return Row(platform, f"skipped: {reason}")
    return Row(platform, summary, failed=code != 0)


def on_python(version: str, checkpoints: Path) -> tuple[int, str]:
    """Run the fast tests that need no torch."""
    python = environment(f"py{version}", interpreter(version))
    install(python, "-e", ".", "--group", "test-base")
    paths = [f"tests/{name}" for name in BASE]
    return tested(python, "-m", FAST, *paths, CKPTCTL_TEST_CHECKPOINTS=str(checkpoints))


def on_torch(version: str) -> tuple[int, str]:
    """Run the tests of reading, writing and resuming with this torch."""
    python = environment(f"torch{version}", sys.executable)
    done = subprocess.run(
        [python, REPOSITORY / "tools" / "install_torch.py", f"torch=={version}"],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise NotHere(done.stderr.partition("\n")[0].removeprefix("error: "))
    install(python, "-e", ".[zstd,s3,obstore,checksums]", "--group", "test-base")
    paths = [f"tests/train/{name}" for name in TORCH]
    return tested(python, "-m", "not slow and not long and not server", *paths)


def torches() -> Iterator[str]:
    """The oldest, the pinned and the newest torch that `pyproject.toml` claims."""
    (tried,) = re.findall(r"torch>=.*# tried: (.*)", (REPOSITORY / "pyproject.toml").read_text())
    (pinned,) = re.findall("^torch==(.*)$", (REPOSITORY / "constraints.txt").read_text(), re.M)
    oldest, *_, newest = tried.split(", ")
    yield from (oldest, pinned, newest)


def interpreter(version: str) -> str:
    """A Python of that version on the path, or of pyenv."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *pyenv):
        # A shim of pyenv is there also where its version is not.
        starts = [found, "--version"]
        if found and subprocess.run(starts, check=False, capture_output=True).returncode == 0:
            return str(found)
    raise NotHere("not on this machine")


def environment(name: str, python: str) -> Path:
    """The Python of a virtual environment that holds nothing but pip."""
    folder = ENVIRONMENTS / name
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    made = folder / "bin" / "python"
    install(made, "--upgrade", "pip>=25.1")
    return made


def install(python: Path, *what: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "install", "-qq", "-c", "constraints.txt", *what],
        check=False,
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise NotHere(f"pip: {done.stderr.strip().splitlines()[-1]}")


def tested(python: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run tests; gives pytest's exit code and the last line of its output."""
    command = [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    say(done.stdout if done.returncode else done.stdout.splitlines()[-1])
    return done.returncode, done.stdout.splitlines()[-1].strip("= ")


def made_checkpoints() -> Path:
    """The checkpoints that the tests wrote with the torch of `.venv`; made where they are not."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from made_checkpoints import name_of_checkpoints

    found = REPOSITORY / ".cache" / name_of_checkpoints()
    if not found.is_dir():
        make: Sequence[object] = (sys.executable, "-m", "pytest", "-q", "tests/fixtures")
        subprocess.run([*map(str, make)], cwd=REPOSITORY, check=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
