"""Restart a job after a failure, as long as it makes progress.

Only a newer step that was inspected and is usable refills the restart budget. The budget is
kept in the state of the run, so that a later invocation continues with it. `attempts`
runs and classifies them, `policy` decides, `holding` keeps the state.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.distributed.launcher import ATTEMPT, RESTART_COUNT
from ckptctl.errors import Fenced, StorageError, StorageUnavailable, UsageError
from ckptctl.findings import EXIT_FRESH, EXIT_NONE_USABLE
from ckptctl.formats.own.supervision import (
    AttemptDocument,
    LauncherDocument,
    SupervisorDocument,
)
from ckptctl.formatting import counted
from ckptctl.selection.picking import pick
from ckptctl.selection.targets import Roots, roots_in
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.attempts import AttemptRunner, LogFolder, begun, closed, reported
from ckptctl.supervisor.child import Signals, Watcher
from ckptctl.supervisor.coordination import Assignment, Coordination, JobEnd, Turn, members_of
from ckptctl.supervisor.hangs import HangWatcher
from ckptctl.supervisor.heartbeats import StepTimes
from ckptctl.supervisor.holding import HeldState, StatePlace, is_over, lead, marker_of, take_over
from ckptctl.supervisor.launchers import POLL_S, Launchers
from ckptctl.supervisor.limits import SectionLimits
from ckptctl.supervisor.nodes import AttemptPlan, Nodes, fill
from ckptctl.supervisor.options import RunKeywords, RunOptions
from ckptctl.supervisor.policy import (
    GIVEN_UP,
    NO_ANSWER,
    NOT_INSPECTED,
    RERUN,
    WAIT_FOR_CAPACITY,
    WRONG_PATH,
    Conclusion,
    Ended,
    RootState,
    budget_of,
    decide,
    series,
    since_progress,
)
from ckptctl.supervisor.processes import MARKER
from ckptctl.supervisor.results import Attempt, Decision, Supervised
from ckptctl.supervisor.roots import WatchedRoots
from ckptctl.supervisor.state import LocalCopy, Revisions, stored_state

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
    with stored_state(roots.first, options) as revisions:
        return _Supervisor(tuple(command), roots, revisions, options).run()


class _NotStarted(Exception):
    """Nothing is started: the exit code, why, and what to run next."""

    def __init__(self, code: int, why: str, next_command: str | None = None) -> None:
        super().__init__(why)
        self.code = code
        self.why = why
        self.next_command = next_command


_TOO_FEW = Conclusion(Decision.WAIT, "too few nodes are left", WAIT_FOR_CAPACITY)


class _Supervisor:
    """Runs the attempts of one job, one after the other."""

    def __init__(
        self, command: tuple[str, ...], roots: Roots, revisions: Revisions, options: RunOptions
    ) -> None:
        self._command = command
        self._options = options
        self._revisions = revisions
        log_dir, phase = options.output.log_dir, options.output.phase
        place = options.launchers.place if options.launchers.count > 1 else None
        self._log_folder = None if log_dir is None else LogFolder(log_dir, phase, place)
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
            evidence_dir = self._options.output.evidence_dir
            hangs = HangWatcher(
                self._sections, self._tell, evidence_dir, step_times=self._step_times
            )
            stack.callback(hangs.close)
            try:
                seen = self._prepare()
                if self._options.launchers.count > 1:
                    return self._summary(self._run_together(hangs, stack))
                held = self._hold(seen)
            except _NotStarted as stop:
                message = f"not started: {stop.why}"
                about = (self._command, self._roots.url, (), (), message)
                return Supervised(*about, stop.code, stop.next_command)
            stack.callback(held.release)
            conclusion = self._run_alone(held, seen.step, self._runner(held, hangs))
        return self._summary(conclusion)

    def _runner(self, *watchers: Watcher) -> AttemptRunner:
        output = self._options.output
        return AttemptRunner(output, self._log_folder, watchers, self._signals, self._tell)

    def _run_alone(self, held: HeldState, step: int | None, runner: AttemptRunner) -> Conclusion:
        """Run attempts until none follows; `step` is the newest usable one."""
        self._sections.recall(held.state["sections"])
        while True:
            if self._attempts:
                self._signals.pause(self._pause_s(held))
            if self._signals.asked is not None:
                return self._asked(self._signals.asked)
            plan = self._nodes.plan(held.state, self._roots.loads)
            if plan is None:
                return _TOO_FEW
            before = held.state
            state, restarts = self._begun(before, plan)
            held.save(state)
            try:
                ended = self._run(state, plan, step, restarts, held.marker(), runner)
            except UsageError:
                held.save(before)  # nothing was started
                raise
            conclusion = self._conclude(held, ended)
            if conclusion.decision is not Decision.RESTART:
                return conclusion
            step = self._attempts[-1].step

    def _pause_s(self, held: HeldState) -> float:
        return self._options.budget.pause_s(budget_of(since_progress(held.state)))

    @staticmethod
    def _asked(number: int) -> Conclusion:
        return Conclusion(Decision.RESTART, "a signal asked for it", 128 + number)

    # One of several launchers

    def _run_together(self, hangs: HangWatcher, stack: ExitStack) -> Conclusion:
        """Lead the launchers of all nodes, or follow the one that leads, until the job ends."""
        launchers = Launchers(self._revisions, self._options.launchers)
        stack.callback(launchers.close)
        url, wait_s = self._roots.url, self._options.wait_s
        together = Coordination(launchers, self._signals, self._tell, wait_s, url)
        stack.callback(together.end_to_lead)
        runner = self._runner(together, hangs)
        while True:
            try:
                turn = together.next(reset=self._options.budget.reset_budget is not None)
            except StorageUnavailable as error:
                raise _NotStarted(NO_ANSWER, error.message) from error
            if isinstance(turn, JobEnd):
                self._report_followed(together, launchers.state)
                return Conclusion(Decision(turn.decision), turn.reason, turn.exit_code)
            if isinstance(turn, Assignment):
                self._sections.recall(turn.state["sections"])
                self._run_part(together, turn, runner)
                continue
            try:
                if self._take_lead(together, turn):
                    conclusion = self._lead(together, runner)
                    together.conclude(conclusion)
                    return conclusion
            except Fenced:
                launchers.check()
                self._tell("another `ckptctl run` leads now")
            finally:
                together.end_to_lead()

    def _take_lead(self, together: Coordination, turn: Turn) -> bool:
        """Hold the state as the leader; False where another one came first."""
        url, reset = self._roots.url, self._options.budget.reset_budget
        if turn.alone is not None and not is_over(
            turn.alone, self._revisions, url, self._signals, self._tell
        ):
            return False
        held = None
        with suppress(StorageError):  # it is the turn of whoever writes first
            held = lead(
                StatePlace(self._revisions, self._copy, url, self._tell),
                together.launch(),
                name=together.id,
                gone=turn.gone,
                reset=reset if together.is_new else None,
            )
        if held is None:
            time.sleep(POLL_S)
            return False
        self._tell("this `ckptctl run` leads those of the other nodes")
        together.begin_to_lead(held)
        self._sections.recall(held.state["sections"])
        return True

    def _lead(self, together: Coordination, runner: AttemptRunner) -> Conclusion:
        """Run attempts on all nodes until none follows; raises `Fenced` where another leads."""
        held = together.leading
        pause_s = 0.0
        while True:
            together.pause(pause_s)
            idle = together.gather([each["node"] for each in held.state["excluded"]])
            asked = together.signal()
            if asked is not None:
                return self._asked(asked)
            # No process of the job is left, also none of a leader that was killed.
            seen = self._roots.await_answer(self._signals, self._tell)
            if seen.code not in (0, EXIT_FRESH, WRONG_PATH):
                return Conclusion(Decision.NEVER, seen.message, seen.code)
            try:
                self._take_in(held, seen)
            except _NotStarted as stop:
                return Conclusion(Decision.GIVEN_UP, stop.why, stop.code)
            self._nodes.meet([each["node"] for each in idle.values()], together.count)
            plan = self._nodes.plan(held.state, self._roots.loads)
            if plan is None:
                return _TOO_FEW
            conclusion = self._lead_attempt(together, plan, idle, seen.step, runner)
            if conclusion.decision is not Decision.RESTART:
                return conclusion
            pause_s = self._pause_s(held)

    def _lead_attempt(
        self,
        together: Coordination,
        plan: AttemptPlan,
        idle: Mapping[int, LauncherDocument],
        step: int | None,
        runner: AttemptRunner,
    ) -> Conclusion:
        """Begin an attempt on all nodes, run the own part, and decide when all have ended."""
        held = together.leading
        members = members_of(plan.runs_on, idle)
        state, restarts = self._begun(held.state, plan)
        changes = {"members": members, "restarts": restarts, "step": step}
        if not together.write(state, **changes, ending=False, signal=None):
            return Conclusion(Decision.NEVER, "the state cannot be written", NO_ANSWER)
        number, began_s = state["attempts"][-1]["number"], time.monotonic()
        part = together.part(held.state)
        ended = None if part is None else self._run_part(together, part, runner)
        return self._conclude(held, together.end_together(number, ended, began_s))

    def _run_part(self, together: Coordination, part: Assignment, runner: AttemptRunner) -> Ended:
        """Run the part of this launcher in an attempt to its end."""
        state, number = part.state, part.number
        excluded = [each["node"] for each in state["excluded"]]
        world_size = state["attempts"][-1]["world_size"]
        words, variables = fill(
            self._command, excluded, (world_size or 0, part.n_nodes), part.place
        )
        plan = AttemptPlan(words, variables, "", world_size, ())
        marker = marker_of(state, self._roots.url, self._options.launchers.place)
        restarts = part.launch["restarts"]
        run = partial(self._run, state, plan, part.place.step, restarts, marker, runner)
        try:
            return together.run_part(number, run)
        except UsageError as error:
            self._tell(f"warning: {error.message}")
            return together.run_part(
                number, lambda: Ended(UsageError.exit_code, 0.0, None, None, asked=False)
            )

    def _report_followed(self, together: Coordination, state: SupervisorDocument | None) -> None:
        """Report the attempts that this launcher followed, as the leader has decided."""
        for attempt in () if state is None else state["attempts"]:
            if attempt["number"] in together.followed and attempt["decision"] is not None:
                conclusion = Conclusion(Decision(attempt["decision"]), attempt["reason"], 0)
                self._attempts.append(
                    reported(attempt, conclusion, 0, self._options.output.phase or None)
                )

    # Before, between and after attempts

    def _prepare(self) -> RootState:
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
            raise _NotStarted(seen.code, seen.message, seen.next_command)
        if seen.code not in (0, EXIT_FRESH):
            # As after an attempt: where steps have disappeared, the storage may come back.
            emptied = seen.code == EXIT_NONE_USABLE and not seen.holds_steps
            raise _NotStarted(NO_ANSWER if emptied else seen.code, seen.message, scan)
        self._roots.use(seen)
        return seen

    def _hold(self, seen: RootState) -> HeldState:
        """Take the state over; raises `_NotStarted` where its budget is spent."""
        url, reset = self._roots.url, self._options.budget.reset_budget
        place = StatePlace(self._revisions, self._copy, url, self._tell)
        held = take_over(place, self._signals, reset)
        if held is None:
            asked = self._signals.asked or 0
            raise _NotStarted(128 + asked, "a signal asked to end")
        try:
            self._take_in(held, seen)
        except _NotStarted:
            held.release()
            raise
        return held

    def _take_in(self, held: HeldState, seen: RootState) -> None:
        """Record the progress of an attempt whose supervisor was killed.

        Raises `_NotStarted` where the budget is spent.
        """
        state = held.state
        if seen.step is not None and (state["best"] is None or seen.step > state["best"]):
            attempts = state["attempts"]
            if attempts and self._options.budget.reset_budget is None:
                last: AttemptDocument = {**attempts[-1], "step": seen.step, "progress": True}
                attempts = [*attempts[:-1], last]
            held.save({**state, "best": seen.step, "attempts": attempts})
            self._roots.use(seen)
        budget = budget_of(since_progress(held.state))
        if budget.exhausted(self._options.budget):
            raise _NotStarted(
                GIVEN_UP,
                f"no restart is left since attempt {held.state['attempts'][-1]['number']}, and no "
                "newer step was saved (--reset-budget REASON begins a new budget)",
                f"ckptctl scan {self._roots.words}",
            )

    def _begun(
        self, state: SupervisorDocument, plan: AttemptPlan
    ) -> tuple[SupervisorDocument, int]:
        """The state with an attempt that begins, and the number of restarts before it."""
        number = state["attempts"][-1]["number"] + 1 if state["attempts"] else 1
        restarts = self._earlier + len(series(state))
        return {**state, "attempts": [*state["attempts"], begun(number, plan)]}, restarts

    def _run(
        self,
        state: SupervisorDocument,
        plan: AttemptPlan,
        step: int | None,
        restarts: int,
        marker: str,
        runner: AttemptRunner,
    ) -> Ended:
        """Run the last attempt of a state, or the part of this launcher in it, to its end."""
        number, budget = state["attempts"][-1]["number"], self._options.budget
        name = f"{state['run']}/{number}"
        left = budget_of(since_progress(state)).left(budget)
        about = [
            f"{left} of {budget.max_restarts} restarts left",
            "no usable step" if step is None else f"newest usable step {step}",
        ]
        if plan.world_size:
            about.append(counted(plan.world_size, "rank"))
        variables = {RESTART_COUNT: str(restarts), ATTEMPT: name, MARKER: marker}
        return runner.run(number, plan, variables, ", ".join(about))

    def _conclude(self, held: HeldState, ended: Ended) -> Conclusion:
        """Inspect the roots after an attempt, decide what follows, and record both."""
        *earlier, attempt = held.state["attempts"]
        number = attempt["number"]
        state: SupervisorDocument = {**held.state, "attempts": earlier}
        seen = self._seen_after(ended)
        best, before = state["best"], since_progress(state)
        progress = seen.step is not None and (best is None or seen.step > best)
        if progress:
            self._roots.use(seen)
        budget = self._options.budget
        conclusion = decide(() if progress else before, ended, seen, best, budget)
        attempt = closed(attempt, ended, seen, conclusion, progress=progress)
        if slow := self._step_times.documents():
            attempt["slow"] = slow
        state = {
            **state,
            "best": seen.step if progress else best,
            "attempts": [*earlier, attempt],
            "sections": self._sections.documents(),
        }
        if conclusion.decision is Decision.RESTART:
            n_excluded = len(state["excluded"])
            state = self._nodes.exclude(state, ended.hang, ended.cause)
            if ended.code == RERUN and len(state["excluded"]) == n_excluded:
                self._tell("warning: exit code 16 asks for other nodes, and none was excluded")
        held.save(state)
        left = budget_of(since_progress(held.state)).left(budget)
        phase = self._options.output.phase or None
        self._attempts.append(reported(attempt, conclusion, left, phase))
        if self._log_folder is not None:
            self._log_folder.note(
                f"attempt {number} ended with {ended.code} after {ended.seconds:.0f} s, newest "
                f"usable step {seen.step}: {conclusion.decision.value}, {conclusion.reason}"
            )
        self._options.on_attempt(self._attempts[-1])
        return conclusion

    def _seen_after(self, ended: Ended) -> RootState:
        """The roots after an attempt; waited for only where a restart needs the answer."""
        stops_at = self._options.budget.no_restart
        again = ended.hang is not None or (ended.code != 0 and ended.code not in stops_at)
        if again and not ended.asked:
            return self._roots.await_answer(self._signals, self._tell)
        return self._roots.inspect()

    def _summary(self, conclusion: Conclusion) -> Supervised:
        n = len(self._attempts)
        attempts = f"{n} attempt{'' if n == 1 else 's'}"
        return Supervised(
            self._command,
            self._roots.url,
            tuple(self._attempts),
            tuple(self._warnings),
            f"{conclusion.decision.as_end} after {attempts}: {conclusion.reason}",
            conclusion.exit_code,
            self._next_command(conclusion),
        )

    def _next_command(self, conclusion: Conclusion) -> str | None:
        """What a person runs where no attempt follows: `classify`, where there is a log."""
        if conclusion.decision not in (Decision.GIVEN_UP, Decision.NEVER):
            return None
        last = self._attempts[-1] if self._attempts else None
        of_storage = (EXIT_NONE_USABLE, *NOT_INSPECTED)
        if last and last.cause is not None and conclusion.exit_code not in of_storage:
            logs = [*self._options.output.logs]
            if self._log_folder is not None:
                logs.append(self._log_folder.path(last.number))
            if logs := [*filter(os.path.exists, logs)]:
                words = ["ckptctl", "classify", *logs, "--exit-code", str(last.exit_code)]
                return shlex.join(words)
        return f"ckptctl scan {self._roots.words}"
