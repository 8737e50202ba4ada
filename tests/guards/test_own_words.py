"""No file of the project names the machines or tools that it was made with."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent

# Put together here, so that this file does not hold what it looks for.
FOREIGN = {
    "a path of one machine": re.compile(r"/(?:" + "work" + r"|home/\w+|tmp/data)/"),
    "a folder outside the repository": re.compile(r"\.\./" + "shared"),
    "the number of an issue": re.compile(r"\b(?:issue|session) #?[0-9]+\b", re.IGNORECASE),
    "a note for later": re.compile(r"\b(?:TO" + "DO|FIX" + "ME|X" + "XX)\b"),
}


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("this is no git checkout")
    return [REPOSITORY / name for name in listed.stdout.split("\0") if name]


def texts() -> list[tuple[str, str]]:
    found = []
    for path in tracked():
        if not path.is_file() or path.suffix in (".distcp", ".xz", ".pt", ".bin"):
            continue
        try:
            found.append((str(path.relative_to(REPOSITORY)), path.read_text("utf-8")))
        except UnicodeDecodeError:
            continue
    return found


@pytest.mark.parametrize("what", FOREIGN)
def test_no_tracked_file_holds(what):
    held = [
        f"{name}: {match[0]}" for name, text in texts() for match in FOREIGN[what].finditer(text)
    ]
    assert held == []


def test_only_files_of_the_project_are_tracked():
    suspicious = re.compile(r"(^|/)(\.env|.*\.orig|.*\.rej|.*~|__pycache__|.*\.log)$")
    names = [str(path.relative_to(REPOSITORY)) for path in tracked()]
    assert [name for name in names if suspicious.search(name)] == []
