"""Processes that report as the ranks of a job do, without torch and without a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from command_line import clean_environment

from ckptctl.distributed.process_table import Process, entry_of, is_alive
from ckptctl.supervisor.processes import Running

WAIT = "sys.stdin.read()"


class Ranks:
    """Ranks of a job on this node; `program` is what each does after its first report."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self.size: int | None = None
        """What the launcher says of the ranks on this node."""
        self.world_size: int | None = None
        """What it says of all; by default the ranks up to the last that is started."""

    def start(self, rank: int, program: str = WAIT, *, section: str = "step") -> None:
        """Start a rank and wait until it has begun with `program`."""
        text = (
            "import os, signal, subprocess, sys, threading, time\n"
            "from ckptctl.train import heartbeat\n"
            f"heartbeat({section!r}, step=7)\n"
            "print(flush=True)\n"
            f"{program}"
        )
        size = {} if self.size is None else {"LOCAL_WORLD_SIZE": str(self.size)}
        world_size = rank + 1 if self.world_size is None else self.world_size
        about = {"RANK": str(rank), "WORLD_SIZE": str(world_size), **size}
        child = subprocess.Popen(
            [sys.executable, "-c", text],
            env=clean_environment(**about, **self._variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._started[rank] = child
        assert child.stdout
        assert child.stdout.readline()

    def pid(self, rank: int) -> int:
        return self._started[rank].pid

    def signal(self, rank: int, number: int) -> None:
        """Send a signal, and wait until it shows."""
        self._started[rank].send_signal(number)
        while state(self.pid(rank)) not in "TZ":
            time.sleep(0.01)

    def tell(self, rank: int) -> None:
        """Let a rank that reads a line from its input go on, and wait for its answer."""
        child = self._started[rank]
        assert child.stdin
        assert child.stdout
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline()

    def processes(self) -> list[Process]:
        """Those that live, with what they have started."""
        pids = [child.pid for child in self._started.values()]
        for pid in pids:
            with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
                pids += map(int, file.read().split())
        found = [entry.process for entry in map(entry_of, pids) if entry]
        return [each for each in found if is_alive(each)]

    @property
    def running(self) -> Running:
        leader = next(iter(self.processes()), Process(1, 0))
        return Running(leader, self.processes)

    def end(self) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for child in self._started.values():
            child.kill()
            child.communicate()


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0].decode()
