"""The budget survives every end of `ckptctl run`: real processes, real kills, real torchrun."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, run_ckptctl
from services.plugin import S3Server
from storage.faulty import FaultyStore
from supervisor.supervised_root import KILL_AT, LEASE, processes_with, states, until

import ckptctl
from ckptctl.distributed.process_table import machine
from ckptctl.errors import (
    AlreadySupervised,
    OwnFileUnreadable,
    OwnFileUnsupported,
    StorageUnavailable,
)
from ckptctl.formats.own.files import as_stored
from ckptctl.formats.own.supervision import STATE_SCHEMA
from ckptctl.storage.opening import open_store
from ckptctl.supervisor import holding
from ckptctl.supervisor.holding import LocalCopy, Revisions
from ckptctl.supervisor.processes import MARKER, Signals

KILLABLE = (sys.executable, str(Path(__file__).parent / "supervised_root.py"))
FAILS = ("sh", "-c", 'echo started >> "$0"; exit 1')


def once(root: Path | str, *attempt: str, **about: object) -> ckptctl.Supervised:
    """One invocation of `run` with one attempt, which ends with 18 unless `attempt` says how."""
    command = attempt or ("sh", "-c", "exit 18")
    return ckptctl.keep_running(command, str(root), backoff_s=0, no_restart=(18,), **about)


def saving(root: Path, source: Path, step: int) -> tuple[str, ...]:
    return "sh", "-c", f"cp -r {shlex.quote(str(source))} {root}/step_{step}; exit 18"


def number_of_starts(tmp_path: Path) -> int:
    path = tmp_path / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


# One budget over separate invocations


def test_a_later_invocation_goes_on_with_the_budget(root: Path):
    assert [once(root).exit_code for _ in range(5)] == [18, 18, 18, 18, 93]
    refused = once(root)
    assert refused.attempts == ()
    assert "no restart is left since attempt 4" in refused.message


def test_progress_refills_the_budget_over_invocations(root: Path, source: Path):
    codes = [once(root).exit_code for _ in range(2)]
    codes += [once(root, *saving(root, source, 100)).exit_code]
    codes += [once(root).exit_code for _ in range(4)]
    assert codes == [18] * 6 + [93]
    attempts = states(root)[-1]["attempts"]
    assert [attempt["progress"] for attempt in attempts] == [False] * 2 + [True] + [False] * 3


def test_steps_of_a_run_whose_loss_is_not_finite_are_no_progress(
    root: Path, source: Path, tmp_path: Path
):
    rows = "".join(f"step: {step} loss: nan\\n" for step in range(1, 11))
    saves = f"cp -r {shlex.quote(str(source))} {root}/step_$((100 + CKPTCTL_RESTART_COUNT))"
    job = ("sh", "-c", f'printf "{rows}"; {saves}; exit 18')
    said: list[str] = []
    about = {"log_dir": str(tmp_path / "logs"), "tell": said.append}
    assert [once(root, *job, **about).exit_code for _ in range(5)] == [18, 18, 18, 18, 93]
    assert "warning: step 100 is no progress: the last 10 reported losses are NaN or infinite" in (
        said
    )
    assert not any(attempt["progress"] for attempt in states(root)[-1]["attempts"])


@pytest.mark.parametrize("how", ["fails", "supervisor killed"])
def test_a_step_whose_loss_was_not_finite_is_no_progress_later_either(
    root: Path, source: Path, tmp_path: Path, how: str
):
    rows = "".join(f"step: {step} loss: nan\\n" for step in range(1, 11))
    saves = f"cp -r {shlex.quote(str(source))} {root}/step_100"
    about = {"log_dir": str(tmp_path / "logs")}
    once(root, "sh", "-c", f'printf "{rows}"; {saves}; exit 18', **about)
    if how == "fails":
        once(root, **about)
    else:
        job = f"touch {tmp_path}/began; sleep 3600"
        command = [*COMMAND, "run", "--root", root, "--", "sh", "-c", job]
        run = subprocess.Popen(command, env=clean_environment())
        until((tmp_path / "began").exists)
        run.kill()
        run.wait()
    once(root, **about)
    assert not any(attempt["progress"] for attempt in states(root)[-1]["attempts"])
    once(root, *saving(root, source, 200), **about)
    assert states(root)[-1]["best"] == 200


def test_a_person_resets_the_budget_with_a_reason_that_is_recorded(root: Path):
    while once(root).exit_code != 93:
        pass
    done = run_ckptctl(
        *("run", "--root", root, "--reset-budget", "node 7 was replaced", "--", "true")
    )
    assert done.returncode == 0
    (reset,) = states(root)[-1]["resets"]
    assert (reset["reason"], reset["after"]) == ("node 7 was replaced", 4)
    empty = run_ckptctl("run", "--root", root, "--reset-budget", " ", "--", "true")
    assert empty.returncode == 2


def test_a_job_that_was_done_begins_a_new_budget(root: Path):
    assert [once(root).exit_code for _ in range(4)] == [18] * 4
    assert once(root, "true", reset_budget="mended").exit_code == 0
    assert [once(root).exit_code for _ in range(5)] == [18] * 4 + [93]


def test_a_second_rerun_without_a_newer_step_stops_with_16(root: Path, source: Path):
    said: list[str] = []
    twice = ckptctl.keep_running(["sh", "-c", "exit 16"], str(root), backoff_s=0, tell=said.append)
    assert (twice.exit_code, len(twice.attempts)) == (16, 2)
    assert any("exit code 16 asks for other nodes" in line for line in said)
    saves = f"cp -r {shlex.quote(str(source))} {root}/step_$CKPTCTL_RESTART_COUNT"
    job = ["sh", "-c", f"{saves}; exit 16"]
    other = ckptctl.keep_running(job, str(root), backoff_s=0, max_free_restarts=2)
    assert len(other.attempts) > 2, "each came after a newer step"


def test_causes_outside_the_job_cost_nothing_and_are_bounded(root: Path):
    job = ["sh", "-c", "exit 75"]
    found = ckptctl.keep_running(job, str(root), backoff_s=0, max_restarts=1, max_free_restarts=4)
    assert (found.exit_code, len(found.attempts)) == (93, 5)
    assert {attempt.left for attempt in found.attempts} == {1}


def test_the_state_can_lie_elsewhere(root: Path, tmp_path: Path):
    elsewhere = tmp_path / "state"
    assert once(root, state=str(elsewhere)).exit_code == 18
    assert not (root / ".ckptctl" / "supervisor").exists()
    assert [path.name for path in elsewhere.glob("0*.json")]
    assert [once(root, state=str(elsewhere)).exit_code for _ in range(4)] == [18] * 3 + [93]


@pytest.mark.server
def test_the_state_of_a_root_in_an_object_store_lies_there(s3_moto: S3Server, tmp_path: Path):
    root = f"s3://{s3_moto.bucket}/{tmp_path.name}"
    about = {"create": True, "wait_s": 0, "storage_options": s3_moto.options}
    assert [once(root, **about).exit_code for _ in range(5)] == [18] * 4 + [93]
    held = s3_moto.client.list_objects_v2(
        Bucket=s3_moto.bucket, Prefix=f"{tmp_path.name}/.ckptctl/supervisor/"
    )
    names = [each["Key"].rpartition("/")[2] for each in held["Contents"]]
    assert len([name for name in names if name[0] == "0"]) == 4, "older revisions are removed"
    assert "lease.json" in names


# `run` is killed


def killable(root: Path, *command: str, at: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KILLABLE, "run", "--root", root, "--backoff", "0", "--", *command],
        env=clean_environment(**({KILL_AT: at} if at else {})),
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("after", ["", "+"])
def test_killed_at_any_write_it_starts_no_attempt_more_than_the_budget(tmp_path: Path, after: str):
    n_kills = 0
    for n in range(1, 100):
        folder = tmp_path / str(n)
        root = folder / "ckpt"
        root.mkdir(parents=True)
        fails = [*FAILS, str(folder / "starts")]
        killed = killable(root, *fails, at=f"{n}{after}")
        if killed.returncode != -signal.SIGKILL:
            break
        n_kills += 1
        assert killable(root, *fails).returncode == 93, n
        assert 1 <= number_of_starts(folder) <= 4, n
        assert processes_with(str(root)) == []
    assert killed.returncode == 93
    assert n_kills > 10


def test_a_job_that_a_killed_run_left_behind_is_ended_and_counts(root: Path, tmp_path: Path):
    # As a worker of torchrun does, the process leaves session and process group.
    job = f'setsid sh -c "echo $$ > {tmp_path}/began; sleep 3600" & wait'
    run = subprocess.Popen(
        [*COMMAND, "run", "--root", root, "--", "sh", "-c", job], env=clean_environment()
    )
    until((tmp_path / "began").exists)
    run.kill()
    run.wait()
    left = processes_with(MARKER)
    assert len(left) >= 2
    done = run_ckptctl("run", "--root", root, "--max-restarts", 1, "--", "sh", "-c", "exit 1")
    assert "that a killed `ckptctl run` left behind" in done.stderr
    assert done.returncode == 93
    assert processes_with(str(root)) == []
    first, second = states(root)[-1]["attempts"]
    assert "its supervisor was killed" in first["reason"]
    assert second["decision"] == "given-up"


def test_what_an_attempt_saved_before_its_run_was_killed_is_its_progress(
    root: Path, source: Path, tmp_path: Path
):
    *words, script = saving(root, source, 100)
    job = script.replace("exit 18", f"touch {tmp_path}/began; sleep 3600")
    run = subprocess.Popen(
        [*COMMAND, "run", "--root", root, "--", *words, job], env=clean_environment()
    )
    until((tmp_path / "began").exists)
    run.kill()
    run.wait()
    once(root)
    first = states(root)[-1]["attempts"][0]
    assert (first["step"], first["inspected"], first["progress"]) == (100, True, True)


def test_a_run_that_is_killed_after_a_signal_to_end_costs_nothing(root: Path, tmp_path: Path):
    # It ends at the second signal, which is that of the next `run`.
    job = f"trap 'trap - TERM' TERM; touch {tmp_path}/began; while :; do sleep 0.1; done"
    for _ in range(2):  # as a scheduler does whose grace is too short for the job
        run = subprocess.Popen(
            [*COMMAND, "run", "--root", root, "--max-restarts", "0", "--", "sh", "-c", job],
            env=clean_environment(),
        )
        until((tmp_path / "began").exists)
        run.terminate()
        until(lambda: states(root)[-1]["attempts"][-1]["free"])
        run.kill()
        run.wait()
        (tmp_path / "began").unlink()
    assert once(root, "true").exit_code == 0
    assert processes_with(str(root)) == []
    reasons = [each["reason"] for each in states(root)[-1]["attempts"]][:2]
    assert all("killed after a signal had asked it to end" in reason for reason in reasons)


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
WORKER = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / ("rank" + os.environ["RANK"])).write_text(str(os.getppid()))
time.sleep(3600)
"""


