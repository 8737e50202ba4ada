"""Only `starting` decides how ckptctl, Python and programs of the system are started."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

IN_THE_PACKAGE = re.compile(
    r"sys\.executable|shutil\.which|[\"']-[mc][\"'], *[\"']ckptctl|safe_path"
)
"""What a caller would need to build such a command itself."""
IN_TEXT = re.compile(r"-m[\"', ]+ckptctl")
"""`python -m ckptctl` and its arguments as a list."""
SAFE = re.compile(r"-P[\"', ]+-m[\"', ]+ckptctl")


def files(*folders: str) -> list[Path]:
    """The files in these folders that git tracks, or would."""
    words = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders)
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [REPOSITORY / name for name in done.stdout.splitlines() if (REPOSITORY / name).exists()]


def test_no_module_but_one_builds_the_command_that_starts_ckptctl_or_python():
    builders = {
        path.relative_to(REPOSITORY).as_posix()
        for path in files("ckptctl")
        if path.suffix == ".py" and IN_THE_PACKAGE.search(path.read_text())
    }
    assert builders == {"ckptctl/starting.py"}


def unsafe_lines(text: str) -> list[str]:
    # A manual page writes `-` as `\-`.
    lines = (line.replace("\\-", "-") for line in text.splitlines())
    return [line for line in lines if len(IN_TEXT.findall(line)) > len(SAFE.findall(line))]


def test_no_document_example_or_tool_starts_the_package_unsafely():
    found = {}
    for path in files("docs", "examples", "runbooks", "tools", "bench", "ckptctl", "README.md"):
        try:
            lines = unsafe_lines(path.read_text())
        except UnicodeDecodeError:  # a picture
            continue
        # The docstring of `__main__` says which module it is; `starting` puts `-P` in front.
        if lines and path.name not in ("__main__.py", "starting.py"):
            found[path.relative_to(REPOSITORY).as_posix()] = lines
    assert found == {}


@pytest.mark.parametrize(
    ("line", "is_unsafe"),
    [
        ("python -m ckptctl pick", True),
        ("torchrun -m ckptctl verify", True),
        (r"torchrun \-m ckptctl verify", True),
        ('[sys.executable, "-m", "ckptctl"]', True),
        ("python -P -m ckptctl pick", False),
        ('[sys.executable, "-P", "-m", "ckptctl"]', False),
        ("torchrun --no-python ckptctl verify", False),
        ("python -m build", False),
    ],
)
def test_the_guard_knows_what_is_unsafe(line, is_unsafe):
    assert bool(unsafe_lines(line)) is is_unsafe
