"""Several `ckptctl run` of one job agree through the state: real processes, real kills."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest
from command_line import clean_environment, run_ckptctl
from services.plugin import S3Server
from services.processes import free_port
from supervisor.supervised_root import LEASE, processes_with, states, until

from ckptctl.distributed.launcher import launched_nodes, launched_on_node

SUPERVISED = (sys.executable, str(Path(__file__).parent / "supervised_root.py"))
NAMESPACE = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
"""Starts a process in which all others of its node end with the first, as in a container."""


class Started(NamedTuple):
    """What one launcher gave its share of an attempt."""

    attempt: int
    node: str
    node_rank: str
    nodes: str
    head: str
    step: str
    restarts: str


class Launchers:
    """The launchers of one job; each is a node of its own, in a namespace where that is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "ckpt"
        self.root.mkdir()
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.text = ""
        self.options: list[object] = []
        self.wrapped: tuple[str, ...] = ()
        self.environment: dict[str, str] = {}

    def job(self, text: str, *options: object, meets: bool = True) -> None:
        """What each part does; `$1` is its node rank. It `meets` the other parts first."""
        started = f'grep -c "^${{CKPTCTL_ATTEMPT#*/}} " "{self.folder}/started"'
        meeting = f'until [ "$({started})" = "$2" ]; do sleep 0.1; done; '
        self.text, self.options = f"{meeting if meets else ''}{text}", [*options]

    def start(self, place: int, count: int = 2) -> subprocess.Popen[bytes]:
        trace = 'echo "${CKPTCTL_ATTEMPT#*/} $NODE_NAME $1 $2 $3 ${4:-none} $CKPTCTL_RESTART_COUNT"'
        script = f'{trace} >> "{self.folder}/started"; {self.text}'
        with self.written(place).open("a") as written:
            self.running[place] = self._started(place, count, script, written)
        return self.running[place]

    def _started(
        self, place: int, count: int, script: str, written: TextIO
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *(*self.wrapped, *SUPERVISED, "run", "--root", self.root, "--backoff", "0"),
                *("--nnodes", str(count), "--node-rank", str(place), *map(str, self.options)),
                *("--", "sh", "-c", script, "part", "{node_rank}", "{nodes}", "{head}"),
                "{resume_step}",
            ],
            env=clean_environment(
                NODE_NAME=f"node{place}",
                XDG_STATE_HOME=str(self.folder / f"home{place}"),
                **self.environment,
            ),
            stderr=written,
        )

    def written(self, place: int) -> Path:
        """What the launchers at a place wrote."""
        return self.folder / f"messages{place}"

    def begin(self, count: int = 2) -> None:
        for place in range(count):
            self.start(place, count)

    def ended(self) -> tuple[list[int], str]:
        """The exit codes of all, and what they wrote, when all have ended."""
        codes = [run.wait() for _, run in sorted(self.running.items())]
        return codes, "\n".join(self.written(place).read_text() for place in sorted(self.running))

    def started(self) -> dict[int, list[Started]]:
        """The parts that were started, by attempt."""
        found = defaultdict(list)
        path = self.folder / "started"
        for line in path.read_text().splitlines() if path.exists() else ():
            attempt, *words = line.split()
            found[int(attempt)].append(Started(int(attempt), *words))
        return found

    def leader(self) -> int:
        """The number of the launcher that leads."""
        until(lambda: states(self.root) and states(self.root)[-1].get("launch"))
        return states(self.root)[-1]["launch"]["leader"]

    def kill(self, place: int) -> None:
        self.running[place].kill()
        self.running.pop(place).wait()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    made = Launchers(tmp_path)
    yield made
    for run in made.running.values():
        run.kill()
        run.wait()
    for pid in processes_with(str(made.root)):
        os.kill(pid, signal.SIGKILL)


def check_agreement(launchers: Launchers, count: int = 2) -> None:
    """Each attempt was one for all its nodes, and no process of it remains."""
    for attempt, parts in launchers.started().items():
        assert len({part.node for part in parts}) == len(parts) <= count, attempt
        shared = {(part.nodes, part.head, part.step, part.restarts) for part in parts}
        assert len(shared) == 1, attempt
        assert {part.node_rank for part in parts} <= {*map(str, range(int(parts[0].nodes)))}
    assert processes_with(str(launchers.root)) == []


