"""Several processes that join one process group, each of which a test can signal or kill."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from command_line import clean_environment, torch_server

JOIN = """
import atexit, os, sys, time
import torch.distributed as dist
rank, size, meet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if size > 1:
    dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=size)
    # gloo may abort a process that just ends while its peers do.
    atexit.register(dist.destroy_process_group)
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""

_BEGIN = """
import os
os.setsid()
os.write(1, b"%d\\n" % os.getpid())
"""


class Rank(subprocess.Popen[str]):
    """A process that is forked for the one which is started; signals are for the forked one."""

    forked: int

    def read_number(self) -> None:
        """Wait for its first line, and read nothing behind it."""
        line = b""
        while not line.endswith(b"\n"):
            if not (byte := os.read(self.stdout.fileno(), 1)):
                raise AssertionError(f"it ended before it began: {self.stderr.read()}")
            line += byte
        self.forked = int(line)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.forked, sig)


@contextmanager
def ranks(code: str, size: int, tmp_path: Path, **env: str) -> Iterator[list[Rank]]:
    """`size` processes that run `code` after they have joined; each leads a group of its own."""
    command = [torch_server().python, "-c", _BEGIN + JOIN + code]
    started = [
        Rank(
            [*command, str(rank), str(size), str(tmp_path / "meet")],
            env=clean_environment(**env),
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for process in started:
            process.read_number()
        yield started
    finally:
        for process in started:
            subprocess.Popen.send_signal(process, signal.SIGKILL)
            process.communicate()


def wait_for(process: subprocess.Popen, line: str) -> None:
    """Read what a process says up to a line that begins so."""
    while text := process.stdout.readline():
        if text.startswith(line):
            return
    raise AssertionError(f"it ended without {line!r}: {process.stderr.read()}")


def ends(started: Sequence[subprocess.Popen]) -> list[tuple[int, list[str], str]]:
    said = [process.communicate() for process in started]
    return [
        (process.returncode, out.splitlines(), err)
        for process, (out, err) in zip(started, said, strict=True)
    ]
