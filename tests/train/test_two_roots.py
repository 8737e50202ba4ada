"""One run in two roots: the step that a resume takes, and what it marks and records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import clean_environment, validated
from storage.faulty import FaultyStore

torch = pytest.importorskip("torch")

from one_process import Job, run  # noqa: E402
from running import codes_of, run_job  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import AccessDenied, StorageUnavailable  # noqa: E402
from ckptctl.findings import Verdict  # noqa: E402
from ckptctl.storage.opening import open_store  # noqa: E402
from ckptctl.train import checkpointer  # noqa: E402

pytestmark = [pytest.mark.torch]


class Second:
    """The second root, and what opens it."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self.options = options

    def verdicts(self) -> dict[int | None, Verdict]:
        found = ckptctl.scan(self.url, grace_s=0.0, **self.options)
        return {report.number: report.verdict for report in found.reports}


@pytest.fixture
def first(tmp_path: Path) -> str:
    """A root with steps 3 and 6."""
    root = tmp_path / "first"
    run(root, 6)
    return str(root)


@pytest.fixture(
    params=["local", pytest.param("s3_moto", marks=[pytest.mark.server, pytest.mark.slow])]
)
def second(request: pytest.FixtureRequest, first: str, tmp_path: Path) -> Second:
    """Another root, with step 9 of the same run."""
    (tmp_path / "second").mkdir()
    found = Second(str(tmp_path / "second"), {})
    if request.param != "local":
        s3 = request.getfixturevalue(request.param)
        found = Second(f"s3://{s3.bucket}/{uuid.uuid4().hex}", {"storage_options": s3.options})
    with open_store(found.url, **found.options) as store:
        store.put(".ckptctl/began", b"")  # a root that does not exist is refused
    run([found.url, first], 9, **found.options)
    return found


@pytest.fixture
def local(first: str, tmp_path: Path) -> str:
    """The second root, on a file system."""
    root = tmp_path / "second"
    root.mkdir()
    run([str(root), first], 9)
    return str(root)


def verdicts(root: str) -> dict[int | None, Verdict]:
    return Second(root, {}).verdicts()


def taken(*roots: str, **options: Any) -> str | None:
    return ckptctl.pick(*roots, grace_s=0.0, **options).path


def test_a_job_resumes_from_the_newest_step_of_both_roots_and_saves_to_the_first(first, second):
    job = run([first, second.url], 12, **second.options)
    assert job.start.step == 9
    assert job.start.path.startswith(second.url)
    assert taken(first, second.url, **second.options) == f"{first}/step_12"
    assert set(second.verdicts()) == {9}


def test_resuming_supersedes_newer_steps_in_both_roots(first, second):
    job = Job([first, second.url], **second.options)
    start = job.resume(3)
    job.die()
    assert (start.report["superseded"], start.report["warnings"]) == ([6, 9], [])
    assert verdicts(first) == {6: Verdict.SUPERSEDED, 3: Verdict.COMPLETE}
    assert second.verdicts() == {9: Verdict.SUPERSEDED}
    assert taken(first, second.url, **second.options) == f"{first}/step_3"


