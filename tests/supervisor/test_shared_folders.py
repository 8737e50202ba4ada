"""What another user puts where `run` reads and writes, and the sound variants of it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import clean_environment, run_ckptctl
from ranks import Ranks
from second_user import UID, as_second_user, give, needs_root, open_to_all

from ckptctl.distributed.process_table import entry_of
from ckptctl.formats.own.heartbeats import (
    FOLDER_VARIABLE,
    KEY_VARIABLE,
    SECTIONS,
    file_name,
    heartbeat_bytes,
    read_heartbeat,
)
from ckptctl.storage.shared_places import open_folder
from ckptctl.supervisor import evidence, heartbeats
from ckptctl.supervisor.attempts import LogFolder
from ckptctl.supervisor.evidence import collect
from ckptctl.supervisor.hangs import GAP_S, HangWatcher
from ckptctl.supervisor.heartbeats import Folder
from ckptctl.supervisor.holding import LocalCopy, new_state
from ckptctl.supervisor.options import SectionLimits
from ckptctl.supervisor.processes import Hang, JobLog

GIVEN = dict.fromkeys(SECTIONS, 30.0)


@pytest.fixture
def memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for `/dev/shm`."""
    folder = open_to_all(place / "shm")
    monkeypatch.setattr(heartbeats, "_IN_MEMORY", str(folder))
    monkeypatch.setattr(evidence, "BETWEEN_S", 0.1)
    return folder


class Job:
    """Ranks, watched by a clock that the test moves."""

    def __init__(self, evidence_dir: Path) -> None:
        self.messages: list[str] = []
        limits = SectionLimits(dict(GIVEN))
        self.watcher = HangWatcher(limits, self.messages.append, str(evidence_dir))
        self.now_s = 1000.0
        self.begin(1)

    def begin(self, attempt: int) -> None:
        self.variables = dict(self.watcher.prepare(attempt, ()))
        self.folder = Path(self.variables[FOLDER_VARIABLE])
        self.key = self.variables[KEY_VARIABLE]
        self.ranks = Ranks(self.variables)

    def wait(self, seconds: float) -> Hang | None:
        """Let time pass, as the supervisor does."""
        found = self.watcher.poll(self.ranks.running, self.now_s)
        until_s = self.now_s + seconds
        while found is None and self.now_s < until_s:
            self.now_s += GAP_S - 1
            found = self.watcher.poll(self.ranks.running, self.now_s)
        return found


@pytest.fixture
def job(place: Path, memory: Path) -> Iterator[Job]:
    made = Job(place / "evidence")
    yield made
    made.ranks.end()
    made.watcher.close()


# Heartbeats: the folder


def forged(folder: Path) -> str:
    """A program of another user that makes the folder again, with the heartbeat of a rank."""
    beat = {
        "rank": 1,
        "local_world_size": 2,
        "node": "a-sound-node",
        "pid": 4194000,
        "started": 1,
        "count": 1,
        "section": "step",
        "step": 7,
        "saving": None,
        "stack_signal": None,
    }
    data = heartbeat_bytes(beat, "not the key").decode()  # type: ignore[arg-type]
    return (
        f"os.umask(0)\nos.mkdir({str(folder)!r}, 0o777)\n"
        f"open({str(folder / file_name(1))!r}, 'w').write({data!r})"
    )


@needs_root
def test_a_folder_that_another_user_makes_again_names_no_node(job: Job):
    job.ranks.start(0)
    assert job.wait(20) is None
    shutil.rmtree(job.folder)
    as_second_user(forged(job.folder))
    assert job.wait(200) is None
    (message,) = [each for each in job.messages if "set aside" in each]
    assert f"{job.folder} was removed, and uid {UID} put something else there" in message
    # The rank writes nothing there either, and the next attempt has a folder of its own.
    assert sorted(os.listdir(job.folder)) == [file_name(1)]
    job.ranks.end()
    taken = job.folder
    job.begin(2)
    assert job.folder != taken
    job.ranks.start(0)
    assert (found := job.wait(40)) is not None
    assert found.ranks == (0,)
    assert sorted(os.listdir(taken)) == [file_name(1)], "nothing foreign was removed"


@needs_root
def test_a_link_in_the_place_of_the_folder_removes_nothing(job: Job, place: Path):
    (place / "kept").mkdir()
    for name in ("theirs", "rank-0.json"):
        (place / "kept" / name).write_text("kept")
    shutil.rmtree(job.folder)
    as_second_user("os.symlink(*sys.argv[1:])", place / "kept", job.folder)
    assert job.wait(60) is None
    job.begin(2)
    job.watcher.close()
    assert sorted(os.listdir(place / "kept")) == ["rank-0.json", "theirs"]
    assert (place / "kept" / "theirs").read_text() == "kept"


