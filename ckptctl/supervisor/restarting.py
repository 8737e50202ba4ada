"""Restart a job after a failure, as long as it makes progress.

Only a newer step that was inspected and is usable refills the restart budget. The budget is
kept in the state of the run, so that a later invocation continues with it. `attempts`
runs and classifies them, `policy` decides, `holding` keeps the state.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.errors import Fenced, StorageError, StorageUnavailable, UsageError
from ckptctl.findings import EXIT_FRESH
from ckptctl.formats.own.supervision import LauncherDocument
from ckptctl.selection.targets import roots_in
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.attempts import AttemptRunner, reported
from ckptctl.supervisor.coordination import Assignment, Coordination, JobEnd, Turn, members_of
from ckptctl.supervisor.hangs import HangWatcher
from ckptctl.supervisor.holding import HeldState, is_over, lead, marker_of, take_over
from ckptctl.supervisor.job import TOO_FEW, NotStarted, SupervisedJob, asked_to_stop
from ckptctl.supervisor.launchers import POLL_S, Launchers
from ckptctl.supervisor.nodes import AttemptPlan, fill
from ckptctl.supervisor.options import RunKeywords, RunOptions
from ckptctl.supervisor.policy import NO_ANSWER, WRONG_PATH, Conclusion, Ended, RootState
from ckptctl.supervisor.results import Decision, Supervised
from ckptctl.supervisor.state import stored_state

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
    with (
        stored_state(roots.first, options) as revisions,
        closing(SupervisedJob(tuple(command), roots, revisions, options)) as job,
    ):
        return _run(job)


def _run(job: SupervisedJob) -> Supervised:
    """Inspect the roots, take the state, then run attempts until none follows."""
    with job.signals.listening(), ExitStack() as stack:
        evidence_dir = job.options.output.evidence_dir
        hangs = HangWatcher(job.sections, job.tell, evidence_dir, step_times=job.step_times)
        stack.callback(hangs.close)
        try:
            seen = job.prepare()
            if job.options.launchers.count > 1:
                return job.summary(run_together(job, hangs, stack))
            held = _hold(job, seen)
        except NotStarted as stop:
            message = f"not started: {stop.why}"
            about = (job.command, job.roots.url, (), (), message)
            return Supervised(*about, stop.code, stop.next_command)
        stack.callback(held.release)
        conclusion = _run_alone(job, held, seen.step, job.runner(held, hangs))
    return job.summary(conclusion)


def _hold(job: SupervisedJob, seen: RootState) -> HeldState:
    """Take the state over; raises `NotStarted` where its budget is spent."""
    held = take_over(job.state_place, job.signals, job.options.budget.reset_budget)
    if held is None:
        raise NotStarted(128 + (job.signals.asked or 0), "a signal asked to end")
    try:
        job.take_in(held, seen)
    except NotStarted:
        held.release()
        raise
    return held


def _run_alone(
    job: SupervisedJob, held: HeldState, step: int | None, runner: AttemptRunner
) -> Conclusion:
    """Run attempts until none follows; `step` is the newest usable one."""
    job.sections.recall(held.state["sections"])
    while True:
        if job.attempts:
            job.signals.pause(job.pause_s(held))
        if job.signals.asked is not None:
            return asked_to_stop(job.signals.asked)
        plan = job.nodes.plan(held.state, job.roots.loads)
        if plan is None:
            return TOO_FEW
        before = held.state
        state, restarts = job.begun(before, plan)
        held.save(state)
        try:
            ended = job.run(state, plan, step, restarts, held.marker(), runner)
        except UsageError:
            held.save(before)  # nothing was started
            raise
        conclusion = job.conclude(held, ended)
        if conclusion.decision is not Decision.RESTART:
            return conclusion
        step = job.attempts[-1].step


def run_together(job: SupervisedJob, hangs: HangWatcher, stack: ExitStack) -> Conclusion:
    """Lead the launchers of all nodes, or follow the one that leads, until the job ends."""
    launchers = Launchers(job.revisions, job.options.launchers)
    stack.callback(launchers.close)
    together = Coordination(launchers, job.signals, job.tell, job.options.wait_s, job.roots.url)
    stack.callback(together.end_to_lead)
    return _Launcher(job, launchers, together, job.runner(together, hangs)).run()


@dataclass(frozen=True, slots=True)
class _Launcher:
    """One of several launchers of a job."""

    job: SupervisedJob
    launchers: Launchers
    together: Coordination
    runner: AttemptRunner

    def run(self) -> Conclusion:
        """Take turns until the job ends."""
        job, together = self.job, self.together
        while True:
            try:
                turn = together.next(reset=job.options.budget.reset_budget is not None)
            except StorageUnavailable as error:
                raise NotStarted(NO_ANSWER, error.message) from error
            if isinstance(turn, JobEnd):
                self._report_followed()
                return Conclusion(Decision(turn.decision), turn.reason, turn.exit_code)
            if isinstance(turn, Assignment):
                job.sections.recall(turn.state["sections"])
                self._run_share(turn)
                continue
            try:
                if self._take_lead(turn):
                    conclusion = self._lead()
                    together.conclude(conclusion)
                    return conclusion
            except Fenced:
                self.launchers.check()
                job.tell("another `ckptctl run` leads now")
            finally:
                together.end_to_lead()

    def _take_lead(self, turn: Turn) -> bool:
        """Hold the state as the leader; False where another one came first."""
        job, together = self.job, self.together
        reset = job.options.budget.reset_budget
        if turn.alone is not None and not is_over(turn.alone, job.state_place, job.signals):
            return False
        held = None
        with suppress(StorageError):  # it is the turn of whoever writes first
            held = lead(
                job.state_place,
                together.launch(),
                name=together.id,
                gone=turn.gone,
                reset=reset if together.is_new else None,
            )
        if held is None:
            time.sleep(POLL_S)
            return False
        job.tell("this `ckptctl run` leads those of the other nodes")
        together.begin_to_lead(held)
        job.sections.recall(held.state["sections"])
        return True

    def _lead(self) -> Conclusion:
        """Run attempts on all nodes until none follows; raises `Fenced` where another leads."""
        job, together = self.job, self.together
        held = together.leading
        pause_s = 0.0
        while True:
            together.pause(pause_s)
            idle = together.gather([each["node"] for each in held.state["excluded"]])
            asked = together.signal()
            if asked is not None:
                return asked_to_stop(asked)
            # No process of the job is left, also none of a leader that was killed.
            seen = job.roots.await_answer(job.signals, job.tell)
            if seen.code not in (0, EXIT_FRESH, WRONG_PATH):
                return Conclusion(Decision.NEVER, seen.message, seen.code)
            try:
                job.take_in(held, seen)
            except NotStarted as stop:
                return Conclusion(Decision.GIVEN_UP, stop.why, stop.code)
            job.nodes.meet([each["node"] for each in idle.values()], together.count)
            plan = job.nodes.plan(held.state, job.roots.loads)
            if plan is None:
                return TOO_FEW
            conclusion = self._lead_attempt(plan, idle, seen.step)
            if conclusion.decision is not Decision.RESTART:
                return conclusion
            pause_s = job.pause_s(held)

    def _lead_attempt(
        self, plan: AttemptPlan, idle: Mapping[int, LauncherDocument], step: int | None
    ) -> Conclusion:
        """Begin an attempt on all nodes, run the own share, and decide when all have ended."""
        job, together = self.job, self.together
        held = together.leading
        members = members_of(plan.runs_on, idle)
        state, restarts = job.begun(held.state, plan)
        changes = {"members": members, "restarts": restarts, "step": step}
        if not together.write(state, **changes, ending=False, signal=None):
            return Conclusion(Decision.NEVER, "the state cannot be written", NO_ANSWER)
        number, began_s = state["attempts"][-1]["number"], time.monotonic()
        share = together.share(held.state)
        ended = None if share is None else self._run_share(share)
        return job.conclude(held, together.end_together(number, ended, began_s))

    def _run_share(self, share: Assignment) -> Ended:
        """Run the share of this launcher in an attempt to its end."""
        job, together = self.job, self.together
        state, number = share.state, share.number
        excluded = [each["node"] for each in state["excluded"]]
        world_size = state["attempts"][-1]["world_size"]
        words, variables = fill(
            job.command, excluded, (world_size or 0, share.n_nodes), share.place
        )
        plan = AttemptPlan(words, variables, "", world_size, ())
        marker = marker_of(state, job.roots.url, job.options.launchers.place)
        restarts = share.launch["restarts"]
        run = partial(job.run, state, plan, share.place.step, restarts, marker, self.runner)
        try:
            return together.run_share(number, run)
        except UsageError as error:
            job.tell(f"warning: {error.message}")
            return together.run_share(
                number, lambda: Ended(UsageError.exit_code, 0.0, None, None, asked=False)
            )

    def _report_followed(self) -> None:
        """Report the attempts that this launcher followed, as the leader has decided."""
        state = self.launchers.state
        for attempt in () if state is None else state["attempts"]:
            if attempt["number"] in self.together.followed and attempt["decision"] is not None:
                conclusion = Conclusion(Decision(attempt["decision"]), attempt["reason"], 0)
                self.job.attempts.append(
                    reported(attempt, conclusion, 0, self.job.options.output.phase or None)
                )
