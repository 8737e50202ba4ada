"""What Slurm answers about a job decides; the answers are those of Slurm 22.05, as recorded."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from command_line import run_ckptctl
from supervisor.supervised_root import states

import ckptctl
from ckptctl.supervisor.nodes import NodeOptions
from ckptctl.supervisor.slurm import ask, srun_on

# `scontrol show job 2 -o`, without the fields that nothing reads.
RUNNING = (
    "JobId=2 JobName=t2.sbatch UserId=root(0) GroupId=root(0) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=0 RunTime=00:00:08 TimeLimit=1-00:00:00 "
    "StartTime=2026-11-27T20:41:37 EndTime={end} Deadline=N/A PreemptTime={preempt} "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList={nodes} BatchHost=n1 NumNodes=2 NumTasks=2"
)
# `scontrol show node n[1-3] -o`, likewise.
NODE = "NodeName={} Arch=x86_64 NodeAddr=127.0.0.11 NodeHostName={} State={} ThreadsPerCore=1\n"
LATE = "2038-01-01T00:00:00"


class Slurm:
    """A `scontrol` on the path that prints what was recorded, about nodes n1 to n3."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "scontrol"
        program.write_text(f'#!/bin/sh\n[ "$1" = show ] && cat "{folder}/$2"\n')
        program.chmod(0o755)
        self.variables = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "2",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURMD_NODENAME": "n1",
            "SLURM_NNODES": "3",
            "SLURM_NTASKS": "6",
        }
        self.job()
        self.nodes("MIXED", "MIXED", "MIXED")

    def job(self, end: str = LATE, preempt: str = "None", nodes: str = "n[1-3]") -> None:
        line = RUNNING.format(end=end, preempt=preempt, nodes=nodes)
        (self.folder / "job").write_text(line + "\n")

    def nodes(self, *states: str) -> None:
        lines = [NODE.format(f"n{n}", f"n{n}", state) for n, state in enumerate(states, 1)]
        (self.folder / "node").write_text("".join(lines))

    def silent(self) -> None:
        (self.folder / "job").unlink()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    (tmp_path / "bin").mkdir()
    made = Slurm(tmp_path / "bin")
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    return made


def run(root: Path, *command: str, said: list[str], **about: object) -> ckptctl.Supervised:
    return ckptctl.keep_running(command, str(root), backoff_s=0, tell=said.append, **about)


def test_a_job_that_goes_on_ends_for_nothing_and_all_its_nodes_are_up(slurm: Slurm):
    assert ask(["n1", "n2", "n3"]) == ("", "", {})


def test_a_preemption_and_the_end_of_the_time_are_known(slurm: Slurm):
    slurm.job(end="2026-11-27T20:42:15", preempt="2026-11-27T20:41:45")
    assert ask([])[:2] == (
        "preemption",
        "Slurm preempts job 2 (PreemptTime 2026-11-27T20:41:45)",
    )
    slurm.job(end=time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 30)))
    assert ask([]).ends == "walltime"


def test_nodes_that_do_not_answer_or_left_the_job_are_down(slurm: Slurm):
    slurm.job(nodes="n[1-2]")
    slurm.nodes("MIXED", "DOWN+NOT_RESPONDING", "IDLE")
    assert ask(["n1", "n2", "n3"]).down == {
        "n2": "DOWN+NOT_RESPONDING",
        "n3": "no longer a node of the job",
    }
    slurm.nodes("MIXED", "MIXED+DRAIN", "IDLE")
    assert [*ask(["n1", "n2"]).down] == [], "what runs on a node that is drained may end there"


def test_without_an_answer_nothing_is_known(slurm: Slurm, monkeypatch: pytest.MonkeyPatch):
    slurm.silent()
    assert ask(["n1"]) is None
    monkeypatch.delenv("SLURM_JOB_ID")
    slurm.job()
    assert ask(["n1"]) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["srun", "python"], ["srun", "--nodes=2", "--ntasks=4", "python"]),
        (["srun", "--nodes=1", "x"], ["srun", "--ntasks=2", "--nodes=1", "x"]),
        (["srun", "-N", "2", "-n8", "x"], ["srun", "-N", "2", "-n8", "x"]),
        (
            ["srun", "--ntasks-per-node=1", "x", "-n", "9"],
            ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "x", "-n", "9"],
        ),
    ],
)
def test_an_srun_states_its_nodes_and_tasks(slurm: Slurm, words: list[str], expected: list[str]):
    assert srun_on(words, 2, ()) == expected
    with_node_left_out = srun_on(words, 2, ("n3.example.org",))
    assert with_node_left_out is not None
    assert with_node_left_out[len(expected) - len(words) + 1] == "--exclude=n3"
    assert srun_on(words, 3, ()) == words, "nothing is left out"


