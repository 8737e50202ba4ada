"""Restart a job after a failure, as long as it makes progress.

Only a newer step that was inspected and is usable refills the restart budget. The budget is
kept in the state of the run, so that a later invocation continues with it. `causes`
classifies failures, `policy` decides, `holding` keeps the state.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.distributed.launcher import RESTART_COUNT, cluster_context
from ckptctl.errors import UsageError
from ckptctl.failures.results import Classification
from ckptctl.findings import EXIT_FRESH, EXIT_NONE_USABLE
from ckptctl.formats.frameworks.layouts import compile_pattern
from ckptctl.formats.own.files import MAX_STRING, time_now
from ckptctl.formats.own.heartbeats import Section
from ckptctl.formats.own.supervision import AttemptDocument, SupervisorDocument
from ckptctl.inspection.seal_and_marks import check_marks_file
from ckptctl.model import Level
from ckptctl.options import PickKeywords, PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.selection.picking import pick
from ckptctl.selection.tiers import roots_in
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.causes import LogFolder, Logs
from ckptctl.supervisor.child import Signals
from ckptctl.supervisor.hangs import HangWatcher
from ckptctl.supervisor.holding import HeldState, take_over
from ckptctl.supervisor.limits import SectionLimits
from ckptctl.supervisor.nodes import NodeOptions, Nodes, Plan
from ckptctl.supervisor.policy import (
    GIVEN_UP,
    MAX_FREE_RESTARTS,
    MAX_RESTARTS,
    NO_ANSWER,
    NO_RESTART,
    NOT_INSPECTED,
    RERUN,
    WAIT_FOR_CAPACITY,
    WRONG_PATH,
    Ended,
    Limits,
    Seen,
    Verdict,
    budget_of,
    decide,
    series,
    since_progress,
)
from ckptctl.supervisor.processes import MARKER
from ckptctl.supervisor.results import Attempt, Decision, Supervised
from ckptctl.supervisor.roots import WatchedRoots
from ckptctl.supervisor.state import STATE_FOLDER, LocalCopy, Revisions
from ckptctl.supervisor.watching import Hang, Running, Watcher

if TYPE_CHECKING:
    from typing_extensions import Unpack

LONGEST_PAUSE_S = 300.0
WAIT_S = 900.0
"""How long to wait for a storage that does not answer: longer than `pick`'s grace."""

_MOST_NAMES = 64
"""Ranks and nodes of one attempt that the state keeps."""


