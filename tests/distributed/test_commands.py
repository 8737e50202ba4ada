"""A short command ends in time, with what it started, and its output is bounded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ckptctl.distributed.commands import MOST_BYTES, Finished, run_bounded
from ckptctl.distributed.process_table import ENDED, entry_of

LONG_S = 60.0


def sh(script: str, timeout_s: float = LONG_S, data: bytes = b"") -> Finished:
    return run_bounded(["sh", "-c", script], timeout_s, data=data)


def test_a_command_gets_its_input_and_returns_code_and_output():
    assert sh("cat; echo problem >&2; exit 3", data=b"text") == (3, "text", "problem\n")


def test_a_process_that_keeps_the_output_open_does_not_delay_the_end():
    assert sh("sleep 600 & echo done; echo $! >&2").stdout == "done\n"


def test_what_a_command_started_is_killed_with_it(tmp_path: Path):
    pid_file = tmp_path / "pid"
    with pytest.raises(TimeoutError, match="did not end within 1 s"):
        sh(f"sleep 600 & echo $! > {pid_file}; wait", 1.0)
    pid = int(pid_file.read_text())
    while (entry := entry_of(pid)) and entry.state not in ENDED:
        time.sleep(0.01)


def test_output_is_bounded():
    assert len(sh(f"head -c {MOST_BYTES + 5} /dev/zero | tr '\\0' x").stdout) == MOST_BYTES


def test_a_command_that_does_not_exist_is_an_error_of_the_system():
    with pytest.raises(FileNotFoundError):
        run_bounded(["/nowhere/command"], LONG_S)