def test_a_failure_on_one_node_ends_the_attempt_on_all_and_all_restart_together(
    launchers: Launchers, framework_roots: Path
):
    saved = framework_roots / "kempnerforge" / "checkpoints" / "step_30"
    saves = f"cp -r {shlex.quote(str(saved))} {launchers.root}/step_100"
    launchers.job(
        f"[ $CKPTCTL_RESTART_COUNT = 1 ] && exit 0; [ $1 = 1 ] && {saves} && exit 5; sleep 3600"
    )
    launchers.begin()
    codes, text = launchers.ended()
    assert codes == [0, 0], text
    assert {attempt: len(parts) for attempt, parts in launchers.started().items()} == {1: 2, 2: 2}
    assert {part.step for part in launchers.started()[1]} == {"none"}
    assert {part.step for part in launchers.started()[2]} == {"100"}
    first, second = states(launchers.root)[-1]["attempts"]
    assert (first["exit_code"], first["progress"], second["decision"]) == (5, True, "done")
    check_agreement(launchers)


def test_the_budget_is_one_for_all_launchers_and_survives_them(launchers: Launchers):
    # An attempt can have ended on one node before it has begun on another.
    launchers.job("[ $1 = 0 ] || exit 3; sleep 3600", "--max-restarts", 2, meets=False)
    launchers.begin(3)
    codes, text = launchers.ended()
    assert codes == [93] * 3, text
    assert sorted(launchers.started()) == [1, 2, 3]
    launchers.running.clear()
    launchers.begin(3)
    codes, text = launchers.ended()
    assert codes == [93] * 3, text
    assert "no restart is left since attempt 3" in text
    assert sorted(launchers.started()) == [1, 2, 3]
    check_agreement(launchers, 3)


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_launcher_that_is_killed_is_noticed_and_the_budget_goes_on(
    launchers: Launchers, who: str
):
    # As a worker of torchrun does, the process leaves session and process group.
    launchers.job(
        "[ $CKPTCTL_RESTART_COUNT = 1 ] && exit 0; setsid sleep 3600 & wait", "--max-restarts", 1
    )
    launchers.begin()
    until(lambda: len(launchers.started()[1]) == 2)
    leader = launchers.leader()
    place = leader if who == "leader" else 1 - leader
    launchers.kill(place)
    # What it left is ended by the one that leads now, and the next attempt waits for it.
    until(lambda: (states(launchers.root)[-1]["attempts"][0]["decision"]) == "restart")
    until(lambda: len(processes_with(str(launchers.root))) <= 1)
    assert sorted(launchers.started()) == [1]
    launchers.start(place)
    codes, text = launchers.ended()
    assert codes == [0, 0], text
    assert launchers.leader() == (1 - leader if who == "leader" else leader)
    assert sorted(launchers.started()) == [1, 2]
    assert states(launchers.root)[-1]["attempts"][0]["free"] is False
    check_agreement(launchers)


@pytest.mark.parametrize("sizes", [(), ("--world-sizes", "2,1")])
def test_a_node_that_does_not_come_is_missing(launchers: Launchers, sizes: tuple[str, ...]):
    launchers.job("exit 0", "--wait-nodes", "6s", *sizes)
    for place in (0, 2):
        launchers.start(place, 3)
    codes, text = launchers.ended()
    assert "warning: node rank 1 did not come in 6 s" in text
    if not sizes:
        assert codes == [94, 94], text
        assert launchers.started() == {}
        return
    assert codes == [0, 0], text
    parts = launchers.started()[1]
    assert {part.nodes for part in parts} == {str(len(parts))}
    check_agreement(launchers, 3)