def keep_running(
    command: Sequence[str],
    root: str | Sequence[str],
    *,
    optional_roots: Collection[str] = (),
    max_restarts: int = MAX_RESTARTS,
    max_free_restarts: int = MAX_FREE_RESTARTS,
    backoff_s: float = 10.0,
    no_restart: Collection[int] = (),
    logs: Sequence[str] = (),
    create: bool = False,
    state: str | None = None,
    reset_budget: str | None = None,
    nodes: NodeOptions = NodeOptions(),
    log_dir: str | None = None,
    phase: str = "",
    wait_s: float = WAIT_S,
    section_timeouts: Mapping[Section, float] = MappingProxyType({}),
    on_attempt: Callable[[Attempt], None] = lambda _attempt: None,
    tell: Callable[[str], None] = lambda _message: None,
    stdout: int | None = None,
    policy: PickPolicy = PickPolicy(),
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[PickKeywords],
) -> Supervised:
    """Run a command, and restart it after a failure while it makes progress.

    `max_restarts` is how many restarts without progress are allowed; a usable step under
    `root`, or under one of several roots, that is newer than any before refills the budget.
    Causes outside the job, such as preemption, cost nothing; `max_free_restarts` bounds them.
    `optional_roots` may be absent, as for `pick`. The pause before a restart starts at
    `backoff_s` and doubles without progress, up to 5 minutes. `no_restart` are exit codes
    to stop at in addition to `NO_RESTART`. `logs` are files that the command writes to:
    what each attempt adds to them is classified. A failure that a restart cannot remove
    ends the run, and so does a failure of the job that occurs twice without progress. With
    `create`, a missing root is created. `wait_s` bounds the wait for a storage that does not
    answer, before the first attempt and after a failed one. The state of the run is kept in
    the first root, or in the folder or URL `state`; a later call continues with it.
    `reset_budget` is the reason to begin a new budget. `nodes` says how nodes are excluded,
    and with how many ranks the job can run. With `log_dir` the output of each attempt goes
    to a file there, which is classified too, and the decisions to `run.log`. `phase` names
    one of several jobs in the same root: it has a state and a log folder of its own.
    `section_timeouts` are limits in seconds: a job with a rank that reports nothing for
    longer hangs, and is ended and restarted; other sections have limits that are learned or
    built in. `on_attempt` gets each attempt when it
    has ended, `tell` the messages between them. `stdout` is the descriptor for the command's
    output, by default the one of this process. The command finds the number of its restarts
    in `CKPTCTL_RESTART_COUNT`. `policy` and `requirements` are those of `pick`; steps are
    inspected at `structure` if no `level` is given. Each field of the three options objects
    is also a keyword.

    The exit code is the command's when it is done, was asked to stop, or must not be started
    again; 10 where the root does not exist; 11 where no step is usable; 75 where the storage
    did not answer in time, or the steps of the run are gone; 93 when the budget is spent.
    Where `pick` calls the root a wrong path, the command runs all the same, with a warning.
    Must be called in the main thread. Raises `UsageError` where the command cannot be
    started, `StorageError` where the sentinel cannot be written.
    """
    if not command:
        raise UsageError("the command is missing", next_command="ckptctl run --root ROOT -- CMD")
    limits = Limits(max_restarts, max_free_restarts, frozenset({*NO_RESTART, *no_restart}))
    limits.check()
    sections = SectionLimits(section_timeouts)
    if not backoff_s >= 0 or not wait_s >= 0:
        raise UsageError("--backoff and --wait-storage must be 0 or more")
    if reset_budget is not None and not reset_budget.strip():
        raise UsageError(
            "--reset-budget needs the reason why the budget is full again",
            instead="--reset-budget 'the node was replaced'",
        )
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
    policy = replace(policy, level=policy.level or Level.STRUCTURE)
    # Invalid arguments raise here; later they would only be a warning.
    compile_pattern(requirements.pattern)
    check_marks_file(requirements.marks)
    opened: Callable[[str], Store] = partial(open_store, storage=storage)
    roots = roots_in(root, optional_roots)
    for url in roots.urls:
        opened(url).close()
    inspect = partial(
        pick,
        *roots.urls,
        optional_roots=roots.optional,
        policy=policy,
        requirements=requirements,
        storage=storage,
    )
    with opened(state or roots.first) as store:
        folder = "/".join([*([] if state else [STATE_FOLDER]), *([phase] if phase else [])])
        log_folder = None if log_dir is None else LogFolder(log_dir, phase)
        tell = tell if log_folder is None else _both(tell, log_folder.note)
        supervisor = _Supervisor(
            _Job(tuple(command), tuple(logs), stdout, sections, phase, log_folder),
            Nodes(nodes, command, tell),
            WatchedRoots(roots, inspect, opened, wait_s),
            Revisions(store, folder, of_root=state is None),
            limits,
            backoff_s,
            tell,
        )
        return supervisor.run(on_attempt, create=create, reset=reset_budget)


class _Job(NamedTuple):
    """The command, its logs, the descriptor for its output, and the limits of its sections."""

    command: tuple[str, ...]
    logs: tuple[str, ...]
    stdout: int | None
    sections: SectionLimits
    phase: str
    log_folder: LogFolder | None


