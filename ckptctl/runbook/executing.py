"""Run the command of a block in bash and keep its output.

Bash runs in its own session: a background job that it starts outlives the runbook and the
terminal. Lines are shown as they arrive, and the last ones are kept for the transcript.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import IO

from ckptctl.errors import StorageError, UsageError
from ckptctl.formats.bounded_json import NotJson, decode_json
from ckptctl.formatting import command_line
from ckptctl.runbook.document import Value
from ckptctl.starting import child_environment, own_command
from ckptctl.storage.shared_places import HeldFolder, open_folder

OnLine = Callable[[str], None]
"""Called with one line of either stream, without its end."""

OnSilence = Callable[[float], None]
"""Called with the seconds since the command began, where it has printed nothing for a while."""

KEPT_LINES = 400
_MAX_LINE = 4000
_KEPT_BYTES = 1 << 20
"""Of each stream, as JSON: an event that holds more than `MAX_EVENT_BYTES` cannot be read."""
_MAX_READ = 1 << 20
"""The most that a pipe holds. Source: `/proc/sys/fs/pipe-max-size`."""
_MAX_FILE_BYTES = 2 << 20
_REPORT = "report.json"
_POLL_S = 0.1
_SILENT_S = 30.0
_EVALUATES = re.compile(r'eval "\$[A-Z][A-Z0-9_]*"')
_GRACE_S = 5.0

_HANDED_ON = frozenset(
    f"CKPTCTL_{name}"
    for name in (
        # where the storage and its steps are
        *("STORAGE_OPTION", "ENDPOINT_URL", "TIMEOUT", "PATTERN", "MARKS"),
        # stricter checks, and proof of a step
        *("KEY_FILE", "SEAL_KEY", "REQUIRE_SEAL", "REQUIRE_SIGNATURE"),
        *("SEAL_RUN", "SEAL_SEQUENCE", "RESTART_COUNT"),
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
        *("JSON", "QUIET", "REPORT", "SET", "YES", "DRY_RUN", "NEW", "CONTINUE", "TRANSCRIPT"),
        *("VERBOSE", "CONFIG"),
    )
)
"""The variables for the runbook command itself."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command; `printed` are the non-empty lines of standard output.

    `lines` are the last lines of both streams, in order of arrival. `report` is the
    document of a ckptctl command in the block, if any.
    """

    exit_code: int
    printed: tuple[str, ...]
    lines: tuple[str, ...]
    duration_s: float
    report: dict[str, object] | None


_SIMPLE = re.compile(r'ckptctl (?:[^;|&<>`\n"]|"[^;|&<>`\n"]*")*(?: 2>/dev/null)?')


def as_typed(code: str, variables: Mapping[str, Value]) -> str | None:
    """A block's command as a person would type it, with its values.

    None for a block that is more than one simple command. Bash itself expands it, so what is
    shown is what runs.
    """
    if _EVALUATES.fullmatch(code):
        return str(variables.get(code[len('eval "$') : -1], ""))
    if "$(" in code or _SIMPLE.fullmatch(code) is None:
        return None
    arrays, values = _in_bash(variables)
    script = f"ckptctl() {{ printf '%s\\0' \"$@\"; }}\n{arrays}{code}"
    try:
        done = subprocess.run(
            ("bash", "-c", script),
            env=_environment(values, without=variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GRACE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return command_line(*(os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]))


def dropped_variables() -> tuple[str, ...]:
    """The ckptctl variables in this environment that blocks do not inherit, sorted."""
    ours = {name for name in os.environ if name.startswith("CKPTCTL_")}
    return tuple(sorted(ours - _HANDED_ON - _OF_THE_RUNBOOK))


def execute(
    code: str,
    variables: Mapping[str, Value],
    handed_on: Mapping[str, str],
    on_line: OnLine,
    on_silence: OnSilence = lambda _: None,
) -> CommandResult:
    """Run `code` with these shell variables, and wait until it ends.

    A text becomes an environment variable, a list an array of the shell. The environment of
    this process is inherited without `dropped_variables`; `handed_on` is added. A command
    that signal N ends has exit code 128+N. Ctrl-C while waiting ends the command first.
    Raises `UsageError` where bash cannot be started, or has no folder for its files.
    """
    started = time.monotonic()
    try:
        # A job in the background may still write there.
        made = tempfile.TemporaryDirectory(prefix="ckptctl-runbook-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(
            f"the block cannot be run without a temporary folder: {error.strerror}",
            next_command="df -h /tmp",
        ) from error
    with made as folder, open_folder(folder) as held:
        arrays, values = _in_bash(variables)
        environment = _environment({**values, **handed_on}, without=variables)
        # A job that the block starts must not write its reports there.
        if "ckptctl " in code:
            environment["CKPTCTL_REPORT"] = os.path.join(folder, _REPORT)
            # What a block checks is defined by its page, not by a file in the current folder.
            environment["CKPTCTL_CONFIG"] = "none"
        # Blocks call the ckptctl that runs the runbook.
        own = f'ckptctl() {{ {shlex.join(own_command().words)} "$@"; }}\n'
        words = ("bash", "-c", f"set -uo pipefail\n{own}{arrays}{code}", "bash")
        heard = _Heard(on_line, on_silence)
        exit_code = _run(words, environment, heard)
        return CommandResult(
            exit_code if exit_code >= 0 else 128 - exit_code,
            _newest(heard.printed),
            _newest(heard.kept),
            round(time.monotonic() - started, 3),
            _document(held, _REPORT),
        )


def _run(words: Sequence[str], environment: Mapping[str, str], heard: _Heard) -> int:
    try:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(
            f"bash could not be started to run the block: {error.strerror}",
            next_command="bash --version",
        ) from error
    try:
        heard.listen(process)
    except BaseException:
        _end(process)
        raise
    return process.returncode


def _in_bash(variables: Mapping[str, Value]) -> tuple[str, dict[str, str]]:
    """Bash code that makes an array of each list, and the environment that it needs.

    Each item is a variable: no value becomes code, nor an argument that every user sees.
    """
    code, values, items = "", dict[str, str](), list[str]()
    for name, value in variables.items():
        if isinstance(value, str):
            values[name] = value
            continue
        names = [f"_ITEM_{name}_{number}" for number in range(len(value))]
        words = " ".join(f'"${item}"' for item in names)
        code += f"{name}=({words})\n"
        values.update(zip(names, value, strict=True))
        items += names
    return code + (f"unset {' '.join(items)}\n" if items else ""), values


def _environment(variables: Mapping[str, str], without: Container[str]) -> dict[str, str]:
    left_out = {*dropped_variables(), *_OF_THE_RUNBOOK}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and name not in without
    }
    return child_environment({**environment, **variables})


class _Heard:
    def __init__(self, on_line: OnLine, on_silence: OnSilence) -> None:
        self.on_line = on_line
        self.on_silence = on_silence
        self.kept: deque[str] = deque(maxlen=KEPT_LINES)
        self.printed: deque[str] = deque(maxlen=KEPT_LINES)
        self._begun: dict[int, bytes] = {}

    def listen(self, process: subprocess.Popen[bytes]) -> None:
        """Take all that a command writes until it ends, in order of arrival, and wait for it.

        A job that it leaves in the background may keep the streams open for days: a thread
        shows what follows.
        """
        stdout, stderr = process.stdout, process.stderr
        assert stdout is not None and stderr is not None  # noqa: S101, PT018 - both are pipes
        is_over = False
        began_s = silent_since_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for stream in (stderr, stdout):
                selector.register(stream, selectors.EVENT_READ, stream is stdout)
            while selector.get_map() and not is_over:
                # What a command wrote before it ended is in the pipes by then.
                is_over = process.poll() is not None
                ready = [key for key, _ in selector.select(0.0 if is_over else _POLL_S)]
                now_s = time.monotonic()
                if ready:
                    silent_since_s = now_s
                elif now_s - silent_since_s >= _SILENT_S:
                    silent_since_s = now_s
                    self.on_silence(now_s - began_s)
                for key in sorted(ready, key=lambda key: bool(key.data)):
                    if not self._read(key.fd, is_stdout=key.data):
                        selector.unregister(key.fd)
            left = [(key.fd, key.data) for key in selector.get_map().values()]
        for stream in (stderr, stdout):
            if begun := self._begun.pop(stream.fileno(), b""):  # the line that has no end
                self._take(begun, is_stdout=stream is stdout)
            if (stream.fileno(), stream is stdout) in left:
                threading.Thread(target=self._follow, args=(stream,), daemon=True).start()
            else:
                stream.close()
        process.wait()

    def _read(self, fd: int, *, is_stdout: bool) -> bool:
        """Take the lines that are there now; False at the end of the stream."""
        data = os.read(fd, _MAX_READ)
        *lines, begun = (self._begun.get(fd, b"") + data).split(b"\n")
        self._begun[fd] = begun[: 4 * _MAX_LINE]
        for line in lines:
            self._take(line, is_stdout=is_stdout)
        return bool(data)

    def _take(self, data: bytes, *, is_stdout: bool) -> None:
        data = data.rstrip(b"\r").replace(b"\0", b"")  # bash drops NUL in `$(command)`, too
        text = _shown(data)
        self.kept.append(text)
        if is_stdout and text.strip():
            # A path that is not UTF-8 becomes the value of a variable.
            self.printed.append(os.fsdecode(data)[:_MAX_LINE].strip())
        self.on_line(text)

    def _follow(self, stream: IO[bytes]) -> None:
        with stream:
            for data in iter(lambda: stream.readline(_MAX_LINE), b""):
                self.on_line(_shown(data.rstrip(b"\r\n")))


def _shown(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")[:_MAX_LINE]


def _newest(lines: Sequence[str]) -> tuple[str, ...]:
    """The last lines that fit into an event; a character takes up to 12 bytes there."""
    sizes = accumulate(len(json.dumps(each)) for each in reversed(lines))
    n_kept = sum(size <= _KEPT_BYTES for size in sizes)
    return tuple(lines)[len(lines) - n_kept :]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and its process group, also where another signal interrupts the wait."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=_GRACE_S)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _document(folder: HeldFolder, name: str) -> dict[str, object] | None:
    try:
        with os.fdopen(folder.open(name), "rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1).decode("utf-8", "replace")
        document = decode_json(text, max_bytes=_MAX_FILE_BYTES, numbers="finite")
    except (OSError, StorageError, NotJson):
        return None
    return document if isinstance(document, dict) else None
