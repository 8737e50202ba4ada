"""The heartbeat of a rank: written for `ckptctl run` alone, and never in the way of the job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment

from ckptctl.errors import UsageError
from ckptctl.formats.own.heartbeats import FOLDER_VARIABLE, KEY_VARIABLE, Heartbeat, read_heartbeat
from ckptctl.train import heartbeat

KEY = "a key of the attempt"


def run(folder: Path | None, program: str, **variables: str) -> str:
    """Run a program of a rank; what it printed."""
    given = {} if folder is None else {FOLDER_VARIABLE: str(folder), KEY_VARIABLE: KEY}
    done = subprocess.run(
        [sys.executable, "-c", f"from ckptctl.train import heartbeat\n{program}"],
        env=clean_environment(**given, **variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def beat_in(folder: Path, rank: int = 0) -> Heartbeat:
    return read_heartbeat((folder / f"rank-{rank}.json").read_bytes(), KEY)


def test_a_job_that_run_did_not_start_writes_nothing_and_sets_no_handler(tmp_path: Path):
    program = """
import os
before = set(os.listdir('/proc/self/fd')), open('/proc/self/status').read().split('SigCgt')[1][:18]
heartbeat('step', step=1)
after = set(os.listdir('/proc/self/fd')), open('/proc/self/status').read().split('SigCgt')[1][:18]
assert before == after
"""
    run(None, program)
    run(tmp_path / "gone", program)


def test_a_heartbeat_holds_the_rank_the_section_and_the_step(tmp_path: Path):
    run(tmp_path, "heartbeat('evaluation', step=12)", RANK="3", WORLD_SIZE="8")
    beat = beat_in(tmp_path, 3)
    assert (beat["rank"], beat["section"], beat["step"], beat["count"]) == (3, "evaluation", 12, 1)


def test_reports_from_one_section_are_not_all_written(tmp_path: Path):
    program = """
import ckptctl.train.heartbeats as own
own.EVERY_S = 1e6
for step in range(1000):
    heartbeat('step', step=step)
"""
    run(tmp_path, program)
    assert (beat_in(tmp_path)["count"], beat_in(tmp_path)["step"]) == (1, 0)


def test_another_section_is_written_at_once(tmp_path: Path):
    run(tmp_path, "heartbeat('step', step=1); heartbeat('checkpoint'); heartbeat('step', step=2)")
    assert (beat_in(tmp_path)["section"], beat_in(tmp_path)["step"]) == ("step", 2)


def test_a_folder_that_is_gone_or_full_does_not_end_the_job(tmp_path: Path):
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    program = f"""
import shutil
heartbeat('step')
shutil.rmtree({str(folder)!r})
heartbeat('checkpoint')
print('goes on')
"""
    assert run(folder, program) == "goes on\n"


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run([sys.executable, '-c', {text!r}], check=True)",
        "multiprocessing.get_context('fork').Process(target=exec, args=({text!r},)).start()",
    ],
)
def test_what_a_rank_starts_does_not_report_for_it(tmp_path: Path, start: str):
    text = "from ckptctl.train import heartbeat\nheartbeat('evaluation', step=99)"
    program = f"""
import multiprocessing, subprocess, sys
heartbeat('step', step=1)
{start.format(text=text)}
"""
    run(tmp_path, program, RANK="0", WORLD_SIZE="2")
    assert (beat_in(tmp_path)["section"], beat_in(tmp_path)["step"]) == ("step", 1)


def test_the_next_process_of_a_rank_takes_its_place(tmp_path: Path):
    run(tmp_path, "heartbeat('step', step=1)")
    run(tmp_path, "heartbeat('setup')")
    assert beat_in(tmp_path)["section"] == "setup"


def test_the_signal_for_stacks_makes_the_process_write_them(tmp_path: Path):
    program = """
import json, os, signal
heartbeat('step')
number = json.load(open(os.environ['CKPTCTL_HEARTBEATS'] + '/rank-0.json'))['stack_signal']
def where_it_is():
    os.kill(os.getpid(), number)
where_it_is()
print('goes on')
"""
    assert run(tmp_path, program) == "goes on\n"
    assert "in where_it_is" in (tmp_path / "rank-0.stacks").read_text()


def test_a_signal_that_the_job_handles_already_is_left_alone(tmp_path: Path):
    program = """
import json, os, signal
called = []
for number in range(40, 65):
    signal.signal(number, lambda number, _: called.append(number))
signal.signal(39, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [38])
heartbeat('step')
os.kill(os.getpid(), 64)
assert called == [64]
"""
    run(tmp_path, program)
    assert beat_in(tmp_path)["stack_signal"] == 37


def test_a_handler_that_the_job_sets_later_withdraws_the_signal(tmp_path: Path):
    program = """
import json, os, signal
heartbeat('step')
number = json.load(open(os.environ['CKPTCTL_HEARTBEATS'] + '/rank-0.json'))['stack_signal']
signal.signal(number, lambda *_: print('its own'))
heartbeat('checkpoint')
os.kill(os.getpid(), number)
"""
    assert run(tmp_path, program) == "its own\n"
    assert beat_in(tmp_path)["stack_signal"] is None


def test_a_job_that_uses_every_signal_has_a_heartbeat_without_one(tmp_path: Path):
    program = """
import signal
for number in range(35, 65):
    signal.signal(number, lambda *_: None)
heartbeat('step')
"""
    run(tmp_path, program)
    assert beat_in(tmp_path)["stack_signal"] is None


@pytest.mark.parametrize("section", ["stepp", "async-save", ""])
def test_a_section_that_does_not_exist_is_refused_in_every_job(section: str):
    with pytest.raises(UsageError, match="the sections are setup, first-step, step, checkpoint"):
        heartbeat(section)