class _NotStarted(Exception):
    """Nothing is started: the exit code, why, and what to run next."""

    def __init__(self, code: int, why: str, next_command: str | None = None) -> None:
        super().__init__(why)
        self.code = code
        self.why = why
        self.next_command = next_command


class _Supervisor:
    """Runs the attempts of one job, one after the other."""

    def __init__(
        self,
        job: _Job,
        nodes: Nodes,
        roots: WatchedRoots,
        revisions: Revisions,
        limits: Limits,
        backoff_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self._job = job
        self._nodes = nodes
        self._roots = roots
        self._revisions = revisions
        self._limits = limits
        self._backoff_s = backoff_s
        self._tell = tell
        self._copy = LocalCopy(roots.url, job.phase)
        self._signals = Signals()
        self._logs = Logs(job.logs)
        self._attempts: list[Attempt] = []
        self._warnings: list[str] = []
        # `run` may itself run in a restarted job.
        count = os.environ.get(RESTART_COUNT, "")
        self._earlier = int(count) if count.isdecimal() else 0

    def run(
        self, on_attempt: Callable[[Attempt], None], *, create: bool, reset: str | None
    ) -> Supervised:
        """Inspect the roots, take the state, then run attempts until none follows."""
        with self._signals.listening(), ExitStack() as stack:
            try:
                seen = self._prepare(create=create, reset=reset is not None)
                held = self._hold(seen, reset)
            except _NotStarted as stop:
                message = f"not started: {stop.why}"
                about = (self._job.command, self._roots.url, (), (), message)
                return Supervised(*about, stop.code, stop.next_command)
            stack.callback(held.release)
            self._job.sections.recall(held.state["sections"])
            hangs = HangWatcher(self._job.sections, self._job.logs, self._tell)
            stack.callback(hangs.close)
            watchers: tuple[Watcher, ...] = (held, hangs)
            verdict = Verdict(Decision.RESTART, "", 0)
            while verdict.decision is Decision.RESTART:
                if self._attempts:
                    self._signals.pause(self._pause_s(held.state))
                if self._signals.asked is not None:
                    reason = "a signal asked for it"
                    verdict = Verdict(Decision.RESTART, reason, 128 + self._signals.asked)
                    break
                plan = self._nodes.plan(held.state, self._roots.loads)
                if plan is None:
                    verdict = Verdict(Decision.WAIT, "too few nodes are left", WAIT_FOR_CAPACITY)
                    break
                verdict = self._run_attempt(held, plan, watchers)
                on_attempt(self._attempts[-1])
        return self._summary(verdict)

    def _prepare(self, *, create: bool, reset: bool) -> Seen:
        """Inspect the roots before the first attempt; raises `_NotStarted`."""
        seen = self._roots.await_answer(self._signals, self._tell)
        scan = f"ckptctl scan {self._roots.words}"
        if seen.code == WRONG_PATH:
            self._warnings.append(
                f"{seen.message}; the job runs, but its progress cannot be measured"
            )
            self._tell(f"warning: {self._warnings[0]}")
            return seen
        if self._signals.asked is not None:
            raise _NotStarted(128 + self._signals.asked, "a signal asked to end")
        known = self._copy.read()
        best = None if known is None or reset else known["best"]
        if seen.code in (0, EXIT_FRESH) and not seen.holds_steps and best is not None:
            raise _NotStarted(
                NO_ANSWER,
                f"step {best} was usable, but {self._roots.url} no longer contains a step: "
                "the storage is not mounted, or was emptied (--reset-budget REASON begins a "
                "new run)",
                scan,
            )
        if seen.code == EXIT_FRESH and not create:
            next_command = f"ckptctl pick {self._roots.words} --allow-fresh --create"
            raise _NotStarted(seen.code, seen.message, next_command)
        if seen.code not in (0, EXIT_FRESH):
            raise _NotStarted(seen.code, seen.message, scan)
        self._roots.use(seen)
        return seen

    def _hold(self, seen: Seen, reset: str | None) -> HeldState:
        """Take the state over; raises `_NotStarted` where its budget is spent."""
        url = self._roots.url
        held = take_over(self._revisions, self._copy, url, self._signals, self._tell, reset)
        if held is None:
            asked = self._signals.asked or 0
            raise _NotStarted(128 + asked, "a signal asked to end")
        state = held.state
        if seen.step is not None and (state["best"] is None or seen.step > state["best"]):
            # A step of the attempt whose supervisor was killed is progress, too.
            attempts = state["attempts"]
            if attempts and reset is None:
                last: AttemptDocument = {**attempts[-1], "step": seen.step, "progress": True}
                attempts = [*attempts[:-1], last]
            held.save({**state, "best": seen.step, "attempts": attempts})
        budget = budget_of(since_progress(held.state))
        if budget.exhausted(self._limits):
            held.release()
            raise _NotStarted(
                GIVEN_UP,
                f"no restart is left since attempt {held.state['attempts'][-1]['number']}, and no "
                "newer step was saved (--reset-budget REASON begins a new budget)",
                f"ckptctl scan {self._roots.words}",
            )
        return held

    def _pause_s(self, state: SupervisorDocument) -> float:
        """The pause before a restart, doubled for each one without progress before it."""
        budget = budget_of(since_progress(state))
        doublings = max(0, min(max(budget.spent, budget.free) - 1, 20))
        return min(LONGEST_PAUSE_S, self._backoff_s * 2.0**doublings)

    def _run_attempt(self, held: HeldState, plan: Plan, watchers: Sequence[Watcher]) -> Verdict:
        """Run one attempt to its end, inspect the roots, and decide what follows."""
        state = held.state
        number = state["attempts"][-1]["number"] + 1 if state["attempts"] else 1
        restarts = self._earlier + len(series(state))
        attempt = _begun(number, plan)
        held.save({**state, "attempts": [*state["attempts"], attempt]})
        began_s = time.monotonic()
        variables = {**plan.variables, RESTART_COUNT: str(restarts), MARKER: held.marker()}
        for watcher in watchers:
            variables |= watcher.prepare(number)
        poll = partial(_poll, watchers)
        try:
            with self._output(number) as output:
                self._logs.begin()
                code, hang = self._signals.run(plan.command, output, variables, poll)
        except UsageError:
            held.save(state)  # nothing was started
            raise
        took_s = time.monotonic() - began_s
        for watcher in watchers:
            watcher.finish()
        if hang is not None:
            self._tell(f"ended the job: {hang.message}")
        cause = self._logs.cause(code) if code else None
        asked = self._signals.asked is not None and hang is None
        ended = Ended(code, cause, hang is not None, asked)
        seen = self._seen_after(ended)
        before = since_progress(state)
        progress = seen.step is not None and (state["best"] is None or seen.step > state["best"])
        if progress:
            self._roots.use(seen)
        verdict = decide(() if progress else before, ended, seen, state["best"], self._limits)
        attempt = {
            **attempt,
            "milliseconds": int(1000 * took_s),
            "exit_code": code,
            "step": seen.step,
            "inspected": seen.code not in NOT_INSPECTED,
            "progress": progress,
            "free": verdict.free,
            "decision": verdict.decision.value,
            "reason": verdict.reason[:MAX_STRING],
            **_blamed(hang, cause),  # type: ignore[typeddict-item]
        }
        best = seen.step if progress else state["best"]
        state = {
            **held.state,
            "best": best,
            "attempts": [*state["attempts"], attempt],
            "sections": self._job.sections.documents(),
        }
        if verdict.decision is Decision.RESTART:
            n_excluded = len(state["excluded"])
            state = self._nodes.exclude(state, hang, cause)
            if code == RERUN and len(state["excluded"]) == n_excluded:
                self._tell("warning: exit code 16 asks for other nodes, and none was excluded")
        held.save(state)
        left = budget_of(since_progress(held.state)).left(self._limits)
        self._attempts.append(_result(attempt, verdict, left, self._job.phase or None))
        if self._job.log_folder is not None:
            self._job.log_folder.note(
                f"attempt {number} ended with {code} after {took_s:.0f} s, newest usable step "
                f"{seen.step}: {verdict.decision.value}, {verdict.reason}"
            )
        return verdict

    @contextmanager
    def _output(self, number: int) -> Iterator[tuple[int | None, int | None]]:
        """Where the output of an attempt goes, and its errors."""
        if self._job.log_folder is None:
            yield self._job.stdout, None
            return
        with self._job.log_folder.output(number) as opened:
            if opened is None:
                self._tell("warning: the log folder cannot be written; the output goes here")
                yield self._job.stdout, None
                return
            fd, path = opened
            self._logs = Logs((*self._job.logs, path))
            self._tell(f"attempt {number} writes to {path}")
            yield fd, fd

    def _seen_after(self, ended: Ended) -> Seen:
        """The roots after an attempt; waited for only where a restart needs the answer."""
        again = ended.hung or (ended.code != 0 and ended.code not in self._limits.no_restart)
        if again and not ended.asked:
            return self._roots.await_answer(self._signals, self._tell)
        return self._roots.inspect()

    def _summary(self, verdict: Verdict) -> Supervised:
        last = self._attempts[-1] if self._attempts else None
        next_command: str | None = None
        if verdict.decision in (Decision.GIVEN_UP, Decision.NEVER):
            next_command = f"ckptctl scan {self._roots.words}"
            of_storage = (EXIT_NONE_USABLE, *NOT_INSPECTED)
            if (
                last
                and last.cause is not None
                and self._job.logs
                and verdict.exit_code not in of_storage
            ):
                words = ["ckptctl", "classify", *self._job.logs]
                next_command = shlex.join([*words, "--exit-code", str(last.exit_code)])
        word = {
            Decision.DONE: "done",
            Decision.STOPPED: "stopped",
            Decision.RESTART: "stopped before a restart",
            Decision.NEVER: "not restarted",
            Decision.GIVEN_UP: "given up",
            Decision.WAIT: "waiting for capacity",
        }[verdict.decision]
        n = len(self._attempts)
        return Supervised(
            self._job.command,
            self._roots.url,
            tuple(self._attempts),
            tuple(self._warnings),
            f"{word} after {n} attempt{'' if n == 1 else 's'}: {verdict.reason}",
            verdict.exit_code,
            next_command,
        )


def _poll(watchers: Sequence[Watcher], running: Running) -> Hang | None:
    now_s = time.monotonic()
    return next(filter(None, (each.poll(running, now_s) for each in watchers)), None)


def _begun(number: int, plan: Plan) -> AttemptDocument:
    """The record of an attempt that begins."""
    return {
        "number": number,
        "started_at": time_now(),
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


def _blamed(hang: Hang | None, cause: Classification | None) -> dict[str, object]:
    """The fields of an attempt that name its cause, and what is at fault."""
    if hang is not None:
        ranks, nodes = hang.ranks, hang.nodes
        return {
            "cause": "hang",
            "section": hang.section,
            "ranks": [*ranks[:_MOST_NAMES]],
            "nodes": [*nodes[:_MOST_NAMES]],
        }
    if cause is None:
        return {}
    ranks = () if cause.rank is None else (cause.rank,)
    return {
        "cause": cause.failure,
        "ranks": [*ranks],
        "nodes": [*cause.nodes[:_MOST_NAMES]],
    }


def _both(tell: Callable[[str], None], note: Callable[[str], None]) -> Callable[[str], None]:
    def telling(message: str) -> None:
        tell(message)
        note(message)

    return telling


def _result(attempt: AttemptDocument, verdict: Verdict, left: int, phase: str | None) -> Attempt:
    """The attempt as `run` reports it."""
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
