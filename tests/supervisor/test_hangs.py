"""A rank that does not come further is reported and named: real processes, a clock of the test."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run_ckptctl, validated
from ranks import Ranks, state
from services.processes import wait_until

from ckptctl.distributed.process_table import entry_of
from ckptctl.errors import OwnFileUnreadable, UsageError
from ckptctl.formats.own.heartbeats import (
    FOLDER_VARIABLE,
    KEY_VARIABLE,
    SECTIONS,
    file_name,
    heartbeat_bytes,
    read_heartbeat,
)
from ckptctl.formats.own.supervision import SectionTimes
from ckptctl.storage.shared_places import open_folder
from ckptctl.supervisor import evidence
from ckptctl.supervisor.evidence import collect
from ckptctl.supervisor.hangs import GAP_S, HangWatcher
from ckptctl.supervisor.options import FACTOR, LONGEST_S, SectionLimits
from ckptctl.supervisor.processes import Hang, JobLog

GIVEN = dict.fromkeys(SECTIONS, 30.0)
BUSY = """
def work(depth):
    end = time.monotonic() + 0.01
    while time.monotonic() < end: pass
    if depth: work(depth - 1)
while True: work(50)
"""


BESIDE = "import time; end = time.time() + 600\nwhile time.time() < end: pass"


class Watch:
    """A watcher of ranks, called by a clock that the test moves."""

    def __init__(self, folder: Path, limits: SectionLimits, logs: tuple[str, ...] = ()) -> None:
        self.messages: list[str] = []
        self.limits = limits
        self.logs = logs
        self.watcher = HangWatcher(limits, self.messages.append, str(folder / "evidence"))
        self.now_s = 1000.0
        self.begin(1)

    def begin(self, attempt: int) -> None:
        self.variables = self.watcher.prepare(attempt, [*map(JobLog, self.logs)])
        self.ranks = Ranks(self.variables)

    def poll(self) -> Hang | None:
        return self.watcher.poll(self.ranks.running, self.now_s)

    def wait(self, seconds: float) -> Hang | None:
        """Let time pass, with a poll every few seconds as the supervisor does."""
        found = self.poll()
        until_s = self.now_s + seconds
        while found is None and self.now_s < until_s:
            self.now_s += GAP_S - 1
            found = self.poll()
        return found

    @property
    def key(self) -> str:
        return self.variables[KEY_VARIABLE]

    def file(self, rank: int) -> Path:
        return Path(self.variables[FOLDER_VARIABLE]) / file_name(rank)


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A function that makes a `Watch`, for short samples; the processes end with the test."""
    monkeypatch.setattr(evidence, "BETWEEN_S", 0.1)
    made: list[Watch] = []

    def make(given: dict | None = None, seen: dict | None = None, **about: object) -> Watch:
        made.append(Watch(tmp_path, SectionLimits(given or {}, seen), **about))
        return made[-1]

    yield make
    for each in made:
        each.ranks.end()
        each.watcher.close()


@pytest.mark.parametrize("section", ["setup", "first-step", "step", "checkpoint", "outside"])
def test_a_stopped_rank_is_named_with_its_section(watch, section: str):
    one = watch(GIVEN)
    for rank in range(3):
        one.ranks.start(rank, section=section)
    assert one.wait(20) is None
    one.ranks.signal(1, signal.SIGSTOP)
    found = one.wait(30)
    assert (found.section, found.ranks, found.nodes) == (section, (1,), (os.uname().nodename,))
    assert "rank 1 was stopped (process state T)" in found.message
    assert [Path(path).name for path in found.evidence] == [
        f"stacks-rank-{rank}.txt" for rank in (0, 2)
    ]
    assert "line" in Path(found.evidence[0]).read_text()


