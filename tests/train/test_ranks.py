"""Several ranks: one answer for all, whatever is wrong with one of them, and in bounded time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from command_line import validated
from damage import flip
from running import codes_of, losses, report_of, rows_of, run_job, samples

import ckptctl
from ckptctl.formats.dcp.metadata import decode_metadata

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """A folder with the root `run` of two ranks, with steps 3 and 6."""
    folder = tmp_path_factory.mktemp("two")
    done = run_job(folder, "--ranks", 2, "--steps", 6)
    assert codes_of(done) == [0], done.stderr
    return folder


@pytest.fixture
def folder(two_ranks, copy_of) -> Path:
    return copy_of(two_ranks)


def said_by_all(done, n_ranks: int) -> list[str]:
    """What each rank ended with, by rank."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    said = dict(line.split(": ", 1) for line in lines)
    return [said[f"rank {rank}"] for rank in range(n_ranks)]


def test_the_samples_go_on_in_one_order_from_four_ranks_to_two_to_three(tmp_path):
    options = ("--batch", 12, "--steps", 8, "--save-every", 2, "--dropout", 0)
    done = run_job(tmp_path, "--ranks", 4, *options, name="unbroken")
    assert codes_of(done) == [0], done.stderr
    unbroken = rows_of(tmp_path, "unbroken")
    done = run_job(tmp_path, "--ranks", 4, 2, 3, "--kill", "seal:1", "seal:2", *options)
    assert codes_of(done) == [-9, -9, 0], done.stderr
    rows = rows_of(tmp_path)
    assert samples(rows) == samples(unbroken)
    assert [row["samples_digest"] for row in rows.values()] == [
        row["samples_digest"] for row in unbroken.values()
    ]
    for step, loss in losses(unbroken).items():
        assert math.isclose(losses(rows)[step], loss, rel_tol=1e-4), step
    report = report_of(tmp_path)
    assert (report["step"], report["saved_world_size"], report["world_size"]) == (6, 2, 3)
    assert report["state"]["derived"] == ["rng"]
    validated(json.dumps(report))


@pytest.mark.long
def test_replicas_of_shards_go_on_to_the_last_bit(tmp_path):
    job = ("--ranks", 4, "--meshes", "2x2", "--steps", 8)
    done = run_job(tmp_path, *job, name="unbroken")
    assert codes_of(done) == [0], done.stderr
    done = run_job(tmp_path, *job, "--kill", "seal:2")
    assert codes_of(done) == [-9, 0], done.stderr
    assert losses(rows_of(tmp_path)) == losses(rows_of(tmp_path, "unbroken"))
    assert report_of(tmp_path)["step"] == 6


@pytest.mark.long
def test_replicas_of_shards_go_on_as_shards_of_four_ranks_and_of_two(tmp_path):
    options = ("--batch", 8, "--steps", 8, "--save-every", 2, "--dropout", 0)
    done = run_job(tmp_path, "--ranks", 4, "--meshes", "2x2", *options, name="unbroken")
    assert codes_of(done) == [0], done.stderr
    unbroken = rows_of(tmp_path, "unbroken")
    lives = ("--ranks", 4, 4, 2, "--meshes", "2x2", "4", "2", "--kill", "seal:1", "seal:2")
    done = run_job(tmp_path, *lives, *options)
    assert codes_of(done) == [-9, -9, 0], done.stderr
    rows = rows_of(tmp_path)
    assert samples(rows) == samples(unbroken)
    for step, loss in losses(unbroken).items():
        assert math.isclose(losses(rows)[step], loss, rel_tol=1e-4), step
    report = report_of(tmp_path)
    assert (report["step"], report["saved_world_size"], report["world_size"]) == (6, 4, 2)


def test_the_random_numbers_of_one_rank_show_in_the_losses(two_ranks, copy_of):
    exact, forgotten = copy_of(two_ranks), copy_of(two_ranks)
    assert codes_of(run_job(exact, "--ranks", 2, "--steps", 8)) == [0]
    done = run_job(forgotten, "--ranks", 2, "--steps", 8, "--forget", "rng-of-one-rank")
    assert codes_of(done) == [0], done.stderr
    assert losses(rows_of(forgotten))[7] != losses(rows_of(exact))[7]


def test_a_step_that_one_rank_cannot_load_is_passed_over_by_all(folder):
    step = folder / "run" / "step_6"
    damage_rank(step, 1)
    done = run_job(folder, "--ranks", 2, "--steps", 8, "--options", '{"level": "listing"}')
    assert codes_of(done) == [0], done.stderr
    report = report_of(folder)
    assert (report["step"], report["fell_back"], report["superseded"]) == (3, True, [6])
    assert "rank 1" in report["rejected"][0]["reason"]
    assert ckptctl.verify(str(step), require_seal=True, level="content").usable  # saved anew


