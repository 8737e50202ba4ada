"""`resolve` on several ranks: steps of rank files, and the line that it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_ranks import ends, ranks

from ckptctl.logs.rows import LogPosition
from ckptctl.logs.text_logs import read_marker
from ckptctl.train import resolve

pytestmark = pytest.mark.torch

RESOLVE = """
import os
from ckptctl import CkptctlError
from ckptctl.train import resolve
os.chdir(("FIRST", "SECOND")[rank])
try:
    say(resolve("auto", "run", settle_s=0.5))
except CkptctlError as error:
    say(error.exit_code, error.message)
"""
NEWEST = {
    "transformers": "checkpoint-6",
    "zero1": "global_step6",
    "accelerate": "checkpoint_2",
    "lightning": "epoch=0-step=6.ckpt",
    "verl": "global_step_30",
}


def marker_in(text: str):
    (line,) = (line for line in text.splitlines() if line.startswith("ckptctl: "))
    return read_marker(line, LogPosition("train.log", 1))


def resolved_on_two_ranks(first: Path, second: Path, tmp_path: Path) -> list[tuple[str, str]]:
    """What each of two ranks prints, if they see the folder `run` of two folders."""
    code = RESOLVE.replace("FIRST", str(first)).replace("SECOND", str(second))
    with ranks(code, 2, tmp_path) as started:
        ended = ends(started)
    assert [end[0] for end in ended] == [0, 0], ended
    return [(" ".join(lines), err) for _, lines, err in ended]


@pytest.mark.slow
@pytest.mark.parametrize("framework", NEWEST)
def test_all_ranks_agree_on_a_step_of_rank_files_and_rank_0_prints_it(
    framework, rank_files, tmp_path
):
    (tmp_path / "run").symlink_to(rank_files / framework)
    (first, said), (second, nothing) = resolved_on_two_ranks(tmp_path, tmp_path, tmp_path)
    assert first == second == f"run/{NEWEST[framework]}"
    assert said.count("ckptctl: resuming from") == 1
    assert "ckptctl: " not in nothing


@pytest.mark.slow
def test_a_rank_that_sees_another_save_of_a_rank_file_is_named(rank_files, copy_of, tmp_path):
    views = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        views.append(tmp_path / name)
        copy_of(rank_files / "verl").rename(tmp_path / name / "run")
    seen = views[1] / "run" / "global_step_30" / "actor" / "optim_world_size_2_rank_1.pt"
    older = views[1] / "run" / "global_step_20" / "actor" / "optim_world_size_2_rank_1.pt"
    seen.write_bytes(older.read_bytes())
    for said, _ in resolved_on_two_ranks(*views, tmp_path):
        assert said.startswith("75 rank 1 on ")
        assert "optim_world_size_2_rank_1.pt has digest" in said


def test_the_line_of_a_resume_is_a_boundary_with_its_step(rank_files, copy_of, capfd):
    root = copy_of(rank_files / "transformers")
    (root / "checkpoint-6" / "optimizer.pt").unlink()
    assert resolve("auto", str(root)) == str(root / "checkpoint-4")
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "; not from step 6: " in said
    assert "optimizer" in said
    marker = marker_in(said)
    assert (marker.step, marker.fresh) == (4, False)


def test_the_line_of_a_count_of_saves_names_no_step(rank_files, capfd):
    assert resolve("auto", str(rank_files / "accelerate")).endswith("checkpoint_2")
    assert marker_in(capfd.readouterr().err) is None


def test_the_line_of_a_fresh_run_is_a_fresh_start(tmp_path: Path, capfd):
    assert resolve("auto", str(tmp_path)) is None
    marker = marker_in(capfd.readouterr().err)
    assert (marker.step, marker.fresh) == (None, True)