def test_a_folder_that_was_removed_is_made_again_and_the_ranks_go_on(job: Job):
    loop = "while sys.stdin.readline():\n    heartbeat('evaluation'); heartbeat('step', step=8)\n"
    job.ranks.start(0, f"{loop}    print(flush=True)")
    assert job.wait(20) is None
    shutil.rmtree(job.folder)
    assert job.wait(20) is None
    about = job.folder.stat()
    assert (about.st_uid, about.st_mode & 0o777) == (os.geteuid(), 0o700)
    job.ranks.tell(0)
    beat = read_heartbeat((job.folder / file_name(0)).read_bytes(), job.key)
    assert beat["step"] == 8
    job.ranks.signal(0, signal.SIGSTOP)
    job.ranks.start(1)
    assert (found := job.wait(80)) is not None
    assert 0 in found.ranks
    assert not [each for each in job.messages if "set aside" in each]


def test_a_folder_belongs_to_one_attempt_and_goes_with_it(memory: Path):
    folder = Folder()
    first, second = dict(folder.begin()), dict(folder.begin())
    assert first[FOLDER_VARIABLE] != second[FOLDER_VARIABLE]
    assert first[KEY_VARIABLE] != second[KEY_VARIABLE]
    assert os.listdir(memory) == [os.path.basename(second[FOLDER_VARIABLE])]
    folder.remove()
    assert os.listdir(memory) == []


@needs_root
def test_folders_that_are_left_behind_are_removed_only_if_they_are_ours(memory: Path):
    names = [f"ckptctl-4194000-{n}-abcdefgh" for n in range(3)]
    for name in names:
        (memory / name).mkdir(0o700)
        (memory / name / "rank-0.json").write_text("{}")
        os.utime(memory / name, (1, 1))
    give(memory / names[1])
    (memory / names[2]).rename(memory / "elsewhere")
    (memory / names[2]).symlink_to("elsewhere")
    Folder()
    assert sorted(os.listdir(memory)) == sorted([names[1], "elsewhere", names[2]])
    assert os.listdir(memory / "elsewhere") == ["rank-0.json"]


# Heartbeats: files in the folder


@pytest.mark.parametrize(
    "what", ["no-mac", "other-key", "of-another-rank", "no-json", "pipe", "link"]
)
def test_a_heartbeat_that_no_process_of_the_attempt_wrote_is_set_aside(
    job: Job, place: Path, what: str
):
    job.ranks.start(0)
    sound = read_heartbeat((job.folder / file_name(0)).read_bytes(), job.key)
    sound["rank"] = 5
    path = job.folder / file_name(5)
    if what == "no-mac":
        path.write_text(json.dumps(sound))
    elif what == "other-key":
        path.write_bytes(heartbeat_bytes(sound, "another"))
    elif what == "of-another-rank":
        path.write_bytes(heartbeat_bytes(sound, job.key).replace(b'"rank":5', b'"rank":6'))
    elif what == "no-json":
        path.write_bytes(b"[" * 100_000)
    elif what == "pipe":
        os.mkfifo(path)
    else:
        (place / "beat").write_bytes(heartbeat_bytes(sound, job.key))
        path.symlink_to(place / "beat")
    found = job.wait(40)
    assert found is not None
    assert found.ranks == (0,)
    assert f"set aside: {path}" in found.message
    assert len([each for each in job.messages if each.startswith("set aside")]) == 1


def test_a_heartbeat_with_the_key_counts(job: Job):
    job.ranks.start(0)
    job.ranks.start(1)
    job.ranks.signal(1, signal.SIGSTOP)
    found = job.wait(40)
    assert found is not None
    assert found.ranks == (1,)
    assert "set aside" not in found.message


