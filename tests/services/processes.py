"""Start a server as a process of its own, and end it reliably."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forking import whole_run


def free_port() -> int:
    """A port of loopback on which nobody listens, which no other test of this run is given.

    It lies below those that the system chooses for connections: one of them could be gone before
    a server has started.
    """
    _, folder = whole_run()
    chosen_by_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with (folder / "ports").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        given = file.read().split()
        while True:
            port = random.randrange(chosen_by_system // 2, chosen_by_system)
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("127.0.0.1", port))
                if str(port) not in given:
                    file.write(f"{port}\n")
                    return port


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something accepts connections on the port."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def wait_until(condition: Callable[[], bool], *, what: str, limit_s: float = 600) -> None:
    """Come back as soon as `condition` holds; raises `TimeoutError` naming `what`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not there after {limit_s:g} s")
        time.sleep(0.05)


@contextmanager
def started(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed where the test fails, instead of being waited for without end."""
    with subprocess.Popen(list(map(str, command)), **options) as process:
        try:
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a child, politely first."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def end_by_pid_file(file: Path, *, of: str) -> None:
    """End the daemon that wrote `file`, if the process of that number still is it.

    `of` is a text that stands on the daemon's command line: process numbers are
    used again.
    """
    text = file.read_text().strip()
    if not text:
        return
    pid = int(text)
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if of not in _command_line(pid):
            return
        os.kill(pid, sent)
        try:
            wait_until(lambda: of not in _command_line(pid), what=f"end of {pid}", limit_s=10)
        except TimeoutError:
            continue


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