def torchrun(tmp_path: Path) -> list[str]:
    (tmp_path / "worker.py").write_text(WORKER)
    port = str(20_000 + os.getpid() % 10_000)
    return [*TORCHRUN, "--master-port", port, str(tmp_path / "worker.py"), str(tmp_path)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["launcher killed", "run killed", "run told to end"])
def test_no_worker_of_torchrun_lives_on(root: Path, tmp_path: Path, how: str):
    command = [*COMMAND, "run", "--root", root, "--max-restarts", "0", "--", *torchrun(tmp_path)]
    run = subprocess.Popen(command, env=clean_environment(), stderr=subprocess.DEVNULL)
    ranks = [tmp_path / "rank0", tmp_path / "rank1"]
    until(lambda: all(path.exists() and path.read_text() for path in ranks))
    if how == "launcher killed":
        os.kill(int(ranks[0].read_text()), signal.SIGKILL)
        assert run.wait() == 93
    elif how == "run told to end":
        run.terminate()
        run.wait()
    else:
        run.kill()
        run.wait()
        assert len(processes_with(str(root))) >= 3
        once(root, "true")
    assert processes_with(str(root)) == []


# Two at once


def test_a_second_run_of_the_same_root_is_refused_while_the_first_lives(root: Path, tmp_path: Path):
    job = f"touch {tmp_path}/began; sleep 3600"
    run = subprocess.Popen(
        [*COMMAND, "run", "--root", root, "--", "sh", "-c", job], env=clean_environment()
    )
    until((tmp_path / "began").exists)
    second = run_ckptctl("run", "--root", root, "--", "true")
    assert second.returncode == 75
    assert f"process {run.pid} of this machine) supervises this job" in second.stderr
    shutil.copytree(root, tmp_path / "copy")
    assert once(tmp_path / "copy", "true").exit_code == 0, "a copy of the root is another run"
    (tmp_path / "link").symlink_to(root)
    linked = run_ckptctl("run", "--root", tmp_path / "link", "--", "true")
    assert linked.returncode == 75, "another path to the root is no other run"
    assert run.poll() is None
    assert processes_with(f"@{root}")
    run.terminate()
    run.wait()
    assert once(root, "true").exit_code == 0


