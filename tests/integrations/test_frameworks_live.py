"""Each integration with its real framework, on two ranks: saved, killed, resumed, checked."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import REPOSITORY, run_ckptctl, validated
from live_frameworks import Run, record, version_of

import ckptctl
from ckptctl.loss.verdict import LossVerdict

pytestmark = [pytest.mark.torch, pytest.mark.slow]

RECORDED = ("transformers", "accelerate", "lightning", "olmo_core")
"""Those whose integration logs the losses and checks the resume."""
SEALED = (*RECORDED, "torchtitan", "megatron.core", "verl")
FRAMEWORKS = (*SEALED, "deepspeed")
ROUNDED = {"lightning": "four decimals", "olmo_core": "four digits"}
"""Those whose console prints too few digits of the loss to prove a resume."""
IN_CI = ("transformers", "accelerate", "lightning")
PAGES = REPOSITORY / "docs" / "frameworks" / "README.md"
SAVED = (12, 24, 36)
KILLED_AT = 44


@dataclass(frozen=True)
class Interrupted:
    """A run that was killed on all ranks after its third save: never resume in `root` itself."""

    framework: str
    root: Path
    console: str


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=[] if f in IN_CI else [pytest.mark.long]) for f in FRAMEWORKS],
)
def interrupted(request, tmp_path_factory, run_job: Run) -> Interrupted:
    assert version_of(request.param) in PAGES.read_text()
    root = tmp_path_factory.mktemp(request.param) / "run"
    done = run_job(request.param, root, "--kill-at", KILLED_AT)
    assert "exitcode: -9" in done.stdout or "exitcode  : -9" in done.stdout, done.stdout
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
    root, is_sealed = interrupted.root, interrupted.framework in SEALED
    scanned = ckptctl.scan(str(root))
    steps = [report.number for report in scanned.reports if report.number]
    assert steps == sorted(SAVED, reverse=True)
    chosen = ckptctl.pick(str(root), require_seal=is_sealed)
    assert chosen.step == SAVED[-1]
    for number in SAVED:
        sealed = ["--require-seal"] if is_sealed else []
        done = run_ckptctl("verify", f"{root}@{number}", "--level", "content", *sealed)
        assert done.returncode == 0, done.stdout
    shown = run_ckptctl("show", chosen.path, "--json")
    assert shown.returncode == 0
    assert validated(shown.stdout)["state"]["optimizer"]["found"]
    record(interrupted.framework, sealed=is_sealed)


def test_a_right_resume_is_proven_by_the_console(interrupted, copied, run_job, tmp_path):
    done = run_job(interrupted.framework, copied, "--stop")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ckptctl: resuming from") == 1
    if interrupted.framework in RECORDED:
        assert re.search(r"\d+ steps were logged twice and agree", done.stdout)
        log = ckptctl.check_loss(str(copied / "train.jsonl"), report=str(copied))
        assert log.verdict is LossVerdict.CONTINUOUS, log.message
    report = ckptctl.check_loss(consoles(tmp_path, interrupted.console, done.stdout))
    assert report.assessments[0].resume.resume_point.step == SAVED[-1]
    is_rounded = interrupted.framework in ROUNDED
    wanted = LossVerdict.NO_JUMP if is_rounded else LossVerdict.CONTINUOUS
    assert report.verdict is wanted, report.message
    if interrupted.framework in SEALED:
        last = ckptctl.verify(f"{copied}@48", level="content", require_seal=True)
        assert last.exit_code == 0, last.findings
    record(interrupted.framework, right=report.verdict.value)


def test_a_resume_with_other_weights_is_wrong_by_the_console(
    interrupted, copied, run_job, tmp_path
):
    done = run_job(interrupted.framework, copied, "--stop", "--wrong")
    if interrupted.framework in RECORDED:
        assert "exitcode  : 30" in done.stdout, done.stdout
        # Two ranks write to one console, now and then into one line.
        assert len(re.findall("error: .*? differ by", done.stdout)) == 2, done.stdout
    report = ckptctl.check_loss(consoles(tmp_path, interrupted.console, done.stdout))
    assert report.verdict is LossVerdict.DISCONTINUOUS, report.message
    record(interrupted.framework, wrong=report.verdict.value)


def test_a_damaged_step_is_passed_over_and_the_reason_is_in_the_log(interrupted, copied, run_job):
    newest = ckptctl.pick(str(copied)).path
    damaged = max(
        (path for path in [Path(newest), *Path(newest).rglob("*")] if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    damaged.write_bytes(damaged.read_bytes()[:-100])
    done = run_job(interrupted.framework, copied, "--steps", SAVED[-1] + 1)
    assert done.returncode == 0, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "ckptctl: resuming from" in line)
    assert f"not from step {SAVED[-1]}: " in line
    is_sealed = interrupted.framework in SEALED
    # torchtitan saves the weights alone in the last step, which is passed over.
    wanted = (SAVED[-1],) if interrupted.framework == "torchtitan" else (SAVED[-1], SAVED[-1] + 1)
    assert ckptctl.pick(str(copied), require_seal=is_sealed).step in wanted
    record(interrupted.framework, passed_over=True)
