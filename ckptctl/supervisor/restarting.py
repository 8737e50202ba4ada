"""Restart a job after a failure, as long as it makes progress.

Only a newer step that was inspected and is usable refills the restart budget. The budget is
kept in the state of the run, so that a later invocation continues with it. `causes`
classifies failures, `policy` decides, `holding` keeps the state.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.distributed.launcher import ATTEMPT, RESTART_COUNT
from ckptctl.errors import UsageError
from ckptctl.findings import EXIT_FRESH, EXIT_NONE_USABLE
from ckptctl.formats.own.supervision import AttemptDocument
from ckptctl.selection.picking import pick
from ckptctl.selection.targets import Roots, roots_in
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.attempts import AttemptRunner, begun, closed, reported
from ckptctl.supervisor.causes import LogFolder
from ckptctl.supervisor.child import Signals
from ckptctl.supervisor.hangs import HangWatcher
from ckptctl.supervisor.holding import HeldState, take_over
from ckptctl.supervisor.limits import SectionLimits
from ckptctl.supervisor.nodes import Nodes, Plan
from ckptctl.supervisor.options import RunKeywords, RunOptions
from ckptctl.supervisor.policy import (
    GIVEN_UP,
    NO_ANSWER,
    NOT_INSPECTED,
    RERUN,
    WAIT_FOR_CAPACITY,
    WRONG_PATH,
    Ended,
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
from ckptctl.supervisor.step_times import StepTimes

if TYPE_CHECKING:
    from typing_extensions import Unpack


def keep_running(
    command: Sequence[str], root: str | Sequence[str], **keywords: Unpack[RunKeywords]
) -> Supervised:
    """Run a command, and restart it after a failure while it makes progress.

    A usable step under `root`, or under one of several roots, that is newer than any before
    refills the restart budget. A failure that a restart cannot remove ends the run, and so does
    a failure of the job that occurs twice without progress. The state of the run is kept in
    the first root; a later call continues with it. The command finds the number of its
    restarts in `CKPTCTL_RESTART_COUNT`. `RunOptions` and the objects in it describe the
    keywords.

    The exit code is the command's when it is done, was asked to stop, or must not be started
    again; 10 where the root does not exist; 11 where no step is usable; 75 where the storage
    did not answer in time, or the steps of the run are gone; 93 when the budget is spent.
    Where `pick` calls the root a wrong path, the command runs all the same, with a warning.
    Must be called in the main thread. Raises `UsageError` where the command cannot be
    started, `StorageError` where the sentinel cannot be written.
    """
    return supervise(command, root, RunOptions().with_keywords(keywords))


def supervise(command: Sequence[str], root: str | Sequence[str], options: RunOptions) -> Supervised:
    """Do what `keep_running` does."""
    if not command:
        raise UsageError("the command is missing", next_command="ckptctl run --root ROOT -- CMD")
    roots = roots_in(root, options.optional_roots)
    for url in roots.urls:
        open_store(url, options.storage).close()
    with open_store(options.state or roots.first, options.storage) as store:
        phase = options.output.phase
        folder = "/".join([*([] if options.state else [STATE_FOLDER]), *([phase] if phase else [])])
        revisions = Revisions(store, folder, of_root=options.state is None)
        return _Supervisor(tuple(command), roots, revisions, options).run()


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
        self, command: tuple[str, ...], roots: Roots, revisions: Revisions, options: RunOptions
    ) -> None:
        self._command = command
        self._options = options
        self._revisions = revisions
        log_dir, phase = options.output.log_dir, options.output.phase
        self._log_folder = None if log_dir is None else LogFolder(log_dir, phase)
        self._nodes = Nodes(options.nodes, command, self._tell)
        self._roots = WatchedRoots(
            roots,
            partial(
                pick,
                *roots.urls,
                optional_roots=roots.optional,
                policy=options.policy,
                requirements=options.requirements,
                storage=options.storage,
            ),
            partial(open_store, storage=options.storage),
            options.wait_s,
        )
        self._sections = SectionLimits(options.section_timeouts)
        self._step_times = StepTimes()
        self._copy = LocalCopy(roots.first, phase)
        self._signals = Signals()
        self._attempts: list[Attempt] = []
        self._warnings: list[str] = []
        # `run` may itself run in a restarted job.
        count = os.environ.get(RESTART_COUNT, "")
        self._earlier = int(count) if count.isdecimal() else 0

    def _tell(self, message: str) -> None:
        self._options.tell(message)
        if self._log_folder is not None:
            self._log_folder.note(message)

    def run(self) -> Supervised:
        """Inspect the roots, take the state, then run attempts until none follows."""
        with self._signals.listening(), ExitStack() as stack:
            try:
                held = self._hold(self._prepare())
            except _NotStarted as stop:
                message = f"not started: {stop.why}"
                about = (self._command, self._roots.url, (), (), message)
                return Supervised(*about, stop.code, stop.next_command)
            stack.callback(held.release)
            self._sections.recall(held.state["sections"])
            hangs = HangWatcher(
                self._sections,
                self._tell,
                self._options.output.evidence_dir,
                step_times=self._step_times,
            )
            stack.callback(hangs.close)
            runner = AttemptRunner(
                self._options.output, self._log_folder, (held, hangs), self._signals, self._tell
            )
            verdict = Verdict(Decision.RESTART, "", 0)
            while verdict.decision is Decision.RESTART:
                if self._attempts:
                    used = budget_of(since_progress(held.state))
                    self._signals.pause(self._options.budget.pause_s(used))
                if self._signals.asked is not None:
                    reason = "a signal asked for it"
                    verdict = Verdict(Decision.RESTART, reason, 128 + self._signals.asked)
                    break
                plan = self._nodes.plan(held.state, self._roots.loads)
                if plan is None:
                    verdict = Verdict(Decision.WAIT, "too few nodes are left", WAIT_FOR_CAPACITY)
                    break
                verdict = self._run_attempt(held, plan, runner)
                self._options.on_attempt(self._attempts[-1])
        return self._summary(verdict)

    def _prepare(self) -> Seen:
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
        reset = self._options.budget.reset_budget
        best = None if known is None or reset else known["best"]
        if seen.code in (0, EXIT_FRESH) and not seen.holds_steps and best is not None:
            raise _NotStarted(
                NO_ANSWER,
                f"step {best} was usable, but {self._roots.url} no longer contains a step: "
                "the storage is not mounted, or was emptied (--reset-budget REASON begins a "
                "new run)",
                scan,
            )
        if seen.code == EXIT_FRESH and not self._options.create:
            next_command = f"ckptctl pick {self._roots.words} --allow-fresh --create"
            raise _NotStarted(seen.code, seen.message, next_command)
        if seen.code not in (0, EXIT_FRESH):
            # As after an attempt: where steps have disappeared, the storage may come back.
            emptied = seen.code == EXIT_NONE_USABLE and not seen.holds_steps
            raise _NotStarted(NO_ANSWER if emptied else seen.code, seen.message, scan)
        self._roots.use(seen)
        return seen

    def _hold(self, seen: Seen) -> HeldState:
        """Take the state over; raises `_NotStarted` where its budget is spent."""
        url, reset = self._roots.url, self._options.budget.reset_budget
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
        if budget.exhausted(self._options.budget):
            held.release()
            raise _NotStarted(
                GIVEN_UP,
                f"no restart is left since attempt {held.state['attempts'][-1]['number']}, and no "
                "newer step was saved (--reset-budget REASON begins a new budget)",
                f"ckptctl scan {self._roots.words}",
            )
        return held

    def _run_attempt(self, held: HeldState, plan: Plan, runner: AttemptRunner) -> Verdict:
        """Run one attempt to its end, inspect the roots, and decide what follows."""
        state = held.state
        number = state["attempts"][-1]["number"] + 1 if state["attempts"] else 1
        restarts = self._earlier + len(series(state))
        attempt = begun(number, plan)
        held.save({**state, "attempts": [*state["attempts"], attempt]})
        try:
            variables = {
                RESTART_COUNT: str(restarts),
                ATTEMPT: f"{state['run']}/{number}",
                MARKER: held.marker(),
            }
            ended = runner.run(number, plan, variables)
        except UsageError:
            held.save(state)  # nothing was started
            raise
        seen = self._seen_after(ended)
        best, before = state["best"], since_progress(state)
        progress = seen.step is not None and (best is None or seen.step > best)
        if progress:
            self._roots.use(seen)
        budget = self._options.budget
        verdict = decide(() if progress else before, ended, seen, best, budget)
        attempt = closed(attempt, ended, seen, verdict, progress=progress)
        if slow := self._step_times.documents():
            attempt["slow"] = slow
        state = {
            **held.state,
            "best": seen.step if progress else best,
            "attempts": [*state["attempts"], attempt],
            "sections": self._sections.documents(),
        }
        if verdict.decision is Decision.RESTART:
            n_excluded = len(state["excluded"])
            state = self._nodes.exclude(state, ended.hang, ended.cause)
            if ended.code == RERUN and len(state["excluded"]) == n_excluded:
                self._tell("warning: exit code 16 asks for other nodes, and none was excluded")
        held.save(state)
        left = budget_of(since_progress(held.state)).left(budget)
        phase = self._options.output.phase or None
        self._attempts.append(reported(attempt, verdict, left, phase))
        if self._log_folder is not None:
            self._log_folder.note(
                f"attempt {number} ended with {ended.code} after {ended.seconds:.0f} s, newest "
                f"usable step {seen.step}: {verdict.decision.value}, {verdict.reason}"
            )
        return verdict

    def _seen_after(self, ended: Ended) -> Seen:
        """The roots after an attempt; waited for only where a restart needs the answer."""
        stops_at = self._options.budget.no_restart
        again = ended.hang is not None or (ended.code != 0 and ended.code not in stops_at)
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
                and self._options.output.logs
                and verdict.exit_code not in of_storage
            ):
                words = ["ckptctl", "classify", *self._options.output.logs]
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
            self._command,
            self._roots.url,
            tuple(self._attempts),
            tuple(self._warnings),
            f"{word} after {n} attempt{'' if n == 1 else 's'}: {verdict.reason}",
            verdict.exit_code,
            next_command,
        )
