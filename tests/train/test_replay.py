"""A replay trains steps again that the run has logged, and leaves the run as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl
from running import codes_of, rows_of, run_job
from services.processes import wait_until

torch = pytest.importorskip("torch")

from one_process import Job, run  # noqa: E402

from ckptctl.errors import NothingToResume, UsageError  # noqa: E402
from ckptctl.formats.own.files import ATTEMPTS_FOLDER  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The root of a job that ended well; it holds steps 3, 6, 9 and 12."""
    root = tmp_path_factory.mktemp("finished") / "run"
    run(root)
    return root


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory) -> Path:
    """A folder with the root and the log of a job of two ranks that ended well."""
    folder = tmp_path_factory.mktemp("on-two-ranks")
    assert codes_of(run_job(folder, "--ranks", 2)) == [0]
    return folder


@pytest.fixture
def root(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def everything(root: Path) -> dict[str, tuple[int, bytes]]:
    """All that lies below a root: each file's bytes, and when each thing was written."""
    return {
        str(path.relative_to(root)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in (root, *root.rglob("*"))
    }


def compare(run_log: Path, canary_log: Path) -> tuple[int, dict]:
    """What `ckptctl loss --canary` says of the log of the run and that of the replay."""
    done = run_ckptctl("loss", "--canary", run_log, canary_log, "--json")
    return done.returncode, validated(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgotten", "verdict", "code"), [("", "continuous", 0), ("optimizer", "suspect", 32)]
)
def test_a_replay_proves_a_resume_that_is_right_and_shows_one_that_is_not(
    on_two_ranks, tmp_path, forgotten, verdict, code
):
    root, canary = on_two_ranks / "run", tmp_path / "canary.jsonl"
    before = everything(root)
    lost = json.dumps({"accept_lost": [forgotten] * bool(forgotten)})
    done = run_job(
        *(on_two_ranks, "--ranks", 2, "--replay", 5, "--forget", forgotten, "--out", canary),
        *("--options", lost),
    )
    assert codes_of(done) == [0]
    assert everything(root) == before
    assert list(rows_of(tmp_path, "canary")) == [7, 8, 9, 10, 11]
    found = compare(on_two_ranks / "run.jsonl", canary)
    assert (found[1]["verdict"], found[0]) == (verdict, code)
    assert "replay: steps 7 to 11 are trained again; nothing is saved" in done.stderr
    assert done.stderr.count("replay: step 9 is not saved") == 1


@pytest.mark.parametrize(("n_steps", "step"), [(1, 9), (3, 9), (4, 6), (6, 6), (9, 3)])
def test_a_replay_begins_at_the_newest_step_that_lies_far_enough_back(root, n_steps, step):
    job = Job(root)
    start = job.ckpt.resume(replay=n_steps)
    assert (start.step, start.last) == (step, step + n_steps)
    assert (start.fresh, start.fell_back, start.report_path) == (False, False, None)
    assert validated(json.dumps(dict(start.report)))["superseded"] == []
    job.ckpt.close()


def test_a_replay_of_a_named_step_begins_there(root):
    job = Job(root)
    start = job.ckpt.resume(3, replay=4)
    assert (start.step, start.last) == (3, 7)
    job.ckpt.close()


def test_a_replay_beside_the_run_takes_nothing_from_it(root):
    training = Job(root)
    training.resume()
    ledger = max(root.glob(f"{ATTEMPTS_FOLDER}/*.jsonl"))
    # A thread writes the last line of a resume.
    wait_until(lambda: len(ledger.read_text().splitlines()) == 2, what=f"line 2 of {ledger}")
    before = everything(root)
    beside = Job(root, keep=1)
    start = beside.ckpt.resume(replay=3)
    beside.train(start.step + 1, 12, save=beside.ckpt.save_async)
    beside.ckpt.failed("something")
    beside.ckpt.close()
    assert everything(root) == before
    training.train(13, 15)
    training.die()


def test_a_save_behind_the_replay_is_refused(root):
    job = Job(root)
    job.ckpt.resume(replay=3)
    with pytest.raises(UsageError, match="the replay ends after step 12, so step 15"):
        job.ckpt.save(15)
    job.ckpt.close()


def test_where_no_step_lies_far_enough_back_the_replay_says_so(root):
    job = Job(root)
    with pytest.raises(
        NothingToResume, match=r"no usable step lies 10 or more steps before step 12"
    ):
        job.ckpt.resume(replay=10)
    job.die()


def test_a_root_without_steps_has_nothing_to_train_again(tmp_path):
    job = Job(tmp_path / "run")
    with pytest.raises(NothingToResume, match="contains no complete step"):
        job.ckpt.resume(replay=5)
    job.die()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("resume_from", "n_steps", "words"),
    [("auto", 0, "must be at least 1"), ("none", 5, "starts from a step")],
)
def test_a_replay_that_means_nothing_is_refused(root, resume_from, n_steps, words):
    job = Job(root)
    with pytest.raises(UsageError, match=words):
        job.ckpt.resume(resume_from, replay=n_steps)
    job.die()


def test_a_replay_passes_over_a_damaged_step(root):
    (root / "step_9" / ".metadata").unlink()
    job = Job(root)
    start = job.ckpt.resume(replay=3)
    assert (start.step, start.fell_back) == (6, True)
    assert [one.step for one in start.rejected] == [9]
    job.ckpt.close()
