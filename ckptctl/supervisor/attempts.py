"""Run one attempt of a job, classify its end by what it added to its logs, and record it.

Only what the attempt added is read: a log that all attempts share holds the failures of
earlier ones too. `classify` finds the cause; `job` decides what follows.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from ckptctl.distributed.launcher import cluster_context
from ckptctl.errors import CkptctlError
from ckptctl.failures.classifying import classify
from ckptctl.failures.results import CLASSES, CONFIDENCES
from ckptctl.formats.own.files import MAX_STRING, time_now, utc_now
from ckptctl.formats.own.supervision import (
    AttemptDocument,
    CauseDocument,
    MemberDocument,
    ShareDocument,
)
from ckptctl.storage.files import is_same_folder
from ckptctl.supervisor.child import EndedElsewhere, Hang, Running, Signals, Stop, Watcher, log_size
from ckptctl.supervisor.nodes import AttemptPlan
from ckptctl.supervisor.options import OutputOptions
from ckptctl.supervisor.policy import (
    NO_ANSWER,
    NO_RESTART,
    NOT_INSPECTED,
    RERUN,
    Conclusion,
    Ended,
    RootState,
)
from ckptctl.supervisor.results import Attempt

MOST_NAMES = 64
"""Ranks and nodes of one attempt that the state keeps."""


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
    ) -> Ended:
        """Run an attempt to its end, with a message with `about` when it has started.

        Raises `UsageError` where the command cannot be started.
        """
        began_s = time.monotonic()
        with self._output(number) as (output, paths):
            logs_to = f", logs: {', '.join(paths)}" if paths else ""
            message = f"attempt {number} started: {about}{logs_to}"
            variables = {**plan.variables, **variables}
            for watcher in self._watchers:
                variables |= watcher.prepare(number, paths)
            logs = Logs(paths)
            code, stop = self._signals.run(
                plan.command, output, variables, lambda: self._tell(message), self._poll
            )
        seconds = time.monotonic() - began_s
        for watcher in self._watchers:
            watcher.finish()
        if stop is not None:
            self._tell(f"ended the job: {stop.message}")
        if isinstance(stop, EndedElsewhere):
            return Ended(code, seconds, None, None, asked=False, ordered=True)
        asked = self._signals.asked is not None and stop is None
        return Ended(code, seconds, logs.cause(code) if code else None, stop, asked)

    def _poll(self, running: Running) -> Stop | None:
        now_s = time.monotonic()
        stops = (each.poll(running, now_s) for each in self._watchers)
        return next((stop for stop in stops if stop is not None), None)

    @contextmanager
    def _output(
        self, number: int
    ) -> Iterator[tuple[tuple[int | None, int | None], tuple[str, ...]]]:
        """Where output and errors of an attempt go; and the logs that it writes to."""
        logs = tuple(self._options.logs)
        if self._log_folder is None:
            yield (self._options.stdout, None), logs
            return
        with self._log_folder.output(number) as opened:
            if opened is None:
                self._tell("warning: the log folder cannot be written; the output goes here")
                yield (self._options.stdout, None), logs
                return
            fd, path = opened
            yield (fd, fd), (*logs, path)


def begun(number: int, plan: AttemptPlan) -> AttemptDocument:
    """The record of an attempt that begins."""
    return {
        "number": number,
        "started_at": utc_now(),
        "host": cluster_context().node,
        "milliseconds": 0,
        "exit_code": None,
        "step": None,
        "inspected": False,
        "progress": False,
        "free": False,
        "decision": None,
        "reason": "",
        "cause": None,
        "section": None,
        "ranks": [],
        "nodes": [],
        "allocation": plan.allocation[:MAX_STRING],
        "world_size": plan.world_size,
    }


def closed(
    attempt: AttemptDocument,
    ended: Ended,
    seen: RootState,
    conclusion: Conclusion,
    *,
    progress: bool,
) -> AttemptDocument:
    """The record of an attempt that has ended."""
    attempt = {
        **attempt,
        "milliseconds": int(1000 * ended.seconds),
        "exit_code": ended.code,
        "step": seen.step,
        "inspected": seen.code not in NOT_INSPECTED,
        "progress": progress,
        "free": conclusion.free,
        "decision": conclusion.decision.value,
        "reason": conclusion.reason[:MAX_STRING],
    }
    if ended.hang is not None:
        attempt["cause"] = "hang"
        attempt["section"] = ended.hang.section
        attempt["ranks"] = [*ended.hang.ranks[:MOST_NAMES]]
        attempt["nodes"] = [*ended.hang.nodes[:MOST_NAMES]]
    elif ended.cause is not None:
        attempt["cause"] = ended.cause["failure"]
        attempt["ranks"] = [] if ended.cause["rank"] is None else [ended.cause["rank"]]
        attempt["nodes"] = [*ended.cause["nodes"]]
    return attempt


def reported(
    attempt: AttemptDocument, conclusion: Conclusion, left: int, phase: str | None
) -> Attempt:
    """The attempt as `run` reports it; `left` are the restarts that are left."""
    return Attempt(
        number=attempt["number"],
        started_at=attempt["started_at"],
        seconds=attempt["milliseconds"] / 1000,
        exit_code=attempt["exit_code"] or 0,
        step=attempt["step"],
        inspected=attempt["inspected"],
        progress=attempt["progress"],
        left=left,
        decision=conclusion.decision,
        reason=conclusion.reason,
        cause=attempt["cause"],
        section=attempt["section"],
        ranks=tuple(attempt["ranks"]),
        nodes=tuple(attempt["nodes"]),
        phase=phase,
        world_size=attempt["world_size"],
    )


# An attempt on several nodes

_KILLED = 137
"""How a share counts whose launcher is gone: as a killed process does."""
_TELLING = (*NO_RESTART, RERUN, NO_ANSWER)
"""Exit codes that a job chooses."""
_CERTAIN = 2
"""The weight of a share that shows why the attempt ended."""


def share_document(number: int, ended: Ended) -> ShareDocument:
    """The end of a share, as the leader reads it."""
    hang = ended.hang
    return {
        "attempt": number,
        "exit_code": ended.code,
        "ordered": ended.ordered,
        "hang": None
        if hang is None
        else {
            "message": hang.message[:MAX_STRING],
            "section": hang.section,
            "ranks": [*hang.ranks[:MOST_NAMES]],
            "nodes": [*hang.nodes[:MOST_NAMES]],
        },
        "cause": ended.cause,
    }


def ended_together(
    shares: Sequence[ShareDocument],
    gone: Sequence[MemberDocument],
    signal: int | None,
    seconds: float,
) -> Ended:
    """How an attempt ended whose shares ended so; the strongest reason decides.

    Shares that were ordered to end show nothing. Where a launcher is gone, the shares of the
    others fail for it, unless one has a certain cause.
    """
    own = [share for share in shares if not share["ordered"]]
    if signal is not None:
        codes = [share["exit_code"] for share in own]
        code = next(filter(None, codes), 0) if codes else 128 + signal
        return Ended(code, seconds, None, None, asked=True)
    failed = sorted((share for share in own if share["exit_code"] or share["hang"]), key=_weight)
    last = failed[-1] if failed else None
    if gone and (last is None or _weight(last) < _CERTAIN):
        nodes = [member["node"] for member in gone]
        cause: CauseDocument = {
            "failure": "infra-node",
            "domain": CLASSES["infra-node"].domain.value,
            "restart": CLASSES["infra-node"].restart.value,
            "confidence": "medium",
            "rule": "",
            "message": f"the `ckptctl run` of {', '.join(nodes)} is gone"[:MAX_STRING],
            "rank": None,
            "nodes": nodes[:MOST_NAMES],
        }
        return Ended(_KILLED, seconds, cause, None, asked=False)
    if last is None:
        code = next((share["exit_code"] for share in shares if share["exit_code"]), 0)
        return Ended(code, seconds, None, None, asked=False)
    hang = last["hang"]
    return Ended(
        last["exit_code"],
        seconds,
        _checked(last["cause"]),
        hang and Hang(hang["message"], hang["section"], tuple(hang["ranks"]), tuple(hang["nodes"])),
        asked=False,
    )


def _weight(share: ShareDocument) -> int:
    """How much the end of a share shows about the attempt."""
    hang, cause = share["hang"], _checked(share["cause"])
    if hang is not None:
        return 3 if hang["ranks"] else 1
    if cause is not None:
        return _CERTAIN if cause["confidence"] == "high" else 1
    return _CERTAIN if share["exit_code"] in _TELLING else 0


def _checked(cause: CauseDocument | None) -> CauseDocument | None:
    """A cause whose words are ours; another launcher may be of another version."""
    if cause is None or cause["failure"] not in CLASSES or cause["confidence"] not in CONFIDENCES:
        return None
    return cause


# Logs

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
        self._sizes = {path: log_size(path) for path in paths}

    def cause(self, exit_code: int) -> CauseDocument | None:
        """Why the attempt with this exit code failed; None if its logs do not show it.

        Nothing that prevents reading them may prevent a restart.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="ckptctl-run-") as folder:
                added = [*self._added(folder)]
                if not added:
                    return None
                found = classify(added, exit_code=exit_code, deadline_s=_DEADLINE_S)
        except (CkptctlError, OSError):  # such as a full disk
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

    def _added(self, folder: str) -> Iterator[str]:
        """Copies of what the attempt added, in a folder; without logs that cannot be read."""
        # Opening a pipe would block.
        for n, path in enumerate(filter(os.path.isfile, self._sizes)):
            copy = os.path.join(folder, f"{n}-{os.path.basename(path)}")
            with suppress(OSError):
                _copy_from(path, self._sizes[path], copy)
                yield copy


