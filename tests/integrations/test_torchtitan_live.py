"""torchtitan's checkpoint manager with proven steps, on two ranks, with asynchronous saves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from live_frameworks import Run, record

import ckptctl
from ckptctl.loss.verdict import LossVerdict

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]

SAVED = (12, 24, 36)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, run_job: Run) -> tuple[Path, Path]:
    """The root and the console of a run that was killed on all ranks after its third save."""
    folder = tmp_path_factory.mktemp("torchtitan")
    done = run_job("torchtitan", folder / "run", "--kill-at", 44)
    assert "exitcode: -9" in done.stdout or "exitcode  : -9" in done.stdout, done.stdout
    (folder / "console").write_text(done.stdout)
    return folder / "run", folder / "console"


@pytest.fixture
def copied(interrupted, tmp_path) -> Path:
    shutil.copytree(interrupted[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_console_shows_whether_the_resume_was_right(
    interrupted, copied, run_job, tmp_path, is_wrong
):
    done = run_job("torchtitan", copied, *(["--wrong"] if is_wrong else []))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ckptctl: resuming from step 36") == 1
    (tmp_path / "console").write_text(done.stdout)
    report = ckptctl.check_loss([str(interrupted[1]), str(tmp_path / "console")])
    wanted = LossVerdict.DISCONTINUOUS if is_wrong else LossVerdict.CONTINUOUS
    assert report.verdict is wanted, report.message
    # The last step holds weights alone, as torchtitan saves it by default.
    assert ckptctl.pick(str(copied)).step == SAVED[-1]
    record("torchtitan", **{"wrong" if is_wrong else "right": report.verdict.value})


def test_every_asynchronous_save_is_sealed(copied, run_job):
    done = run_job("torchtitan", copied)
    assert done.returncode == 0, done.stdout
    for number in (*SAVED, 48):
        report = ckptctl.verify(f"{copied}@{number}", level="content", require_seal=True)
        assert report.exit_code == 0, report.findings
    record("torchtitan", sealed=True)


def test_a_damaged_step_is_passed_over(copied, run_job):
    shard = copied / "step-36" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    done = run_job("torchtitan", copied, "--steps", 36)
    assert done.returncode == 0, done.stdout
    assert "ckptctl: resuming from step 24" in done.stdout
    assert "not from step 36: " in done.stdout
    record("torchtitan", passed_over=True)
