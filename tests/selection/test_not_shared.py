"""Steps of which each node sees the files of its own ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptctl
from ckptctl import Answer

pytestmark = pytest.mark.torch


@pytest.fixture
def root(checkpoints: Path, copy_of: Callable[[Path], Path]) -> Path:
    """A private copy of a run of 4 FSDP2 ranks: steps 100 to 500, long ago."""
    copy = copy_of(checkpoints / "run_fsdp4")
    for path in copy.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return copy


def keep_ranks(step: Path, ranks: range) -> None:
    """Leave what the node of these ranks sees; rank 0 writes the metadata."""
    for path in step.glob("*.distcp"):
        if int(path.name.split("_")[2]) not in ranks:
            path.unlink()
    if 0 not in ranks:
        (step / ".metadata").unlink()


def codes(found: ckptctl.Pick) -> list[str]:
    return [one.code for one in found.findings]


@pytest.mark.parametrize("ranks", [range(2), range(2, 4)])
def test_what_one_node_sees_is_no_interrupted_save(root, ranks):
    for step in root.glob("step_*"):
        keep_ranks(step, ranks)
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.answer, found.exit_code) == (Answer.NONE_USABLE, 11)
    assert "the root may not be shared" in found.message
    lacking = "2, 3" if 0 in ranks else "0, 1"
    assert f"lack the files of the same ranks ({lacking})" in found.message
    assert found.next_command == "ckptctl explain root.not-shared"
    assert codes(found) == ["root.not-shared"]
    assert ckptctl.scan(str(root)).message == found.message


def test_two_newest_steps_that_lack_the_same_ranks_are_named_beside_the_older_one(root):
    for number in (400, 500):
        keep_ranks(root / f"step_{number}", range(2))
    found = ckptctl.pick(str(root))
    assert (found.step, codes(found)) == (300, ["root.not-shared"])


def test_steps_that_lack_different_ranks_are_damage(root):
    (root / "step_500" / "__1_0.distcp").unlink()
    (root / "step_400" / "__2_0.distcp").unlink()
    assert codes(ckptctl.pick(str(root))) == ["root.suspect"]


def test_one_step_that_lacks_ranks_is_no_pattern(root):
    keep_ranks(root / "step_500", range(2, 4))
    assert codes(ckptctl.pick(str(root))) == []


def test_a_sound_root_is_shared(root):
    assert codes(ckptctl.pick(str(root))) == []
