"""Classify the end of one attempt by what it added to its logs.

Only what the attempt added is read: a log that all attempts share holds the failures of
earlier ones too. `classify` finds the cause; `restarting` decides what follows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from ckptctl.errors import CkptctlError
from ckptctl.failures.classifying import classify
from ckptctl.formats.own.files import MAX_STRING, time_now
from ckptctl.formats.own.supervision import CauseDocument

MOST_NAMES = 64
"""Ranks and nodes of one attempt that the state keeps."""

_UNKNOWN = "unknown"
_DEADLINE_S = 30.0
"""The longest time that a restart waits for the cause."""
_MOST_BYTES = 64 << 20
"""How much of the end of each log is read."""


class Logs:
    """The logs of an attempt: local files, which need not exist yet.

    What they hold when this object is made belongs to earlier attempts.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._sizes = {path: _size(path) for path in paths}

    def cause(self, exit_code: int) -> CauseDocument | None:
        """Why the attempt with this exit code failed; None if its logs do not show it."""
        with tempfile.TemporaryDirectory(prefix="ckptctl-run-") as folder:
            added = []
            # Opening a pipe would block.
            for n, path in enumerate(filter(os.path.isfile, self._sizes)):
                copy = os.path.join(folder, f"{n}-{os.path.basename(path)}")
                # A log that cannot be read must not prevent a restart.
                with suppress(OSError):
                    _copy_from(path, self._sizes[path], copy)
                    added.append(copy)
            if not added:
                return None
            try:
                found = classify(added, exit_code=exit_code, deadline_s=_DEADLINE_S)
            except CkptctlError:
                return None
        if found.failure == _UNKNOWN:
            return None
        return {
            "failure": found.failure,
            "domain": found.domain.value,
            "restart": found.restart.value,
            "confidence": found.confidence,
            "rule": found.evidence[0].rule if found.evidence else "",
            "message": found.message[:MAX_STRING],
            "rank": found.rank,
            "nodes": [*found.nodes[:MOST_NAMES]],
        }


def _size(path: str) -> int:
    with suppress(OSError):
        return os.path.getsize(path)
    return 0


def _copy_from(path: str, start: int, copy: str) -> None:
    """Copy the end of the added text; a log that became shorter was rewritten."""
    with open(path, "rb") as log, open(copy, "wb") as added:
        size = os.fstat(log.fileno()).st_size
        log.seek(max(start if size >= start else 0, size - _MOST_BYTES))
        shutil.copyfileobj(log, added)


class LogFolder:
    """The logs of a job: a folder for each attempt, and `run.log` with the decisions.

    A folder that cannot be written must not prevent an attempt: its output goes where that of
    `run` goes, then. `launcher` is the number of this one where there are several: each writes
    files of its own.
    """

    def __init__(self, folder: str, phase: str, launcher: int | None = None) -> None:
        self._folder = folder
        self._suffix = ".log" if launcher is None else f"-{launcher}.log"
        self._attempts = os.path.join(folder, phase) if phase else folder
        self._prefix = f"{phase}: " if phase else ""

    @contextmanager
    def output(self, attempt: int) -> Iterator[tuple[int, str] | None]:
        """A descriptor for the output of an attempt and its path; None where there is none."""
        path = os.path.join(self._attempts, str(attempt), f"output{self._suffix}")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError:
            yield None
            return
        try:
            yield fd, path
        finally:
            os.close(fd)

    def note(self, message: str) -> None:
        """Add a line to `run.log`, as far as that is possible."""
        with suppress(OSError):
            os.makedirs(self._folder, exist_ok=True)
            with open(
                os.path.join(self._folder, f"run{self._suffix}"), "a", encoding="utf-8"
            ) as file:
                file.write(f"{time_now()} {self._prefix}{message}\n")