def test_what_a_killed_run_left_behind_is_ended_by_a_run_over_another_path(
    root: Path, tmp_path: Path
):
    job = f"touch {tmp_path}/began; sleep 3600"
    run = subprocess.Popen(
        [*COMMAND, "run", "--root", root, "--", "sh", "-c", job], env=clean_environment()
    )
    until((tmp_path / "began").exists)
    run.kill()
    run.wait()
    (tmp_path / "link").symlink_to(root)
    assert processes_with(f"@{root}")
    assert once(tmp_path / "link", "true").exit_code == 0
    assert processes_with(f"@{root}") == []


def of_another_machine(root: Path) -> None:
    """Let the newest revision say that another machine holds the state."""
    document = states(root)[-1]
    owner = {
        "id": "a" * 32,
        "host": "gpu-007",
        "machine": "elsewhere/1",
        "pid": os.getpid(),
        "started": 1,
        "root": str(root),
    }
    write_state(root, {**document, "owner": owner})


def write_state(root: Path, document: dict) -> None:
    fields = {name: each for name, each in document.items() if name not in ("schema", "digest")}
    folder = root / ".ckptctl" / "supervisor"
    number = 1 + max(int(path.stem) for path in folder.glob("0*.json"))
    (folder / f"{number:010}.json").write_bytes(as_stored(STATE_SCHEMA, fields))


