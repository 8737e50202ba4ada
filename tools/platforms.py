"""Run tests on every Python and on the oldest and the newest torch that are claimed.

    python tools/platforms.py [--write]

prints a table; with --write also into docs/platforms.md. Each platform has an environment of its
own below `.cache/platforms`, with the versions of `constraints.txt` where pip has them. A Python
runs the tests of the base package, a torch those of reading, writing and resuming, on checkpoints
that the pinned torch of `.venv` wrote. The Python of `.venv` runs every test in `make test`, and
here those of the base package if no other Python is at hand. Ends with 1 where a test failed, or
what a platform needs could not be installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENTS = REPOSITORY / ".cache" / "platforms"
DOCUMENT = REPOSITORY / "docs" / "platforms.md"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
BASE = ("inspection", "formats", "records", "selection", "failures", "logs", "loss", "cli")
TORCH = ("test_reader.py", "test_writer.py", "test_loadable.py", "test_checkpointer.py")
FAST = "not server and not slow and not long"
_TABLE = re.compile(r"(?<=<!-- platforms -->\n).*?(?=<!-- end -->)", re.DOTALL)

say = partial(print, flush=True)


class NotHere(Exception):
    """Why a platform cannot be tried on this machine."""


class NotInstalled(Exception):
    """Why what a platform needs was not installed, although it could be."""


@dataclass(frozen=True)
class Platform:
    """A Python or torch, a function that gives the Python of its environment, and its tests."""

    name: str
    prepare: Callable[[], Path]
    marks: str
    paths: Sequence[str]


def main() -> int:
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from made_checkpoints import checkpoints

    os.environ["CKPTCTL_TEST_CHECKPOINTS"] = str(checkpoints())
    tried: dict[str, str] = {}
    failed = False
    # The next environment is installed while the tests run in the one before.
    with ThreadPoolExecutor(1) as pool:
        prepared = [(each, pool.submit(each.prepare)) for each in platforms()]
        for platform, python in prepared:
            say(f"== {platform.name}")
            try:
                passed, result = tested(python.result(), platform.marks, platform.paths)
            except NotHere as reason:
                passed, result = True, f"not tried: {reason}"
            except NotInstalled as reason:
                passed, result = False, f"not installed: {reason}"
            tried[platform.name] = result
            failed |= not passed
            say(result)
    own = f"Python {OWN}"
    tried.setdefault(own, "every test, in `make test`")
    shown = sorted(tried, key=lambda name: (name.split()[0], [*map(int, re.findall(r"\d+", name))]))
    table = [
        "| platform | tests |",
        "|---|---|",
        *(f"| {name} | {tried[name]} |" for name in shown),
    ]
    say("\n" + "\n".join(table))
    if sys.argv[1:] == ["--write"]:
        text = "\n".join(table) + "\n"
        DOCUMENT.write_text(_TABLE.sub(lambda _: text, DOCUMENT.read_text()))
    return int(failed)


def platforms() -> Iterator[Platform]:
    """The claimed Pythons and torches; the own Python only where no other is at hand."""
    others = [each for each in PYTHONS if each != OWN]
    for version in others if any(map(interpreter, others)) else PYTHONS:
        prepare = partial(with_python, version)
        paths = [f"tests/{name}" for name in BASE]
        yield Platform(f"Python {version}", prepare, f"{FAST} and not torch", paths)
    for version in torches():
        paths = [f"tests/train/{name}" for name in TORCH]
        yield Platform(f"torch {version}", partial(with_torch, version), FAST, paths)


def with_python(version: str) -> Path:
    """An environment for the tests that need no torch."""
    if (found := interpreter(version)) is None:
        raise NotHere("this Python is not on the machine")
    python = environment(f"py{version}", found)
    install(python, "-e", ".", "--group", "test-base")
    return python


def with_torch(version: str) -> Path:
    """An environment for the tests of reading, writing and resuming with this torch."""
    python = environment(f"torch{version}", sys.executable)
    install(python, "pip>=25.1")
    run = [python, REPOSITORY / "tools" / "install_torch.py", f"torch=={version}"]
    done = subprocess.run(run, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise NotHere(done.stderr.partition("\n")[0].removeprefix("error: "))
    install(python, "numpy", "-e", ".[zstd,s3,obstore,checksums]", "--group", "test-base")
    return python


def torches() -> Iterator[str]:
    """The oldest and the newest torch that `pyproject.toml` claims."""
    (tried,) = re.findall(r"# torch tried: (.*)", (REPOSITORY / "pyproject.toml").read_text())
    oldest, *_, newest = tried.split(", ")
    yield from (oldest, newest)


def interpreter(version: str) -> str | None:
    """A Python of that version on the path, or of pyenv; None where there is none."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *pyenv):
        # A shim of pyenv is there also where its version is not.
        starts = [found, "--version"]
        if found and subprocess.run(starts, check=False, capture_output=True).returncode == 0:
            return str(found)
    return None


def environment(name: str, python: str) -> Path:
    """The Python of a virtual environment that an earlier run may have filled."""
    made = ENVIRONMENTS / name / "bin" / "python"
    if not made.exists():
        subprocess.run([python, "-m", "venv", "--without-pip", ENVIRONMENTS / name], check=True)
    return made


def install(python: Path, *what: str) -> None:
    """Install with the pip of `.venv`, which each environment would only install again."""
    pip = [sys.executable, "-m", "pip", "--python", python]
    command = [*pip, "install", "-qq", "-c", "constraints.txt", *what]
    done = subprocess.run(command, check=False, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise NotInstalled(f"pip: {done.stderr.strip().splitlines()[-1]}")


def tested(python: Path, marks: str, paths: Sequence[str]) -> tuple[bool, str]:
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


if __name__ == "__main__":
    raise SystemExit(main())
