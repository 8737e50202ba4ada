"""A signal in the middle of a removal: what is gone by then is reported."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from command_line import (
    COMMAND,
    REPOSITORY,
    clean_environment,
    run_ckptctl,
    torch_server,
    validated,
)
from made_roots import make_templates, put_step
from next_commands import next_command
from services.counting_proxy import Fault
from services.plugin import S3Server
from services.processes import started, wait_until

import ckptctl
from ckptctl.cli.app import run
from ckptctl.formats.own.ledger import RemovingLine, SavedLine
from ckptctl.selection.history import read_attempts
from ckptctl.storage.opening import open_store

pytestmark = pytest.mark.torch

SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name
)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 100 to 500, all whole and sealed; to be copied."""
    templates = make_templates(tmp_path_factory.mktemp("templates"))
    root = tmp_path_factory.mktemp("sealed") / "run"
    root.mkdir()
    for number in range(100, 600, 100):
        put_step(templates, root, number)
    return root


def in_bucket(root: Path, s3: S3Server) -> str:
    """The URL of a copy of a root in a bucket of its own."""
    return s3.upload(root, "run", s3.new_bucket())


def steps_in(url: str, s3: S3Server) -> set[int]:
    with open_store(url, storage_options=s3.options) as store:
        names = {file.path.partition("/")[0] for file in store.list_tree()}
    return {int(name.removeprefix("step_")) for name in names if name.startswith("step_")}


def command(*words: str, env: Mapping[str, str]) -> AbstractContextManager[subprocess.Popen[str]]:
    return started(
        [*COMMAND, *words],
        env=clean_environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.server
@pytest.mark.parametrize(
    ("number", "as_json"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, True),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
    ],
)
def test_a_prune_that_a_signal_ends_reports_what_it_removed(
    sealed, s3_moto, counting_proxy, number, as_json
):
    url, proxy = in_bucket(sealed, s3_moto), counting_proxy(s3_moto.endpoint)
    n_files = sum(path.is_file() for path in (sealed / "step_100").rglob("*"))
    # The second step hangs as its first object goes: its metadata.
    proxy.break_request("DELETE", Fault.SILENT, nth=n_files + 1, lasts=True)
    env = {**s3_moto.environment, "AWS_ENDPOINT_URL": proxy.url}
    words = ["prune", url, "--keep", "2", "--apply", *(["--json"] if as_json else [])]
    with command(*words, env=env) as process:
        wait_until(lambda: proxy.counts["DELETE"] > n_files, what="the second removal")
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert steps_in(url, s3_moto) == {200, 300, 400, 500}
    reasons = {
        100: "older than the newest 2 good steps",
        200: "its removal was interrupted: it may be complete, incomplete or gone",
        300: "not reached",
    }
    if as_json:
        document = validated(out)
        assert (document["exit_code"], document["ok"]) == (128 + number, False)
        decisions = {each["number"]: each for each in document["decisions"]}
        assert {one for one, each in decisions.items() if each["removed"]} == {100}
        assert {one: decisions[one]["reason"] for one in reasons} == reasons
    else:
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert lines[0].startswith("interrupted; removed until then: 1 step, ")
        for step, reason in reasons.items():
            (line,) = [line for line in lines if line.endswith(f" {reason}")]
            assert line.startswith("removed 100 " if step == 100 else f"stays {step} ")
    proxy.reset()
    again = next_command(out)
    assert again == f"ckptctl prune {url} --keep 2"
    assert run_ckptctl(*again.split()[1:], env=env).returncode == 0
    done = ckptctl.prune(url, 2, apply=True, grace_s=0.0, storage_options=s3_moto.options)
    assert {one.number for one in done.decisions if one.removed} == {200, 300}
    assert steps_in(url, s3_moto) == {400, 500}