def test_a_worker_that_was_stopped_is_named_with_the_rank_that_started_it(watch):
    one = watch(GIVEN)
    for rank in range(2):
        one.ranks.start(rank)
    fork = "pid = os.fork()\nif not pid: {}\nsys.stdin.read()"
    one.ranks.start(2, fork.format("os.kill(os.getpid(), signal.SIGSTOP)"))
    one.ranks.start(3, fork.format("time.sleep(1e6)"))
    wait_until(lambda: all(children(one.ranks.pid(rank)) for rank in (2, 3)), what="the workers")
    (stopped,), (asleep,) = (children(one.ranks.pid(rank)) for rank in (2, 3))
    wait_until(lambda: state(stopped) == "T", what="the stop")
    found = one.wait(40)
    assert found.ranks == (2,)
    assert f"process {stopped} (python" in found.message
    assert "which it started, was stopped (process state T)" in found.message
    kept = {Path(path).name: Path(path).read_text() for path in found.evidence}
    assert f"process {stopped}" in kept["processes-rank-2.txt"]
    assert f"process {asleep}" in kept["processes-rank-3.txt"]
    assert "most recent call first" in kept["processes-rank-3.txt"], "a fork of a rank answers"
    assert "processes-rank-0.txt" not in kept


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def test_a_rank_that_was_killed_is_named_where_its_peers_wait(watch):
    one = watch(GIVEN)
    for rank in range(3):
        one.ranks.start(rank)
    one.ranks.signal(2, signal.SIGKILL)
    assert one.wait(40).ranks == (2,)


def test_a_rank_that_never_reported_is_named(watch):
    one = watch(GIVEN)
    one.ranks.size = 4
    for rank in (0, 1, 3):
        one.ranks.start(rank)
    found = one.wait(40)
    assert found.ranks == (2,)
    assert "has not reported at all" in found.message


def test_a_rank_whose_stack_differs_is_not_named_where_no_other_waits_for_it(watch):
    one = watch(GIVEN)
    for rank in range(3):
        one.ranks.start(rank)
    one.ranks.start(3, "batch = None\ntime.sleep(1e6)")
    found = one.wait(40)
    assert found.ranks == ()
    assert "undecided: the ranks are at 2 different places" in found.message


def test_a_rank_that_does_not_write_its_stacks_is_named(watch):
    one = watch(GIVEN)
    one.ranks.start(0)
    one.ranks.start(1)
    everything = "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))"
    one.ranks.start(2, f"{everything}\nsys.stdin.readline(); print(flush=True)\nsys.stdin.read()")
    one.ranks.tell(2)  # until then it would still answer
    found = one.wait(40)
    assert found.ranks == (2,)
    assert "does not write its stacks when asked" in found.message


def test_ranks_at_the_same_place_are_undecided(watch):
    one = watch(GIVEN)
    for rank in range(3):
        one.ranks.start(rank)
    found = one.wait(40)
    assert found.ranks == ()
    assert "undecided: all ranks are at the same place" in found.message


# Time that does not count


def test_a_gap_of_the_clock_restarts_all_timers(watch):
    one = watch(GIVEN)
    one.ranks.start(0)
    assert one.wait(20) is None
    one.now_s += 3600
    assert one.wait(20) is None
    assert one.wait(30) is not None


def test_a_job_that_is_stopped_as_a_whole_does_not_hang(watch):
    one = watch(GIVEN)
    for rank in range(2):
        one.ranks.start(rank)
        one.ranks.signal(rank, signal.SIGSTOP)
    assert one.wait(100) is None
    assert any("the whole job is stopped" in message for message in one.messages)


def test_what_was_in_progress_ends_with_the_attempt(watch):
    one = watch(GIVEN)
    one.ranks.start(0, section="checkpoint")
    assert one.wait(20) is None
    one.ranks.end()
    before = one.file(0)
    one.begin(2)
    assert not before.parent.exists()
    assert not one.file(0).exists()
    assert one.wait(25) is None
    one.ranks.start(0, section="step")
    assert one.wait(25) is None
    assert one.wait(30).section == "step"


def test_ranks_that_have_ended_are_not_waited_for(watch):
    one = watch(GIVEN)
    one.ranks.start(0, section="outside")
    one.poll()
    one.ranks.signal(0, signal.SIGKILL)
    assert one.wait(200) is None


def test_a_rank_that_has_ended_before_the_others_is_not_waited_for(watch):
    one = watch(GIVEN)
    one.ranks.start(0, section="outside")
    loop = "while sys.stdin.readline():\n    time.sleep(1.1); heartbeat('step'); print(flush=True)"
    one.ranks.start(1, loop)
    one.poll()
    one.ranks.signal(0, signal.SIGKILL)
    for _ in range(4):
        one.ranks.tell(1)
        assert one.wait(20) is None


def test_nobody_is_named_where_the_reports_are_left_to_one_of_several_ranks(watch):
    one = watch(GIVEN)
    one.ranks.size = one.ranks.world_size = 4
    one.ranks.start(0)
    found = one.wait(40)
    assert found.ranks == ()
    assert "1 rank of 4 could be seen from here" in found.message


