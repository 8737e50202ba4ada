"""Run a command to its end, bounded in time and in bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ckptctl.starting import child_environment

MOST_BYTES = 4 << 20
"""How much is returned of what a command prints."""


class Finished(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    stdout: str
    stderr: str


def run_bounded(
    words: Sequence[str],
    timeout_s: float,
    *,
    data: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a command with `data` on standard input, in a session of its own.

    It has ended when the command itself has: a process that it leaves behind may keep its output
    open. Where it takes longer than `timeout_s`, or the wait is interrupted, it is killed with
    all that it started in its session. `environment` is None for that of this process; programs
    are found in the absolute folders of its PATH only. Raises `TimeoutError`, and another
    `OSError` where it cannot be started.
    """
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(data)
        given.seek(0)
        process = subprocess.Popen(
            words,
            stdin=given,
            stdout=out,
            stderr=err,
            env=child_environment(environment),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"it did not end within {timeout_s:,.0f} s") from error
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(MOST_BYTES).decode("utf-8", "replace"))
    return Finished(code, *texts)
