"""A drill injects real faults into real jobs on copies, and never touches the real root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, run_ckptctl, validated
from services.plugin import S3Server
from supervisor.supervised_root import processes_with

from ckptctl.drill import job as job_module
from ckptctl.drill.drilling import FAULTS, Drilled, Trial, as_markdown
from ckptctl.drill.job import DrillJob, JobOptions, LoggedSteps, copy_step, fingerprint
from ckptctl.errors import StorageFull
from ckptctl.options import StorageOptions

STOCK = Path(__file__).with_name("stock_job.py")
PLAIN = Path(__file__).with_name("plain_job.py")
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
        (("--", "true"), "names no place for its root"),
        ((), "the command is missing"),
        (("--work", "ckpt/drill", "--", "true", "{root}"), "is in the root"),
        (("--work", "ckpt", "--", "true", "{root}"), "already exists"),
        (("--root", "link", "--work", "link/drill", "--", "true", "{root}"), "is in the root"),
        (("--work", "/dev/null/drill", "--", "true", "{root}"), "Not a directory"),
        (("--fault", "meteor", "--", "true", "{root}"), "'meteor' is no fault"),
    ],
)
def test_what_could_reach_the_real_root_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
):
    monkeypatch.chdir(root.parent)
    Path("link").symlink_to("ckpt")
    before = fingerprint(str(root), StorageOptions())
    given = () if "--root" in words else ("--root", "ckpt")
    done = run_ckptctl("drill", *given, *words)
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


def test_a_job_that_fails_by_itself_is_refused_with_its_exit_code(root: Path, tmp_path: Path):
    words = ("--work", tmp_path / "drill", "--", "sh", "-c", "no-such-launcher {root}")
    done = run_ckptctl("drill", "--root", root, *words)
    assert done.returncode == 2
    assert "the job ended with 127 after 0 saves" in done.stderr
    log = tmp_path / "drill" / "no-fault" / "logs" / "1" / "output.log"
    assert f"next:  ckptctl classify {log}" in done.stderr


def test_a_growing_log_is_read_on_from_where_it_was(tmp_path: Path):
    log = tmp_path / "output.log"
    logged = LoggedSteps(log)
    assert (logged.read().n, logged.last) == (0, None)
    with log.open("a", buffering=1) as out:
        for step in range(1, 11):
            out.write(f"step {step} loss {4 / step:.3f} grad_norm 1.0\n")
        assert (logged.read().n, logged.last) == (10, 10)
        log.write_bytes(b"#" * log.stat().st_size)  # what was read is not read again
        out.write("step 11 loss 0.364 grad_norm 1.0\n")
        out.write("step 12 loss 0.333 grad_norm 1.0")
    assert (logged.read(to_end=True).n, logged.last) == (12, 12)


def test_a_poll_that_takes_long_is_repeated_less_often(tmp_path: Path, monkeypatch):
    job = DrillJob(JobOptions(command=("true",)), tmp_path, tmp_path, lambda: None)
    pauses: list[float] = []
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(job_module.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(job_module.time, "sleep", pauses.append)
    answers = iter([None, None, "a row"])
    assert job.await_("row", lambda: next(answers)) == "a row"
    assert pauses == [12.0, 12.0]


def test_a_copy_shares_no_file_with_the_step(root: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    assert copy_step(str(root), "step_30", copy, StorageOptions()) in ("reflink", "copy")
    files = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file())
    for path in files:
        assert (root / path).read_bytes() == (copy / path).read_bytes()
        assert (root / path).stat().st_ino != (copy / path).stat().st_ino


def test_a_copy_leaves_out_what_is_no_file(root: Path, tmp_path: Path):
    os.mkfifo(root / "step_30" / "pipe")
    (root / "step_30" / "lost").symlink_to("nowhere")
    copy_step(str(root), "step_30", tmp_path / "copy", StorageOptions())
    assert not list((tmp_path / "copy" / "step_30").glob("[pl]*"))


def test_a_copy_has_the_files_to_which_links_of_the_real_root_lead(root: Path, tmp_path: Path):
    (tmp_path / "small").write_text("{}")
    (tmp_path / "large").write_bytes(b"#" * (2 << 20))
    for link in (root / "step_30" / "tokenizer.json", root / "tokenizer.json"):
        link.symlink_to(tmp_path / "small")
    (root / "data.bin").symlink_to(tmp_path / "large")
    copy = tmp_path / "copy"
    copy_step(str(root), "step_30", copy, StorageOptions())
    for path in (copy / "step_30" / "tokenizer.json", copy / "tokenizer.json"):
        assert path.read_text() == "{}"
        assert not path.is_symlink()
    assert not (copy / "data.bin").exists()  # large, and beside the step


def test_a_copy_for_which_there_is_no_space_is_an_error_of_the_storage(root: Path, tmp_path: Path):
    folder = tmp_path / "copy" / "step_30"
    folder.mkdir(parents=True)
    (folder / ".metadata").symlink_to("/dev/full")
    with pytest.raises(StorageFull, match="No space left"):
        copy_step(str(root), "step_30", tmp_path / "copy", StorageOptions())


def test_a_report_holds_names_that_are_not_text_or_are_markup(tmp_path: Path):
    trial = Trial("x", description="a\udcff\u202e", problems=["<b>"], folder="f")
    found = Drilled(("a`b",), "/run\udcff", 1, 0, "copy", True, True, (trial,), "grade", 33, None)
    text = as_markdown(found)
    assert text.encode()
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "- command: `` 'a`b' ``" in as_markdown(found)
    assert "| fault | grade |\n" in as_markdown(found), "columns that no trial fills are left out"


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


@pytest.mark.server
def test_a_copy_of_a_step_in_an_object_store_is_whole(
    root: Path, tmp_path: Path, s3_moto: S3Server
):
    url, storage = upload(root, s3_moto), StorageOptions(storage_options=s3_moto.options)
    before = fingerprint(url, storage)
    assert copy_step(url, "step_30", tmp_path / "copy", storage) == "download"
    files = contents(root)
    assert contents(tmp_path / "copy") == files
    assert fingerprint(url, storage) == before
    name = next(name for name in files if name.endswith(".distcp"))
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    s3_moto.client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=b"another")
    assert fingerprint(url, storage) != before


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their paths."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def upload(root: Path, s3: S3Server) -> str:
    """Put a root into a bucket of its own; its URL."""
    return s3.upload(root, "runs", s3.new_bucket())


# Signals


@pytest.mark.parametrize(
    ("when", "number", "fault"),
    [
        ("a run from step", signal.SIGTERM, "rank-killed"),
        ("was stopped", signal.SIGTERM, "rank-stopped"),
        ("RB-7 begins", signal.SIGINT, "rank-killed"),
        ("restarted after", signal.SIGTERM, "storage-stalled"),
    ],
)
@pytest.mark.slow
def test_a_signal_ends_all_that_was_started_and_leaves_a_report(
    root: Path, tmp_path: Path, when: str, number: signal.Signals, fault: str
):
    """The signal comes after a message; the job ignores SIGTERM on one of its ranks."""
    before = fingerprint(str(root), StorageOptions())
    words = ("--root", root, "--work", tmp_path / "drill", "--fault", fault, "--", sys.executable)
    drill = subprocess.Popen(
        [*COMMAND, "drill", *map(str, words), PLAIN, "{root}", "{step}", root / "step_30"],
        env=clean_environment(DRILLED_IN=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert drill.stderr is not None
    said = []
    for line in drill.stderr:
        said.append(line)
        if when in line:
            break
    if number is signal.SIGINT:  # as a terminal does
        os.killpg(drill.pid, number)
    else:
        drill.send_signal(number)
    told = drill.stderr.readline()
    assert told == (
        f"ckptctl: {number.name}: the job gets SIGTERM, and what is left after 15 s SIGKILL; "
        "after another Ctrl-C at once\n"
    ), [*said, told, drill.communicate()]
    if number is signal.SIGINT:
        time.sleep(0.6)
        os.killpg(drill.pid, number)
    out, errors = drill.communicate()
    assert drill.returncode == 128 + number, [said, out, errors]
    assert processes_with(str(tmp_path)) == []
    assert not list((tmp_path / "drill").glob("*/root")), "the copies are removed"
    report = (tmp_path / "drill" / "report.md").read_text()
    assert f"ended by {number.name}; of 1 faults, the job survives 0 of 0 faults" in report
    assert fingerprint(str(root), StorageOptions()) == before


# Jobs that cannot be drilled


COPIES = """
import json, shutil, sys, time
from pathlib import Path
root, source = map(Path, sys.argv[1:])
for step in range(31, 10_000):
    print(json.dumps({"step": step, "loss": 2.0 + step % 7}), flush=True)
    shutil.copytree(source, root / f"tmp-{step}")
    (root / f"tmp-{step}").rename(root / f"step_{step}")
    time.sleep(0.2)