def test_a_lease_of_another_machine_is_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch):
    once(root)
    of_another_machine(root)
    monkeypatch.setattr(holding, "LEASE_S", 0.5)
    said: list[str] = []
    assert once(root, "true", tell=said.append).exit_code == 0
    assert any("`ckptctl run` on gpu-007 held this job" in line for line in said)


def test_a_holder_that_renews_its_lease_keeps_the_job(root: Path, monkeypatch: pytest.MonkeyPatch):
    once(root)
    of_another_machine(root)
    lease = root / ".ckptctl" / "supervisor" / "lease.json"
    monkeypatch.setattr(holding, "LEASE_S", 600.0)
    renewing = threading.Timer(1.5, lease.write_text, args=["renewed"])
    renewing.start()
    with pytest.raises(AlreadySupervised, match="it renewed its lease"):
        once(root, "true")


def test_a_run_that_was_overtaken_ends_its_job_and_says_so(root: Path, tmp_path: Path):
    job = f"touch {tmp_path}/began; sleep 3600"
    run = subprocess.Popen(
        [*KILLABLE, "run", "--root", root, "--", "sh", "-c", job],
        env=clean_environment(**{LEASE: "12"}),  # looked after every second
        stderr=subprocess.PIPE,
        text=True,
    )
    until((tmp_path / "began").exists)
    of_another_machine(root)
    _, err = run.communicate()
    assert run.returncode == 93
    assert "took the job over from this one" in err
    assert processes_with(str(root)) == []


# A state that cannot be written, or is damaged


def test_a_state_that_cannot_be_written_stops_no_job_and_is_written_later(
    root: Path, tmp_path: Path
):
    (root / ".ckptctl").mkdir()
    blocked = root / ".ckptctl" / "supervisor"
    blocked.touch()
    said: list[str] = []
    job = ["sh", "-c", f"rm {blocked}; exit 18"]
    found = once(root, *job, tell=said.append)
    assert found.exit_code == 18
    assert any("the state cannot be written now" in line for line in said)
    assert states(root)[-1]["attempts"][-1]["exit_code"] == 18


def test_an_old_revision_that_cannot_be_removed_stops_no_job(root: Path):
    once(root)
    oldest = min((root / ".ckptctl" / "supervisor").glob("0*.json"))
    oldest.unlink()
    (oldest / "in").mkdir(parents=True)  # a folder that is not empty
    said: list[str] = []
    assert [once(root, tell=said.append).exit_code for _ in range(2)] == [18] * 2
    shutil.rmtree(oldest)
    assert [each["exit_code"] for each in states(root)[-1]["attempts"]] == [18] * 3
    assert [line for line in said if " started: " not in line] == []


class _LosesAnswers(FaultyStore):
    """Writes a revision, and reports that the storage did not answer."""

    n_lost = 0

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        super().put(path, data, replace=replace)
        if not replace and self.n_lost:
            self.n_lost -= 1
            raise StorageUnavailable("no answer")


@pytest.mark.parametrize("at", ["first", "later"])
def test_a_revision_whose_answer_was_lost_is_no_other_run(root: Path, at: str):
    with open_store(str(root)) as local:
        store = _LosesAnswers(local)
        revisions = Revisions(store, ".ckptctl/supervisor", of_root=False)
        place = holding.StatePlace(revisions, LocalCopy(str(root)), str(root), lambda _: None)
        store.n_lost = 1 if at == "first" else 0
        held = holding.take_over(place, Signals(print))
        assert held is not None
        store.n_lost = 1 if at == "later" else 0
        held.save({**held.state, "best": 7})
        held.poll()
        held.release()
    assert (states(root)[-1]["best"], states(root)[-1]["owner"]) == (7, None)