@pytest.mark.parametrize("signalled", [(0, 1), (0,), (1,)])
def test_a_signal_to_any_launcher_stops_all_with_one_code(
    launchers: Launchers, signalled: tuple[int, ...]
):
    launchers.job(
        f'trap "touch {launchers.folder}/saved$1; exit 7" TERM; touch {launchers.folder}/ready$1; '
        "while :; do sleep 0.1; done"
    )
    launchers.begin()
    for place in (0, 1):
        until((launchers.folder / f"ready{place}").exists)
    for place in signalled:
        launchers.running[place].terminate()
    codes, text = launchers.ended()
    assert codes == [7, 7], text
    assert (launchers.folder / "saved0").exists()
    assert (launchers.folder / "saved1").exists()
    (attempt,) = states(launchers.root)[-1]["attempts"]
    assert (attempt["decision"], attempt["free"]) == ("stopped", True)
    check_agreement(launchers)


def test_a_second_process_at_one_place_replaces_the_first(launchers: Launchers):
    launchers.job(f"touch {launchers.folder}/ready; sleep 3600", "--wait-nodes", "1h")
    first = launchers.start(1, 3)
    until((launchers.root / ".ckptctl/supervisor/launchers/1.json").exists)
    second = launchers.start(1, 3)
    assert first.wait() == 93
    assert "took the place of this one" in launchers.written(1).read_text()
    second.terminate()
    assert second.wait() == 143


def test_one_launcher_is_refused_where_several_supervise_and_the_other_way_round(
    launchers: Launchers,
):
    launchers.job(f"touch {launchers.folder}/ready; sleep 3600")
    launchers.begin()
    until((launchers.folder / "ready").exists)
    alone = run_ckptctl("run", "--root", launchers.root, "--", "true")
    assert alone.returncode == 75
    assert "supervises this job" in alone.stderr
    launchers.running[0].terminate()
    assert len({*launchers.ended()[0]}) == 1


@pytest.mark.server
def test_launchers_agree_through_an_object_store(s3_moto: S3Server, launchers: Launchers):
    launchers.root = f"s3://{s3_moto.bucket}/{launchers.folder.name}"  # type: ignore[assignment]
    launchers.job("[ $CKPTCTL_RESTART_COUNT = 1 ] && exit 0; [ $1 = 1 ] && exit 5; sleep 3600")
    launchers.options += ["--create", "--wait-storage", "10m"]
    for name, value in s3_moto.options.items():
        text = value if isinstance(value, str) else json.dumps(value)
        launchers.options += ["--storage-option", f"{name}={text}"]
    launchers.begin()
    codes, text = launchers.ended()
    assert codes == [0, 0], text
    assert {attempt: len(parts) for attempt, parts in launchers.started().items()} == {1: 2, 2: 2}
    check_agreement(launchers)


# Nodes that do not see each other's processes: leases


def no_namespaces() -> str:
    """Why no namespace can be made; empty where it can."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(why := no_namespaces()), reason=why or "none")


def in_namespaces(launchers: Launchers, lease_s: float) -> None:
    launchers.wrapped = NAMESPACE
    launchers.environment[LEASE] = str(lease_s)


@pytest.mark.slow
@needs_namespaces
def test_a_storage_that_does_not_answer_longer_than_a_lease_ends_no_job(launchers: Launchers):
    in_namespaces(launchers, 3)
    launchers.job(f"until [ -e {launchers.folder}/over ]; do sleep 0.1; done")
    launchers.begin()
    until(lambda: len(launchers.started()[1]) == 2)
    launchers.root.rename(launchers.folder / "away")
    time.sleep(9)  # three leases
    (launchers.folder / "away").rename(launchers.root)
    time.sleep(3)
    (launchers.folder / "over").touch()
    codes, text = launchers.ended()
    assert codes == [0, 0], text
    assert sorted(launchers.started()) == [1]


@pytest.mark.long
@needs_namespaces
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_leaders_that_are_killed_and_suspended_at_random_never_act_at_once(
    launchers: Launchers, seed: int
):
    """Three nodes; every attempt is begun by one leader, and is the same on all its nodes."""
    in_namespaces(launchers, 4)
    draw = random.Random(seed)
    folder = launchers.folder
    # A part that finds another of its node, or of another attempt's node that lives, says so.
    launchers.job(
        f'exec 9> "{folder}/lock$NODE_NAME"; flock -n 9 || echo twice >> "{folder}/faults"; '
        f'until [ -e "{folder}/over" ]; do sleep 0.1; done',
        *("--max-restarts", 400, "--wait-nodes", "10m"),
    )
    launchers.begin(3)
    counts: Counter[str] = Counter()
    for _ in range(12):
        n = len(launchers.started())
        until(lambda n=n: len(launchers.started()[max(1, n)]) == 3)
        time.sleep(draw.uniform(0, 2))
        place = draw.choice([launchers.leader(), draw.randrange(3)])
        what = draw.choice(["kill", "kill", "suspend"])
        counts[what] += 1
        if what == "kill":
            launchers.kill(place)
            launchers.start(place, 3)
        else:
            for number, pause_s in ((signal.SIGSTOP, draw.uniform(0, 10)), (signal.SIGCONT, 0)):
                for pid in below(launchers.running[place].pid):
                    os.kill(pid, number)
                time.sleep(pause_s)
    (folder / "over").touch()
    codes, text = launchers.ended()
    assert codes == [0, 0, 0], text
    assert not (folder / "faults").exists()
    check_agreement(launchers, 3)
    document = states(launchers.root)[-1]
    assert [each["number"] for each in document["attempts"]] == sorted(launchers.started())
    assert document["attempts"][-1]["decision"] == "done"
    assert counts["kill"]


def below(pid: int) -> list[int]:
    """The first process of a node, and those of `ckptctl run` in it; not the job's."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in children]


