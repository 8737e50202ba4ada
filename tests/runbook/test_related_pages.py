"""The runbooks that RB-7 leads to: a run without a person stops where a person decides."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl

LOST_GPU = (
    "Nov 20 03:12:44 node017 kernel: [12345.678901] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, "
    "GPU has fallen off the bus.\n"
)
WATCHDOG = (
    "[rank0]:[E1120 03:22:44.120331234 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=3311, OpType=ALLREDUCE)\n"
)


@pytest.fixture
def root(framework_roots: Path, tmp_path: Path) -> Path:
    source = framework_roots / "kempnerforge" / "checkpoints"
    return Path(shutil.copytree(source, tmp_path / "ckpt"))


def run(page: str, root: Path | str, *inputs: str, **options: object) -> dict:
    words = [word for each in inputs for word in ("--set", each)]
    done = run_ckptctl("runbook", "run", page, root, "--yes", "--json", *words, **options)
    document = validated(done.stdout)
    assert document["exit_code"] == done.returncode
    return document


def test_a_node_that_is_named_and_not_drained_stops_with_93(root: Path, tmp_path: Path):
    (tmp_path / "dmesg.log").write_text(LOST_GPU)
    document = run("gpu-fault", root, f"LOG={tmp_path}/dmesg.log")
    assert document["exit_code"] == 93
    assert "still in the pool" in json.dumps(document)


def test_a_log_that_names_no_hardware_leads_back_to_rb_7(root: Path, tmp_path: Path):
    (tmp_path / "job.log").write_text("Traceback (most recent call last):\nKeyError: 'x'\n")
    assert run("gpu-fault", root, f"LOG={tmp_path}/job.log")["exit_code"] == 11


def test_a_hang_with_a_lost_gpu_behind_it_is_no_hang_to_resume_from(root: Path, tmp_path: Path):
    (tmp_path / "dmesg.log").write_text(LOST_GPU)
    (tmp_path / "job.log").write_text(WATCHDOG)
    logs = (f"LOG={tmp_path}/job.log", f"LOG={tmp_path}/dmesg.log")
    document = run("nccl-hang", root, *logs)
    assert document["exit_code"] == 93
    assert "gpu-fault" in json.dumps(document)


def test_a_hang_whose_job_still_runs_stops_with_93(root: Path, tmp_path: Path):
    (tmp_path / "job.log").write_text(WATCHDOG)
    document = run("nccl-hang", root, f"LOG={tmp_path}/job.log")
    assert document["exit_code"] == 93
    assert "still runs" in json.dumps(document)


@pytest.mark.server
def test_a_hang_on_an_object_store_is_followed_to_its_end(s3_moto, root: Path, tmp_path: Path):
    (tmp_path / "job.log").write_text(WATCHDOG)
    url = s3_moto.upload(root, uuid.uuid4().hex)
    inputs = (f"LOG={tmp_path}/job.log", "END=true")
    assert run("nccl-hang", url, *inputs, env=s3_moto.environment)["exit_code"] == 0


@pytest.mark.parametrize(("speed", "code"), [(1000, 0), (500, 31)])
def test_half_the_speed_without_a_look_at_the_nodes_stops(
    root: Path, tmp_path: Path, speed: int, code: int
):
    log = tmp_path / "train.jsonl"
    rows = [
        {"step": n, "loss": 3 - n / 1000, "tokens_per_second": 1000 + n % 3} for n in range(1, 213)
    ]
    rows += [
        {"step": n, "loss": 3 - n / 1000, "tokens_per_second": speed + (n + 1) % 3}
        for n in range(201, 260)
    ]
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert run("mfu-regression", root, f"LOG={log}")["exit_code"] == code
