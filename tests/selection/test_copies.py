"""Every sound root of the fixtures stays usable after a copy by any tool, with new write times."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from every_case import all_cases

import ckptctl
from ckptctl.errors import CkptctlError

pytestmark = pytest.mark.torch


def in_any_order(source: Path, target: Path) -> None:
    files = [path for path in source.rglob("*") if path.is_file()]
    random.Random(len(files)).shuffle(files)
    for path in files:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def by_tar(source: Path, target: Path) -> None:
    target.mkdir()
    command = 'tar -C "$1" -cf - . | tar -C "$2" -xmf -'
    subprocess.run(["sh", "-c", command, "sh", source, target], check=True)


def by_rsync(source: Path, target: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")
    subprocess.run(["rsync", "-r", f"{source}/", target], check=True)


TOOLS: dict[str, Callable[[Path, Path], object]] = {
    "cp -r": lambda source, target: subprocess.run(["cp", "-r", source, target], check=True),
    "tar -m": by_tar,
    "rsync -r": by_rsync,
    "any order": in_any_order,
}


@pytest.fixture
def roots(checkpoints: Path, framework_roots: Path, rank_files: Path) -> list[Path]:
    """All roots of the fixtures of which a step is chosen without options."""
    found = [*checkpoints.iterdir(), *framework_roots.glob("*/*"), *rank_files.iterdir()]
    return [root for root in sorted(found) if root.is_dir() and chosen(root) is not None]


def chosen(root: Path) -> int | None:
    try:
        return ckptctl.pick(str(root)).step
    except CkptctlError:
        return None


@pytest.mark.parametrize("tool", TOOLS)
def test_the_newest_step_of_a_copy_is_chosen_without_options(roots, tmp_path, tool):
    assert len(roots) > 20
    with all_cases() as case:
        for place, root in enumerate(roots):
            with case(f"{root.parent.name}/{root.name}"):
                copy = tmp_path / str(place)
                TOOLS[tool](root, copy)
                found = ckptctl.pick(str(copy))
                assert (found.exit_code, found.step) == (0, chosen(root))
