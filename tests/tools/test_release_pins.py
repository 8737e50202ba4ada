"""The files that releases are built from are pinned by version and hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pinned_versions import ENTRY, normalized, pins

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = ("archive.txt", "release.txt")


def named(requirements: list[str]) -> set[str]:
    return {normalized(re.split("[^A-Za-z0-9._-]", each)[0]) for each in requirements}


@pytest.mark.parametrize("name", FILES)
def test_every_line_is_a_comment_or_a_version_with_hashes(name):
    text = (REPOSITORY / "requirements" / name).read_text()
    rest = ENTRY.sub("", text)
    assert all(line.startswith("#") for line in rest.splitlines()), rest
    assert "/" not in rest.replace("tools/release_pins.py", "")
    assert len(pins(REPOSITORY / "requirements" / name)) == len(ENTRY.findall(text))


def test_what_ckptctl_needs_and_what_builds_it_is_pinned():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    archive, release = (pins(REPOSITORY / "requirements" / name) for name in FILES)
    assert named(project["project"]["dependencies"]) <= archive.keys()
    assert named(project["build-system"]["requires"]) <= release.keys()
    assert named(project["dependency-groups"]["dist"]) <= release.keys()


@pytest.mark.parametrize("name", FILES)
def test_the_versions_are_those_that_are_tested(name):
    """Where `constraints.txt` names a package, a release is not built from another version."""
    found = re.findall(
        r"^([A-Za-z0-9._-]+)==(\S+)", (REPOSITORY / "constraints.txt").read_text(), re.M
    )
    tested = {normalized(package): version for package, version in found}
    pinned = pins(REPOSITORY / "requirements" / name)
    assert {package: tested.get(package, version) for package, version in pinned.items()} == pinned
