"""The newest step is damaged in every way of the table: all ranks take the same older one."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment

pytestmark = [pytest.mark.torch, pytest.mark.long]

JOB = Path(__file__).with_name("matrix_job.py")
REPOSITORY = JOB.parent.parent.parent
INTERRUPTED = "the metadata is missing"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What four ranks came to, for each damage, sealed and not, with a step to fall back to."""
    done = subprocess.run(
        [sys.executable, JOB, tmp_path_factory.mktemp("matrix")],
        env=clean_environment(PYTHONPATH=f"{REPOSITORY}", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_damage_was_tried_with_a_seal_and_without(rows: list[dict]):
    damages = runpy.run_path(str(REPOSITORY / "tools" / "damage_table.py"))["DAMAGES"]
    assert len(damages) >= 9
    tried = {(row["damage"], row["sealed"], row["fallback"]) for row in rows}
    assert tried == {(what, seal, n) for what in damages for seal in (True, False) for n in (0, 2)}


def test_all_ranks_fall_back_to_the_same_older_step_and_hold_what_was_saved(rows: list[dict]):
    ended = [row["ended"] for row in rows if row["fallback"] == 2]
    for ranks in ended:
        assert {tuple(rank[:3]) for rank in ranks} == {("resumed", 10, True)}
    assert {json.dumps(ranks) for ranks in ended} == {json.dumps(ended[0])}


def test_where_none_may_be_passed_over_all_ranks_end_with_the_same_error(rows: list[dict]):
    ended = {row["damage"]: row["ended"] for row in rows if row["fallback"] == 0}
    # A save that was interrupted is no damage, and does not count.
    assert {rank[1] for rank in ended.pop(INTERRUPTED)} == {10}
    for ranks in ended.values():
        ((how, error, code, said),) = {tuple(rank) for rank in ranks}
        assert (how, error, code) == ("raised", "NothingToResume", 11)
        assert "1 damaged step, more than --max-fallback 0 allows" in said
