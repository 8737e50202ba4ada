"""Several processes that join one process group, each of which a test can signal or kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from command_line import clean_environment

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


@contextmanager
def ranks(code: str, size: int, tmp_path: Path, **env: str) -> Iterator[list[subprocess.Popen]]:
    """`size` processes that run `code` after they have joined; each leads a group of its own."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN + code, str(rank), str(size), str(tmp_path / "meet")],
            env=clean_environment(**env),
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(size)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
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
