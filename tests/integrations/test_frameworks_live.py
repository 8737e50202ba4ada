"""Each integration with its real framework, on two ranks: saved, killed, resumed, checked."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import run_ckptctl, validated
from live_frameworks import Run, record

import ckptctl
from ckptctl.loss.verdict import LossVerdict

pytestmark = [pytest.mark.torch, pytest.mark.slow]

FRAMEWORKS = ("transformers", "accelerate", "lightning")
SAVED = (12, 24, 36)
KILLED_AT = 44


@dataclass(frozen=True)
class Interrupted:
    """A run that was killed on all ranks after its third save: never resume in `root` itself."""

    framework: str
    root: Path
    console: str


@pytest.fixture(scope="module", params=FRAMEWORKS)
def interrupted(request, tmp_path_factory, run_job: Run) -> Interrupted:
    root = tmp_path_factory.mktemp(request.param) / "run"
    done = run_job(request.param, root, "--kill-at", KILLED_AT)
    assert "exitcode: -9" in done.stdout, done.stdout
    return Interrupted(request.param, root, done.stdout)


@pytest.fixture
def copied(interrupted, tmp_path) -> Path:
    """A copy of the interrupted run, to resume in."""
    root = tmp_path / "run"
    shutil.copytree(interrupted.root, root, symlinks=True)
    return root


def consoles(tmp_path: Path, *texts: str) -> list[str]:
    """Files with the output of the framework, as a job script would redirect it."""
    paths = [tmp_path / f"console-{number}.log" for number, _ in enumerate(texts)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return list(map(str, paths))


def test_every_save_is_sealed_and_the_newest_is_picked(interrupted):
    root = interrupted.root
    scanned = ckptctl.scan(str(root))
    assert [report.number for report in scanned.reports] == sorted(SAVED, reverse=True)
    chosen = ckptctl.pick(str(root), require_seal=True)
    assert chosen.step == SAVED[-1]
    for number in SAVED:
        done = run_ckptctl("verify", f"{root}@{number}", "--level", "content", "--require-seal")
        assert done.returncode == 0, done.stdout
    shown = run_ckptctl("show", chosen.path, "--json")
    assert shown.returncode == 0
    assert validated(shown.stdout)["state"]["optimizer"]["found"]
    record(interrupted.framework, sealed=True)


def test_a_resume_is_proven_by_the_log_and_by_the_console(interrupted, copied, run_job, tmp_path):
    done = run_job(interrupted.framework, copied, "--stop")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ckptctl: resuming from") == 1
    assert f"{KILLED_AT - SAVED[-1]} steps were logged twice and agree" in done.stdout
    log = ckptctl.check_loss(str(copied / "train.jsonl"), report=str(copied))
    assert log.verdict is LossVerdict.CONTINUOUS
    console = consoles(tmp_path, interrupted.console, done.stdout)
    report = ckptctl.check_loss(console)
    assert report.assessments[0].resume.resume_point.step == SAVED[-1]
    # A bar of Lightning has four decimals of a loss that varies by a third.
    rounded = LossVerdict.NO_JUMP if interrupted.framework == "lightning" else log.verdict
    assert report.verdict is rounded, report.message
    record(interrupted.framework, right=report.verdict.value)


def test_a_resume_with_other_weights_is_stopped_on_every_rank(
    interrupted, copied, run_job, tmp_path
):
    done = run_job(interrupted.framework, copied, "--stop", "--wrong")
    assert done.returncode != 0
    assert "exitcode  : 30" in done.stdout
    # Two ranks write to one console, now and then into one line.
    assert len(re.findall("error: .*? differ by", done.stdout)) == 2, done.stdout
    console = consoles(tmp_path, interrupted.console, done.stdout)
    report = ckptctl.check_loss(console)
    assert report.exit_code == 30
    record(interrupted.framework, wrong=report.verdict.value)


def test_a_damaged_step_is_passed_over_and_the_reason_is_in_the_log(interrupted, copied, run_job):
    newest = ckptctl.pick(str(copied)).path
    damaged = max(
        (path for path in [Path(newest), *Path(newest).rglob("*")] if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    damaged.write_bytes(damaged.read_bytes()[:-100])
    done = run_job(interrupted.framework, copied, "--steps", SAVED[-1])
    assert done.returncode == 0, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "ckptctl: resuming from" in line)
    assert f"not from step {SAVED[-1]}: " in line
    assert ckptctl.pick(str(copied), require_seal=True).step == SAVED[-1]
    record(interrupted.framework, passed_over=True)
