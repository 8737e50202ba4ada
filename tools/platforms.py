"""Run tests on every Python and on the oldest and the newest torch that are claimed.

    python tools/platforms.py [--write]

prints a table; with --write also into docs/platforms.md, where a platform that could not be
tried keeps its last result. Each platform has an environment of its own below
`.cache/platforms`, with the versions of `constraints.txt` where pip has them. A Python runs the
tests of the base package, a torch those of reading, writing and resuming, on checkpoints that
the pinned torch of `.venv` wrote; that one runs every test. Ends with 1 where a test failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENTS = REPOSITORY / ".cache" / "platforms"
DOCUMENT = REPOSITORY / "docs" / "platforms.md"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
BASE = ("checks", "formats", "records", "selection", "failures", "loss", "cli")
TORCH = ("test_reader.py", "test_writer.py", "test_loadable.py", "test_checkpointer.py")
FAST = "not server and not slow and not long"
_TABLE = re.compile(r"(?<=<!-- platforms -->\n).*?(?=<!-- end -->)", re.DOTALL)
_ROW = re.compile(r"^\| (\w+ [\d.]+) \| (.*) \|$", re.M)

say = partial(print, flush=True)


class NotHere(Exception):
    """Why a platform cannot be tried."""


def main() -> int:
    os.environ["CKPTCTL_TEST_CHECKPOINTS"] = str(made_checkpoints())
    runs = {f"Python {each}": partial(on_python, each) for each in PYTHONS}
    runs |= {f"torch {each}": partial(on_torch, each) for each in torches()}
    rows = dict(_ROW.findall(DOCUMENT.read_text()))
    failed = False
    for platform, run in runs.items():
        say(f"== {platform}")
        try:
            passed, result = run()
        except NotHere as reason:
            result = f"not tried: {reason}"
            rows.setdefault(platform, result)
        else:
            rows[platform] = result
            failed |= not passed
        say(result)
    table = ["| platform | tests |", "|---|---|", *(f"| {p} | {rows[p]} |" for p in runs)]
    say("\n" + "\n".join(table))
    if sys.argv[1:] == ["--write"]:
        text = "\n".join(table) + "\n"
        DOCUMENT.write_text(_TABLE.sub(lambda _: text, DOCUMENT.read_text()))
    return int(failed)


def on_python(version: str) -> tuple[bool, str]:
    """Run the fast tests that need no torch."""
    python = environment(f"py{version}", interpreter(version))
    install(python, "-e", ".", "--group", "test-base")
    return tested(python, f"{FAST} and not torch", [f"tests/{name}" for name in BASE])


def on_torch(version: str) -> tuple[bool, str]:
    """Run the tests of reading, writing and resuming with this torch."""
    python = environment(f"torch{version}", sys.executable)
    run = [python, REPOSITORY / "tools" / "install_torch.py", f"torch=={version}"]
    done = subprocess.run(run, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise NotHere(done.stderr.partition("\n")[0].removeprefix("error: "))
    install(python, "numpy", "-e", ".[zstd,s3,obstore,checksums]", "--group", "test-base")
    return tested(python, FAST, [f"tests/train/{name}" for name in TORCH])


def torches() -> Iterator[str]:
    """The oldest and the newest torch that `pyproject.toml` claims."""
    (tried,) = re.findall(r"# torch tried: (.*)", (REPOSITORY / "pyproject.toml").read_text())
    oldest, *_, newest = tried.split(", ")
    yield from (oldest, newest)


def interpreter(version: str) -> str:
    """A Python of that version on the path, or of pyenv."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *pyenv):
        # A shim of pyenv is there also where its version is not.
        starts = [found, "--version"]
        if found and subprocess.run(starts, check=False, capture_output=True).returncode == 0:
            return str(found)
    raise NotHere("this Python is not on the machine")


def environment(name: str, python: str) -> Path:
    """The Python of a virtual environment that an earlier run may have filled."""
    made = ENVIRONMENTS / name / "bin" / "python"
    if not made.exists():
        subprocess.run([python, "-m", "venv", ENVIRONMENTS / name], check=True)
        install(made, "--upgrade", "pip>=25.1")
    return made


def install(python: Path, *what: str) -> None:
    command = [python, "-m", "pip", "install", "-qq", "-c", "constraints.txt", *what]
    done = subprocess.run(command, check=False, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise NotHere(f"pip: {done.stderr.strip().splitlines()[-1]}")


def tested(python: Path, marks: str, paths: list[str]) -> tuple[bool, str]:
    """Whether the tests passed, and how many."""
    command = [python, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run(
        [*command, *paths],
        check=False,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        say(done.stdout)
    *_, summary = done.stdout.splitlines() or ["pytest printed nothing"]
    return done.returncode == 0, summary.partition(" in ")[0].strip("= ")


def made_checkpoints() -> Path:
    """The checkpoints that the tests wrote with the torch of `.venv`; made where they are not."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from made_checkpoints import name_of_checkpoints

    found = REPOSITORY / ".cache" / name_of_checkpoints()
    if not found.is_dir():
        make = [sys.executable, "-m", "pytest", "-q", "tests/fixtures"]
        subprocess.run(make, cwd=REPOSITORY, check=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
