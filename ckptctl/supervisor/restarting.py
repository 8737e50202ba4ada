"""Restart a job after a failure, as long as it makes progress.

Only a newer step that was inspected and is usable refills the restart budget. The budget is
kept in the state of the run, so that a later invocation continues with it. `attempts`
runs and classifies them, `policy` decides, `holding` keeps the state.

An alarm is raised where an attempt saves no newer usable step for several save intervals. How
often the job saves is learned from the steps that appear meanwhile, also where they are removed
again: the files of a root that was copied are seconds apart, whatever the job needs between two.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from ckptctl.distributed.launcher import ATTEMPT, RESTART_COUNT, cluster_context
from ckptctl.errors import CkptctlError, StorageError, Unknown, UsageError, guarded
from ckptctl.failures.results import Classification
from ckptctl.findings import EXIT_FRESH, EXIT_NONE_USABLE
from ckptctl.formats.frameworks.layouts import compile_pattern
from ckptctl.formats.own.files import MAX_STRING, utc_now
from ckptctl.formats.own.supervision import (
    MAX_ATTEMPTS,
    Attempt,
    Decision,
    SupervisorDocument,
)
from ckptctl.formatting import command_line, counted
from ckptctl.model import ExitCode, NextCommand
from ckptctl.outside_numbers import whole
from ckptctl.selection.history import begin_run
from ckptctl.selection.picking import Pick, pick
from ckptctl.selection.roots import list_all, list_root
from ckptctl.selection.targets import Roots, SeenRoots, roots_in
from ckptctl.selection.watching import (
    Watched,
    overdue,
    overdue_event,
    pauses_s,
    save_interval_s,
    written_s,
)
from ckptctl.storage.opening import local_path, open_store
from ckptctl.storage.waiting import leave_unwatched, start_daemon
from ckptctl.supervisor.attempts import AttemptRunner, LogFolder
from ckptctl.supervisor.evidence import over_slurm
from ckptctl.supervisor.hangs import HangWatcher
from ckptctl.supervisor.holding import (
    HeldState,
    LocalCopy,
    Revisions,
    StatePlace,
    stored_state,
    take_over,
)
from ckptctl.supervisor.nodes import AttemptPlan, Nodes
from ckptctl.supervisor.options import RunKeywords, RunOptions, SectionLimits
from ckptctl.supervisor.policy import (
    GIVEN_UP,
    NO_ANSWER,
    NOT_FINITE,
    NOT_INSPECTED,
    RERUN,
    WAIT_FOR_CAPACITY,
    WRONG_PATH,
    AttemptEnd,
    Conclusion,
    RootState,
    budget_of,
    decide,
    is_progress,
    series,
    since_progress,
    stopped_by_scheduler,
)
from ckptctl.supervisor.processes import MARKER, Hang, JobLog, Running, Signals, Watcher
from ckptctl.supervisor.slurm import ask as ask_slurm
from ckptctl.supervisor.slurm import is_srun, job_id


@dataclass(frozen=True, slots=True)
class Supervised:
    """How the job ended, and after which attempts."""

    command: tuple[str, ...]
    """The command of the job."""
    root: str
    """The root in which progress was measured."""
    attempts: tuple[Attempt, ...]
    """Every attempt of the job, in order; none where it was not started."""
    warnings: tuple[str, ...]
    """Why the progress of the job cannot be measured."""
    message: str
    """How it ended, in one line."""
    exit_code: ExitCode
    next_command: NextCommand


_SETUP_S = 600.0
"""How long an attempt may take until its first save, at least: it loads, compiles and trains."""
_POLL_S = (5.0, 300.0)
"""The shortest and the longest time between two listings; half a save interval within these."""
_OF_LONGEST = 1.5
"""No alarm before so many times the longest time between two saves: an evaluation, a full epoch."""
_MOST_STEPS = 1_000
"""Of how many steps of an attempt the write times are kept, the newest."""


class StepAlarm(Watcher):
    """Watches the root `url` during each attempt; `inspect` finds its newest usable step.

    `best` is the newest one that was known before the attempt.
    """

    def __init__(
        self,
        url: str,
        options: RunOptions,
        inspect: Callable[[], RootState],
        best: Callable[[], int | None],
    ) -> None:
        self._url = url
        self._options = options
        self._inspect = inspect
        self._best = best
        self._ended = threading.Event()
        self._event: Watched | None = None
        self._pauses: list[float] = []  # of the attempts before

    def prepare(self, _attempt: int, _logs: Sequence[JobLog]) -> Mapping[str, str]:
        """Begin to wait for a newer step."""
        self._event = None
        self._ended = threading.Event()
        if self._options.alarm_after > 0:
            start_daemon("ckptctl-alarm", self._run, self._ended, self._best())
        return {}

    def poll(self, _running: Running, _now_s: float) -> Hang | None:
        """Report the alarm; it ends nothing."""
        event, self._event = self._event, None
        if event is not None:
            self._options.tell(f"warning: {event.message}")
            self._options.on_alarm(event)
        return None

    def finish(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self, ended: threading.Event, newest: int | None) -> None:
        # A fault of ckptctl in it must not reach the job.
        guarded("waiting for a newer step", partial(self._watch, ended, newest))

    def _watch(self, ended: threading.Event, newest: int | None) -> None:
        leave_unwatched()
        since_s, least_s, alarmed = time.monotonic(), _SETUP_S, False
        earlier = self._pauses
        there: set[int] | None = None  # the steps that this attempt found
        seen: dict[int, float] = {}  # when those that it saved were written
        pause_s = 0.0
        while not ended.wait(pause_s):
            with suppress(CkptctlError):
                written = self._written()
                there = set(written) if there is None else there
                seen |= {n: at_s for n, at_s in written.items() if at_s and n not in there}
                seen = {number: seen[number] for number in sorted(seen)[-_MOST_STEPS:]}
                step = newest
                if written and (newest is None or max(written) > newest):
                    step = self._inspect().step
                if step is not None and (newest is None or step > newest):
                    newest, since_s, alarmed = step, time.monotonic(), False
                    least_s = least_s if step in there else 0.0
            self._pauses = pauses = [*earlier, *pauses_s(seen)][-_MOST_STEPS:]
            interval_s = save_interval_s(pauses)
            pause_s = min(max((interval_s or 0.0) / 2, _POLL_S[0]), _POLL_S[1])
            waited_s, after = time.monotonic() - since_s, self._options.alarm_after
            least_of_pauses_s = _OF_LONGEST * max(pauses, default=0.0)
            late = overdue(newest, waited_s, interval_s, after, max(least_s, least_of_pauses_s))
            if late is not None and not alarmed:
                alarmed = True
                self._event = overdue_event(self._url, late)

    def _written(self) -> dict[int, float | None]:
        with open_store(self._url, self._options.storage) as store:
            listing = list_all(store, compile_pattern(self._options.requirements.pattern))
            written = written_s(store, listing)
        return {step.number: written.get(step.number) for step in listing.steps}


_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


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


def supervise(
    command: Sequence[str],
    root: str | Sequence[str],
    options: RunOptions,
    run: Callable[[SupervisedJob], Supervised] | None = None,
) -> Supervised:
    """Do what `keep_running` does; with `run`, which runs the attempts in its place."""
    if not command:
        urls = (root,) if isinstance(root, str) else root
        options_of_roots = [word for url in urls for word in ("--root", url)]
        raise UsageError(
            "the command is missing",
            next_command=f"{command_line('run', *options_of_roots)} -- CMD",
        )
    roots = roots_in(root, options.optional_roots)
    for url in roots.urls:
        open_store(url, options.storage).close()
    with (
        stored_state(roots.first, options) as revisions,
        closing(SupervisedJob(tuple(command), roots, revisions, options)) as job,
    ):
        return (run or _run)(job)


def _run(job: SupervisedJob) -> Supervised:
    """Inspect the roots, take the state, then run attempts until none follows."""
    with job.signals.listening(), ExitStack() as stack:
        evidence_dir = job.options.output.evidence_dir
        hangs = HangWatcher(
            job.sections,
            job.tell,
            evidence_dir,
            elsewhere=over_slurm() if is_srun(job.command) else None,
        )
        stack.callback(hangs.close)
        try:
            seen = job.prepare()
            held = hold(job, seen)
        except NotStarted as stop:
            return job.not_started(stop)
        stack.callback(held.release)
        # The alarm inspects in a thread of its own, and shares nothing with the job.
        inspect = WatchedRoots(job.all_roots, job.options).inspect
        alarm = StepAlarm(job.roots.url, job.options, inspect, lambda: held.state["best"])
        conclusion = _run_attempts(job, held, seen.step, job.runner(held, hangs, alarm))
    return job.summary(conclusion)


def hold(job: SupervisedJob, seen: RootState) -> HeldState:
    """Take the state over; raises `NotStarted` where its budget is spent."""
    place = StatePlace(job.revisions, job.copy, job.roots.url, job.tell)
    held = take_over(place, job.signals, job.options.budget.reset_budget)
    if held is None:
        raise NotStarted(128 + (job.signals.asked or 0), "a signal asked to end")
    try:
        job.take_in(held, seen)
    except NotStarted:
        held.release()
        raise
    return held


def _run_attempts(
    job: SupervisedJob, held: HeldState, step: int | None, runner: AttemptRunner
) -> Conclusion:
    """Run attempts until none follows; `step` is the newest usable one."""
    job.sections.recall(held.state["sections"])
    while True:
        if job.attempts:
            job.signals.pause(job.pause_s(held))
        if job.signals.asked is not None:
            return Conclusion(Decision.RESTART, "a signal asked for it", 128 + job.signals.asked)
        slurm = ask_slurm(job.nodes.names)
        if job.attempts and slurm is not None and slurm.ends:
            return stopped_by_scheduler(slurm.ends, slurm.why, job.attempts[-1].exit_code or 0)
        down = {} if slurm is None else slurm.down
        plan = job.nodes.plan(held.state, job.roots.loads, down)
        if plan is None:
            return Conclusion(Decision.WAIT, "too few nodes are left", WAIT_FOR_CAPACITY)
        before = held.state
        state, restarts = job.begun(before, plan)
        held.save(state)
        try:
            number = state["attempts"][-1].number
            variables = {
                RESTART_COUNT: str(restarts),
                ATTEMPT: f"{state['run']}/{number}",
                MARKER: held.marker(),
            }
            ended = runner.run(number, plan, variables, job.about(state, plan, step))
        except UsageError:
            held.save(before)  # nothing was started
            raise
        conclusion = job.conclude(held, ended, plan)
        if conclusion.decision is not Decision.RESTART:
            return conclusion
        step = job.attempts[-1].step


class WatchedRoots:
    """The roots of the run, inspected before the first attempt and after each one."""

    def __init__(self, roots: Roots, options: RunOptions) -> None:
        self.url = roots.first
        self.words = roots.words
        self._roots = roots
        self._options = options
        self._used = False
        self._seen_roots = SeenRoots()

    def _pick(self, **keywords: Any) -> Pick:
        options = self._options
        return pick(
            *self._roots.urls,
            optional_roots=self._roots.optional,
            policy=options.pick_policy,
            requirements=options.requirements,
            storage=options.storage,
            **keywords,
        )

    def inspect(self) -> RootState:
        """The newest usable step, without waiting for a storage that does not answer."""
        try:
            # No process saves between two attempts, so an unfinished save is not in progress.
            found = self._pick(allow_fresh=True, **({"grace_s": 0.0} if self._used else {}))
            holds_steps = bool(found.passed_over or found.chosen)
            if self._used:
                self._check_same()
        except (StorageError, UsageError) as error:
            return RootState(error.exit_code, error.message)
        step = found.chosen.number if found.chosen else None
        return RootState(found.exit_code, found.message, step, holds_steps, found.next_command)

    def _check_same(self) -> None:
        for url in self._roots.mandatory:
            with open_store(url, self._options.storage) as store:
                # `decide` answers where the steps are gone.
                self._seen_roots.check(store, list_root(store), steps_stay=False)

    def loads(self, world_size: int) -> bool:
        """Whether the newest usable step loads with so many ranks, and loses nothing required."""
        seen = self.inspect()
        try:
            found = self._pick(allow_fresh=True, world_size=world_size)
        except (StorageError, UsageError):
            return False
        return seen.step is None or (found.chosen is not None and found.chosen.number == seen.step)

    def await_answer(self, signals: Signals, tell: Callable[[str], None]) -> RootState:
        """The same, waiting for the storage to answer up to the limit."""
        until_s = time.monotonic() + self._options.wait_s
        pause_s = _FIRST_WAIT_S
        while (seen := self.inspect()).code == NO_ANSWER and signals.asked is None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            if pause_s == _FIRST_WAIT_S:
                tell(
                    f"waiting for {self.url}, at most {self._options.wait_s:.0f} s: {seen.message}"
                )
            signals.pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        return seen

    def use(self, seen: RootState) -> None:
        """Write the sentinels, or record the usable step, before an attempt begins."""
        self._used = True
        with ExitStack() as stack:
            stores = [
                stack.enter_context(open_store(url, self._options.storage))
                for url in self._roots.mandatory
            ]
            begin_run(stores, seen.step)
        with suppress(StorageError):  # the next inspection reports it
            self._check_same()


MOST_NAMES = 64
"""Ranks and nodes of one attempt that the state keeps."""


def _concluded(
    attempt: Attempt, ended: AttemptEnd, seen: RootState, conclusion: Conclusion, *, progress: bool
) -> Attempt:
    attempt = replace(
        attempt,
        seconds=round(ended.seconds, 3),
        exit_code=ended.code,
        step=seen.step,
        inspected=seen.code not in NOT_INSPECTED,
        progress=progress,
        free=conclusion.free,
        decision=conclusion.decision,
        reason=conclusion.reason[:MAX_STRING],
    )
    if ended.hung is not None:
        return replace(
            attempt,
            cause="hang",
            section=ended.hung.section,
            ranks=ended.hung.ranks[:MOST_NAMES],
            nodes=ended.hung.nodes[:MOST_NAMES],
        )
    if ended.cause is not None:
        rank = ended.cause.rank
        return replace(
            attempt,
            cause=ended.cause.failure,
            ranks=() if rank is None else (rank,),
            nodes=ended.cause.nodes[:MOST_NAMES],
        )
    return attempt


class NotStarted(Exception):
    """Nothing is started: the exit code, why, and what to run next."""

    def __init__(self, code: int, why: str, next_command: str | None = None) -> None:
        super().__init__(why)
        self.code = code
        self.why = why
        self.next_command = next_command


class SupervisedJob:
    """The job that `run` supervises: its command, roots and attempts."""

    def __init__(
        self, command: tuple[str, ...], roots: Roots, revisions: Revisions, options: RunOptions
    ) -> None:
        self.command = command
        self.options = options
        self.revisions = revisions
        log_dir = options.output.log_dir
        self._notes_failed = False
        self._log_folder = None if log_dir is None else LogFolder(log_dir, local_path(roots.first))
        self.nodes = Nodes(options.nodes, command, self.tell)
        self.all_roots = roots
        self.roots = WatchedRoots(roots, options)
        self.sections = SectionLimits(options.section_timeouts)
        self.copy = LocalCopy(roots.first)
        self.signals = Signals(self.tell)
        self.attempts: list[Attempt] = []
        self._warnings: list[str] = []
        # `run` may itself run in a restarted job.
        count = os.environ.get(RESTART_COUNT, "")
        self._earlier = whole(count, MAX_ATTEMPTS) or 0

    def tell(self, message: str) -> None:
        """Report a message, in the log folder too."""
        self.options.tell(message)
        self._note(message)

    def _note(self, message: str) -> None:
        if self._log_folder is None:
            return
        why = self._log_folder.note(message)
        if why is not None and not self._notes_failed:
            self._notes_failed = True
            self.options.tell(f"warning: the decisions are not written to the log folder: {why}")

    def runner(self, *watchers: Watcher) -> AttemptRunner:
        """What runs one attempt, and is polled by `watchers`."""
        output = self.options.output
        return AttemptRunner(output, self._log_folder, watchers, self.signals, self.tell)

    def close(self) -> None:
        """Close the logs."""
        if self._log_folder is not None:
            self._log_folder.close()

    def pause_s(self, held: HeldState) -> float:
        """How long to wait before the next attempt."""
        return self.options.budget.pause_s(budget_of(since_progress(held.state)))

    def prepare(self) -> RootState:
        """Inspect the roots before the first attempt; raises `NotStarted`."""
        seen = self.roots.await_answer(self.signals, self.tell)
        scan = command_line("scan", *self.roots.words)
        if seen.code == WRONG_PATH:
            self._warnings.append(
                f"{seen.message}; the job runs, but its progress cannot be measured"
            )
            self.tell(f"warning: {self._warnings[0]}")
            return seen
        if self.signals.asked is not None:
            raise NotStarted(128 + self.signals.asked, "a signal asked to end")
        known = self.copy.read()
        if self.copy.set_aside:
            self.tell(f"warning: set aside: {self.copy.set_aside}")
        reset = self.options.budget.reset_budget
        best = None if known is None or reset else known["best"]
        if seen.code in (0, EXIT_FRESH) and not seen.holds_steps and best is not None:
            raise NotStarted(
                NO_ANSWER,
                f"step {best} was usable, but {self.roots.url} no longer contains a step: "
                "the storage is not mounted, or was emptied (--reset-budget REASON begins a "
                "new run)",
                scan,
            )
        if seen.code == EXIT_FRESH and not self.options.create:
            raise NotStarted(seen.code, seen.message, seen.next_command)
        if seen.code not in (0, EXIT_FRESH):
            # As after an attempt: where steps have disappeared, the storage may come back.
            emptied = seen.code == EXIT_NONE_USABLE and not seen.holds_steps
            raise NotStarted(NO_ANSWER if emptied else seen.code, seen.message, scan)
        self.roots.use(seen)
        return seen

    def take_in(self, held: HeldState, seen: RootState) -> None:
        """Record the progress of an attempt whose supervisor was killed.

        Raises `NotStarted` where the budget is spent.
        """
        state = held.state
        attempts = state["attempts"]
        resets = self.options.budget.reset_budget is not None
        if is_progress(state, seen.step):
            if attempts and not resets:
                last = replace(attempts[-1], step=seen.step, inspected=True, progress=True)
                attempts = [*attempts[:-1], last]
            held.save({**state, "best": seen.step, "attempts": attempts})
            self.roots.use(seen)
        budget = budget_of(since_progress(held.state))
        if budget.exhausted(self.options.budget):
            raise NotStarted(
                GIVEN_UP,
                f"no restart is left since attempt {held.state['attempts'][-1].number}, and no "
                "newer step was saved (--reset-budget REASON begins a new budget)",
                command_line("scan", *self.roots.words),
            )

    def begun(self, state: SupervisorDocument, plan: AttemptPlan) -> tuple[SupervisorDocument, int]:
        """The state with an attempt that begins, and the number of restarts before it."""
        attempt = Attempt(
            number=state["attempts"][-1].number + 1 if state["attempts"] else 1,
            started_at=utc_now(),
            host=cluster_context().node,
            allocation=plan.allocation[:MAX_STRING],
            world_size=plan.world_size,
        )
        restarts = self._earlier + len(series(state))
        return {**state, "attempts": [*state["attempts"], attempt]}, restarts

    def about(self, state: SupervisorDocument, plan: AttemptPlan, step: int | None) -> str:
        """What is known of an attempt that begins, for the message."""
        budget = self.options.budget
        left = budget_of(since_progress(state)).left(budget)
        about = [
            f"{left} of {budget.max_restarts} restarts left",
            "no usable step" if step is None else f"newest usable step {step}",
        ]
        if plan.world_size:
            about.append(counted(plan.world_size, "rank"))
        return ", ".join(about)

    def conclude(self, held: HeldState, ended: AttemptEnd, plan: AttemptPlan) -> Conclusion:
        """Inspect the roots after an attempt, decide what follows, and record both."""
        ended = self._as_slurm_knows(ended, plan.nodes)
        *earlier, attempt = held.state["attempts"]
        state: SupervisorDocument = {**held.state, "attempts": earlier}
        # The roots are waited for only where a restart needs the answer.
        stops = ended.by_itself and (not ended.code or ended.code in self.options.budget.no_restart)
        if stops or ended.asked:
            seen = self.roots.inspect()
        else:
            seen = self.roots.await_answer(self.signals, self.tell)
        best, before = state["best"], since_progress(state)
        progress = is_progress(state, seen.step)
        if progress and seen.step is not None and ended.n_not_finite >= NOT_FINITE:
            progress = False
            state = {**state, "not_finite": [*state["not_finite"], seen.step]}
            self.tell(
                f"warning: step {seen.step} is no progress: the last {ended.n_not_finite} reported "
                "losses are NaN or infinite"
            )
        if progress:
            self.roots.use(seen)
        budget = self.options.budget
        conclusion = decide(() if progress else before, ended, seen, best, budget)
        attempt = _concluded(attempt, ended, seen, conclusion, progress=progress)
        used = budget_of(since_progress({**state, "attempts": [*earlier, attempt]}))
        attempt = replace(attempt, left=used.left(budget))
        state = {
            **state,
            "best": seen.step if progress else best,
            "attempts": [*earlier, attempt],
            "sections": dict(self.sections.seen),
        }
        if conclusion.decision is Decision.RESTART:
            n_excluded = len(state["excluded"])
            if not ended.lost_node:  # the scheduler leaves it out while it is down
                state = self.nodes.exclude(state, ended.hung, ended.cause)
            if ended.by_itself and ended.code == RERUN and len(state["excluded"]) == n_excluded:
                self.tell("warning: exit code 16 asks for other nodes, and none was excluded")
        held.save(state)
        self.record(attempt)
        return conclusion

    def record(self, attempt: Attempt) -> None:
        """Take in an attempt that has ended, and report it."""
        self.attempts.append(attempt)
        self._note(attempt.sentence)
        reported_to = guarded("reporting the attempt", partial(self.options.on_attempt, attempt))
        if isinstance(reported_to, Unknown):
            self.tell(f"warning: {reported_to.message}")

    def _as_slurm_knows(self, ended: AttemptEnd, nodes: Sequence[str]) -> AttemptEnd:
        """The end of an attempt on `nodes` with what Slurm knows of its reason.

        Text is the fallback. A node that the attempt did not have says nothing about its end.
        """
        if ended.asked or (ended.by_itself and not ended.code) or job_id() is None:
            return ended
        failure = "" if ended.cause is None else ended.cause.failure
        # After a hang the logs hold what ended the job, and that was this process.
        by_text = ended.by_itself and failure in ("preemption", "walltime")
        slurm = ask_slurm(nodes)
        if slurm is None:
            if by_text:
                self.tell(f"warning: Slurm does not answer; {failure} is read from the logs alone")
            return ended
        if slurm.ends:
            return ended._replace(
                stopped=slurm.why, cause=Classification.stated(slurm.ends, slurm.why, "high")
            )
        if slurm.down:
            states = ", ".join(f"{node} as {state}" for node, state in slurm.down.items())
            message = f"Slurm reports {states}"
            cause = Classification.stated("infra-node", message, "high", [*slurm.down])
            return ended._replace(lost_node=True, cause=cause)
        if by_text:
            self.tell(
                f"the logs show {failure}, and Slurm ends neither the job nor a node: unknown"
            )
            return ended._replace(cause=None)
        return ended

    def not_started(self, stop: NotStarted) -> Supervised:
        """The result where nothing more was started."""
        attempts, message = tuple(self.attempts), f"not started: {stop.why}"
        return Supervised(
            self.command, self.roots.url, attempts, (), message, stop.code, stop.next_command
        )

    def summary(self, conclusion: Conclusion) -> Supervised:
        """The result of the run."""
        attempts = counted(len(self.attempts), "attempt")
        return Supervised(
            self.command,
            self.roots.url,
            tuple(self.attempts),
            tuple(self._warnings),
            f"{conclusion.decision.as_end} after {attempts}: {conclusion.reason}",
            conclusion.exit_code,
            self._next_command(conclusion),
        )

    def _next_command(self, conclusion: Conclusion) -> str | None:
        """What a person runs where no attempt follows: `classify`, where there is a log."""
        if conclusion.decision not in (Decision.GIVEN_UP, Decision.NEVER):
            return None
        last = self.attempts[-1] if self.attempts else None
        of_storage = (EXIT_NONE_USABLE, *NOT_INSPECTED)
        if last and last.cause is not None and conclusion.exit_code not in of_storage:
            logs = [*self.options.output.logs]
            if self._log_folder is not None:
                logs.append(self._log_folder.path(last.number))
            if logs := [*filter(os.path.exists, logs)]:
                return command_line("classify", *logs, "--exit-code", last.exit_code or 0)
        return command_line("scan", *self.roots.words)