def test_fewer_nodes_get_the_tasks_of_each_or_no_attempt_is_started(
    slurm: Slurm, root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x3)")
    assert srun_on(["srun", "x"], 1, ()) == ["srun", "--nodes=1", "--ntasks=2", "x"]
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "3,2,1")
    assert srun_on(["srun", "x"], 1, ()) is None
    assert srun_on(["srun", "-n4", "x"], 1, ()) == ["srun", "--nodes=1", "-n4", "x"]
    monkeypatch.delenv("SLURM_TASKS_PER_NODE")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    assert srun_on(["srun", "x"], 2, ()) is None
    slurm.nodes("MIXED", "MIXED", "DOWN+NOT_RESPONDING")
    said: list[str] = []
    nodes = NodeOptions(world_sizes=(6, 4))
    assert run(root, "srun", "true", said=said, nodes=nodes).exit_code == 94
    assert any("state --ntasks or --ntasks-per-node of srun" in line for line in said)


def test_names_of_nodes_with_a_domain_are_those_of_slurm(slurm: Slurm, root: Path):
    slurm.job(nodes="n[1-2]")
    slurm.nodes("MIXED", "DOWN+NOT_RESPONDING", "IDLE")
    assert ask([f"n{n}.example.org" for n in (1, 2, 3)]).down == {
        "n2.example.org": "DOWN+NOT_RESPONDING",
        "n3.example.org": "no longer a node of the job",
    }
    said: list[str] = []
    nodes = NodeOptions(nodes=("login", "10.0.0.2"))
    assert run(root, "true", said=said, nodes=nodes).exit_code == 0
    assert any("none of login,10.0.0.2 (--nodes) is a node of the SLURM job" in s for s in said)


def test_an_answer_that_is_no_text_is_read_all_the_same(slurm: Slurm):
    line = RUNNING.format(end=LATE, preempt="None", nodes="n[1-3]")
    (slurm.folder / "job").write_bytes(line.encode() + b" Comment=\xff\xfe\n")
    assert ask(["n1"]) == ("", "", {})


def test_a_preempted_job_starts_nothing_more_at_no_cost(slurm: Slurm, root: Path):
    slurm.job(preempt="2026-11-27T20:41:45")
    ended = run(root, "sh", "-c", "exit 137", said=[], max_restarts=0)
    assert (ended.exit_code, len(ended.attempts)) == (94, 1)
    (attempt,) = states(root)[-1]["attempts"]
    assert (attempt["decision"], attempt["cause"], attempt["free"]) == (
        "stopped",
        "preemption",
        True,
    )


def test_a_job_that_somebody_cancelled_ends_with_its_own_code(slurm: Slurm, root: Path):
    (slurm.folder / "job").write_text("JobId=2 JobState=CANCELLED NodeList=n[1-3]\n")
    ended = run(root, "sh", "-c", "exit 143", said=[])
    assert (ended.exit_code, len(ended.attempts)) == (143, 1)
    assert "Slurm reports job 2 as CANCELLED" in ended.message


TEXT = (
    "slurmstepd: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-27T20:41:45 DUE TO PREEMPTION ***"
)


def test_text_of_a_preemption_counts_only_where_slurm_does_not_answer(
    slurm: Slurm, root: Path, tmp_path: Path
):
    said: list[str] = []
    job = ("sh", "-c", f'echo "{TEXT}"; [ "$CKPTCTL_RESTART_COUNT" -ge 1 ]')
    about = {"log_dir": str(tmp_path / "logs"), "said": said}
    assert run(root, *job, **about).exit_code == 0
    assert any("Slurm ends neither the job nor a node" in line for line in said)
    slurm.silent()
    assert run(root, *job, **about).exit_code == 0
    assert any("preemption is read from the logs alone" in line for line in said)
    attempts = states(root)[-1]["attempts"]
    assert [attempt["free"] for attempt in attempts] == [False, True, True, True]


