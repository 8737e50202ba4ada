"""How does the command of a block run, and what did it say?

Bash runs it, in a session of its own: a job that it leaves in the background
outlives the runbook and the terminal. What it prints is shown line by line as
it comes, and its end is kept for the transcript.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

OnLine = Callable[[str], None]
"""Called with one line of either stream, without its end."""

KEPT_LINES = 400
_MAX_LINE = 4000
_MAX_FILE_BYTES = 2 << 20
_GRACE_S = 5.0

# The ckptctl that runs the runbook is the one that its blocks call.
_PRELUDE = 'set -uo pipefail\nckptctl() { "$CKPTCTL_PYTHON" -m ckptctl "$@"; }\n'
# What would change the form of the answers that a block reads.
_NOT_HANDED_ON = ("CKPTCTL_JSON", "CKPTCTL_QUIET", "CKPTCTL_REPORT")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: `said` is the last line on standard output that is not empty.

    `lines` are the last of both streams, in the order in which they came. `report` is the
    document of the ckptctl command in it, if there was one, and `picture` the SVG that it
    left in `$PICTURE`.
    """

    exit_code: int
    said: str
    lines: tuple[str, ...]
    duration_s: float
    report: dict[str, object] | None
    picture: str | None


def execute(code: str, variables: Mapping[str, str], on_line: OnLine) -> Ended:
    """Run `code` with these variables beside those of this process, and wait for its end.

    An exit by signal N is 128+N. What interrupts the waiting (Ctrl-C) ends the command first.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptctl-runbook-") as folder:
        report, picture = Path(folder) / "report.json", Path(folder) / "picture.svg"
        environment = _environment({**variables, "PICTURE": str(picture)})
        # A job that the block starts must not write its own reports there.
        if "ckptctl " in code:
            environment["CKPTCTL_REPORT"] = str(report)
        process = subprocess.Popen(
            ["bash", "-c", _PRELUDE + code],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        heard = _Heard(on_line)
        ears = [
            heard.listen("stdout", process.stdout),
            heard.listen("stderr", process.stderr),
        ]
        try:
            exit_code = process.wait()
        except BaseException:
            _end(process)
            raise
        for ear in ears:
            # A job in the background may keep the streams open for days.
            ear.join(timeout=1.0)
        return Ended(
            exit_code if exit_code >= 0 else 128 - exit_code,
            heard.said,
            tuple(heard.kept),
            time.monotonic() - started,
            _document(report),
            _text(picture),
        )


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
    environment.update(variables)
    environment["CKPTCTL_PYTHON"] = sys.executable
    return environment


class _Heard:
    """What was printed on both streams so far."""

    def __init__(self, on_line: OnLine) -> None:
        self.on_line = on_line
        self.kept: deque[str] = deque(maxlen=KEPT_LINES)
        self.said = ""
        self._lock = threading.Lock()

    def listen(self, name: str, stream: IO[bytes] | None) -> threading.Thread:
        """A thread that takes in one stream to its end."""
        thread = threading.Thread(target=self._listen, args=(name, stream), daemon=True)
        thread.start()
        return thread

    def _listen(self, name: str, stream: IO[bytes] | None) -> None:
        if stream is None:
            return
        with stream:
            for data in stream:
                text = data.decode("utf-8", "backslashreplace").rstrip("\r\n")[:_MAX_LINE]
                self._take(name, text)

    def _take(self, name: str, text: str) -> None:
        with self._lock:
            self.kept.append(text)
            if name == "stdout" and text.strip():
                self.said = text.strip()
            self.on_line(text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it started in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _document(path: Path) -> dict[str, object] | None:
    try:
        document = json.loads(_text(path) or "null")
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _text(path: Path) -> str | None:
    """What a command left in a file; None where it left none, or more than is kept."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        return path.read_text("utf-8", "replace")
    except OSError:
        return None
