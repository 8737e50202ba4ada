"""`ckptctl run --torchrun` on two nodes: real agents, real torchrun, real gloo ranks.

The nodes are two agents on this machine with names and addresses of their own.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_line import clean_environment, run_ckptctl, validated
from services.processes import free_port, wait_until
from supervised_root import processes_with, states

HERE = Path(__file__).parent
FIRST, SECOND = "node-1", "node-2"
KEPT_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=8"

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@dataclass
class Agents:
    """The agents of one job, and what each of them reports."""

    folder: Path
    port: int
    nnodes: str = "2"
    job: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    conf: str = ""
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.folder / "ckpt"

    def start(
        self,
        node: str,
        *options: str,
        address: str = "127.0.0.1",
        host: str = FIRST,
        folder: Path | None = None,
    ):
        (self.folder / f"{node}.txt").touch()
        serves = "true" if node == host else "false"
        command = [
            *(sys.executable, HERE / "supervised_root.py", "run", "--root", self.root, "--create"),
            *("--backoff", "0", "--report", self.folder / f"{node}.json", *self.options, *options),
            *("--torchrun", "--", "--nnodes", self.nnodes, "--nproc-per-node", "2"),
            *("--rdzv-endpoint", f"127.0.0.1:{self.port}", "--local-addr", address),
            *(
                "--rdzv-conf",
                f"is_host={serves},{KEPT_ALIVE},last_call_timeout=20{self.conf}",
            ),
            *(HERE / "agents_job.py", self.root, *self.job, "--nnodes", "9"),
        ]
        with open(self.folder / f"{node}.txt", "ab") as out:
            self.started[node] = subprocess.Popen(
                [str(word) for word in command],
                stdout=out,
                stderr=out,
                cwd=folder,
                env=clean_environment(
                    NODE_NAME=node,
                    OMP_NUM_THREADS="1",
                    XDG_STATE_HOME=str(self.folder / f"{node}-state"),
                ),
            )

    def text(self, node: str) -> str:
        return (self.folder / f"{node}.txt").read_text()

    def wait_for(self, text: str, node: str = FIRST) -> None:
        wait_until(lambda: text in self.text(node), what=text)

    def codes(self) -> list[int]:
        """The exit codes of all agents."""
        return [child.wait() for _, child in sorted(self.started.items())]

    def attempts(self, node: str = FIRST) -> list[dict]:
        return validated((self.folder / f"{node}.json").read_text())["attempts"]

    def end(self) -> None:
        for child in self.started.values():
            child.kill()
            child.wait()
        wait_until(lambda: not processes_with(str(self.folder)), what="the ranks")


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    job = Agents(tmp_path, free_port())
    yield job
    job.end()


def test_a_failure_and_a_hang_on_one_node_restart_the_job_on_both(agents: Agents):
    agents.job = ("10", "raise:4:3 sleep:8:3 none")
    agents.options = ("--section-timeouts", "step:8", "--max-restarts", "1")
    agents.options += ("--log-dir", str(agents.folder / "logs"))
    agents.start(FIRST)
    agents.start(SECOND)
    assert agents.codes() == [0, 0], agents.text(FIRST) + agents.text(SECOND)
    failed, hung, done = attempts = agents.attempts()
    assert agents.attempts(SECOND) == attempts, "one budget and one history"
    assert states(agents.root)[-1]["attempts"] == attempts

    assert (failed["cause"], failed["ranks"], failed["step"]) == ("job-code", [3], 2)
    assert (failed["progress"], failed["left"], failed["world_size"]) == (True, 0, 4)
    assert failed["allocation"] == f"{FIRST},{SECOND}"
    # Step 6 is newer: the hang costs the one restart of a full budget.
    assert (hung["cause"], hung["ranks"], hung["nodes"]) == ("hang", [3], [SECOND])
    assert (hung["section"], hung["step"], hung["decision"]) == ("step", 6, "restart")
    assert (done["decision"], done["step"]) == ("done", 10)
    for node in (FIRST, SECOND):
        text = agents.text(node)
        assert "rank 3 is not in the collective that the others wait in" in text
        assert "wait_for_data" in text
        outputs = [agents.folder / "logs" / node / str(n) / "output.log" for n in (2, 3)]
        assert ["resumed 2 " in path.read_text() for path in outputs] == [True, False]
        assert "resumed 6 " in outputs[1].read_text()
    assert "node-2 is named (hang) and stays" in agents.text(FIRST)
    assert states(agents.root)[-1]["excluded"] == []


def test_a_crash_loop_ends_with_93_on_every_node_and_the_budget_stays_spent(agents: Agents):
    agents.job = ("10", "raise:2:1")
    agents.options = ("--max-restarts", "1")
    for node in (FIRST, SECOND):
        agents.start(node)
    assert agents.codes() == [93, 93]
    assert [each["decision"] for each in agents.attempts(SECOND)] == ["restart", "given-up"]
    for node in (FIRST, SECOND):
        agents.start(node)
    assert agents.codes() == [93, 93]
    assert "no restart is left since attempt 2" in agents.text(SECOND)
    assert agents.attempts() == []


def test_an_exit_code_of_a_rank_that_forbids_a_restart_is_that_of_every_agent(agents: Agents):
    agents.job = ("10", "exit:2:3")
    for node in (FIRST, SECOND):
        agents.start(node)
    assert agents.codes() == [17, 17]
    (attempt,) = agents.attempts()
    assert attempt["decision"] == "never-restart"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_job_goes_on_with_the_nodes_that_are_left(agents: Agents, number: int):
    agents.nnodes, agents.job = "1:2", ("60", "none")
    for node in (FIRST, SECOND):
        agents.start(node)
    agents.wait_for("resumed 0 rank 0 of 4")
    wait_until(lambda: states(agents.root)[-1]["attempts"], what="the attempt")
    wait_until((agents.root / "step_4").exists, what="a step")
    agents.started[SECOND].send_signal(number)
    left, gone = agents.codes()
    assert (left, gone) == (0, -9 if number == signal.SIGKILL else 143)
    first, second, *others = agents.attempts()
    assert not others, agents.text(FIRST) + agents.text(SECOND)
    assert (first["world_size"], second["world_size"]) == (4, 2)
    assert (second["decision"], second["step"]) == ("done", 60)
    if number == signal.SIGTERM:
        assert (first["free"], first["reason"]) == (
            True,
            "a signal asked node-2 to end; 3 of 3 restarts left",
        )
    else:
        assert (first["free"], first["cause"], first["nodes"]) == (False, "infra-node", [SECOND])
    # The ranks of the agent that was killed got SIGTERM, and all saved.
    assert "saved" in agents.text(SECOND)
    assert f"resumed {first['step']} rank 0 of 2" in agents.text(FIRST)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_another_agent_leads_where_the_first_is_gone(agents: Agents, number: int):
    agents.nnodes, agents.job = "1:2", ("60", "none")
    agents.start(SECOND, address="127.0.0.2", host=SECOND)
    agents.start(FIRST, host=SECOND)  # its address is the lower one
    wait_until((agents.root / "step_4").exists, what="a step")
    assert states(agents.root)[-1]["owner"]["pid"] == agents.started[FIRST].pid
    agents.started[FIRST].send_signal(number)
    assert agents.codes() == [-9 if number == signal.SIGKILL else 143, 0], agents.text(SECOND)
    first, second = states(agents.root)[-1]["attempts"]
    assert (first["host"], first["world_size"]) == (FIRST, 4)
    assert (second["host"], second["world_size"], second["decision"]) == (SECOND, 2, "done")
    if number == signal.SIGTERM:
        assert (first["free"], first["exit_code"]) == (True, 143)
        assert first["reason"].startswith("a signal asked node-1 to end")
    else:
        assert (first["free"], first["reason"]) == (False, "its supervisor was killed")


def test_sigterm_to_both_agents_saves_on_all_ranks_and_ends_with_143(agents: Agents):
    agents.job = ("100000", "none")
    for node in (FIRST, SECOND):
        agents.start(node)
    wait_until((agents.root / "step_4").exists, what="a step")
    for child in agents.started.values():
        child.terminate()
    assert agents.codes() == [143, 143]
    (attempt,) = agents.attempts()
    assert (attempt["decision"], attempt["free"]) == ("stopped", True)
    for node in (FIRST, SECOND):
        assert agents.text(node).count(f"saved {attempt['step']} rank") == 2


def test_a_node_that_comes_later_joins_and_can_lead(agents: Agents):
    agents.nnodes, agents.job = "1:2", ("200", "none")
    agents.start(SECOND, address="127.0.0.2", host=SECOND)
    wait_until((agents.root / "step_2").exists, what="a step")
    # Its address is the lower one.
    agents.start(FIRST, "--reset-budget", "a reason of the first start", host=SECOND)
    agents.wait_for("of 4")
    for child in agents.started.values():
        child.terminate()
    assert agents.codes() == [143, 143]
    joined, stopped = agents.attempts(SECOND)
    assert (joined["free"], joined["world_size"], joined["host"]) == (True, 2, SECOND)
    assert (stopped["world_size"], stopped["host"]) == (4, FIRST)
    assert states(agents.root)[-1]["resets"] == []
    assert states(agents.root)[-1]["owner"] is None


def test_sigterm_ends_an_agent_though_the_one_that_leads_does_not_decide(agents: Agents):
    agents.job, agents.conf = ("100000", "none"), ",keep_alive_max_attempt=600"
    agents.start(SECOND, address="127.0.0.2", host=SECOND)
    agents.start(FIRST, host=SECOND)
    wait_until((agents.root / "step_4").exists, what="a step")
    agents.started[FIRST].send_signal(signal.SIGSTOP)
    agents.started[SECOND].terminate()
    assert agents.started[SECOND].wait(60) == 143
    assert agents.text(SECOND).count("saved") == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_node_that_serves_the_rendezvous_the_others_end_their_ranks(
    agents: Agents, number: int
):
    """It is gone, or it does not answer, as after a loss of power."""
    agents.job, agents.conf = ("100000", "none"), ",read_timeout=5"
    for node in (FIRST, SECOND):
        agents.start(node)
    wait_until((agents.root / "step_4").exists, what="a step")
    agents.started[FIRST].send_signal(number)
    assert agents.started[SECOND].wait(60) == 94
    assert "the rendezvous" in agents.text(SECOND)
    (attempt,) = states(agents.root)[-1]["attempts"]
    assert attempt["decision"] is None, "the next invocation closes it"


def test_the_agent_that_leads_records_that_the_rendezvous_is_gone(agents: Agents):
    agents.job, agents.conf = ("100000", "none"), ",read_timeout=5"
    agents.start(SECOND, address="127.0.0.2", host=SECOND)
    agents.start(FIRST, host=SECOND)
    wait_until((agents.root / "step_4").exists, what="a step")
    agents.started[SECOND].kill()
    assert agents.started[FIRST].wait(60) == 94
    (attempt,) = states(agents.root)[-1]["attempts"]
    assert (attempt["host"], attempt["cause"], attempt["free"]) == (FIRST, "infra-node", False)
    assert (attempt["decision"], agents.attempts()) == ("restart", [attempt])


def test_two_agents_on_one_node_and_two_jobs_in_one_rendezvous_are_refused(agents: Agents):
    agents.job = ("10", "none")
    agents.start(FIRST)
    agents.started["other"] = agents.started.pop(FIRST)
    agents.start(FIRST, host="")
    assert agents.codes() == [2, 2]
    assert agents.text(FIRST).count("two agents of this job run on node-1") == 2
    agents.start(FIRST)
    agents.start(SECOND, "--root", str(agents.folder / "other"))
    assert agents.codes() == [2, 2, 2]
    assert "start different jobs" in agents.text(FIRST)
    assert "start different jobs" in agents.text(SECOND)
    for node in (FIRST, SECOND):
        (agents.folder / f"at-{node}").mkdir()
        agents.start(node, "--root", "same", folder=agents.folder / f"at-{node}")
    assert agents.codes() == [2, 2, 2], "one name, and two folders"
    assert not agents.root.exists()


def test_a_wrong_agent_that_comes_later_ends_alone_and_the_job_goes_on(agents: Agents):
    agents.nnodes, agents.job = "1:2", ("100000", "none")
    agents.start(SECOND, address="127.0.0.2", host=SECOND)
    wait_until((agents.root / "step_2").exists, what="a step")
    # Its address is the lower one: it would lead.
    agents.start(FIRST, "--root", str(agents.folder / "other"), host=SECOND)
    assert agents.started[FIRST].wait() == 2
    assert "start different jobs" in agents.text(FIRST)
    agents.wait_for("resumed from step", SECOND)
    agents.started[SECOND].terminate()
    assert agents.started[SECOND].wait() == 143
    joined, _ = agents.attempts(SECOND)
    assert (joined["free"], joined["decision"]) == (True, "restart")


def test_a_signal_between_two_attempts_takes_a_node_out_at_no_cost(agents: Agents):
    agents.nnodes, agents.job = "1:2", ("10", "raise:4:3 none")
    agents.options = ("--backoff", "20")
    for node in (FIRST, SECOND):
        agents.start(node)
    agents.wait_for("attempt 1 ended", SECOND)
    time.sleep(8)  # they have met again, and wait for the second attempt
    agents.started[SECOND].terminate()
    assert agents.codes() == [0, 143]
    failed, done = agents.attempts()
    assert (failed["world_size"], failed["free"]) == (4, False)
    assert (done["world_size"], done["decision"]) == (2, "done")


def test_torchrun_starts_no_rank_where_its_agent_is_killed_before_it_runs(agents: Agents):
    agents.nnodes, agents.job = "1", ("10", "none")
    agents.start(FIRST)
    agents.wait_for("attempt 1 started")
    agents.started[FIRST].kill()
    wait_until(lambda: not processes_with(str(agents.folder)), what="the end of torchrun")
    assert "resumed" not in agents.text(FIRST)


def test_arguments_that_no_agent_can_have_end_with_2(tmp_path: Path):
    for words, what in (
        (["--nnodes", "2", "train.py"], "--rdzv-endpoint HOST:PORT is missing"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1"], "training_script"),
        (["--standalone", "train.py"], "c10d"),
        (["--max-restarts", "3", "--rdzv-endpoint", "a:1", "train.py"], "before the --"),
        (["--nnodes", "x", "--rdzv-endpoint", "a:1", "train.py"], "invalid literal"),
        (["--rdzv-conf", "join_timeout=x", "--rdzv-endpoint", "a:1", "train.py"], "invalid"),
        (["--rdzv-conf", "read_timeout=0", "--rdzv-endpoint", "a:1", "train.py"], "1 or more"),
    ):
        done = run_ckptctl("run", "--root", tmp_path, "--torchrun", "--", *words)
        assert (done.returncode, what in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())
    words = ("--world-sizes", "4,2", "--torchrun", "--", "train.py")
    done = run_ckptctl("run", "--root", tmp_path, *words)
    assert (done.returncode, "--nnodes MIN:MAX" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("address", ["nohost.invalid:29400", "127.0.0.1"])
def test_where_too_few_nodes_come_the_agent_ends_with_94_and_nothing_is_started(
    tmp_path: Path, address: str
):
    """The address has no host, or no other node."""
    if address == "127.0.0.1":
        address += f":{free_port()}"
    done = run_ckptctl(
        *("run", "--root", tmp_path / "ckpt", "--create", "--torchrun", "--", "--nnodes", "2"),
        *("--rdzv-endpoint", address, "--rdzv-conf", "join_timeout=3,read_timeout=3", "train.py"),
    )
    assert done.returncode == 94, done.stderr
    assert f"the rendezvous at {address} did not come about" in done.stderr
    assert "frame #" not in done.stderr
    assert not (tmp_path / "ckpt").exists()
