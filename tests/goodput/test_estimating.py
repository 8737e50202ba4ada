"""What a failure costs, from numbers that are given and from what lies under a root."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import UsageError
from ckptctl.goodput.estimating import measured


@pytest.fixture
def root(framework_roots: Path, tmp_path: Path) -> Path:
    """Five steps, 100 apart and saved every 600 s, each within 30 s; one restart in between."""
    source = framework_roots / "kempnerforge" / "checkpoints" / "step_30"
    at = 1_700_000_000
    for number in (100, 200, 300, 400, 500):
        step = tmp_path / "root" / f"step_{number}"
        shutil.copytree(source, step)
        at += 7200 if number == 300 else 600
        files = sorted(one for one in step.rglob("*") if one.is_file())
        for place, file in enumerate(files):
            seconds = at - 30 + 30 * place // (len(files) - 1)
            os.utime(file, (seconds, seconds))
    return tmp_path / "root"


def test_the_times_of_saves_are_those_of_their_files(root):
    seen = measured(str(root))
    assert (seen.n_steps, seen.interval_s, seen.save_s) == (5, 600, 30)
    assert seen.n_bytes == sum(
        f.stat().st_size for f in (root / "step_100").rglob("*") if f.is_file()
    )


def test_a_seal_that_came_later_does_not_make_a_save_longer(root):
    own = root / "step_500" / ".ckptctl"
    own.mkdir(exist_ok=True)
    (own / "seal.json").write_text("{}")
    assert measured(str(root)).save_s == 30


def test_a_root_of_one_step_says_how_long_it_took_and_not_how_often(root):
    for number in (100, 200, 300, 400):
        shutil.rmtree(root / f"step_{number}")
    seen = measured(str(root))
    assert (seen.interval_s, seen.save_s) == (None, 30)
    found = ckptctl.recovery_cost(str(root))
    assert found.per_failure_s is None
    assert found.message.startswith("fewer than two saves")


def test_the_times_of_a_copy_measure_nothing(root):
    for each in root.rglob("*"):
        os.utime(each, (1_700_000_000, 1_700_000_000))
    seen = measured(str(root))
    assert (seen.interval_s, seen.save_s) == (None, None)
    assert "times of a copy" in ckptctl.recovery_cost(str(root)).message


def test_what_is_measured_and_what_is_given_are_told_apart(root):
    found = ckptctl.recovery_cost(str(root), mtbf_s=11124, load_s=240, save_s=60)
    sources = {one.name: (one.value, one.source) for one in found.given}
    assert sources["interval"] == (600, "measured")
    assert sources["save"] == (60, "given")
    assert (found.rollback_s, found.startup_s, found.per_failure_s) == (300, 240, 540)
    assert found.daly_s == pytest.approx(1115.7, abs=0.1)
    assert found.share < found.best_share < 0.9


@pytest.mark.parametrize(("parts", "total"), [((5, 30, 67, 3), 1905), ((5, 30, 120, 90), 2045)])
def test_the_recovery_times_of_a_published_job(parts, total):
    reschedule, connect, compiling, load = parts
    found = ckptctl.recovery_cost(
        interval_s=3600,
        reschedule_s=reschedule,
        connect_s=connect,
        load_s=load,
        compile_s=compiling,
    )
    assert found.per_failure_s == total
    assert found.next_command == "ckptctl cost --interval 3600 --mtbf TIME"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "the interval between saves is unknown"),
        ({"interval_s": 0}, "--interval is 0"),
        ({"interval_s": float("nan")}, "--interval is nan"),
        ({"interval_s": 1, "mtbf_s": float("inf")}, "--mtbf is inf"),
        ({"interval_s": 1, "load_s": -1}, "--load is -1"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, says):
    with pytest.raises(UsageError, match=says):
        ckptctl.recovery_cost(**wrong)


def test_a_save_that_takes_the_whole_interval_is_refused():
    with pytest.raises(ckptctl.UsageError, match="must be shorter than --interval"):
        ckptctl.recovery_cost(interval_s=3600, save_s=3600, mtbf_s=3600)