@SIGNALS
@pytest.mark.parametrize("n_gone", [1, 2])
def test_whenever_the_signal_comes_exactly_the_steps_that_are_gone_are_named(
    sealed, tmp_path, number, n_gone
):
    root = shutil.copytree(sealed, tmp_path / "run")
    for step in (200, 300):  # large enough for the signal to fall into its removal
        for file in range(3000):
            (root / f"step_{step}" / f"extra_{file}").write_bytes(b"")

    def gone() -> set[int]:
        return {step for step in range(100, 600, 100) if not (root / f"step_{step}").exists()}

    words = ("prune", str(root), "--keep", "2", "--apply", "--json")
    with command(*words, env={}) as process:
        wait_until(lambda: len(gone()) >= n_gone or process.poll() is not None, what="a removal")
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode in (0, 128 + number), err
    decisions = validated(out)["decisions"]
    (open_, closed) = ([], [])
    for each in decisions:
        (open_ if "interrupted" in each["reason"] else closed).append(each)
    assert len(open_) <= 1
    named = {each["number"] for each in closed if each["removed"]}
    assert named | {each["number"] for each in open_} >= gone() >= named
    assert {100, 200, 300} >= gone()
    assert ckptctl.pick(str(root)).step == 500


def test_a_python_caller_that_is_interrupted_is_told_and_gets_the_exception(
    sealed, tmp_path, monkeypatch
):
    from ckptctl.selection import pruning

    root = shutil.copytree(sealed, tmp_path / "run")
    real = pruning.remove_step

    def removed(store: object, name: str, **options: object) -> bool:
        if name == "step_300":
            signal.raise_signal(signal.SIGINT)
        return real(store, name, **options)

    monkeypatch.setattr(pruning, "remove_step", removed)
    told: list[ckptctl.Pruned] = []
    with pytest.raises(KeyboardInterrupt):
        ckptctl.prune(str(root), 1, apply=True, on_ended=told.append)
    (found,) = told
    assert [one.number for one in found.decisions if one.removed] == [200, 100]
    assert found.exit_code == 130
    assert found.next_command == f"ckptctl prune {root} --keep 1"


def test_an_interruption_behind_the_last_removal_loses_no_name(sealed, tmp_path, monkeypatch):
    from ckptctl.selection import pruning

    def aborted(store: object, uploads: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(pruning, "_aborted", aborted)
    root = shutil.copytree(sealed, tmp_path / "run")
    told: list[ckptctl.Pruned] = []
    with pytest.raises(KeyboardInterrupt):
        ckptctl.prune(str(root), 3, apply=True, on_ended=told.append)
    (found,) = told
    assert [one.number for one in found.decisions if one.removed] == [200, 100]


def test_a_program_that_calls_the_command_keeps_its_signal_handlers(sealed, tmp_path):
    root = shutil.copytree(sealed, tmp_path / "run")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run(["prune", str(root), "--keep", "2", "--apply"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


JOB = """
import os, sys
sys.path[:0] = sys.argv[2:]
from one_process import Job

print(os.getpid(), flush=True)
job = Job(sys.argv[1], keep=1)
job.resume()
job.train(1, 10_000, save_every=1)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_the_ledger_names_every_step_that_keep_removed_however_the_job_ends(tmp_path, number):
    root = tmp_path / "run"
    tests = REPOSITORY / "tests"
    job = [torch_server().python, "-c", JOB, root, tests, tests / "train"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with started(job, env=clean_environment(OMP_NUM_THREADS="1"), **streams) as process:
        forked = int(process.stdout.readline())
        # A later one, too: each save removes the one before.
        eighth = [root / f"step_{step}" for step in range(8, 200)]
        wait_until(lambda: any(each.exists() for each in eighth), what="the eighth save")
        os.kill(forked, number)
        process.wait()
    assert process.returncode
    with open_store(str(root)) as store:
        ((_, rows),) = read_attempts(store)
    saved = {row.step for row in rows if isinstance(row, SavedLine)}
    removing = [row for row in rows if isinstance(row, RemovingLine)]
    named = {row.step for row in removing}
    gone = {step for step in saved if not (root / f"step_{step}").exists()}
    assert len(gone) >= 2
    assert gone <= named <= saved
    paths_of = {row.step: row.path for row in removing}
    assert all(path == str(root / f"step_{step}") for step, path in paths_of.items())