def test_heartbeats_that_somebody_removed_are_not_held_against_the_job(watch):
    one = watch(GIVEN)
    one.ranks.start(0)
    assert one.wait(20) is None
    shutil.rmtree(one.file(0).parent)
    assert one.wait(100) is None
    assert one.file(0).parent.is_dir()


# Slow and sound work


def test_a_limit_that_nobody_gave_is_extended_while_stacks_change(watch):
    one = watch(seen={"step": SectionTimes(0, LONGEST_S / FACTOR - 10)})
    one.ranks.start(0)
    one.ranks.start(1, BUSY)
    assert one.wait(LONGEST_S - 10) is None
    assert [m for m in one.messages if "but the job works" in m and "; evidence in " in m]
    assert one.wait(20).section == "step"


def test_a_limit_that_nobody_gave_is_extended_while_an_evaluation_runs_beside(watch):
    one = watch()
    one.ranks.start(0)
    # Beside busier processes it gets little of the processor, and still works.
    one.ranks.start(1, f"subprocess.run(['nice', sys.executable, '-c', {BESIDE!r}])")
    assert one.wait(620) is None
    assert [m for m in one.messages if "but the job works" in m and "; evidence in " in m]


def test_a_limit_that_a_person_gave_is_not_extended(watch):
    one = watch(GIVEN)
    one.ranks.start(0, BUSY)
    assert one.wait(40).section == "step"


def test_without_work_a_built_in_limit_ends_the_job(watch):
    one = watch()
    one.ranks.start(0)
    one.ranks.start(1)
    assert one.wait(590) is None
    assert "limit 10 min" in one.wait(20).message


def test_an_asynchronous_save_has_a_limit_beside_the_step(watch):
    one = watch({"async-save": 100})
    for rank in range(2):
        one.ranks.start(
            rank,
            "from ckptctl.train.heartbeats import report_saving\n"
            "report_saving(7)\n"
            f"if {rank}: report_saving(None)\n"
            "while sys.stdin.readline():\n"
            "    heartbeat('step'); time.sleep(1); heartbeat('step'); print(flush=True)",
        )
    found = None
    for _ in range(5):
        for rank in range(2):
            one.ranks.tell(rank)
        found = found or one.wait(25)
    assert (found.section, found.ranks) == ("async-save", (0,))


# SectionLimits


def test_limits_are_learned_from_what_ranks_needed_and_kept_above_the_least():
    limits = SectionLimits(
        {}, {"step": SectionTimes(5000, 1.0), "checkpoint": SectionTimes(50, 2000.0)}
    )
    assert limits.of("step").seconds == 180
    assert limits.of("checkpoint").seconds == FACTOR * 2000
    assert SectionLimits({}, {"step": SectionTimes(10, 1.0)}).of("step").seconds == 600
    assert SectionLimits({"step": 7.0}, {"step": SectionTimes(10, 1e6)}).of("step") == (7.0, True)


def test_times_between_reports_are_learned(watch):
    one = watch()
    one.ranks.start(
        0, "while sys.stdin.readline():\n    time.sleep(1.1); heartbeat('step'); print(flush=True)"
    )
    assert one.wait(100) is None
    one.ranks.tell(0)
    one.poll()
    assert one.limits.seen["step"].n == 1
    assert one.limits.seen["step"].longest_s >= 100


def test_an_undecided_hang_makes_the_next_limit_longer(watch):
    one = watch()
    one.ranks.start(0)
    one.ranks.start(1)
    assert one.wait(700).ranks == ()
    assert one.limits.of("step").seconds > 2000


def test_a_hang_of_ranks_at_different_places_makes_no_limit_longer(watch):
    one = watch()
    one.ranks.start(0)
    one.ranks.start(1, "batch = None\ntime.sleep(1e6)")
    assert one.wait(700).ranks == ()
    assert one.limits.of("step").seconds == 600


@pytest.mark.parametrize("given", [{"stepp": 60.0}, {"step": 1.0}, {"step": float("nan")}])
def test_a_limit_that_cannot_be_kept_is_refused(given: dict):
    with pytest.raises(UsageError):
        SectionLimits(given)


# Without heartbeats


def test_without_heartbeats_and_logs_nothing_is_detected_and_that_is_said(watch):
    one = watch(GIVEN)
    assert one.wait(1000) is None
    (message,) = one.messages
    assert message.startswith("a hang is detected only if the job writes heartbeats")