def _copy_from(path: str, start: int, copy: str) -> None:
    """Copy the end of the added text; a log that became shorter was rewritten.

    What another process adds meanwhile is left out: it may write faster than this copies.
    """
    with open(path, "rb") as log, open(copy, "wb") as added:
        size = os.fstat(log.fileno()).st_size
        begin = max(start if size >= start else 0, size - _MOST_BYTES)
        log.seek(begin)
        added.write(log.read(size - begin))


class LogFolder:
    """The logs of a job: a folder for each attempt, and `run.log` with the decisions.

    A folder that cannot be written must not prevent an attempt: its output goes where that of
    `run` goes, then. `launcher` is the number of this one where there are several: each writes
    files of its own. Below the checkpoint root `root` nothing is written while that is missing
    or another folder is in its place: logs must not create the root of a run.
    """

    def __init__(
        self, folder: str, phase: str, launcher: int | None = None, *, root: str | None = None
    ) -> None:
        self._folder = folder
        above = None if root is None else os.path.abspath(root)
        is_below = above is not None and f"{os.path.abspath(folder)}/".startswith(f"{above}/")
        self._root = above if is_below else None
        self._root_id: tuple[int, int] | None = None
        self._suffix = ".log" if launcher is None else f"-{launcher}.log"
        self._attempts = os.path.join(folder, phase) if phase else folder
        self._prefix = f"{phase}: " if phase else ""

    def path(self, attempt: int) -> str:
        """Where the output of an attempt goes."""
        return os.path.join(self._attempts, str(attempt), f"output{self._suffix}")

    @contextmanager
    def output(self, attempt: int) -> Iterator[tuple[int, str] | None]:
        """A descriptor for the output of an attempt and its path; None where there is none."""
        path = self.path(attempt)
        try:
            self._make(os.path.dirname(path))
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
            self._make(self._folder)
            line = f"{time_now()} {self._prefix}{message}\n"
            with open(os.path.join(self._folder, f"run{self._suffix}"), "ab") as file:
                file.write(line.encode("utf-8", "backslashreplace"))

    def _make(self, folder: str) -> None:
        if self._root is not None:
            about = os.stat(self._root)
            now = about.st_dev, about.st_ino
            self._root_id = self._root_id or now
            if not is_same_folder(self._root_id, now, self._root):
                raise FileNotFoundError(self._root)
        os.makedirs(folder, exist_ok=True)
