"""Restart a job after a failure, as long as it makes progress.

Only a newer step that was inspected and is usable refills the restart budget. The budget is
kept in the state of the run, so that a later invocation continues with it. `attempts`
runs and classifies them, `policy` decides, `holding` keeps the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckptctl.errors import UsageError
from ckptctl.selection.targets import roots_in
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.attempts import AttemptRunner
from ckptctl.supervisor.hangs import HangWatcher
from ckptctl.supervisor.holding import HeldState, take_over
from ckptctl.supervisor.job import TOO_FEW, NotStarted, SupervisedJob, asked_to_stop
from ckptctl.supervisor.leading import run_together
from ckptctl.supervisor.options import RunKeywords, RunOptions
from ckptctl.supervisor.policy import Conclusion, RootState
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
    with stored_state(roots.first, options) as revisions:
        return _run(SupervisedJob(tuple(command), roots, revisions, options))


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
