"""A full disk costs the save that does not fit, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment

SCRIPT = Path(__file__).with_name("full_disk.py")


def why_not() -> str | None:
    """Why no disk can be mounted here that only one process sees."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else None


pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no disk to fill: {why_not()}")


def rows_of(folder: Path, *options: object) -> dict[str, dict]:
    """What was tried, in order, and what came of it."""
    disk = folder / "disk"
    disk.mkdir()
    path = f"{SCRIPT.parent.parent.parent}:{SCRIPT.parent.parent}"
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, SCRIPT, options[0], disk, *options[1:]],
        env=clean_environment(PYTHONPATH=path, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {row["what"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.torch
@pytest.mark.long
def test_a_save_that_does_not_fit_says_so_and_the_next_one_that_does_is_made(tmp_path: Path):
    rows = rows_of(tmp_path, "save")
    assert rows.pop("verify")["code"] == 0
    last = rows.pop("save")
    assert (last["raised"], last["steps"]) == (None, [f"step_{last['picked']}", "step_3"])
    tries = list(rows.values())
    assert len(tries) >= 10
    ends = [row["raised"] for row in tries]
    assert ends.index(None) > 5
    for row in tries[: ends.index(None)]:
        assert (row["raised"], row["code"], row["left"]) == ("SaveFailed", 75, [])
        assert "No space left on device" in row["said"]
        assert row["next"].startswith(("df -h ", "ckptctl seal "))
        if "is complete but was not sealed" not in row["said"]:
            assert "written bytes were removed; " in row["said"]
            assert (row["picked"], row["steps"]) == (3, ["step_3"])


@pytest.mark.torch
@pytest.mark.slow
def test_a_save_that_failed_names_the_command_that_shows_what_is_used_up(tmp_path: Path):
    row = rows_of(tmp_path, "inodes")["save"]
    assert (row["raised"], row["code"], row["steps"]) == ("SaveFailed", 75, ["step_3"])
    assert "all 90 inodes are in use" in row["said"]
    assert row["next"] == f"df -i {tmp_path / 'disk' / 'run'}"


@pytest.mark.slow
def test_what_writes_little_leaves_nothing_behind_and_says_how_much_was_lacking(
    checkpoints: Path, tmp_path: Path
):
    rows = rows_of(tmp_path, "others", checkpoints / "run_bare4")
    assert rows.pop("verify")["code"] == 0
    assert "bytes are needed for step_20" in rows.pop("reshard, asked before")["said"]
    full = {what: row for what, row in rows.items() if row["raised"]}
    assert {what for what in rows if what.endswith(" with 0")} <= set(full)
    assert {"reshard", "seal", "pin", "pin in a file"} <= set(rows) - set(full)
    for row in full.values():
        assert (row["raised"], row["code"]) == ("StorageFull", 75)
        assert "No space left on device" in row["said"]
        assert "bytes to write, " in row["said"]
        assert row["next"].startswith("df -h ")
    assert {tuple(row["left"]) for row in rows.values()} == {()}
    assert {row["picked"] for row in rows.values()} == {20}


@pytest.mark.parametrize(
    ("limits", "lacking", "next_command"),
    [
        ("size=3m", "0 are free", "df -h "),
        ("size=9m,nr_inodes=90", "all 90 inodes are in use", "df -i "),
    ],
)
def test_retention_makes_room_on_a_full_disk_where_nothing_else_can_be_written(
    framework_roots: Path, tmp_path: Path, limits: str, lacking: str, next_command: str
):
    source = framework_roots / "kempnerforge" / "checkpoints"
    rows = rows_of(tmp_path, "answers", source, limits)
    report, pin, prune = rows["report"], rows["pin"], rows["prune"]
    assert (report["raised"], report["code"]) == ("UsageError", 2)
    assert "the report cannot be written to " in report["said"]
    assert (pin["raised"], pin["code"]) == ("StorageFull", 75)
    assert lacking in pin["said"]
    assert report["next"].startswith(next_command)
    assert pin["next"].startswith(next_command)
    assert (prune["raised"], prune["steps"]) == (None, ["step_30"])
    assert {tuple(row["left"]) for row in rows.values()} == {()}