@pytest.mark.parametrize("seal", [True, False])
def test_steps_of_an_optional_root_that_was_absent_are_not_taken_when_it_is_back(
    first, tmp_path, seal
):
    second, away = tmp_path / "second", tmp_path / "away"
    second.mkdir()
    run([str(second), first], 9, seal=seal)
    second.rename(away)
    job = Job(first, optional_roots=[str(second)])
    start = job.resume("auto")
    assert start.step == 6
    assert "does not exist" in start.report["warnings"][0]
    assert any(line.startswith("warning: ") and str(second) in line for line in job.said)
    job.die()
    away.rename(second)
    for roots in ((first, str(second)), (str(second), first)):
        assert taken(*roots) == f"{first}/step_6"
    found = ckptctl.scan(first, str(second), grace_s=0.0)
    assert found.chosen == f"{first}/step_6"
    assert {report.number: report.verdict for report in found.reports}[9] is Verdict.SUPERSEDED
    assert run(first, 9, optional_roots=[str(second)]).start.step == 6
    assert taken(first, optional_roots=[str(second)]) == f"{first}/step_9"


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that has writes of `Checkpointer` into a root fail; the rest is real."""

    def breaks(root: str) -> None:
        def opened(url: str, *args: Any, **kwargs: Any) -> Any:
            store = open_store(url, *args, **kwargs)
            if url != root:
                return store
            broken = FaultyStore(store)
            broken.fail("put", AccessDenied(f"{root}: read-only file system"), lasts=True)
            return broken

        monkeypatch.setattr(checkpointer, "open_store", opened)

    return breaks


@pytest.mark.parametrize("optional", [True, False])
def test_steps_of_a_root_that_cannot_be_written_to_are_ruled_out_by_the_record(
    first, local, read_only, optional
):
    os.utime(f"{local}/step_9/.metadata", (4e9, 4e9))  # a clock that is far ahead
    read_only(local)
    about: Any = {"optional_roots": [local]} if optional else {}
    job = Job([first, local], **about)
    start = job.resume(3)
    job.die()
    assert start.report["superseded"] == [6]
    assert "read-only" in start.report["warnings"][0]
    assert verdicts(local) == {9: Verdict.COMPLETE}
    assert taken(first, local) == f"{first}/step_3"
    (record,) = Path(first, ".ckptctl", "branches").glob("*.from-3.json")
    assert validated(record.read_text())["step"] == 3
    report = max(Path(first, ".ckptctl", "attempts").glob("*.resume.json"))
    assert validated(report.read_text())["warnings"] == start.report["warnings"]


@pytest.mark.parametrize("damage", [b"", b"{", b"\x00" * 400])
def test_a_record_that_is_damaged_counts_by_its_name(first, local, read_only, damage):
    read_only(local)
    job = Job([first, local])
    job.resume(3)
    job.die()
    (record,) = Path(first, ".ckptctl", "branches").glob("*.from-3.json")
    record.write_bytes(damage)
    assert taken(first, local) == f"{first}/step_3"


def test_a_step_that_was_left_can_be_resumed_from_by_its_path_and_is_of_the_branch_again(
    first, local, read_only
):
    read_only(local)
    for resume_from in (3, f"{local}/step_9"):
        job = Job([first, local])
        job.resume(resume_from)
        job.die()
    assert taken(first, local) == f"{local}/step_9"


@pytest.mark.parametrize("seal", [True, False])
def test_a_step_that_came_into_the_other_root_after_the_resume_is_taken(first, local, seal):
    job = run([first, local], 12, seal=seal)
    assert job.start.step == 9
    shutil.copytree(f"{first}/step_12", f"{local}/step_12")
    shutil.rmtree(f"{first}/step_12")
    assert taken(first, local) == f"{local}/step_12"


def test_a_step_that_another_checkpointer_of_the_job_saves_is_taken(first, local):
    slow, fast = Job([first, local]), Job([local, first])
    assert [fast.resume().step, slow.resume().step] == [9, 9]
    time.sleep(1.1)  # a seal is dated to the second
    fast.train(10, 12)
    slow.die()
    fast.die()
    assert taken(first, local) == f"{local}/step_12"


def test_a_copy_of_a_step_that_stands_in_the_first_root_is_taken(first, local, read_only):
    read_only(local)
    job = Job([first, local])
    job.resume(3)
    job.die()
    shutil.copytree(f"{local}/step_9", f"{first}/step_9")
    assert taken(first, local) == f"{first}/step_9"
    assert taken(local, first) == f"{local}/step_9"


@pytest.mark.slow
def test_a_job_that_is_killed_between_the_record_and_the_marks_leaves_no_step_to_be_taken(
    first, local, tmp_path
):
    hook = tmp_path / "hook.py"
    hook.write_text(
        "from ckptctl.train import abandoning\n"
        "real = abandoning.supersede\n"
        "def killed(held, branch, step):\n"
        f"    if branch.store.url == {local!r}:\n"
        "        os.killpg(os.getpgid(0), signal.SIGKILL)\n"
        "    return real(held, branch, step)\n"
        "abandoning.supersede = killed\n"
    )
    options = ("--ranks", 1, "--other-root", local, "--resume-from", 3, "--hook", hook)
    done = run_job(tmp_path, *options, name="first")
    assert codes_of(done) == [-9], done.stderr
    assert verdicts(local) == {9: Verdict.COMPLETE}
    assert taken(first, local) == f"{first}/step_3"


@pytest.mark.slow
def test_two_ranks_resume_from_the_second_root_and_are_killed_and_go_on(first, local, tmp_path):
    options = ("--ranks", 2, "--other-root", local, "--steps", 15, "--kill", "metadata:2")
    done = run_job(tmp_path, *options, name="first")
    assert codes_of(done) == [-9, 0], done.stderr
    reports = sorted(Path(first, ".ckptctl", "attempts").glob("*.resume.json"))
    assert [json.loads(path.read_text())["step"] for path in reports[-2:]] == [9, 12]
    assert taken(first, local) == f"{first}/step_15"


def test_a_step_of_the_second_root_that_proves_bad_twice_is_rejected_there(first, local):
    for _ in range(2):
        job = Job([first, local])
        assert job.resume().step == 9
        job.ckpt.note(10)
        job.ckpt.failed("the same in both")
        job.ckpt.close()
    assert run([first, local], 6).start.step == 6
    assert verdicts(local) == {9: Verdict.REJECTED}


def test_a_bad_step_of_a_root_that_cannot_be_written_to_is_passed_over(first, local, read_only):
    read_only(local)
    for _ in range(2):
        job = Job([first, local])
        assert job.resume().step == 9
        job.ckpt.note(10)
        job.ckpt.failed("the same in both")
        job.ckpt.close()
    job = Job([first, local])
    assert job.resume().step == 6
    job.die()
    assert taken(first, local) == f"{first}/step_6"


def test_a_new_run_makes_every_mandatory_root_and_starts_again(tmp_path):
    roots = [str(tmp_path / "a"), str(tmp_path / "b")]
    gone = str(tmp_path / "gone")
    job = Job(roots, optional_roots=[gone])
    assert job.resume().fresh
    job.die()
    assert [os.path.exists(f"{root}/.ckptctl/root.json") for root in roots] == [True, True]
    assert not os.path.exists(gone)
    assert run(roots, 3, optional_roots=[gone]).start.fresh
    assert taken(*roots) == f"{roots[0]}/step_3"


def test_a_mandatory_root_that_is_gone_stops_a_resume(first, local):
    shutil.rmtree(local)
    job = Job([first, local])
    with pytest.raises(StorageUnavailable, match="a newer step may be"):
        job.resume()
    job.die()


def test_run_writes_the_sentinel_into_every_mandatory_root(tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    words = [word for root in roots for word in ("--root", str(root))]
    command = [sys.executable, "-m", "ckptctl", "run", *words, "--create", "--", "true"]
    for _ in range(2):
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert all((root / ".ckptctl" / "root.json").exists() for root in roots)


def test_what_is_rejected_in_another_root_does_not_count_as_kept(first, tmp_path):
    second = tmp_path / "second"
    shutil.copytree(f"{first}/step_3", second / "step_3")
    job = Job([first, str(second)], keep=2)
    job.resume()
    job.train(7, 12)
    job.ckpt._retention.wait()
    shutil.copytree(f"{first}/step_12", second / "step_12")
    ckptctl.mark(str(second / "step_12"), "rejected", reason="the loss diverges")
    job.train(13, 15)
    job.ckpt._retention.wait()
    job.die()
    assert {path.name for path in Path(first).glob("step_*")} == {
        *("step_6", "step_9", "step_12", "step_15")  # it resumed from step 6
    }
    ckptctl.mark(f"{first}/step_15", "rejected", reason="the loss diverges")
    assert taken(first, str(second)) == f"{first}/step_9"