def test_the_local_copy_counts_where_the_store_lacks_the_newest(root: Path):
    assert [once(root).exit_code for _ in range(3)] == [18] * 3
    for path in sorted((root / ".ckptctl" / "supervisor").glob("0*.json"))[1:]:
        path.unlink()  # a snapshot of the storage was restored
    assert [once(root).exit_code for _ in range(2)] == [18, 93]


def test_a_root_that_was_emptied_is_no_new_run(root: Path, source: Path):
    once(root, *saving(root, source, 100))
    shutil.rmtree(root)
    root.mkdir()
    found = once(root)
    assert (found.exit_code, found.attempts) == (75, ())
    assert "step 100 was usable" in found.message
    assert once(root, reset_budget="a new run").exit_code == 18


def test_an_older_revision_counts_where_the_newest_is_damaged(root: Path):
    assert [once(root).exit_code for _ in range(2)] == [18] * 2
    newest = sorted((root / ".ckptctl" / "supervisor").glob("0*.json"))[-1]
    newest.write_bytes(newest.read_bytes()[:-20])
    assert [once(root).exit_code for _ in range(3)] == [18, 18, 93]


def hostile(document: dict) -> dict[str, dict]:
    """The same with one thing that no state has."""
    attempt = document["attempts"][0]
    return {
        "a command": {**document, "command": ["rm", "-r", "/"]},
        "a negative number": {**document, "best": -1},
        "a text for a number": {**document, "attempts": [{**attempt, "exit_code": "0"}]},
        "no order": {**document, "attempts": [attempt, attempt]},
        "a marker of other processes": {**document, "run": "x@/"},
        "a million ranks": {**document, "attempts": [{**attempt, "nodes": [[]] * 10_000}]},
    }


def test_a_state_that_somebody_tampered_with_is_refused(root: Path):
    once(root)
    good = states(root)[-1]
    shutil.rmtree(os.environ["XDG_STATE_HOME"])
    for name, document in hostile(good).items():
        shutil.rmtree(root / ".ckptctl" / "supervisor")
        (root / ".ckptctl" / "supervisor").mkdir()
        (root / ".ckptctl" / "supervisor" / "0000000001.json").touch()
        write_state(root, document)
        with pytest.raises(OwnFileUnreadable):
            once(root, "touch", str(root / "ran"))
        assert not (root / "ran").exists(), name
    done = run_ckptctl("run", "--root", root, "--", "true")
    assert done.returncode == 22
    assert "--reset-budget" in done.stderr
    assert once(root, "true", reset_budget="damaged").exit_code == 0


def test_a_state_of_another_major_version_is_refused_even_with_a_reset(root: Path):
    once(root)
    document = {**states(root)[-1]}
    del document["schema"], document["digest"]
    later = root / ".ckptctl" / "supervisor" / "9000000000.json"
    later.write_bytes(as_stored("ckptctl.supervisor/3", document))
    with pytest.raises(OwnFileUnsupported):
        once(root, "true", reset_budget="by force")


def test_a_pid_in_the_state_is_never_signalled(root: Path):
    innocent = subprocess.Popen(["sleep", "3600"])
    once(root)
    document = states(root)[-1]
    owner = {
        "id": "b" * 32,
        "host": "here",
        "machine": machine(),
        "pid": innocent.pid,
        "started": 1,
        "root": str(root),
    }
    running = {**document["attempts"][-1], "decision": None}
    write_state(root, {**document, "owner": owner, "attempts": [running]})
    assert once(root, "true").exit_code == 0
    assert innocent.poll() is None
    innocent.kill()
    innocent.wait()


def test_a_clock_that_jumps_changes_nothing(root: Path):
    once(root)
    document = states(root)[-1]
    future = {**document["attempts"][-1], "started_at": "2999-01-01T00:00:00Z"}
    write_state(root, {**document, "attempts": [future]})
    assert [once(root).exit_code for _ in range(4)] == [18] * 3 + [93]


def test_another_user_can_read_the_state(root: Path):
    once(root)
    newest = sorted((root / ".ckptctl" / "supervisor").glob("0*.json"))[-1]
    assert newest.stat().st_mode & 0o044 == 0o044
    json.loads(newest.read_text())
