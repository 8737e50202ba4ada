"""Told to stop, a job saves; told again in the middle of that, it ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from command_line import clean_environment
from train_ranks import wait_for

import ckptctl
from ckptctl.findings import Verdict

pytestmark = [pytest.mark.torch, pytest.mark.long]

JOB = Path(__file__).with_name("emergency_job.py")
PATH = f"{JOB.parent.parent.parent}:{JOB.parent.parent}:{JOB.parent}"


@contextmanager
def job(root: Path, *moment: int) -> Iterator[subprocess.Popen]:
    """The job on two ranks under torchrun; all of it ends with the block.

    The ranks lead sessions of their own: they outlive a torchrun that is killed.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    process = subprocess.Popen(
        [*torchrun, JOB, root, *map(str, moment)],
        env=clean_environment(PYTHONPATH=PATH, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        for file in root.parent.glob("*.pid-*"):
            with suppress(ProcessLookupError):
                os.kill(int(file.name.rpartition("-")[2]), signal.SIGKILL)
            file.unlink()
        process.communicate()


def pids_of(process: subprocess.Popen) -> list[int]:
    """The ranks, as they name themselves before they train."""
    lines = [process.stdout.readline() for _ in range(2)]
    assert all(line.startswith("pid ") for line in lines), process.stderr.read()
    return [int(line.split()[1]) for line in lines]


def test_torchrun_that_is_told_to_stop_lets_its_ranks_save_a_step_that_is_resumed_from(
    tmp_path: Path,
):
    root = tmp_path / "run"
    with job(root) as process:
        wait_for(process, "ready")
        process.terminate()
        out, err = process.communicate()
    saved = {line for line in out.splitlines() if line.startswith("saved ")}
    assert len(saved) == 1, err
    step = int(saved.pop().split()[1])
    assert step >= 10
    assert ckptctl.pick(str(root), require_seal=True).step == step


def test_a_kill_in_the_middle_of_an_emergency_save_leaves_the_step_before(tmp_path: Path):
    root = tmp_path / "run"
    with job(root, 2) as process:
        ranks = pids_of(process)
        wait_for(process, "ready")
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)
        wait_for(process, "saving")
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    newest = ckptctl.scan(str(root), grace_s=0.0).reports[0]
    assert newest.number >= 10
    assert (newest.verdict, newest.interrupted) == (Verdict.INCOMPLETE, True)
    found = ckptctl.pick(str(root), grace_s=0.0)
    assert (found.step, found.passed_over[0].report.number) == (6, newest.number)
    with job(root) as process:
        first = process.stdout.readline()
        assert first.split()[2:] == ["from", "6"], process.stderr.read()