"""


@pytest.mark.slow
def test_a_job_whose_steps_are_all_refused_is_not_waited_for(root: Path, tmp_path: Path):
    (tmp_path / "job.py").write_text(COPIES)
    words = ("--root", root, "--work", tmp_path / "drill", "--fault", "rank-killed")
    job = (sys.executable, tmp_path / "job.py", "{root}", "{step}")
    done = run_ckptctl("drill", *words, "--", *job)
    assert done.returncode == 2, done.stderr
    assert "as saved steps are refused: step " in done.stderr
    assert "--patience" not in done.stderr
    assert processes_with(str(tmp_path)) == []


# Real jobs


def drilled(work: Path, root: object, *words: object, exit_code: int = 0, **env: str) -> dict:
    """The trials of a drill by their faults; the root must be as it was."""
    done = run_ckptctl(
        *("drill", "--root", root, "--work", work, "--json", *words), env={**ONE_THREAD, **env}
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    found = validated(done.stdout)
    assert found["root_unchanged"]
    assert processes_with(str(work)) == []
    assert not list(work.glob("*/root")), "the copies are removed"
    assert found["message"] in (work / "report.md").read_text()
    return {trial["fault"]: trial for trial in found["trials"]}


def trained(*words: object) -> None:
    """Run a job to its end, whatever that is."""
    command = [*TORCHRUN, *map(str, words)]
    subprocess.run(command, env=clean_environment(**ONE_THREAD), capture_output=True)


@pytest.mark.torch
@pytest.mark.server
@pytest.mark.slow
def test_a_script_of_stock_dcp_in_an_object_store_survives_a_damaged_shard(
    tmp_path: Path, s3_moto: S3Server
):
    trained(STOCK, "--root", tmp_path / "ckpt", "--steps", 10)
    trials = drilled(
        *(tmp_path / "drill", upload(tmp_path / "ckpt", s3_moto), "--fault", "shard-damaged"),
        *("--", *TORCHRUN, STOCK, "--root", "{root}", "--resume-from", "{step}"),
        **s3_moto.environment,
    )
    damaged = trials["shard-damaged"]
    assert damaged["problems"] == []
    assert damaged["resumed_from"] == damaged["expected_step"] >= 20
    assert damaged["lost_steps"] >= 10
    assert damaged["loss"] == "continuous"


@pytest.mark.torch
@pytest.mark.long
def test_a_script_of_stock_dcp_survives_every_fault(tmp_path: Path):
    trained(STOCK, "--root", tmp_path / "ckpt", "--steps", 10)
    trials = drilled(
        *(tmp_path / "drill", tmp_path / "ckpt", "--seed", 2, "--"),
        *(*TORCHRUN, STOCK, "--root", "{root}", "--resume-from", "{step}"),
    )
    assert [*trials] == [*FAULTS]
    assert all(trial["problems"] == [] for trial in trials.values()), trials
    assert trials["rank-stopped"]["cause"] == "hang"


@pytest.mark.torch
@pytest.mark.long
def test_a_job_that_forgets_its_state_fails_the_drill(tmp_path: Path):
    trained(STOCK, "--root", tmp_path / "ckpt", "--steps", 10)
    trials = drilled(
        *(tmp_path / "drill", tmp_path / "ckpt", "--fault", "rank-killed", "--"),
        *(*TORCHRUN, STOCK, "--forgets", "--root", "{root}", "--resume-from", "{step}"),
        exit_code=33,
    )
    assert trials["rank-killed"]["problems"]