def test_the_key_is_in_the_environment_of_the_job_and_nowhere_else(tmp_path: Path):
    (tmp_path / "ckpt").mkdir()
    program = """
import os, subprocess, sys
from ckptctl.train import heartbeat
heartbeat("step", step=1)
folder = os.environ["CKPTCTL_HEARTBEATS"]
assert sorted(os.listdir(folder)) == ["rank-0.json", "rank-0.stacks"]
shown = open(folder + "/rank-0.json").read() + open("/proc/%d/cmdline" % os.getppid()).read()
assert os.environ["CKPTCTL_HEARTBEAT_KEY"] not in shown
open(sys.argv[1], "w").write(os.environ["CKPTCTL_HEARTBEAT_KEY"])
print("step 1: out of memory")
sys.exit(3)
"""
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    done = run_ckptctl(
        *("run", "--json", "--root", tmp_path / "ckpt", "--max-restarts", 0),
        *("--log-dir", tmp_path / "logs", "--report", tmp_path / "report.json"),
        *("--evidence-dir", tmp_path / "evidence", "--"),
        *(sys.executable, "-c", program, tmp_path / "key"),
        env=state,
    )
    assert (tmp_path / "key").exists(), done.stderr
    key = (tmp_path / "key").read_text()
    (tmp_path / "key").unlink()
    assert len(key) == 64
    assert key not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"report.json", "run.log", "output.log"} <= {path.name for path in files}
    assert [path for path in files if key.encode() in path.read_bytes()] == []


def test_a_job_inside_of_a_job_does_not_report_to_the_outer_run(tmp_path: Path):
    outer = {FOLDER_VARIABLE: str(tmp_path), KEY_VARIABLE: "key of the outer job"}
    folder = Folder()
    inner = dict(folder.begin())
    folder.remove()
    assert inner.keys() == outer.keys()
    program = "from ckptctl.train import heartbeat\nheartbeat('step')"
    subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environment(**{**outer, **dict.fromkeys(inner, "")}),
        check=True,
    )
    assert os.listdir(tmp_path) == []


# Dumps of the flight recorder


DUMP = pickle.dumps({"version": "2.4", "entries": [], "pg_config": {}}, 2)


@needs_root
def test_the_dump_of_another_user_is_set_aside_and_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    dumps, out = open_to_all(place / "tmp"), place / "out"
    out.mkdir()
    for rank in (0, 3, 4, 5):
        (dumps / f"trace_{rank}").write_bytes(DUMP)
    give(dumps / "trace_3")
    (dumps / "trace_4").chmod(0o666)
    give(dumps / "trace_5")
    os.utime(dumps / "trace_5", (1, 1))
    os.mkfifo(dumps / "trace_6")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(dumps / "trace_"))
    found = collect({}, lambda: (), None, open_folder(str(out)), 1000.0)
    assert [dump.rank for dump in found.dumps] == [0]
    assert found.set_aside == (
        f"{dumps}/trace_3 belongs to uid {UID}",
        f"{dumps}/trace_4 can be written by every user",
        f"{dumps}/trace_6 is a pipe of uid 0, not a regular file",
    )


@needs_root
def test_the_dumps_of_the_user_that_root_runs_the_job_as_count(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    dumps, out = open_to_all(place / "tmp"), place / "out"
    out.mkdir()
    (dumps / "trace_3").write_bytes(DUMP)
    give(dumps / "trace_3")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(dumps / "trace_"))
    become = f"import os; os.setgid({UID}); os.setuid({UID}); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", become], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout
    child.stdout.readline()
    entry = entry_of(child.pid)
    assert entry
    try:
        found = collect({}, lambda: (entry.process,), None, open_folder(str(out)), 1000.0)
    finally:
        child.communicate(b"\n")
    assert [dump.rank for dump in found.dumps] == [3]
    assert found.set_aside == ()


@needs_root
def test_evidence_is_not_written_behind_a_link_of_another_user(job: Job, place: Path):
    (place / "home").mkdir()
    (place / "home" / "rc").write_text("mine\n")
    attempt = place / "evidence" / "attempt-1"
    attempt.mkdir(parents=True)
    (attempt / "stacks-rank-0.txt").symlink_to(place / "home" / "rc")
    (attempt / "stacks-rank-7.txt").write_text("forged")
    give(attempt, attempt / "stacks-rank-0.txt", attempt / "stacks-rank-7.txt")
    job.ranks.start(0)
    found = job.wait(40)
    assert found is not None
    assert found.evidence == ()
    assert (place / "home" / "rc").read_text() == "mine\n"


# The log folder


