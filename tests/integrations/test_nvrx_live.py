"""NVRx loads verified local checkpoints, and shares its heartbeats with `ckptctl run`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import REPOSITORY, run_ckptctl, validated
from live_frameworks import (
    JOBS,
    Run,
    interpreter,
    job_environment,
    record,
    seal_by_watch,
    torchrun,
    version_of,
)

import ckptctl
from ckptctl.loss.verdict import LossVerdict

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]

NVRX = "nvidia_resiliency_ext"


@pytest.fixture(autouse=True)
def is_installed() -> None:
    version_of(NVRX)


def found(run_job: Run, root: Path) -> str:
    """What `find_latest` of the integration answers, on both ranks."""
    return re.search(r"found (.*)", run_job(NVRX, root, "--steps", 0).stdout)[1]


def test_a_damaged_local_checkpoint_is_not_found(run_job, tmp_path):
    script = REPOSITORY / "fixtures" / "rank_files.py"
    command = [interpreter(), *torchrun(), str(script), "nvrx", str(tmp_path)]
    subprocess.run(command, env=job_environment(), check=True)
    root = tmp_path / "session"
    for path in root.glob("*/iter_0000006_*.pt"):
        # NVRx keeps one iteration, and for a moment the one before it.
        shutil.copyfile(path, path.with_name(path.name.replace("0006", "0004")))
    assert found(run_job, root) == "[6, 6]"
    newest = root / "1" / "iter_0000006_1_local.pt"
    data = newest.read_bytes()
    newest.write_bytes(data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:])
    assert found(run_job, root) == "[4, 4]"
    (root / "0" / "iter_0000004_0_local.pt").write_bytes(b"")
    assert found(run_job, root) == "[-1, -1]"
    record(NVRX, passed_over=True)


def test_a_resume_from_local_checkpoints_is_told_from_a_wrong_one(run_job, tmp_path):
    root = tmp_path / "session"
    killed = run_job(NVRX, root, "--kill-at", 44)
    assert ckptctl.pick(str(root)).path == f"{root}@36", killed.stdout
    seal_by_watch(root)
    assert ckptctl.pick(str(root), require_seal=True).path == f"{root}@36"
    record(NVRX, sealed="by watch")
    for name, options, wanted in (
        ("right", (), LossVerdict.CONTINUOUS),
        ("wrong", ("--wrong",), LossVerdict.DISCONTINUOUS),
    ):
        copied = shutil.copytree(root, tmp_path / name / "session")
        resumed = run_job(NVRX, copied, *options)
        assert resumed.returncode == 0, resumed.stdout
        consoles = [tmp_path / f"killed-{name}.log", tmp_path / f"resumed-{name}.log"]
        for path, done in zip(consoles, (killed, resumed), strict=True):
            path.write_text(done.stdout)
        report = ckptctl.check_loss(list(map(str, consoles)))
        assert report.verdict is wanted, report.message
        record(NVRX, **{name: report.verdict.value}, log="–")


def test_a_rank_that_hangs_in_a_section_of_nvrx_is_named(tmp_path):
    """NVRx's own limits are longer than those of `ckptctl run` here."""
    config = tmp_path / "ft.yaml"
    sections = dict.fromkeys(("setup", "step", "checkpointing"), 6000)
    limits = {"rank_section_timeouts": sections, "enable_nic_monitor": False}
    config.write_text(json.dumps({"fault_tolerance": limits}))
    report = tmp_path / "report.json"
    done = run_ckptctl(
        *("run", "--root", tmp_path / "root", "--create", "--backoff", 0, "--max-restarts", 1),
        *("--section-timeouts", "step:60", "--report", report, "--", interpreter()),
        *("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--nproc-per-node", 2),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", 0),
        *("--ft-cfg-path", config, JOBS / "nvrx_heartbeats_job.py"),
        env=job_environment(),
    )
    assert done.returncode == 0, done.stderr
    first, second = validated(report.read_text())["attempts"]
    assert (first["cause"], first["section"], first["ranks"]) == ("hang", "step", [1])
    assert (second["cause"], second["decision"]) == (None, "done")
