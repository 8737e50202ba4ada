"""A job that fails is started again while it makes progress: real children, real signals."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, validated
from next_commands import run_and_follow as run_ckptctl
from services.counting_proxy import Fault
from services.processes import started, wait_until

import ckptctl
from ckptctl.errors import UsageError
from ckptctl.formats.own.supervision import Decision
from ckptctl.options import Requirements, StorageOptions
from ckptctl.selection import watching
from ckptctl.selection.watching import Watched
from ckptctl.supervisor import restarting
from ckptctl.supervisor.options import RunKeywords, RunOptions

JOB = """
import os, shutil, sys, time
plan, root, source = sys.argv[1:4]
with open(plan) as file:
    attempt, *later = file.read().split()
with open(plan, "w") as file:
    file.write(" ".join(later))
step, _, code = attempt.partition(":")
if step:
    shutil.copytree(source, os.path.join(root, "step_" + step))
if code == "kill":
    os.kill(os.getpid(), 9)
sys.exit(int(code))
"""


@pytest.fixture
def job(source: Path, tmp_path: Path):
    """A function that gives the command of a job with attempts like `100:1` (saves 100, ends 1)."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "job.py").write_text(JOB)

    def command(*attempts: str) -> list[str]:
        (tmp_path / "plan").write_text(" ".join(attempts))
        paths = [str(tmp_path / name) for name in ("job.py", "plan", "ckpt")]
        return [sys.executable, *paths, str(source)]

    return command


def kept_running(command: list[str], tmp_path: Path, **about: object) -> ckptctl.Supervised:
    return ckptctl.keep_running(command, str(tmp_path / "ckpt"), **{"backoff_s": 0, **about})


def test_a_job_that_ends_with_0_is_done_after_one_life(job, tmp_path: Path):
    found = kept_running(job("100:0"), tmp_path)
    assert (found.exit_code, len(found.attempts)) == (0, 1)
    assert found.attempts[0].decision is Decision.DONE
    assert (found.attempts[0].step, found.attempts[0].progress) == (100, True)


def test_the_budget_is_spent_by_lives_without_progress_and_ends_with_93(job, tmp_path: Path):
    found = kept_running(job(*[":1"] * 9), tmp_path, max_restarts=3)
    assert found.exit_code == 93
    assert [attempt.left for attempt in found.attempts] == [2, 1, 0, 0]
    assert found.attempts[-1].decision is Decision.GIVEN_UP
    assert found.next_command == f"ckptctl scan {tmp_path / 'ckpt'}"


def test_a_newer_usable_step_fills_the_budget_again(job, tmp_path: Path):
    attempts = (":1", ":1", "100:1", ":1", "200:1", ":1", ":0")
    found = kept_running(job(*attempts), tmp_path, max_restarts=2)
    assert found.exit_code == 0
    assert [each.progress for each in found.attempts] == [
        bool(attempt[:-2]) for attempt in attempts
    ]
    assert kept_running(job(":1", ":1", ":1"), tmp_path, max_restarts=2).exit_code == 93


