"""A simulated fault kills or stops one rank, the same on every rank, and only once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment

from ckptctl.errors import UsageError
from ckptctl.train import simulate_fault

PROGRAM = "import sys, time; from ckptctl.train import simulate_fault; {}; time.sleep({})"


def ranks(call: str, n: int = 3, sleep_s: int = 3600, **variables: str) -> list[subprocess.Popen]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(call, sleep_s)],
            env=clean_environment(RANK=str(rank), WORLD_SIZE=str(n), **variables),
        )
        for rank in range(n)
    ]


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def state(process: subprocess.Popen) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_the_rank_that_is_named_is_killed_and_no_other():
    started = ranks("simulate_fault('rank_killed', rank=1)")
    assert started[1].wait() == -signal.SIGKILL
    assert [started[0].poll(), started[2].poll()] == [None, None]
    end(started)


@pytest.mark.slow
def test_a_rank_that_hangs_is_stopped():
    started = ranks("simulate_fault('rank_hung', rank=0)")
    while state(started[0]) != "T":
        assert started[0].poll() is None
    end(started)


@pytest.mark.slow
def test_without_a_rank_all_choose_the_same_one():
    started = ranks("simulate_fault('rank_killed', seed=4)", sleep_s=20)
    assert sorted(process.wait() for process in started) == [-signal.SIGKILL, 0, 0]


@pytest.mark.slow
def test_a_restarted_job_goes_on():
    call = "simulate_fault('rank_killed', rank=0)"
    (only,) = ranks(call, n=1, sleep_s=5, CKPTCTL_RESTART_COUNT="1")
    assert only.wait() == 0


def test_what_no_job_can_do_is_refused():
    for arguments in (
        {"fault": "rank_eaten"},
        {"rank": 1},
        {"rank": -1},
        {"delay": -1.0},
    ):
        with pytest.raises(UsageError):
            simulate_fault(**arguments)
