"""The phases of a job run in order, each with its own budget, state and logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import run_ckptctl, validated
from storage.faulty import FaultyStore

from ckptctl.errors import StorageUnavailable
from ckptctl.options import StorageOptions
from ckptctl.storage.opening import open_store
from ckptctl.supervisor import phases, state
from ckptctl.supervisor.options import RunOptions


def job(tmp_path: Path, *phases: tuple[str, str], more: str = "") -> Path:
    """A job file with phases of a name and a shell command."""
    path = tmp_path / "job.toml"
    tables = [
        f"[[phase]]\nname = '{name}'\ncommand = ['sh', '-c', '''{command}''']\n{more}"
        for name, command in phases
    ]
    path.write_text("\n".join(tables))
    return path


def run(root: Path, job: Path, *words: object):
    return run_ckptctl("run", "--root", root, "--backoff", 0, "--job", job, *words)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_phase_begins_only_after_the_one_before_it_was_done(root: Path, tmp_path: Path):
    fails = job(tmp_path, ("pretrain", "exit 2"), ("anneal", f"touch {tmp_path}/ran"))
    assert run(root, fails).returncode == 2
    assert not (tmp_path / "ran").exists()
    works = job(tmp_path, ("pretrain", "true"), ("anneal", f"touch {tmp_path}/ran"))
    assert run(root, works).returncode == 0
    assert (tmp_path / "ran").exists()


def test_a_later_invocation_continues_with_the_first_phase_that_is_not_done(
    root: Path, tmp_path: Path
):
    count = f"echo pretrain >> {tmp_path}/ran"
    phases = ("pretrain", count), ("anneal", f"[ -e {tmp_path}/mended ] || exit 2")
    assert run(root, job(tmp_path, *phases)).returncode == 2
    (tmp_path / "mended").touch()
    again = run(root, job(tmp_path, *phases))
    assert again.returncode == 0
    assert "pretrain: done before" in again.stderr
    assert lines(tmp_path / "ran") == ["pretrain"]


def test_a_phase_that_is_done_does_not_run_again_when_the_storage_fails(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    phase = phases.Phase("pretrain", ("sh", "-c", f"echo ran >> {tmp_path}/ran"))
    assert phases.run_phases([phase], str(root), RunOptions()).exit_code == 0

    def opened(url: str, storage: StorageOptions) -> FaultyStore:
        store = FaultyStore(open_store(url, storage))
        store.fail("list_dir", StorageUnavailable("no answer"), path=".ckptctl/supervisor/pretrain")
        return store

    monkeypatch.setattr(state, "open_store", opened)
    with pytest.raises(StorageUnavailable):
        phases.run_phases([phase], str(root), RunOptions(wait_s=0))
    assert lines(tmp_path / "ran") == ["ran"]


def test_each_phase_has_its_own_budget(root: Path, tmp_path: Path):
    once = f"echo x >> {tmp_path}/$CKPTCTL_RESTART_COUNT"
    flaky = f"{once}; [ $CKPTCTL_RESTART_COUNT = 2 ]"
    path = job(tmp_path, ("a", flaky), ("b", flaky), more="max-restarts = 2\n")
    done = run(root, path, "--json")
    assert done.returncode == 0
    attempts = validated(done.stdout)["attempts"]
    assert [(each["phase"], each["number"]) for each in attempts] == [
        *(("a", n) for n in (1, 2, 3)),
        *(("b", n) for n in (1, 2, 3)),
    ]


def test_a_validation_that_fails_starts_again_from_its_beginning(root: Path, tmp_path: Path):
    validate = f"echo begin >> {tmp_path}/said; [ $CKPTCTL_RESTART_COUNT = 1 ] && echo end"
    assert run(root, job(tmp_path, ("validate", f"{validate} >> {tmp_path}/said"))).returncode == 0
    assert lines(tmp_path / "said") == ["begin", "begin", "end"]


def test_every_attempt_has_its_own_log_and_the_decisions_are_in_run_log(root: Path, tmp_path: Path):
    talks = "echo attempt $CKPTCTL_RESTART_COUNT; echo error >&2; [ $CKPTCTL_RESTART_COUNT = 1 ]"
    assert run(root, job(tmp_path, ("train", talks))).returncode == 0
    logs = root / ".ckptctl" / "supervisor" / "logs"
    for n in (1, 2):
        assert lines(logs / "train" / str(n) / "output.log") == [f"attempt {n - 1}", "error"]
    decisions = lines(logs / "run.log")
    assert any("train: attempt 1 ended with 1" in line for line in decisions)
    assert any("train: attempt 2 ended with 0" in line for line in decisions)


def test_the_output_of_an_attempt_is_classified(root: Path, tmp_path: Path):
    oom = "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.'; exit 1"
    done = run(root, job(tmp_path, ("train", oom)), "--json")
    attempts = validated(done.stdout)["attempts"]
    assert [attempt["cause"] for attempt in attempts] == ["job-oom", "job-oom"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = [",
        "[[phase]]\nname = 'a'\n",
        "[[phase]]\ncommand = ['true']\n",
        "[[phase]]\nname = '../x'\ncommand = ['true']\n",
        "[[phase]]\nname = 'a'\ncommand = 'true'\n",
        "[[phase]]\nname = 'a'\ncommand = [1]\n",
        "[[phase]]\nname = 'a'\ncommand = ['true']\nrestarts = 3\n",
        "[[phase]]\nname = 'a'\ncommand = ['true']\n" * 2,
        "[[phase]]\nname = 'a'\ncommand = ['true']\nmax-restarts = -1\n",
        "phase = 3",
        "a = " + "[" * 5000,
    ],
)
def test_a_job_file_that_is_none_is_refused(root: Path, tmp_path: Path, text: str):
    path = tmp_path / "job.toml"
    path.write_text(text)
    done = run(root, path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_a_command_and_a_job_file_exclude_each_other(root: Path, tmp_path: Path):
    path = job(tmp_path, ("a", "true"))
    assert run(root, path, "--", "true").returncode == 2
    assert run_ckptctl("run", "--root", root).returncode == 2
