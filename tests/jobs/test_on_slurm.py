"""The job scripts of `examples/jobs` on a real Slurm, from their start to `scancel`.

The scripts are submitted as they are; nodes, GPUs and the time limit are given to `sbatch`.
`train.py` beside this file saves only when it is told to end, so a step shows an emergency save.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import flip
from services.processes import wait_until
from services.slurm import Slurm

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
FRAMEWORKS = Path(__file__).resolve().parents[2] / ".cache" / "framework-venv" / "bin"
FT_LAUNCHER = shutil.which("ft_launcher", path=f"{Path(sys.executable).parent}:{FRAMEWORKS}")

pytestmark = [pytest.mark.slow, pytest.mark.torch]
needs_ft_launcher = pytest.mark.skipif(
    FT_LAUNCHER is None, reason="nvidia-resiliency-ext is not installed: make frameworks"
)
SCRIPTS = [
    "slurm_torchrun.sbatch",
    "slurm_run.sbatch",
    pytest.param("ft_launcher.sbatch", marks=needs_ft_launcher),
]


ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
"""States from which Slurm takes a job no further; others, such as SIGNALING, pass."""


class Job:
    """One job of a script, in a folder of its own."""

    def __init__(
        self, slurm: Slurm, folder: Path, script: Path, *words: str, **variables: str
    ) -> None:
        self.slurm = slurm
        self.folder = folder
        self.id = slurm.sbatch(*words, script, cwd=folder, **variables)

    def logs(self) -> str:
        """What the job has printed, with the logs of `ckptctl run`."""
        files = [*self.folder.glob("*.out"), *sorted(self.folder.glob("logs-*/*/output.log"))]
        return "\n".join(file.read_text(errors="replace") for file in files)

    def resumed(self) -> list[int]:
        """The steps from which its rank 0 has resumed so far; 0 for a fresh start."""
        return [int(step) for step in re.findall(r"^resumed step (\d+) rank 0 ", self.logs(), re.M)]

    def saved(self) -> list[int]:
        """The steps that its rank 0 has saved so far."""
        return [int(step) for step in re.findall(r"^saved step (\d+) rank 0 ", self.logs(), re.M)]

    def wait_for_start(self, number: int) -> None:
        """Wait until it trains for the `number`th time."""
        wait_until(lambda: self._has_started(number), what=f"start {number}", limit_s=200)

    def _has_started(self, number: int) -> bool:
        assert self.state() not in ENDED, self.logs()
        return len(self.resumed()) >= number

    def state(self) -> str:
        """The state that Slurm reports."""
        return self.slurm.job(self.id)["JobState"]

    def restarts(self) -> int:
        """How often Slurm has started it again."""
        return int(self.slurm.job(self.id)["Restarts"])


Submit = Callable[..., Job]


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path) -> Submit:
    """A function that submits a script of `examples/jobs`, or another one, on two nodes."""
    shutil.copy(Path(__file__).with_name("train.py"), tmp_path)
    path = f"{Path(sys.executable).parent}:{FRAMEWORKS}"

    def submitted(script: str, *words: str, **variables: str) -> Job:
        given = {
            "ROOT": str(tmp_path / "ckpt"),
            "GPUS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(JOBS.parents[1]),
            **variables,
        }
        environment = slurm.environment(**given)
        environment["PATH"] = f"{path}:{environment['PATH']}"
        limits = ("--nodes=2", "--gpus-per-node=1", "--time=10", "--signal=B:USR1@60", *words)
        return Job(slurm, tmp_path, JOBS / script, *limits, **environment)

    yield submitted
    slurm.revive()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_continues_after_its_time_limit_and_a_preemption_and_not_after_scancel(
    script, submit, slurm
):
    job = submit(script)
    job.wait_for_start(1)
    slurm.end_soon(job.id, 70)
    job.wait_for_start(2)
    assert job.resumed() == [0, *job.saved()]
    assert job.restarts() == 1

    other = slurm.sbatch(*("-p", "high", "-N4", "--exclusive", "--wrap", "sleep 1"), cwd=job.folder)
    slurm.wait_for_state(other, "COMPLETED")
    job.wait_for_start(3)
    assert job.resumed() == [0, *job.saved()]
    assert job.resumed()[2] > job.resumed()[1] > 0
    assert job.restarts() == 2
    if "_run" in script:
        # Neither the limit nor the preemption costs a restart, or starts one where it would die.
        told = re.findall(r"attempt (\d+) started: (\d) of 3 restarts left", job.logs())
        assert told == [("1", "3"), ("2", "3"), ("3", "3")]

    slurm.run("scancel", job.id)
    assert slurm.wait_for_state(job.id, "CANCELLED") == "CANCELLED"
    wait_until(lambda: job.id not in slurm.run("squeue", "-h", "-o", "%i").stdout, what="its end")
    assert (job.state(), job.restarts()) == ("CANCELLED", 2)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_exception_of_the_program_is_not_started_again_by_slurm(script, submit, slurm):
    job = submit(script, "--nodes=1", RAISES_AT="2", CKPTCTL_BACKOFF="0")
    assert slurm.wait_for_state(job.id, "FAILED") == "FAILED"
    assert "the code of the user fails" in job.logs()
    assert job.restarts() == 0


def lose_node(job: Job, slurm: Slurm, *, batch_host: bool) -> None:
    shown = slurm.run("scontrol", "show", "hostnames", slurm.job(job.id)["NodeList"]).stdout
    others = set(shown.split()) - {slurm.job(job.id)["BatchHost"]}
    slurm.power_off(slurm.job(job.id)["BatchHost"] if batch_host else others.pop())


@pytest.mark.parametrize(
    ("script", "batch_host", "restarts"),
    [
        ("slurm_torchrun.sbatch", False, 1),
        ("slurm_run.sbatch", True, 1),
        ("slurm_run.sbatch", False, 0),
    ],
)
def test_a_job_continues_where_a_node_is_lost(script, batch_host, restarts, submit, slurm):
    # Without another start of the job it continues within the allocation, on the nodes left.
    job = submit(script)
    job.wait_for_start(1)
    lose_node(job, slurm, batch_host=batch_host)
    job.wait_for_start(2)
    assert job.restarts() == restarts


def test_two_steps_of_one_job_verify_two_checkpoints_at_one_time(
    slurm, checkpoints, copy_of, tmp_path
):
    damaged, sound = (copy_of(checkpoints / "run_fsdp4") / "step_500" for _ in range(2))
    flip(damaged / "__0_0.distcp")
    script = tmp_path / "verify.sh"
    verify = "srun --overlap --ntasks=2 ckptctl verify --level content"
    script.write_text(
        f"#!/bin/bash\n{verify} {damaged} &\n{verify} {sound} &\n"
        "wait %1; echo damaged $?; wait %2; echo sound $?\n"
    )
    environment = slurm.environment()
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    words = ("--nodes=2", "--ntasks=2", "--output=verify.out", script)
    job = slurm.sbatch(*words, cwd=tmp_path, **environment)
    slurm.wait_for_state(job, "COMPLETED", "FAILED")
    printed = (tmp_path / "verify.out").read_text()
    assert "damaged 21\n" in printed
    assert "sound 0\n" in printed