def damage_rank(step: Path, rank: int) -> None:
    """Flip a byte of the longest record that a rank wrote."""
    metadata = decode_metadata((step / ".metadata").read_bytes())
    ranges = [c.byte_range for t in metadata.tensors.values() for c in t.chunks]
    longest = max((r for r in ranges if r.file == f"__{rank}_0.distcp"), key=lambda r: r.length)
    path = step / longest.file
    flip(path, longest.offset + longest.length // 2)


def test_a_rank_that_sees_an_empty_mount_is_named_and_nobody_loads(folder, tmp_path):
    (tmp_path / "empty" / "run").mkdir(parents=True)
    hook = tmp_path / "hook.py"
    hook.write_text(
        f"os.chdir({str(tmp_path / 'empty')!r} if rank == 1 else {str(folder)!r})\n"
        "options.root = 'run'\n"
    )
    done = run_job(
        folder, "--ranks", 3, "--steps", 8, "--hook", hook, "--options", '{"settle_s": 0.5}'
    )
    assert codes_of(done) == [75]
    for said in said_by_all(done, 3):
        assert said.startswith("StorageUnavailable: rank 1 on ")
        assert "this machine does not see the files of rank 0" in said
    assert [path.name for path in sorted((folder / "run").glob("step_*"))] == ["step_3", "step_6"]


def test_a_rank_that_dies_in_the_middle_of_a_resume_ends_the_others(folder, tmp_path):
    hook = tmp_path / "hook.py"
    hook.write_text(
        "from ckptctl.train import resuming\n"
        "def die(*args): os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 1: resuming.read_into = die\n"
    )
    done = run_job(folder, "--ranks", 3, "--steps", 8, "--hook", hook)
    assert codes_of(done)[0] in (75, -9)
    lines = [line for line in done.stderr.splitlines() if "RanksLost" in line]
    assert [line[:7] for line in sorted(lines)] == ["rank 0:", "rank 2:"]
    assert ckptctl.pick(str(folder / "run")).step == 6


def test_a_step_that_is_deleted_under_all_ranks_is_passed_over(folder, tmp_path):
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import shutil\n"
        "from ckptctl.train import resuming\n"
        "opened = resuming.open_on_all\n"
        "def removed(chosen, *rest):\n"
        "    step = opened(chosen, *rest)\n"
        "    if chosen.number == 6 and rank == 0: shutil.rmtree(chosen.url)\n"
        "    return step\n"
        "resuming.open_on_all = removed\n"
    )
    done = run_job(folder, "--ranks", 2, "--steps", 8, "--hook", hook)
    assert codes_of(done) == [0], done.stderr
    assert report_of(folder)["step"] == 3


def test_an_orphan_of_several_ranks_ends_alike_on_all_of_them(folder, tmp_path):
    hook = tmp_path / "hook.py"
    hook.write_text(
        "from ckptctl.selection import history\n"
        "from ckptctl.train import saving\n"
        "real, asked = saving.check_token, []\n"
        "def taken_over(store, token):\n"
        "    asked.append(1)\n"
        "    if len(asked) == 2: history.take_token(store, lambda before: 'another')\n"
        "    real(store, token)\n"
        "saving.check_token = taken_over\n"
    )
    done = run_job(folder, "--ranks", 2, "--steps", 9, "--hook", hook)
    assert codes_of(done) == [93]
    for said in said_by_all(done, 2):
        assert said.startswith("Fenced: ")
        assert "attempt another took the root over" in said
    assert not (folder / "run" / "step_9" / ".metadata").exists()


@pytest.mark.parametrize("lost_on", [None, 1])
def test_a_loss_that_one_rank_alone_lost_leaves_the_resumed_step_unconfirmed(
    folder, tmp_path, lost_on
):
    hook = tmp_path / "hook.py"
    hook.write_text(
        "noted = Checkpointer.note\n"
        "def note(self, step, *, loss=None):\n"
        f"    lost = rank == {lost_on} and step == 7\n"
        "    noted(self, step, loss=float('nan') if lost else loss)\n"
        "Checkpointer.note = note\n"
    )
    options = json.dumps({"confirm_after": 3})
    done = run_job(folder, "--ranks", 2, "--steps", 9, "--options", options, "--hook", hook)
    assert codes_of(done) == [0], done.stderr
    codes = {one.code for one in ckptctl.verify(f"{folder / 'run'}@6").findings}
    assert ("step.confirmed" in codes) == (lost_on is None)