def test_logs_are_written_into_a_new_folder_and_behind_a_link_of_this_user(place: Path):
    (place / "real").mkdir()
    (place / "link").symlink_to("real")
    for folder in (place / "new" / "logs", place / "link"):
        logs = LogFolder(str(folder))
        log = logs.output(3)
        assert isinstance(log, JobLog)
        assert log.fd is not None
        os.write(log.fd, b"said")
        assert log.size() == 4
        assert logs.note("decided") is None
        assert Path(log.path).read_text() == "said"
        assert " decided" in (folder / "run.log").read_text()
        logs.close()


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
@pytest.mark.parametrize("what", ["link", "folder-link", "pipe", "file", "hard-link"])
def test_what_another_user_planted_for_the_output_is_not_used(place: Path, what: str, mode: int):
    logs = open_to_all(place / "logs", mode)
    (place / "home").mkdir()
    (place / "home" / "rc").write_text("mine\n")
    planted = logs / "1" / "output.log"
    if what == "folder-link":
        planted = logs / "1"
        planted.symlink_to(place / "home")
    else:
        planted.parent.mkdir()
        give(planted.parent)
    if what == "link":
        planted.symlink_to(place / "home" / "rc")
    elif what == "pipe":
        os.mkfifo(planted, 0o666)
    elif what == "file":
        planted.write_text("forged\n")
    elif what == "hard-link":
        os.link(place / "home" / "rc", planted)
    if what != "hard-link":
        give(planted)
    log = LogFolder(str(logs)).output(1)
    assert isinstance(log, str)
    assert str(planted) in log or "second name" in log
    if what != "hard-link":
        assert f"uid {UID}" in log
    assert (place / "home" / "rc").read_text() == "mine\n"
    assert os.listdir(place / "home") == ["rc"]


@needs_root
def test_a_log_folder_that_another_user_swaps_keeps_the_output_of_the_attempt(place: Path):
    open_to_all(place / "open", 0o777)
    logs = LogFolder(str(place / "open" / "logs"))
    log = logs.output(1)
    assert isinstance(log, JobLog)
    assert log.fd is not None
    (place / "home").mkdir()
    as_second_user(
        "os.rename(sys.argv[1], sys.argv[2])\nos.symlink(sys.argv[3], sys.argv[1])",
        *(place / "open" / "logs", place / "open" / "moved", place / "home"),
    )
    os.write(log.fd, b"said")
    assert log.size() == 4
    assert f"is a link that uid {UID} created" in str(logs.note("decided"))
    assert isinstance(logs.output(2), str)
    assert os.listdir(place / "home") == []
    logs.close()


@needs_root
def test_decisions_go_into_the_log_of_a_colleague_where_not_everybody_can_write(place: Path):
    logs = open_to_all(place / "logs", 0o775)
    (logs / "run.log").write_text("theirs\n")
    give(logs / "run.log")
    assert LogFolder(str(logs)).note("decided") is None
    assert (logs / "run.log").read_text().startswith("theirs\n")
    assert "decided" in (logs / "run.log").read_text()
    logs.chmod(0o1777)
    assert f"run.log belongs to uid {UID}" in str(LogFolder(str(logs)).note("decided"))


@needs_root
def test_a_run_goes_on_beside_a_log_folder_that_it_cannot_use(place: Path):
    logs = open_to_all(place / "logs", 0o1777)
    (place / "ckpt").mkdir()
    os.mkfifo(logs / "run.log", 0o666)
    (logs / "1").symlink_to("/")
    give(logs / "run.log", logs / "1")
    done = run_ckptctl(
        *("run", "--root", place / "ckpt", "--log-dir", logs, "--max-restarts", 0, "--"),
        *("echo", "said by the job"),
        env={"XDG_STATE_HOME": str(place / "state")},
    )
    assert done.returncode == 0, done.stderr
    assert "said by the job" in done.stdout
    assert done.stderr.count("the decisions are not written to the log folder") == 1
    assert "the output goes here" in done.stderr
    assert f"uid {UID}" in done.stderr


@needs_root
def test_a_log_that_is_another_users_link_is_not_classified(place: Path):
    open_to_all(place / "open")
    (place / "secret").write_text("")
    (place / "ckpt").mkdir()
    log = place / "open" / "job.log"
    log.symlink_to(place / "secret")
    give(log)
    done = run_ckptctl(
        *("run", "--root", place / "ckpt", "--log", log, "--max-restarts", 0, "--"),
        *(
            "sh",
            "-c",
            f"echo 'torch.OutOfMemoryError: CUDA out of memory' >> {place}/secret; exit 1",
        ),
        env={"XDG_STATE_HOME": str(place / "state")},
    )
    assert f"set aside: {log} is a link that uid {UID} created" in done.stderr
    assert "job-oom" not in done.stderr


# The copy of the state


@needs_root
def test_a_copy_of_the_state_that_another_user_wrote_is_set_aside(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(place))
    copy = LocalCopy(str(place / "root"))
    state = new_state(str(place / "root"))
    copy.write(state)
    assert copy.read() == state
    assert copy.set_aside == ""
    give(copy.path)
    assert copy.read() is None
    assert f"belongs to uid {UID}" in copy.set_aside
