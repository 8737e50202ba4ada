"""How a signal reaches a program on a real Slurm, and whether `doctor` knows it.

Each script passes the signal before the time limit on in its own way, to a program that needs two
seconds for its save. All are submitted at once. What `doctor slurm` reports of them must be what
was seen: nothing where the save is there, the mistake where it is not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from services.processes import wait_until
from services.slurm import Slurm

import ckptctl

pytestmark = [pytest.mark.slow, pytest.mark.torch]

SAVING = """\
import os, signal, sys, time
signals = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _frame: signals.append(number))
name = os.environ["NAME"]
open(f"{name}.started", "w").close()
while not signals:
    time.sleep(0.05)
time.sleep(2)
open(f"{name}.saved", "w").close()
sys.exit(128 + signals[0])
"""
START = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x.out
#SBATCH --signal={signal}@60
{script}
"""
SRUN = "srun --kill-on-bad-exit=1 python train.py --resume-from auto"
TORCHRUN = SRUN.replace("python", "torchrun --nproc-per-node=1")


def with_trap(sent: str, signal: str = "USR1", run: str = SRUN, end: str = " &") -> str:
    return (
        f"trap '{sent}' {signal}\n{run}{end}\npid=$!\nwait \"$pid\"\ncode=$?\n"
        '((code > 128)) && wait "$pid"\nexit "$code"'
    )


TO_STEP = 'scancel --signal=TERM "$SLURM_JOB_ID.0"'
TO_JOB = 'scancel --signal=TERM "$SLURM_JOB_ID"'
TO_ALL = 'scancel --full --signal=TERM "$SLURM_JOB_ID"'
HANDLES = "SIGTERM,SIGUSR1"

# The name of a script: `--signal`, its commands, what `doctor` reports, whether the save is there.
# None: most often it is lost. It is there where the shell ends before srun has the signal.
FORMS: dict[str, tuple[str, str, str | None, bool | None]] = {
    "step": ("TERM", SRUN, None, True),
    "step-without-srun": ("TERM", SRUN.partition("=1 ")[2], "signal.no-step", False),
    "exec-srun": ("B:TERM", f"exec {SRUN}", "signal.srun-killed", False),
    "exec-srun-usr1": ("B:USR1", f"exec {SRUN}", None, True),
    "exec-python": ("B:TERM", f"exec {SRUN.partition('=1 ')[2]}", None, True),
    "trap-step": ("B:USR1", with_trap(TO_STEP), None, True),
    "trap-job": ("B:USR1", with_trap(TO_JOB), None, True),
    "trap-full": ("B:USR1", with_trap(TO_ALL), "signal.srun-killed", None),
    "trap-kill": ("B:TERM", with_trap('kill -TERM "$pid"', "TERM"), "signal.srun-killed", False),
    "trap-kill-usr1": ("B:USR1", with_trap('kill -USR1 "$pid"'), None, True),
    "foreground": ("B:USR1", with_trap(TO_STEP, end=""), "signal.foreground", False),
    "python-no-trap": ("B:TERM", SRUN.partition("=1 ")[2], "signal.no-trap", False),
    "torchrun": ("B:USR1", with_trap(TO_STEP, run=TORCHRUN), None, True),
    "torchrun-option": (
        *("USR1", TORCHRUN.replace("train.py", f"--signals-to-handle={HANDLES} train.py")),
        *(None, True),
    ),
    "torchrun-variable": ("USR1", f"PET_SIGNALS_TO_HANDLE={HANDLES} {TORCHRUN}", None, True),
}


@pytest.fixture(scope="module")
def saved(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Whether the program of each form has saved in its notice, and not only in KillWait."""
    folder = tmp_path_factory.mktemp("forms")
    (folder / "train.py").write_text(SAVING)
    environment = slurm.environment()
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    jobs = {}
    for name, (signal, script, _, _) in FORMS.items():
        file = folder / f"{name}.sh"
        file.write_text(START.format(signal=signal, script=script))
        words = ("--no-requeue", "--time=10", "--job-name", name, file)
        jobs[name] = slurm.sbatch(*words, cwd=folder, **{**environment, "NAME": name})
    wait_until(
        lambda: all((folder / f"{name}.started").exists() for name in FORMS),
        what="start of all programs",
    )
    for job in jobs.values():
        slurm.end_soon(job, 45)
    ended = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
    states = {name: slurm.wait_for_state(job, *ended) for name, job in jobs.items()}
    slurm.revive()
    return {
        name: (folder / f"{name}.saved").exists() and states[name] != "TIMEOUT" for name in FORMS
    }


@pytest.mark.parametrize("name", FORMS)
def test_the_save_is_there_where_doctor_reports_nothing(name, saved, tmp_path):
    signal, script, mistake, is_saved = FORMS[name]
    assert is_saved in (None, saved[name])
    file = tmp_path / "job.sh"
    file.write_text(START.format(signal=signal, script=script))
    advice = ckptctl.doctor("slurm", str(file)).advice
    assert {each.name for each in advice if each.name.startswith("signal.")} == (
        {mistake} if mistake else set()
    )