def test_no_attempt_is_started_on_a_node_that_is_down(slurm: Slurm, root: Path, tmp_path: Path):
    slurm.nodes("MIXED", "MIXED", "DOWN+NOT_RESPONDING")
    said: list[str] = []
    job = ("sh", "-c", f'echo "$*" > {tmp_path}/told', "job", "-n{world_size}", "-x{excluded}")
    nodes = NodeOptions(world_sizes=(6, 4))
    assert run(root, *job, said=said, nodes=nodes).exit_code == 0
    assert (tmp_path / "told").read_text() == "-n4 -xn3\n"
    assert "leaving n3 out of the attempt: DOWN+NOT_RESPONDING" in said
    (attempt,) = states(root)[-1]["attempts"]
    assert attempt["world_size"] == 4
    assert states(root)[-1]["excluded"] == [], "it is left out while it is down"


def test_without_a_smaller_size_a_node_that_is_down_is_waited_for(slurm: Slurm, root: Path):
    slurm.nodes("MIXED", "MIXED", "DOWN+NOT_RESPONDING")
    done = run_ckptctl("run", "--root", root, "--", "true", env=slurm.variables)
    assert done.returncode == 94
    assert "leaving n3 out of the attempt: DOWN+NOT_RESPONDING" in done.stderr


def test_an_attempt_whose_node_went_down_costs_one_restart_and_names_it(
    slurm: Slurm, root: Path, tmp_path: Path
):
    down = tmp_path / "node"
    down.write_text(NODE.format("n2", "n2", "DOWN+NOT_RESPONDING"))
    fails = f'[ "$CKPTCTL_RESTART_COUNT" -ge 1 ] || {{ cp {down} {tmp_path}/bin/node; exit 137; }}'
    nodes = NodeOptions(world_sizes=(6, 4), exclude_command=f"touch {tmp_path}/drained-{{node}}")
    ended = run(root, "sh", "-c", fails, said=[], nodes=nodes)
    first, second = ended.attempts
    assert (first.cause, first.nodes) == ("infra-node", ("n2",))
    assert (first.left, second.world_size) == (2, 4)
    assert not (tmp_path / "drained-n2").exists(), "nothing need be drained"


HANGS = """
mkdir -p {tmp}/told; echo "$*" > {tmp}/told/$CKPTCTL_RESTART_COUNT
[ "$CKPTCTL_RESTART_COUNT" -ge {n} ] && exit 0
[ "$CKPTCTL_RESTART_COUNT" = {loses} ] && cp {tmp}/node {tmp}/bin/node
trap "exit 0" TERM
while :; do sleep 0.1; done
"""


def hanging(tmp_path: Path, n: int, loses: int) -> tuple[str, ...]:
    """A job that hangs in its first attempts and ends with 0 when told to end; a node is lost."""
    job = HANGS.format(tmp=tmp_path, n=n, loses=loses)
    return "sh", "-c", job, "job", "-n{world_size}", "-x{excluded}"


def silence_of(tmp_path: Path) -> dict[str, object]:
    """End a job whose log does not grow for 2 s."""
    return {"section_timeouts": {"outside": 2.0}, "log_dir": str(tmp_path / "logs")}


def test_a_hang_after_a_lost_node_is_never_done_and_is_started_without_the_node(
    slurm: Slurm, root: Path, tmp_path: Path
):
    (tmp_path / "node").write_text(NODE.format("n2", "n2", "DOWN+NOT_RESPONDING"))
    about = {"nodes": NodeOptions(world_sizes=(6, 4)), **silence_of(tmp_path)}
    ended = run(root, *hanging(tmp_path, 1, 0), said=[], **about)
    assert [attempt.decision.value for attempt in ended.attempts] == ["restart", "done"]
    assert (ended.attempts[0].cause, ended.attempts[0].nodes) == ("infra-node", ("n2",))
    assert (tmp_path / "told" / "1").read_text() == "-n4 -xn2\n"


def test_a_node_that_was_left_out_before_is_not_blamed_for_a_later_hang(
    slurm: Slurm, root: Path, tmp_path: Path
):
    slurm.nodes("MIXED", "DOWN+NOT_RESPONDING", "MIXED")
    about = {"nodes": NodeOptions(world_sizes=(6, 4)), **silence_of(tmp_path)}
    ended = run(root, *hanging(tmp_path, 1, 9), said=[], **about)
    assert [attempt.cause for attempt in ended.attempts] == ["hang", None]


def test_a_job_that_was_cancelled_while_it_hung_does_not_end_with_0(
    slurm: Slurm, root: Path, tmp_path: Path
):
    (slurm.folder / "job").write_text("JobId=2 JobState=CANCELLED NodeList=n[1-3]\n")
    ended = run(root, *hanging(tmp_path, 1, 9), said=[], **silence_of(tmp_path))
    assert (ended.exit_code, len(ended.attempts)) == (143, 1)
