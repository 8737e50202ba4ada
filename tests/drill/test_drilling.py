"""A drill injects real faults into real jobs on copies, and never touches the real root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment, run_ckptctl, validated
from supervisor.supervised_root import processes_with

from ckptctl.drill.copying import copy_step, fingerprint
from ckptctl.drill.faults import FAULTS
from ckptctl.options import StorageOptions

STOCK = Path(__file__).with_name("stock_job.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "drill" / "train.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def root(framework_roots: Path, tmp_path: Path) -> Path:
    """A root with one usable step."""
    source = framework_roots / "kempnerforge" / "checkpoints" / "step_30"
    copy_step(str(source.parent), source.name, tmp_path / "ckpt", StorageOptions())
    return tmp_path / "ckpt"


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--", "true"), "does not say where its root belongs"),
        ((), "the command is missing"),
        (("--work", "ckpt/drill", "--", "true", "{root}"), "is in the root"),
        (("--work", "ckpt", "--", "true", "{root}"), "already exists"),
        (("--fault", "meteor", "--", "true", "{root}"), "'meteor' is no fault"),
    ],
)
def test_what_could_reach_the_real_root_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
):
    monkeypatch.chdir(root.parent)
    before = fingerprint(str(root), StorageOptions())
    done = run_ckptctl("drill", "--root", "ckpt", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("ckptctl drill") == 1, done.stderr  # one command comes next
    assert fingerprint(str(root), StorageOptions()) == before


def test_a_root_without_a_step_ends_as_pick_does(tmp_path: Path):
    (tmp_path / "ckpt").mkdir()
    words = ("--work", tmp_path / "drill", "--", "true", "{root}")
    assert run_ckptctl("drill", "--root", tmp_path / "ckpt", *words).returncode == 10
    assert not (tmp_path / "drill").exists()


def test_a_job_that_saves_nothing_is_refused_with_its_log(root: Path, tmp_path: Path):
    words = ("--work", tmp_path / "drill", "--", "sh", "-c", 'echo "step 1 loss 2.5"', "{root}")
    done = run_ckptctl("drill", "--root", root, *words)
    assert done.returncode == 2
    assert "the job ended before it saved 2 steps" in done.stderr
    assert str(tmp_path / "drill" / "no-fault" / "logs" / "1" / "output.log") in done.stderr


# Copies


def test_a_copy_shares_no_file_with_the_step(root: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    assert copy_step(str(root), "step_30", copy, StorageOptions()) in ("reflink", "copy")
    files = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file())
    for path in files:
        assert (root / path).read_bytes() == (copy / path).read_bytes()
        assert (root / path).stat().st_ino != (copy / path).stat().st_ino


def test_every_change_of_a_root_shows_in_its_fingerprint(root: Path):
    seen = {fingerprint(str(root), StorageOptions())}
    (shard,) = root.glob("step_30/__0_0.distcp")
    about, data = shard.stat(), shard.read_bytes()
    assert {fingerprint(str(root), StorageOptions())} == seen, "a read changes nothing"
    shard.write_bytes(data)
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))
    seen.add(fingerprint(str(root), StorageOptions()))
    (root / "new").touch()
    seen.add(fingerprint(str(root), StorageOptions()))
    (root / "new").unlink()
    seen.add(fingerprint(str(root), StorageOptions()))
    assert len(seen) == 4


# Real jobs


def drilled(tmp_path: Path, *words: object, exit_code: int = 0) -> dict[str, dict]:
    """The trials of a drill by their faults; the root must be as it was."""
    done = run_ckptctl(
        *("drill", "--root", tmp_path / "ckpt", "--work", tmp_path / "drill", "--json", *words),
        env=ONE_THREAD,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    found = validated(done.stdout)
    assert found["root_unchanged"]
    assert processes_with(str(tmp_path)) == []
    assert not list((tmp_path / "drill").glob("*/root")), "the copies are removed"
    for name in ("report.md", "report.html"):
        assert found["message"] in (tmp_path / "drill" / name).read_text()
    return {trial["fault"]: trial for trial in found["trials"]}


def trained(*words: object) -> None:
    """Run a job to its end, whatever that is."""
    command = [*TORCHRUN, *map(str, words)]
    subprocess.run(command, env=clean_environment(**ONE_THREAD), capture_output=True)


@pytest.mark.torch
@pytest.mark.slow
def test_a_script_of_stock_dcp_survives_a_damaged_shard(tmp_path: Path):
    trained(STOCK, "--root", tmp_path / "ckpt", "--steps", 10)
    trials = drilled(
        *(tmp_path, "--fault", "shard-damaged", "--"),
        *(*TORCHRUN, STOCK, "--root", "{root}", "--resume-from", "{step}"),
    )
    damaged = trials["shard-damaged"]
    assert damaged["problems"] == []
    assert damaged["resumed_from"] == damaged["expected_step"] >= 20
    assert damaged["lost_steps"] >= 10
    assert damaged["loss"] == "continuous"


@pytest.mark.torch
@pytest.mark.long
def test_the_example_survives_every_fault(tmp_path: Path):
    job = (EXAMPLE, "--save-every", 8, "--steps", 160, "--pace", 0.3)
    trained(*job, "--root", tmp_path / "ckpt", "--kill-rank", 10)
    words = (*TORCHRUN, *job, "--root", "{root}")
    trials = drilled(tmp_path, "--seed", 2, "--", *words)
    assert [*trials] == [*FAULTS]
    assert all(trial["problems"] == [] for trial in trials.values()), trials
    stopped = trials["rank-stopped"]
    assert (stopped["cause"], len(stopped["ranks"])) == ("hang", 1)


@pytest.mark.torch
@pytest.mark.long
def test_a_job_that_forgets_its_state_fails_the_drill(tmp_path: Path):
    trained(STOCK, "--root", tmp_path / "ckpt", "--steps", 10)
    trials = drilled(
        *(tmp_path, "--fault", "rank-killed", "--"),
        *(*TORCHRUN, STOCK, "--forgets", "--root", "{root}", "--resume-from", "{step}"),
        exit_code=33,
    )
    assert trials["rank-killed"]["problems"]
