"""LitGPT's own pretraining by the files of its page: killed, and resumed rightly and wrongly."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live_frameworks import interpreter, job_environment, record, seal_by_watch, version_of
from test_frameworks_live import PAGES

import ckptctl
from ckptctl.loss.verdict import LossVerdict

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]

PAGE = PAGES.parent / "litgpt.md"
STATEFUL = "from torchdata.stateful_dataloader import StatefulDataLoader"
PLAIN = "from torch.utils.data import DataLoader as StatefulDataLoader"


def pretrain(folder: Path, *, kill_at: int = 0, loader: str = STATEFUL) -> tuple[int, str]:
    """Run the script of the page in a folder; its exit code and its console."""
    (words, config, script) = re.findall(
        r"^```\w+[^\n]*\n(.*?)^```$", PAGE.read_text(), re.M | re.S
    )
    assert STATEFUL in words
    folder.mkdir(exist_ok=True)
    (folder / "words.py").write_text(words.replace(STATEFUL, loader))
    (folder / "pretrain.yaml").write_text(config)
    programs = [str(Path(python).parent) for python in (interpreter(), sys.executable)]
    environment = job_environment(
        PATH=os.pathsep.join([*programs, os.environ["PATH"]]),
        PYTHONPATH=str(folder),
        PYTHONUNBUFFERED="1",
        TORCH_COMPILE_DISABLE="1",
    )
    console = ""
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            console += line
            if f" step {kill_at} |" in line:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, console


def test_a_resume_of_litgpt_is_told_from_a_wrong_one(tmp_path):
    import torch

    assert version_of("litgpt") in PAGES.read_text()
    killed_code, killed = pretrain(tmp_path / "killed", kill_at=44)
    root = tmp_path / "killed" / "run-7"
    chosen = ckptctl.pick(str(root))
    assert (killed_code, chosen.step) == (-signal.SIGKILL, 36), killed
    assert chosen.absent == ("scheduler", "rng")
    seal_by_watch(root)
    assert ckptctl.pick(str(root), require_seal=True).step == 36
    record("litgpt", sealed="by watch")
    wanted = {"right": LossVerdict.CONTINUOUS, "wrong": LossVerdict.DISCONTINUOUS}
    for name, verdict in wanted.items():
        folder = shutil.copytree(tmp_path / "killed", tmp_path / name)
        if name == "wrong":
            file = folder / "run-7" / "step-00000036" / "lit_model.pth"
            state = torch.load(file, weights_only=False)
            for tensor in state["model"].values():
                tensor.mul_(3)
            torch.save(state, file)
            shutil.rmtree(file.parent / ".ckptctl")
        code, console = pretrain(folder)
        assert code == 0, console
        logs = folder / "run-7" / "logs" / "csv"
        found = ckptctl.check_loss([str(logs / f"version_{n}" / "metrics.csv") for n in (0, 1)])
        assert found.verdict is verdict, found.message
        (tmp_path / f"{name}-0.log").write_text(killed)
        (tmp_path / f"{name}-1.log").write_text(console)
        report = ckptctl.check_loss([str(tmp_path / f"{name}-{n}.log") for n in (0, 1)])
        assert report.n_resumes == 1
        record("litgpt", **{name: report.verdict.value}, log="–")
        assert report.verdict is (LossVerdict.NO_JUMP if name == "right" else verdict)


def test_litgpt_cannot_load_what_it_saves_with_a_plain_loader(tmp_path):
    version_of("litgpt")
    pretrain(tmp_path, kill_at=15, loader=PLAIN)
    root = tmp_path / "run-7"
    chosen = ckptctl.pick(str(root), level="content")
    assert (chosen.step, "dataloader" in chosen.absent) == (12, False)
    code, console = pretrain(tmp_path, loader=PLAIN)
    assert code == 1
    assert "Weights only load failed" in console
    (tmp_path / "console.log").write_text(console)
    assert ckptctl.classify([str(tmp_path / "console.log")]).failure == "job-config"