# Real torchrun


@pytest.mark.torch
@pytest.mark.long
def test_torchrun_of_two_nodes_restarts_together_from_the_same_step(
    launchers: Launchers, tmp_path: Path
):
    port = free_port()
    job = Path(__file__).parent / "launched_job.py"
    launchers.job(
        f"exec {shlex.quote(sys.executable)} -m torch.distributed.run --nnodes=$2 --node-rank=$1 "
        f"--nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{port} --rdzv-id=job "
        f"{shlex.quote(str(job))} {launchers.root} {tmp_path}"
    )
    launchers.environment["OMP_NUM_THREADS"] = "1"
    launchers.begin()
    codes, text = launchers.ended()
    assert codes == [0, 0], text
    ranks = [path.read_text().split() for path in sorted(tmp_path.glob("rank-*"))]
    assert len(ranks) == 4
    assert all(steps == ["0", "4"] for steps in ranks), "each attempt began at one step"
    check_agreement(launchers)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"SLURM_NNODES": "4", "SLURM_NODEID": "0"}, (None, 0)),  # a batch script is one process
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, (4, 3)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, (2, 1)),
        ({"PET_NNODES": "2:4", "PET_NODE_RANK": "1"}, (4, 1)),
        ({"JOB_COMPLETION_INDEX": "2"}, (None, 2)),
        ({}, (None, None)),
    ],
)
def test_how_many_launchers_there_are_is_read_from_the_environment(environment, found):
    assert launched_nodes(environment) == found


@pytest.mark.parametrize(
    ("environment", "n_processes"),
    [
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"}, 8),
        ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "2"}, 2),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, 1),
        ({"SLURM_NTASKS": "16", "SLURM_NNODES": "2"}, 1),  # a batch script is one process
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "0"}, 1),
        ({}, 1),
    ],
)
def test_how_many_processes_share_a_node_is_read_from_the_environment(environment, n_processes):
    assert launched_on_node(environment) == n_processes


def test_a_launcher_for_each_rank_is_refused_unless_their_number_is_given(tmp_path: Path):
    (tmp_path / "ckpt").mkdir()
    step = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"}
    command = ["run", "--root", tmp_path / "ckpt", "--", "true"]
    done = run_ckptctl(*command, env=step)
    assert done.returncode == 2
    assert "8 `ckptctl run` were started on this node, 8 in all" in done.stderr
    command[1:1] = ["--nnodes", "1"]
    assert run_ckptctl(*command, env=step).returncode == 0


def test_several_launchers_without_a_number_are_refused(tmp_path: Path):
    (tmp_path / "ckpt").mkdir()
    for options in (("--nnodes", 2), ("--nnodes", 2, "--node-rank", 2)):
        done = run_ckptctl("run", "--root", tmp_path / "ckpt", *options, "--", "true")
        assert done.returncode == 2
        assert "--node-rank" in done.stderr
