"""A few power cuts lose nothing, and the campaign detects a forgotten flush."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import power_cuts
import pytest
from command_line import run_program
from cut_disk import System, why_not
from watched_calls import Call, Unflushed

SHARE = ("seal", "reject", "prune --apply", "save, where one was interrupted")

needs_a_disk = pytest.mark.skipif(
    why_not(System.EXT4) is not None, reason=f"no power to cut: {why_not(System.EXT4)}"
)


def run(*options: object) -> subprocess.CompletedProcess[str]:
    return run_program(
        sys.executable, power_cuts.__file__, "--jobs", "1", *map(str, options), OMP_NUM_THREADS="1"
    )


@needs_a_disk
@pytest.mark.slow
@pytest.mark.torch
def test_no_power_cut_takes_what_was_answered_for_or_leaves_what_passes_for_whole() -> None:
    done = run("--share", 0.02, "--systems", "ext4", "--only", *SHARE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.torch
@pytest.mark.long
def test_all_that_is_written_is_flushed_by_its_end_also_where_no_power_can_be_cut() -> None:
    done = run("--share", 0.005)
    assert done.returncode in (0, power_cuts.WITHOUT_DISKS), done.stdout + done.stderr
    assert "17 writers" in done.stdout


@needs_a_disk
@pytest.mark.torch
@pytest.mark.long
def test_a_tool_that_flushes_nothing_would_be_caught(tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text("import os\nos.fsync = lambda fd: None\n")
    done = run("--systems", "ext4", "--only", "reject", "--hook", hook)
    assert done.returncode == 1
    assert re.search("reject, call [0-9]+, nothing left, ext4: the mark is gone", done.stderr)


# What is not flushed


@pytest.fixture
def calls(tmp_path: Path) -> Unflushed:
    seen = Unflushed()
    seen(Call("mkdir", f"{tmp_path}/a"))
    seen(Call("fsync", str(tmp_path)))
    assert seen.left() == []
    return seen


def test_a_file_is_flushed_when_its_bytes_are_and_its_name(calls: Unflushed, tmp_path: Path):
    file = f"{tmp_path}/a/file"
    calls(Call("open", file))
    calls(Call("write", file))
    assert calls.left() == [f"bytes written: {file}", f"name made: {file}"]
    calls(Call("fsync", file))
    assert calls.left() == [f"name made: {file}"]
    calls(Call("fsync", f"{tmp_path}/a"))
    assert calls.left() == []


def test_bytes_are_flushed_before_they_get_their_name(calls: Unflushed, tmp_path: Path):
    calls(Call("open", f"{tmp_path}/a/aside"))
    calls(Call("rename", f"{tmp_path}/a/aside", f"{tmp_path}/a/file"))
    assert calls.too_early == [
        f"{tmp_path}/a/aside was not flushed when it became {tmp_path}/a/file"
    ]


def test_a_folder_is_flushed_before_it_is_moved(calls: Unflushed, tmp_path: Path):
    calls(Call("mkdir", f"{tmp_path}/a/b"))
    calls(Call("rename", f"{tmp_path}/a", f"{tmp_path}/c"))
    assert calls.too_early == [f"{tmp_path}/a/b was not flushed when it became {tmp_path}/c"]
    assert calls.left() == [
        f"folder made: {tmp_path}/c/b",
        f"name left: {tmp_path}/a",
        f"name made: {tmp_path}/c",
    ]


def test_what_is_removed_with_its_folder_needs_no_flush_of_its_own(
    calls: Unflushed, tmp_path: Path
):
    calls(Call("remove", f"{tmp_path}/a/file"))
    calls(Call("rmdir", f"{tmp_path}/a"))
    assert calls.left() == [f"name removed: {tmp_path}/a"]
