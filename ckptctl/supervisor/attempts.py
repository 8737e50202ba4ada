"""Run one attempt of a job, and make the records of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ckptctl.distributed.launcher import cluster_context
from ckptctl.formats.own.files import MAX_STRING, utc_now
from ckptctl.formats.own.supervision import AttemptDocument
from ckptctl.supervisor.causes import MOST_NAMES, LogFolder, Logs
from ckptctl.supervisor.child import Signals
from ckptctl.supervisor.nodes import Plan
from ckptctl.supervisor.options import OutputOptions
from ckptctl.supervisor.policy import NOT_INSPECTED, Ended, Seen, Verdict
from ckptctl.supervisor.results import Attempt
from ckptctl.supervisor.watching import EndedElsewhere, Running, Stop, Watcher


class AttemptRunner:
    """Starts the attempts of one job and watches each until it ends.

    `log_folder` is where the output of each attempt goes; without it, where `options` say.
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

    def run(self, number: int, plan: Plan, variables: Mapping[str, str]) -> Ended:
        """Run an attempt to its end; raises `UsageError` where the command cannot be started."""
        began_s = time.monotonic()
        with self._output(number) as (output, paths):
            variables = {**plan.variables, **variables}
            for watcher in self._watchers:
                variables |= watcher.prepare(number, paths)
            logs = Logs(paths)
            code, stop = self._signals.run(plan.command, output, variables, self._poll)
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
            self._tell(f"attempt {number} writes to {path}")
            yield (fd, fd), (*logs, path)


def begun(number: int, plan: Plan) -> AttemptDocument:
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
    attempt: AttemptDocument, ended: Ended, seen: Seen, verdict: Verdict, *, progress: bool
) -> AttemptDocument:
    """The record of an attempt that has ended."""
    attempt = {
        **attempt,
        "milliseconds": int(1000 * ended.seconds),
        "exit_code": ended.code,
        "step": seen.step,
        "inspected": seen.code not in NOT_INSPECTED,
        "progress": progress,
        "free": verdict.free,
        "decision": verdict.decision.value,
        "reason": verdict.reason[:MAX_STRING],
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


def reported(attempt: AttemptDocument, verdict: Verdict, left: int, phase: str | None) -> Attempt:
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
        decision=verdict.decision,
        reason=verdict.reason,
        cause=attempt["cause"],
        section=attempt["section"],
        ranks=tuple(attempt["ranks"]),
        nodes=tuple(attempt["nodes"]),
        phase=phase,
        world_size=attempt["world_size"],
    )