def test_a_log_that_does_not_grow_ends_a_job_only_by_a_limit_that_a_person_gave(
    watch, tmp_path: Path
):
    (tmp_path / "log").write_text("step 1\n")
    one = watch({}, logs=(str(tmp_path / "log"),))
    one.now_s = one.watcher._logs._grew_s
    for _ in range(2):
        one.now_s += 4
        assert one.poll() is None


def test_a_job_that_reported_in_an_earlier_attempt_is_expected_to_report(watch):
    one = watch({"outside": 60}, seen={"step": SectionTimes(3, 1.0)})
    assert one.wait(50) is None
    assert one.wait(20).section == "outside"


# What others write into the folder


BEAT = {
    "rank": 0,
    "local_world_size": None,
    "world_size": None,
    "node": "n1",
    "pid": 9,
    "started": 1,
    "count": 3,
    "section": "step",
    "step": 7,
    "saving": None,
    "stack_signal": 64,
}


@pytest.mark.parametrize(
    "change",
    [
        *({"rank": 1 << 20}, {"pid": 0}, {"pid": 1 << 31}, {"stack_signal": 65}),
        *({"section": "else"}, {"section": "async-save"}, {"count": -1}, {"count": 1.5}),
        *({"node": "--all"}, {"node": "a,b"}, {"node": "a[1-9]"}, {"node": "a=b"}, {"more": 1}),
    ],
)
def test_a_heartbeat_out_of_bounds_is_refused(change: dict):
    read_heartbeat(heartbeat_bytes(BEAT, "key"), "key")
    with pytest.raises(OwnFileUnreadable):
        read_heartbeat(heartbeat_bytes({**BEAT, **change}, "key"), "key")


def test_a_heartbeat_that_names_a_process_outside_of_the_job_does_no_harm(watch):
    one = watch(GIVEN)
    one.ranks.start(0)
    outsider = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    named = {"rank": 5, "pid": outsider.pid, "started": entry_of(outsider.pid).process.started}
    one.file(5).write_bytes(heartbeat_bytes({**BEAT, **named}, one.key))
    one.file(6).write_bytes(b"[" * 100_000)
    found = one.wait(40)
    assert found.ranks == (5,)
    outsider.communicate(b"\n")
    assert outsider.returncode == 0


def test_a_heartbeat_is_read_as_it_was_written(watch):
    one = watch(GIVEN)
    one.ranks.start(3, section="checkpoint")
    beat = read_heartbeat(one.file(3).read_bytes(), one.key)
    assert heartbeat_bytes(beat, one.key) == one.file(3).read_bytes()
    assert (beat["rank"], beat["section"], beat["step"], beat["pid"]) == (
        3,
        "checkpoint",
        7,
        one.ranks.pid(3),
    )


@pytest.mark.parametrize("log", ["--log", "--log-dir"])
def test_a_real_job_whose_log_does_not_grow_is_ended_and_restarted(tmp_path: Path, log: str):
    (tmp_path / "ckpt").mkdir()
    job = 'echo began; [ "$CKPTCTL_RESTART_COUNT" -ge 1 ] || sleep 3600'
    done = run_ckptctl(
        *("run", "--root", tmp_path / "ckpt", "--backoff", 0, log, tmp_path / "log"),
        *("--out-of-section-timeout", 5, "--report", tmp_path / "report.json", "--"),
        *("sh", "-c", job),
    )
    assert done.returncode == 0, done.stderr
    attempts = validated((tmp_path / "report.json").read_text())["attempts"]
    assert [each["cause"] for each in attempts][:: len(attempts) - 1] == ["hang", None]
    assert "no log grew for" in done.stderr


def test_only_regular_files_are_kept_as_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dumps, out, secret = tmp_path / "tmp", tmp_path / "out", tmp_path / "secret"
    dumps.mkdir()
    out.mkdir()
    data = pickle.dumps({"version": "2.4", "entries": [], "pg_config": {}}, 2)
    (dumps / "trace_3").write_bytes(data)
    secret.write_bytes(data)
    (dumps / "trace_4").symlink_to(secret)
    os.mkfifo(dumps / "trace_5")
    (dumps / "trace_6").mkdir()
    (dumps / "trace_7").symlink_to("/dev/zero")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(dumps / "trace_"))
    found = collect({}, lambda: (), None, open_folder(str(out)), 0.0)
    assert [dump.rank for dump in found.dumps] == [3]
    assert [file.name for file in out.iterdir()] == ["flight-recorder-rank-3"]
