"""Run one attempt of a job, and classify its end by what it added to its logs.

Only what the attempt added is read: a log that all attempts share holds the failures of
earlier ones too. `classify` finds the cause; `policy` decides what follows.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TypeVar

from ckptctl.errors import StorageError, Unknown, guarded
from ckptctl.failures.classifying import classify
from ckptctl.failures.results import Classification
from ckptctl.formats.own.files import time_now
from ckptctl.logs.reading import LogReader
from ckptctl.logs.rows import Row
from ckptctl.redaction import redacted
from ckptctl.storage.files import is_same_folder
from ckptctl.storage.shared_places import (
    HeldFolder,
    new_private_folder,
    open_folder,
    open_named,
)
from ckptctl.supervisor.nodes import AttemptPlan
from ckptctl.supervisor.options import OutputOptions
from ckptctl.supervisor.policy import AttemptEnd
from ckptctl.supervisor.processes import Hang, JobLog, Running, Signals, Watcher


class AttemptRunner:
    """Starts the attempts of one job and watches each until it ends.

    `log_folder` is where the output of each attempt goes; without it, that of `options`.
    """

    def __init__(
        self,
        options: OutputOptions,
        log_folder: LogFolder | None,
        watchers: Sequence[Watcher],
        signals: Signals,
        tell: Callable[[str], None],
    ) -> None:
        self._options = options
        self._log_folder = log_folder
        self._watchers = watchers
        self._signals = signals
        self._tell = tell

    def run(
        self, number: int, plan: AttemptPlan, variables: Mapping[str, str], about: str
    ) -> AttemptEnd:
        """Run an attempt to its end, with a message with `about` when it has started.

        Raises `UsageError` where the command cannot be started.
        """
        began_s = time.monotonic()
        output, job_logs = self._output(number)
        paths = [log.path for log in job_logs]
        logs_to = f", logs: {', '.join(paths)}" if paths else ""
        message = f"attempt {number} started: {about}{logs_to}"
        variables = {**plan.variables, **variables}
        for watcher in self._watchers:
            variables |= watcher.prepare(number, job_logs)
        logs = Logs(job_logs, self._tell)
        code, stop = self._signals.run(
            plan.command, output, variables, lambda: self._tell(message), self._poll
        )
        seconds = time.monotonic() - began_s
        for watcher in self._watchers:
            watcher.finish()
        if stop is not None:
            self._tell(f"ended the job: {stop.message}")
        asked = self._signals.asked is not None and stop is None
        cause = logs.cause(code) if code else None
        n_not_finite = guarded("reading the loss in the logs", logs.n_not_finite)
        if cause is not None and cause.failure == UNKNOWN:
            self._tell(f"warning: the cause is unknown: {cause.message}")
        n_rows = 0 if isinstance(n_not_finite, Unknown) else n_not_finite
        return AttemptEnd(code, seconds, cause, stop, asked, n_not_finite=n_rows)

    def _poll(self, running: Running) -> Hang | None:
        now_s = time.monotonic()
        stops = (each.poll(running, now_s) for each in self._watchers)
        return next((stop for stop in stops if stop is not None), None)

    def _output(self, number: int) -> tuple[tuple[int | None, int | None], tuple[JobLog, ...]]:
        logs = tuple(map(JobLog, self._options.logs))
        if self._log_folder is None:
            return (self._options.stdout, None), logs
        log = self._log_folder.output(number)
        if isinstance(log, str):
            self._tell(f"warning: the log folder cannot be used ({log}); the output goes here")
            return (self._options.stdout, None), logs
        return (log.fd, log.fd), (*logs, log)


# Logs

UNKNOWN = "unknown"
_DEADLINE_S = 30.0
"""The longest time that a restart waits for the cause."""
_MOST_BYTES = 64 << 20
"""How much of the end of each log is read."""
_LOSS_BYTES = 1 << 20
"""How much of it is read for its last losses."""
T = TypeVar("T")


class Logs:
    """The logs of an attempt: local files, which need not exist yet.

    What they hold when this object is made belongs to earlier attempts. `tell` gets why a log
    was not read.
    """

    def __init__(self, logs: Iterable[JobLog], tell: Callable[[str], None]) -> None:
        self._sizes = {log: log.size() for log in logs}
        self._tell = tell

    def cause(self, exit_code: int) -> Classification | None:
        """Why the attempt with this exit code failed; None if its logs do not show it.

        Nothing that prevents reading them may prevent a restart: it is an unknown cause, whose
        message states what happened.
        """
        found = guarded("reading the logs of the attempt", partial(self._classified, exit_code))
        if isinstance(found, Unknown):
            return Classification.stated(UNKNOWN, found.message)
        if found is None or found.failure != UNKNOWN:
            return found
        unread = "; ".join(found.unread[:3])
        return Classification.stated(UNKNOWN, unread) if unread else None

    def n_not_finite(self) -> int:
        """How many of the last reported losses are NaN or infinite, in a row and in each log."""
        return max(self._added(_LOSS_BYTES, _n_not_finite), default=0)

    def _classified(self, exit_code: int) -> Classification | None:
        folder = new_private_folder("ckptctl-run-")

        def copied(name: str, data: bytes) -> str:
            folder.write(name, data)
            # Only the descriptor leads to it for sure, whoever can write the parent folder.
            return os.path.join(folder.held_path, name)

        try:
            added = [*self._added(_MOST_BYTES, copied)]
            if not added:
                return None
            return classify(added, exit_code=exit_code, deadline_s=_DEADLINE_S)
        finally:
            folder.remove()

    def _added(self, most: int, use: Callable[[str, bytes], T]) -> Iterator[T]:
        """What `use` makes of a name for each log and of the last `most` bytes that were added.

        A log that cannot be read is left out.
        """
        for n, (log, size) in enumerate(self._sizes.items()):
            try:
                source = os.dup(log.fd) if log.fd is not None else open_named(log.path)
                with os.fdopen(source, "rb") as file:
                    # A log that became shorter was rewritten. What another process adds meanwhile
                    # is left out: it may write faster than this copies.
                    end = os.fstat(file.fileno()).st_size
                    begin = max(size if end >= size else 0, end - most)
                    file.seek(begin)
                    data = file.read(end - begin)
                used = use(f"{n}-{os.path.basename(log.path)}", data)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._tell(f"warning: {log.path} was not read: {error.strerror}")
            except StorageError as error:
                self._tell(f"warning: set aside: {error.message}")
            else:
                yield used


def _n_not_finite(name: str, data: bytes) -> int:
    n, reader = 0, LogReader(name)
    for row in chain(reader.feed(data), reader.end()):
        if isinstance(row, Row) and row.loss is not None:
            n = 0 if math.isfinite(row.loss.value) else n + 1
    return n


class LogFolder:
    """The logs of a job: a folder for each attempt, and `run.log` with the decisions.

    A folder that cannot be written must not prevent an attempt: its output goes where that of
    `run` goes, then. Folder and files are held open; others may be able to write the folder.
    Below the checkpoint root `root` nothing is created while that is missing or another folder
    is in its place: logs must not create the root of a run.
    """

    def __init__(self, folder: str, root: str | None = None) -> None:
        self._path = folder
        above = None if root is None else os.path.abspath(root)
        is_below = above is not None and f"{os.path.abspath(folder)}/".startswith(f"{above}/")
        self._root = above if is_below else None
        self._root_id: tuple[int, int] | None = None
        self._folder: HeldFolder | None = None
        self._notes: int | None = None
        self._output: int | None = None

    def path(self, attempt: int) -> str:
        """Where the output of an attempt goes."""
        return os.path.join(self._path, str(attempt), "output.log")

    def output(self, attempt: int) -> JobLog | str:
        """The log for the output of an attempt, open until the next one; or why there is none."""
        self._close_output()
        try:
            with self._held().folder(str(attempt), make=True) as within:
                self._output = within.append("output.log")
        except OSError as error:
            return error.strerror or type(error).__name__
        except StorageError as error:
            return error.message
        return JobLog(self.path(attempt), self._output)

    def note(self, message: str) -> str | None:
        """Add a line to `run.log`, as far as that is possible; why it is not."""
        name = "run.log"
        line = redacted(f"{time_now()} {message}\n")
        try:
            folder = self._held()
            if self._notes is None or not _is_at(folder, name, self._notes):
                notes = folder.append(name, private=False)
                if self._notes is not None:
                    os.close(self._notes)
                self._notes = notes
            os.write(self._notes, line.encode("utf-8", "backslashreplace"))
        except OSError as error:
            return f"{os.path.join(self._path, name)}: {error.strerror}"
        except StorageError as error:
            return error.message
        return None

    def close(self) -> None:
        """Close what is held open."""
        self._close_output()
        if self._notes is not None:
            os.close(self._notes)
            self._notes = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _close_output(self) -> None:
        if self._output is not None:
            os.close(self._output)
            self._output = None

    def _held(self) -> HeldFolder:
        """The folder; opened again, with all checks, where its path leads to another by now."""
        if self._folder is None or not self._folder.is_there():
            self._check_root()
            folder = open_folder(self._path, make=True)
            if self._folder is not None:
                self._folder.close()
            self._folder = folder
        return self._folder

    def _check_root(self) -> None:
        """Raise `OSError` if the checkpoint root above is missing, or not the one of before."""
        if self._root is None:
            return
        about = os.stat(self._root)
        now = about.st_dev, about.st_ino
        self._root_id = self._root_id or now
        if not is_same_folder(self._root_id, now, self._root):
            raise FileNotFoundError(errno.ENOENT, "it is not the root of before", self._root)


def _is_at(folder: HeldFolder, name: str, fd: int) -> bool:
    """Whether a name in a folder is that of an open file; it may have been rotated away."""
    with suppress(OSError):
        return os.path.samestat(folder.about_file(name), os.fstat(fd))
    return False
