"""A hang of a job on two nodes names the rank at fault and no other, or nobody.

The ranks are real gloo processes with real stacks. The nodes are two groups of processes with
names of their own (`NODE_NAME`), markers, and folders for heartbeats; the second is seen only by
the process that is started there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from command_line import clean_environment
from services.processes import wait_until

from ckptctl.distributed.process_table import entry_of
from ckptctl.formats.own.heartbeats import FOLDER_VARIABLE, SECTIONS
from ckptctl.supervisor import evidence
from ckptctl.supervisor.evidence import collect_elsewhere
from ckptctl.supervisor.hangs import GAP_S, HangWatcher
from ckptctl.supervisor.options import SectionLimits
from ckptctl.supervisor.processes import MARKER, Hang, Running, end_processes, marked

PROGRAM = Path(__file__).with_name("node_of_ranks.py")
FIRST, SECOND = "node-1", "node-2"

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@dataclass
class TwoNodes:
    """A job with as many ranks on each of two nodes, and what watches it from the first one."""

    folder: Path
    per_node: int
    limits: SectionLimits
    plan: list[str]
    now_s: float = 1000.0
    case: int = 0

    @property
    def last(self) -> int:
        """The last rank, on the second node."""
        return 2 * self.per_node - 1

    def start(self) -> None:
        self.watchers: dict[str, HangWatcher] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        for node in (FIRST, SECOND):
            own = (self.folder / node).resolve()
            own.mkdir(mode=0o700)
            elsewhere = None
            if node == FIRST:
                start = ("env", f"{FOLDER_VARIABLE}={self.folder / SECOND}", f"NODE_NAME={SECOND}")
                start = (*start, f"CKPTCTL_COLLECTS={self.marker(SECOND)}")

                def elsewhere(variables, _own, start=start):
                    return collect_elsewhere(start, variables)

            out = str(self.folder / "evidence")
            watcher = HangWatcher(self.limits, lambda _: None, out, elsewhere=elsewhere)
            self.watchers[node] = watcher
        variables = dict(self.watchers[FIRST].prepare(1, []))
        self.begin(FIRST, 0, variables)
        self.begin(SECOND, self.per_node, {**variables, FOLDER_VARIABLE: str(self.folder / SECOND)})

    def marker(self, node: str) -> str:
        return f"{self.folder}/{node}"

    def begin(self, node: str, first: int, variables: dict[str, str]) -> None:
        about = {"LOCAL_WORLD_SIZE": self.per_node, "WORLD_SIZE": 2 * self.per_node, "FIRST": first}
        own = {**variables, MARKER: self.marker(node), "NODE_NAME": node}
        child = subprocess.Popen(
            [sys.executable, PROGRAM, self.folder, " ".join(self.plan)],
            env=clean_environment(**{name: str(value) for name, value in about.items()}, **own),
        )
        self.started.append(child)

    def hang(self, *, sees_second: bool = True) -> Hang:
        """Wait until all ranks are in the next case, and what the watcher finds then."""
        words = [self.folder / f"{self.case}-{rank}" for rank in range(self.last + 1)]
        wait_until(lambda: all(path.exists() for path in words), what="the ranks")
        fault, _, rank = self.plan[self.case].partition(":")
        if fault == "stop":
            wait_until(lambda: state_of(int(words[int(rank)].read_text())) == "T", what="the stop")
        watcher = self.watchers[FIRST]
        elsewhere = watcher._elsewhere
        watcher._elsewhere = elsewhere if sees_second else None
        (leader, *_) = marked(self.marker(FIRST))
        running = Running(leader, partial(marked, self.marker(FIRST)), self.marker(FIRST))
        hang = None
        while hang is None:
            self.now_s += GAP_S - 1
            hang = watcher.poll(running, self.now_s)
        watcher._elsewhere = elsewhere
        (self.folder / str(self.case)).touch()
        if fault == "stop":
            os.kill(int(words[int(rank)].read_text()), signal.SIGCONT)
        self.case += 1
        return hang

    def end(self) -> None:
        for watcher in self.watchers.values():
            watcher.close()
        for node in (FIRST, SECOND):
            end_processes(partial(marked, self.marker(node)), 0)
        for child in self.started:
            child.wait()


def state_of(pid: int) -> str:
    entry = entry_of(pid)
    return entry.state if entry else ""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A function that starts a job on two nodes."""
    monkeypatch.setattr(evidence, "BETWEEN_S", 0.3)
    made: list[TwoNodes] = []

    def make(per_node: int, *plan: str) -> TwoNodes:
        limits = SectionLimits(dict.fromkeys(SECTIONS, 30.0))
        made.append(TwoNodes(tmp_path, per_node, limits, [*plan]))
        made[0].start()
        return made[0]

    yield make
    for job in made:
        job.end()


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_the_rank_at_fault_is_named_and_no_other_or_nobody(nodes, per_node: int):
    last = 2 * per_node - 1
    plan = (f"sleep:{last}", f"sleep:{last}", "sleep:0", f"stop:{last}", f"recv:{last}")
    job: TwoNodes = nodes(per_node, *plan)

    asleep = job.hang()
    assert (asleep.ranks, asleep.nodes) == ((last,), (SECOND,))
    assert "is not in the collective that the others wait in" in asleep.message
    assert "wait_for_data" in asleep.message
    assert asleep.hardware == (), "a stack speaks against the program"

    unseen = job.hang(sees_second=False)
    assert (unseen.ranks, unseen.nodes) == ((), ())
    assert f"of {last + 1} could be seen from here" in unseen.message

    on_first = job.hang()
    assert (on_first.ranks, on_first.nodes, on_first.hardware) == ((0,), (FIRST,), ())

    stopped = job.hang()
    assert (stopped.ranks, stopped.nodes, stopped.hardware) == ((last,), (SECOND,), ())
    assert "was stopped (process state T)" in stopped.message

    # As with a broken network: every rank waits for others.
    waiting = job.hang()
    assert (waiting.ranks, waiting.nodes) == ((), ())
    assert "all ranks wait in collectives" in waiting.message