def test_a_newer_step_that_is_not_whole_is_no_progress(job, source: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    os.truncate(broken / "__0_0.distcp", 100)
    shutil.copytree(source, tmp_path / "ckpt" / "step_1")
    command = job("100:1", "200:1", ":1")
    found = kept_running([*command[:-1], str(broken)], tmp_path, max_restarts=1)
    assert [each.progress for each in found.attempts] == [False, False]
    assert found.exit_code == 93


@pytest.mark.parametrize("code", [2, 11, 17, 93, 94, 127])
def test_exit_codes_that_would_come_again_are_passed_on_at_once(job, tmp_path: Path, code: int):
    found = kept_running(job(f"100:{code}", ":0"), tmp_path)
    assert (found.exit_code, len(found.attempts)) == (code, 1)
    assert found.attempts[0].decision is Decision.NEVER


def test_the_caller_can_name_more_of_them(job, tmp_path: Path):
    assert kept_running(job(":18", ":0"), tmp_path).exit_code == 0
    assert kept_running(job(":18", ":0"), tmp_path, no_restart=(18,)).exit_code == 18


def test_a_job_that_was_killed_is_started_again_and_its_code_is_128_and_the_signal(
    job, tmp_path: Path
):
    found = kept_running(job(":kill", "100:0"), tmp_path)
    assert [attempt.exit_code for attempt in found.attempts] == [137, 0]


def test_where_steps_are_there_and_none_is_usable_nothing_is_started_over_them(
    job, source: Path, tmp_path: Path
):
    shutil.copytree(source, tmp_path / "ckpt" / "step_100")
    os.truncate(tmp_path / "ckpt" / "step_100" / "__0_0.distcp", 100)
    found = kept_running(job(":1", ":0"), tmp_path)
    assert (found.exit_code, len(found.attempts)) == (11, 0)
    assert (tmp_path / "plan").read_text() == ":1 :0"


# What the root holds between two attempts


def script(folder: Path, text: str) -> list[str]:
    """A job in bash; it counts its attempts in the file `attempts`."""
    count = "n=$(cat attempts 2>/dev/null || echo 0); echo $((n + 1)) > attempts"
    (folder / "job.sh").write_text(f"cd {folder}; {count}; {text}")
    return ["bash", str(folder / "job.sh")]


def n_attempts(folder: Path) -> int:
    path = folder / "attempts"
    return int(path.read_text()) if path.exists() else 0


def test_steps_that_vanish_after_one_was_usable_end_with_75(job, source: Path, tmp_path: Path):
    (tmp_path / "ckpt" / "train.log").touch()
    shutil.copytree(source, tmp_path / "ckpt" / "step_100")
    found = kept_running(script(tmp_path, "rm -r ckpt/step_100; exit 1"), tmp_path)
    assert (found.exit_code, len(found.attempts), n_attempts(tmp_path)) == (75, 1, 1)
    assert "step 100 was usable, but the root no longer contains a step" in found.message
    # The record remembers it for whoever asks next.
    assert ckptctl.pick(str(tmp_path / "ckpt"), allow_fresh=True).exit_code == 11
    assert kept_running(["touch", str(tmp_path / "ran")], tmp_path).exit_code == 75
    assert not (tmp_path / "ran").exists()


def test_steps_of_which_none_is_usable_after_a_life_end_with_11(job, source: Path, tmp_path: Path):
    shutil.copytree(source, tmp_path / "ckpt" / "step_100")
    damage = "truncate -s 100 ckpt/step_100/__0_0.distcp; exit 1"
    found = kept_running(script(tmp_path, damage), tmp_path)
    assert (found.exit_code, n_attempts(tmp_path)) == (11, 1)
    assert found.next_command == f"ckptctl scan {tmp_path / 'ckpt'}"


@pytest.mark.parametrize("leaves", ["", "; mkdir ckpt"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_root_that_is_gone_is_waited_for_within_a_bound(
    job, source: Path, tmp_path: Path, comes_back: bool, leaves: str
):
    shutil.copytree(source, tmp_path / "ckpt" / "step_100")

    def mount() -> None:
        while not (tmp_path / "away").exists():
            time.sleep(0.01)
        time.sleep(2)
        if leaves:  # the mount point, as umount leaves it
            (tmp_path / "ckpt").rmdir()
        (tmp_path / "away").rename(tmp_path / "ckpt")

    mounting = threading.Thread(target=mount)
    if comes_back:
        mounting.start()
    text = f'[ "$n" = 1 ] && exit 0; mv ckpt away{leaves}; exit 1'
    said: list[str] = []
    wait_s = 600 if comes_back else 0
    found = kept_running(script(tmp_path, text), tmp_path, wait_s=wait_s, tell=said.append)
    if comes_back:
        mounting.join()
    assert (found.exit_code, n_attempts(tmp_path)) == ((0, 2) if comes_back else (75, 1))
    assert found.attempts[0].inspected is comes_back
    gone = "another folder is in its place" if leaves else "it does not exist any more"
    waited = [line for line in said if "waiting for" in line and gone in line]
    assert len(waited) == comes_back


def test_a_storage_that_is_not_mounted_yet_is_waited_for_before_the_first_life(tmp_path: Path):
    root = tmp_path / "mount" / "ckpt"
    done = ckptctl.keep_running(["true"], str(root), wait_s=0)
    assert (done.exit_code, done.attempts) == (75, ())
    mounting = threading.Timer(1.5, root.mkdir, kwargs={"parents": True})
    mounting.start()
    done = ckptctl.keep_running(["true"], str(root), wait_s=600)
    mounting.join()
    assert (done.exit_code, len(done.attempts)) == (0, 1)


def test_a_signal_ends_the_wait_for_the_storage(tmp_path: Path):
    with subprocess.Popen(
        [*COMMAND, "run", "--root", tmp_path / "mount" / "ckpt", "--", "true"],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert "waiting for" in process.stderr.readline()
        process.terminate()
        _, err = process.communicate()
    assert process.returncode == 143
    assert "not started: a signal asked to end" in err


def test_a_root_that_does_not_exist_is_made_with_create_alone(tmp_path: Path):
    root = tmp_path / "ckpt"
    ran = ["touch", str(tmp_path / "ran")]
    found = kept_running(ran, tmp_path)
    assert (found.exit_code, found.attempts) == (10, ())
    assert "does not exist: check the path" in found.message
    assert list(tmp_path.iterdir()) == []
    assert found.next_command == f"ckptctl scan {tmp_path}"
    document = validated(run_ckptctl("run", "--json", "--root", root, "--", *ran).stdout)
    assert (document["exit_code"], document["attempts"]) == (10, [])
    assert kept_running(ran, tmp_path, create=True).exit_code == 0
    assert (root / ".ckptctl" / "root.json").exists()


def test_the_sentinel_is_there_before_the_first_life(job, tmp_path: Path):
    assert kept_running(script(tmp_path, "cp ckpt/.ckptctl/root.json seen"), tmp_path).attempts
    assert validated((tmp_path / "seen").read_text())["began_empty"] is True


def test_the_job_is_told_how_often_it_was_started_again(
    job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = 'echo $CKPTCTL_RESTART_COUNT >> told; [ "$n" = 2 ]'
    assert kept_running(script(tmp_path, text), tmp_path).exit_code == 0
    assert (tmp_path / "told").read_text().split() == ["0", "1", "2"]
    monkeypatch.setenv("CKPTCTL_RESTART_COUNT", "4")  # it runs in a job of its like
    assert kept_running(["bash", "-c", f"echo $CKPTCTL_RESTART_COUNT > {tmp_path}/told"], tmp_path)
    assert (tmp_path / "told").read_text() == "4\n"


def test_a_job_that_dies_in_its_first_save_is_started_again_and_is_fresh(
    job, source: Path, tmp_path: Path
):
    pick = f"{shlex.join(COMMAND)} pick --allow-fresh ckpt >> picked; echo $? >> picked"
    # The shards come before the metadata: this is what a kill in the middle leaves.
    file = shlex.quote(f"{source}/__0_0.distcp")
    save = f"mkdir -p ckpt/step_3 && cp {file} ckpt/step_3; kill -9 $$"
    text = f'{pick}; [ "$n" = 2 ] && exit 0; {save}'
    found = kept_running(script(tmp_path, text), tmp_path)
    assert [attempt.exit_code for attempt in found.attempts] == [137, 137, 0]
    assert (tmp_path / "picked").read_text().split() == ["0", "0", "0"]


def test_a_wrong_path_is_a_warning_and_the_job_runs(job, tmp_path: Path):
    (tmp_path / "ckpt" / "last.ckpt").write_bytes(b"PK")
    done = run_ckptctl("run", "--json", "--root", tmp_path / "ckpt", "--", "true")
    document = validated(done.stdout)
    assert (done.returncode, len(document["attempts"])) == (0, 1)
    (warning,) = document["warnings"]
    assert "1 entry of unknown content (last.ckpt)" in warning
    failed = kept_running(script(tmp_path, "exit 1"), tmp_path, max_restarts=1)
    assert (failed.exit_code, n_attempts(tmp_path)) == (93, 2)


def test_the_reason_counts_the_restarts_as_the_life_does(job, tmp_path: Path):
    found = kept_running(job(":1", "100:1", ":1", ":0"), tmp_path, max_restarts=2)
    assert [(attempt.left, attempt.reason) for attempt in found.attempts[:-1]] == [
        (1, "1 of 2 restarts left without a newer step"),
        (1, "1 of 2 restarts left without a newer step"),
        (0, "0 of 2 restarts left without a newer step"),
    ]


def test_each_attempt_is_announced_with_what_is_left_of_the_budget(job, tmp_path: Path):
    said: list[str] = []
    kept_running(job("100:1", ":1", ":0"), tmp_path, log_dir=str(tmp_path / "l"), tell=said.append)
    assert [line for line in said if " started: " in line] == [
        f"attempt {number} started: {about}, logs: {tmp_path}/l/{number}/output.log"
        for number, about in enumerate(
            (
                "3 of 3 restarts left, no usable step",
                "2 of 3 restarts left, newest usable step 100",
                "1 of 3 restarts left, newest usable step 100",
            ),
            1,
        )
    ]


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
WORN_OUT = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("said", "failure", "attempts"),
    [
        ((OUT_OF_MEMORY, OUT_OF_MEMORY), "job-oom", 2),
        ((OUT_OF_MEMORY, WORN_OUT, OUT_OF_MEMORY, OUT_OF_MEMORY), "job-oom", 3),
    ],
)
def test_the_same_failure_of_the_job_twice_is_not_tried_a_third_time(
    tmp_path: Path, said: tuple[str, ...], failure: str, attempts: int
):
    (tmp_path / "ckpt").mkdir()
    log = tmp_path / "train log"
    log.write_text(f"{OUT_OF_MEMORY}\n")  # of a run before: it counts for none of these attempts
    for n, line in enumerate(said):
        (tmp_path / f"said-{n}").write_text(f"{line}\n")
    script = 'cat said-$(ls gone 2>/dev/null | wc -l) >> "train log"; mkdir -p gone; mktemp gone/X'
    command = ["bash", "-c", f"cd {tmp_path} && {{ {script}XXXXXX >/dev/null; exit 1; }}"]
    found = kept_running(command, tmp_path, max_restarts=9, logs=[str(log)])
    causes = [attempt.cause for attempt in found.attempts]
    assert (causes[-1], causes.count(failure)) == (failure, 2)
    assert (len(found.attempts), found.attempts[-1].decision) == (attempts, Decision.NEVER)
    assert found.exit_code == 1
    assert found.next_command == f"ckptctl classify '{log}' --exit-code 1"


def test_the_output_in_the_log_folder_is_what_to_classify(tmp_path: Path):
    (tmp_path / "ckpt").mkdir()
    command = script(tmp_path, f"echo '{OUT_OF_MEMORY}'; exit 1")
    found = kept_running(command, tmp_path, log_dir=str(tmp_path / "logs"))
    log = tmp_path / "logs" / "2" / "output.log"
    assert found.next_command == f"ckptctl classify {log} --exit-code 1"


def test_a_root_whose_name_is_no_unicode_is_supervised_as_any_other(tmp_path: Path):
    root = tmp_path / os.fsdecode(b"run \xff")
    root.mkdir()
    done = run_ckptctl(
        *("run", "--root", str(root), "--max-restarts", "1", "--backoff", "0"),
        *("--log-dir", str(root / "logs"), "--", "false"),
    )
    assert done.returncode == 93, done.stderr
    for text in (done.stderr, (root / "logs" / "run.log").read_text()):
        assert re.search("attempt 2 ended with 1 after .*, no usable step", text)


def test_a_log_that_does_not_say_why_or_is_not_there_decides_nothing(job, tmp_path: Path):
    logs = [str(tmp_path / "quiet.log"), str(tmp_path / "gone.log")]
    Path(logs[0]).write_text("step 1 loss 2.0\n")
    found = kept_running(job(*[":1"] * 9), tmp_path, max_restarts=2, logs=logs)
    assert ([attempt.cause for attempt in found.attempts], found.exit_code) == ([None] * 3, 93)


def test_a_job_that_removes_the_folder_of_temporary_files_is_restarted(tmp_path: Path):
    scratch, log = tmp_path / "scratch", tmp_path / "log"
    scratch.mkdir()
    job = f'echo failed >> {log}; rm -rf {scratch}; [ "$CKPTCTL_RESTART_COUNT" = 1 ]'
    words = ("run", "--root", tmp_path / "ckpt", "--create", "--backoff", 0, "--log", log)
    done = subprocess.run(
        [*COMMAND, *map(str, words), "--", "sh", "-c", job],
        env={**clean_environment(), "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_supervisor_that_has_ended_leaves_no_thread_behind(job, tmp_path: Path):
    before = set(threading.enumerate())
    kept_running(job(":0"), tmp_path, logs=[str(tmp_path / "log")])

    def is_alone() -> bool:
        left = set(threading.enumerate()) - before
        return not any(each.name.startswith("ckptctl-") for each in left)

    wait_until(is_alone, what="the end of every thread")


def test_what_a_life_leaves_behind_is_gone_before_the_next_begins(tmp_path: Path):
    (tmp_path / "ckpt").mkdir()
    orphan = f"""
import subprocess, sys
left = subprocess.Popen(["sleep", "600"])
with open({str(tmp_path / "pids")!r}, "a") as file:
    file.write(f"{{left.pid}} ")
sys.exit(1)
"""
    kept_running([sys.executable, "-c", orphan], tmp_path, max_restarts=1)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        while running(pid):  # ends, or the time limit of every test fails it
            time.sleep(0.01)


def running(pid: int) -> bool:
    """Whether a process is there and no zombie that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("command", "about"),
    [([], {}), (["/no/such/program"], {}), (["true"], {"max_restarts": -1})],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, command: list[str], about: dict):
    with pytest.raises(UsageError):
        kept_running(command, tmp_path, create=True, **about)


# The command, and signals


GRACEFUL = """
import signal, sys, time
def stop(number, frame):
    print("saved after", signal.Signals(number).name, flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGHUP, stop)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_nothing_is_started_again(tmp_path: Path, sent: signal.Signals):
    (tmp_path / "ckpt").mkdir()
    with subprocess.Popen(
        [*COMMAND, "run", "--root", tmp_path / "ckpt", "--", sys.executable, "-c", GRACEFUL],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sent)
        out, err = process.communicate()
    assert process.returncode == 143
    assert out == f"saved after {sent.name}\n"
    assert "stopped after 1 attempt: a signal asked for it" in err


STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
left = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), left.pid, flush=True)
time.sleep(600)
"""


@contextmanager
def stubborn_run(root: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`run` with a job that ignores SIGTERM and SIGINT, and the process that it has started."""
    root.mkdir()
    with subprocess.Popen(
        [*COMMAND, "run", "--root", root, "--", sys.executable, "-c", STUBBORN],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        *_, child = pids = [*map(int, process.stdout.readline().split())]
        try:
            yield process, child
        finally:
            for pid in (process.pid, *pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_signal_that_the_job_ignores_is_reported_with_what_follows(tmp_path: Path):
    with stubborn_run(tmp_path / "ckpt") as (process, _):
        process.terminate()
        assert next(line for line in process.stderr if "SIGTERM" in line) == (
            "ckptctl: passed SIGTERM on to the command, and waits without a limit until it ends; "
            "Ctrl-C twice kills it with all its processes\n"
        )
        process.send_signal(signal.SIGINT)
        time.sleep(2)  # half a second counts from when it has arrived
        process.send_signal(signal.SIGINT)
        assert "stopped after 1 attempt: a signal asked for it" in process.communicate()[1]


def test_a_second_ctrl_c_kills_the_job_and_its_children_at_once(tmp_path: Path):
    with stubborn_run(tmp_path / "ckpt") as (process, child):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # as `timeout -s INT` does
        assert "Ctrl-C again kills it" in next(line for line in process.stderr if "SIGINT" in line)
        time.sleep(1)
        assert process.poll() is None
        assert running(child)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, running(child)) == (128 + signal.SIGKILL, False)
    assert "Ctrl-C a second time: the job and all its processes get SIGKILL" in err


@pytest.mark.server
def test_a_second_ctrl_c_ends_the_wait_for_a_storage_that_does_not_answer(s3_moto, counting_proxy):
    proxy = counting_proxy(s3_moto.endpoint)
    for verb in ("LIST", "GET", "HEAD", "PUT"):
        proxy.break_request(verb, Fault.SILENT, lasts=True)
    about = {**s3_moto.environment, "AWS_ENDPOINT_URL": proxy.url}
    command = [*COMMAND, "run", "--root", f"s3://{s3_moto.bucket}/run", "--timeout", 600, "--"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started([*command, "true"], env=clean_environment(**about), **streams) as process:
        wait_until(lambda: proxy.counts.total() > 0, what="the first request")
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.6)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, ""), err
    assert err.splitlines()[0] == "error: ended by SIGINT; no file was left half written"


def test_a_signal_in_the_pause_before_a_restart_ends_the_pause(tmp_path: Path):
    (tmp_path / "ckpt").mkdir()
    with subprocess.Popen(
        [*COMMAND, "run", "--root", tmp_path / "ckpt", "--backoff", "1h", "--", "false"],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        next(line for line in process.stderr if "ended with 1" in line)
        process.terminate()
        _, err = process.communicate()
    assert process.returncode == 143
    assert "stopped before a restart" in err


def test_the_output_of_the_job_is_its_own_and_ours_is_beside_it(job, tmp_path: Path):
    command = ["sh", "-c", "echo loss 1.0"]
    done = run_ckptctl("run", "--root", tmp_path / "ckpt", "--", *command)
    assert (done.returncode, done.stdout) == (0, "loss 1.0\n")
    assert done.stderr.splitlines()[-1] == "ckptctl: done after 1 attempt: the command succeeded"
    assert run_ckptctl("run", "--root", tmp_path / "ckpt", "-q", "--", *command).stderr == ""


def test_the_document_holds_to_its_schema_and_stands_alone(job, tmp_path: Path):
    done = run_ckptctl(
        *("run", "--json", "--root", tmp_path / "ckpt", "--backoff", "0", "--max-restarts", 1),
        *("--", *job(":1", "100:1", ":5", ":0")),
    )
    document = validated(done.stdout)
    assert document["exit_code"] == done.returncode == 93
    assert [attempt["exit_code"] for attempt in document["attempts"]] == [1, 1, 5]


def test_options_behind_the_dashes_are_the_jobs_own(job, tmp_path: Path):
    done = run_ckptctl("run", "--root", tmp_path / "ckpt", "--", "no-such-program", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no-such-program: No such file or directory")


def test_codes_that_are_none_are_refused(tmp_path: Path):
    done = run_ckptctl("run", "--root", tmp_path, "--no-restart-on", "16,x", "--", "true")
    assert done.returncode == 2
    assert "exit codes from 0 to 255, not 'x'" in done.stderr


def test_progress_counts_in_any_of_several_roots(job, source: Path, tmp_path: Path):
    durable = tmp_path / "durable"
    shutil.copytree(source, durable / "step_5")
    words = ["run", "--root", durable, "--root", tmp_path / "ckpt"]
    words += ["--optional-root", tmp_path / "gone", "--max-restarts", "1", "--backoff", "0s"]
    done = run_ckptctl(*words, "--json", "--", *job("100:1", "200:1", "300:1", ":0"))
    document = validated(done.stdout)
    assert done.returncode == 0
    assert [attempt["step"] for attempt in document["attempts"]] == [100, 200, 300, 300]
    assert [attempt["progress"] for attempt in document["attempts"]] == [True, True, True, False]


@pytest.mark.parametrize("create", [False, True])
def test_every_mandatory_root_bears_the_record(job, tmp_path: Path, create: bool):
    roots = [str(tmp_path / name) for name in ("ckpt", "other")]
    (tmp_path / "ckpt").rmdir()
    if not create:
        for root in roots:
            os.mkdir(root)
    optional = str(tmp_path / "optional")
    pick = shlex.join([*COMMAND, "pick", "--allow-fresh", *roots, "--optional-root", optional])
    command = script(tmp_path, f'{pick}; echo $? >> picked; [ "$n" = 2 ]')
    found = ckptctl.keep_running(
        command, roots, optional_roots=[optional], backoff_s=0, create=create
    )
    assert found.exit_code == 0
    assert (tmp_path / "picked").read_text().split() == ["0", "0", "0"]
    assert not os.path.exists(optional)


def test_the_keywords_are_the_fields_of_the_options_objects():
    parts = [getattr(RunOptions(), part) for part in ("budget", "output", "policy")]
    parts += [Requirements(), StorageOptions(), RunOptions()]
    names = [each.name for part in parts for each in dataclasses.fields(part)]
    assert len(names) == len(set(names))
    assert set(RunKeywords.__annotations__) == set(names)
    made = RunOptions().with_keywords({"max_restarts": 5, "log_dir": "logs", "wait_s": 1.0})
    assert (made.budget.max_restarts, made.output.log_dir, made.wait_s) == (5, "logs", 1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        ckptctl.keep_running(["true"], "ckpt", nonsense=1)


@pytest.mark.parametrize(
    ("variables", "instead"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, "ckptctl run ... -- srun ... COMMAND"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "-- mpirun ... COMMAND"),
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "podFailurePolicy"),
    ],
)
def test_one_of_several_is_refused_with_what_to_do_instead(
    tmp_path: Path, variables: dict[str, str], instead: str
):
    done = run_ckptctl("run", "--root", tmp_path, "--", "true", env=variables)
    assert done.returncode == 2
    assert "and one supervises a job with all its nodes" in done.stderr
    assert instead in " ".join(done.stderr.split())
    alone = {"SLURM_STEP_NUM_TASKS": "1", "PET_NNODES": "1", "JOB_COMPLETION_INDEX": "3"}
    assert run_ckptctl("run", "--root", tmp_path, "--", "true", env=alone).returncode == 0


SAVES_AND_REMOVES = """
n=10
while [ $n -le 15 ]; do
    cp -r {source} {root}/saving && mv {root}/saving {root}/step_$n
    rm -rf {root}/step_$((n - 1)); n=$((n + 1)); sleep 1
done
"""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alarms after seconds."""
    monkeypatch.setattr(watching, "LEAST_S", 1.0)
    monkeypatch.setattr(restarting, "_SETUP_S", 1.0)
    monkeypatch.setattr(restarting, "_POLL_S", (0.2, 0.5))


@pytest.mark.usefixtures("soon")
def test_a_copied_root_raises_no_alarm_before_the_job_has_saved(root: Path, source: Path):
    for n, number in enumerate((10, 20, 30, 40)):
        shutil.copytree(source, root / f"step_{number}")
        for file in (root / f"step_{number}").rglob("*"):
            os.utime(file, (1e9 + n, 1e9 + n))
    events: list[Watched] = []
    about = {"on_alarm": events.append, "allow_missing_state": True}
    assert ckptctl.keep_running(["sleep", "5"], str(root), **about).exit_code == 0
    assert events == []


@pytest.mark.usefixtures("soon")
def test_an_attempt_that_saves_nothing_newer_is_an_alarm_and_goes_on(
    root: Path, source: Path, tmp_path: Path
):
    said: list[str] = []
    events: list[Watched] = []
    job = SAVES_AND_REMOVES.format(source=source, root=root)
    job += f"until [ -e {tmp_path}/alarm ]; do sleep 0.1; done"

    def on_alarm(event: Watched) -> None:
        events.append(event)
        (tmp_path / "alarm").touch()

    ended = ckptctl.keep_running(
        ["sh", "-c", job],
        str(root),
        tell=said.append,
        on_alarm=on_alarm,
        allow_missing_state=True,
    )
    assert ended.exit_code == 0
    (event,) = events
    assert (event.event.value, event.number) == ("overdue", 15)
    assert any(line.startswith("warning: no proven step newer than 15") for line in said)
