"""A real job of 4 ranks under torchrun that hangs is ended, and the right rank is named."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import clean_environment, run_ckptctl, validated

JOB = Path(__file__).with_name("hang_job.py")

pytestmark = [pytest.mark.torch, pytest.mark.long]


@pytest.fixture(scope="module")
def unit_s() -> float:
    """How long this machine takes now to import what a rank does: limits are multiples of it."""
    began_s = time.monotonic()
    program = "import torch.distributed.fsdp, torch.distributed.checkpoint.state_dict"
    subprocess.run([sys.executable, "-c", program], env=clean_environment(), check=True)
    return max(5.0, time.monotonic() - began_s)


def attempts_of(folder: Path, plan: list[str], *options: object, exit_code: int = 0) -> list[dict]:
    """What `run` reports of each attempt of a job that does what the plan says."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = run_ckptctl(
        *("run", "--root", folder / "ckpt", "--create", "--backoff", "0", "--max-restarts", 9),
        *("--report", folder / "report.json", *options, "--"),
        *(*torchrun, "--nproc-per-node", 4, JOB, folder / "ckpt", " ".join(plan)),
        env={"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == exit_code, done.stderr
    attempts = validated((folder / "report.json").read_text())["attempts"]
    assert len(attempts) == len(plan), done.stderr
    return attempts


def test_the_rank_at_fault_is_named_in_every_section(tmp_path: Path, unit_s: float):
    plan = [
        *("stop:setup:2", "stop:first-step:1", "stop:step:3", "stop:checkpoint:0"),
        *("stop:evaluation:3", "stop:outside:1", "other::2", "loader::1", "none"),
    ]
    sections = ("setup", "first-step", "step", "checkpoint", "evaluation")
    attempts = attempts_of(
        tmp_path,
        plan,
        "--section-timeouts",
        ",".join(f"{section}:{2 * unit_s}" for section in sections),
        "--out-of-section-timeout",
        15 * unit_s,
    )
    named = [(each["cause"], each["section"], *each["ranks"]) for each in attempts]
    assert named == [
        ("hang", "setup", 2),
        ("hang", "first-step", 1),
        ("hang", "step", 3),
        ("hang", "checkpoint", 0),
        ("hang", "evaluation", 3),
        ("hang", "outside", 1),
        ("hang", "step"),  # it waits in a collective, and others may wait for what they get
        ("hang", "step", 1),
        (None, None),
    ]
    assert all(len(each["nodes"]) == len(each["ranks"]) for each in attempts[:-1])
    assert [each["decision"] for each in attempts] == [*["restart"] * 8, "done"]


def test_slow_work_is_not_a_hang(tmp_path: Path, unit_s: float):
    """A save ten times as long as before, and an evaluation without steps."""
    for word in ("slow:save:0.5", "slow:save:5", f"slow:evaluation:{3 * unit_s}", "slow:step:5"):
        (attempt,) = attempts_of(tmp_path, [word])
        assert (attempt["cause"], attempt["decision"]) == (None, "done")
    state = max((tmp_path / "ckpt" / ".ckptctl" / "supervisor").glob("0*.json"))
    assert {"setup", "checkpoint"} <= json.loads(state.read_text())["sections"].keys()
