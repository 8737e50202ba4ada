"""Run the command of a block in bash and keep its output.

Bash runs in its own session: a background job that it starts outlives the runbook and the
terminal. Lines are shown as they arrive, and the last ones are kept for the transcript.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO

from ckptctl.data_classes import dataclass
from ckptctl.formats.bounded_json import NotJson, decode_json
from ckptctl.runbook.document import Value

OnLine = Callable[[str], None]
"""Called with one line of either stream, without its end."""

KEPT_LINES = 400
_MAX_LINE = 4000
_MAX_READ = 1 << 16
_MAX_FILE_BYTES = 2 << 20
_GRACE_S = 5.0

# Blocks call the same ckptctl that runs the runbook. `-m` would import
# modules from the current folder first, which may be a checkpoint root.
_PRELUDE = """set -uo pipefail
ckptctl() {
  "$CKPTCTL_PYTHON" -c 'import sys
sys.path[:] = [each for each in sys.path if each]
from ckptctl.__main__ import main
sys.exit(main())' "$@"
}
"""
_HANDED_ON = frozenset(
    f"CKPTCTL_{name}"
    for name in (
        # where the storage and its steps are
        *("STORAGE_OPTION", "ENDPOINT_URL", "TIMEOUT", "PATTERN", "MARKS"),
        # stricter checks, and proof of a step
        *("KEY_FILE", "SEAL_KEY", "REQUIRE_SEAL", "RESTART_COUNT"),
        # resource limits and output format
        *("JOBS", "MEMORY", "COLOR", "COLUMNS", "DEBUG"),
    )
)
"""The operator's ckptctl variables that blocks inherit.

The others set options of single commands, `CKPTCTL_ALLOW_MISSING_STATE` or `CKPTCTL_LEVEL`: what a
block checks is defined by its page, not by the operator's shell.
"""
_OF_THE_RUNBOOK = frozenset(
    f"CKPTCTL_{name}"
    for name in (
        *("JSON", "QUIET", "REPORT", "SET", "YES", "DRY_RUN", "NEW", "CONTINUE", "TAKE_OVER"),
        *("TRANSCRIPT", "FOLDER", "PYTHON"),
    )
)
"""The variables for the runbook command itself."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a command; `printed` are the non-empty lines of standard output.

    `lines` are the last lines of both streams, in order of arrival. `report` is the
    document of a ckptctl command in the block, if any, and `picture` the SVG that it wrote
    to `$PICTURE`.
    """

    exit_code: int
    printed: tuple[str, ...]
    lines: tuple[str, ...]
    duration_s: float
    report: dict[str, object] | None
    picture: str | None


def dropped_variables() -> tuple[str, ...]:
    """The ckptctl variables in this environment that blocks do not inherit, sorted."""
    ours = {name for name in os.environ if name.startswith("CKPTCTL_")}
    return tuple(sorted(ours - _HANDED_ON - _OF_THE_RUNBOOK))


def execute(
    code: str, variables: Mapping[str, Value], handed_on: Mapping[str, str], on_line: OnLine
) -> Ended:
    """Run `code` with these shell variables, and wait until it ends.

    A text becomes an environment variable, a list an array of the shell. The environment of
    this process is inherited without `dropped_variables`; `handed_on` is added. A command
    that signal N ends has exit code 128+N. Ctrl-C while waiting ends the command first.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptctl-runbook-") as folder:
        report, picture = Path(folder) / "report.json", Path(folder) / "picture.svg"
        lists = {name: value for name, value in variables.items() if not isinstance(value, str)}
        texts = {name: value for name, value in variables.items() if isinstance(value, str)}
        environment = _environment({**texts, **handed_on, "PICTURE": str(picture)}, without=lists)
        # A job that the block starts must not write its reports there.
        if "ckptctl " in code:
            environment["CKPTCTL_REPORT"] = str(report)
        process = subprocess.Popen(
            ["bash", "-c", _PRELUDE + _arrays(lists) + code, "bash", *chain(*lists.values())],
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
            # A background job may keep the streams open for days.
            ear.join(timeout=1.0)
        return Ended(
            exit_code if exit_code >= 0 else 128 - exit_code,
            tuple(heard.printed),
            tuple(heard.kept),
            time.monotonic() - started,
            _document(report),
            _text(picture),
        )


def _arrays(lists: Mapping[str, Sequence[str]]) -> str:
    """Bash code that creates arrays from its arguments, so that no value becomes code."""
    made, first = "", 1
    for name, items in lists.items():
        made += f'{name}=("${{@:{first}:{len(items)}}}")\n'
        first += len(items)
    return f"{made}set --\n"


def _environment(variables: Mapping[str, str], without: Container[str]) -> dict[str, str]:
    left_out = {*dropped_variables(), *_OF_THE_RUNBOOK}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and name not in without
    }
    environment.update(variables)
    environment["CKPTCTL_PYTHON"] = sys.executable
    return environment


class _Heard:
    """The output of both streams so far."""

    def __init__(self, on_line: OnLine) -> None:
        self.on_line = on_line
        self.kept: deque[str] = deque(maxlen=KEPT_LINES)
        self.printed: deque[str] = deque(maxlen=KEPT_LINES)
        self._lock = threading.Lock()

    def listen(self, name: str, stream: IO[bytes] | None) -> threading.Thread:
        """Start a thread that reads one stream to its end."""
        thread = threading.Thread(target=self._listen, args=(name, stream), daemon=True)
        thread.start()
        return thread

    def _listen(self, name: str, stream: IO[bytes] | None) -> None:
        if stream is None:
            return
        begun = b""
        with stream:
            while data := os.read(stream.fileno(), _MAX_READ):
                *lines, begun = (begun + data).split(b"\n")
                begun = begun[: 4 * _MAX_LINE]
                self._take(name, lines)
        if begun:
            self._take(name, [begun])

    def _take(self, name: str, lines: Iterable[bytes]) -> None:
        """Pass lines on that arrived together, with none of the other stream among them."""
        with self._lock:
            for data in lines:
                text = data.decode("utf-8", "backslashreplace").rstrip("\r")[:_MAX_LINE]
                self.kept.append(text)
                if name == "stdout" and text.strip():
                    self.printed.append(text.strip())
                self.on_line(text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and its process group."""
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
        document = decode_json(_text(path) or "null", max_bytes=_MAX_FILE_BYTES)
    except NotJson:
        return None
    return document if isinstance(document, dict) else None


def _text(path: Path) -> str | None:
    """The content of a file that a command wrote; None if it is missing or too large."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        return path.read_text("utf-8", "replace")
    except OSError:
        return None
