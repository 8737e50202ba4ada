"""Decide what follows an attempt of a job. Pure: no clock, no storage, no process.

Attempts since the last progress share a budget. Progress, an end with 0, and a person's word
begin a new one. A cause outside the job costs nothing, every other failure costs one restart.
`docs/run.md` shows the decisions as a table.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from ckptctl.errors import OptionError, StorageError, UsageError
from ckptctl.failures.results import Classification, Domain, Restart
from ckptctl.findings import EXIT_DENIED, EXIT_NONE_USABLE
from ckptctl.formats.own.supervision import (
    MAX_ATTEMPTS,
    Attempt,
    Decision,
    SupervisorDocument,
)
from ckptctl.options import Parameter, not_negative
from ckptctl.supervisor.processes import Hang

GIVEN_UP = 93
"""Do not restart. Source: `ft_launcher` of NVRx, `--ft-no-restart-exit-code`."""
WAIT_FOR_CAPACITY = 94
"""Too few nodes now; whoever started the job starts it again later."""
RERUN, VALIDATION_FAILED = 16, 17
"""Run elsewhere to tell a bad device from a bad result; the result is bad.

Source: `RerunStateMachine` of Megatron-LM."""

NO_RESTART = (2, 11, VALIDATION_FAILED, 23, 24, 25, 77, GIVEN_UP, WAIT_FOR_CAPACITY, 126, 127)
"""Exit codes after which a restart would fail in the same way: ckptctl's and the shell's too."""

MAX_RESTARTS = 3
"""Source: `max_no_progress_cycles` of NVRx; DLRover restarts a job 3 times, too."""
NOT_FINITE = 10
"""After so many losses in a row that are not finite a newer step is no progress.

Source: `LossGuard(after=10)`; a loss scaler skips single steps."""
MAX_FREE_RESTARTS = 50
"""Source: `jobMaxRetryCount` of HyperPod."""
LONGEST_PAUSE_S = 300.0

NO_ANSWER = StorageError.exit_code
WRONG_PATH = UsageError.exit_code
NOT_INSPECTED = (NO_ANSWER, EXIT_DENIED)

_AT_ONCE = frozenset({"python.assertion", "compile.failed"})
"""Rules of `classify` whose cause comes again, whatever their class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions:
    """What bounds the restarts of a job."""

    max_restarts: Annotated[
        int,
        Parameter(
            "--max-restarts N", "How many restarts are allowed without a newer usable step.", min=0
        ),
    ] = MAX_RESTARTS
    max_free_restarts: Annotated[
        int,
        Parameter(
            "--max-free-restarts N",
            "How many restarts for causes outside the job, such as preemption, are allowed "
            "without a newer usable step.",
            min=0,
            setting=True,
        ),
    ] = MAX_FREE_RESTARTS
    no_restart: Annotated[
        Collection[int],
        Parameter(
            "--no-restart-on CODE,...",
            "Exit codes after which not to restart, besides 2, 11, 17, 23, 24, 25, 77, 93, "
            "94, 126 and 127.",
            setting=True,
        ),
    ] = ()
    backoff_s: Annotated[
        float,
        Parameter(
            "--backoff TIME",
            "The first pause before a restart; it doubles without progress, up to 5 minutes.",
        ),
    ] = 10.0
    reset_budget: Annotated[
        str | None,
        Parameter(
            "--reset-budget REASON", "Begin a new budget; the reason is recorded.", common=False
        ),
    ] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "no_restart", frozenset({*NO_RESTART, *self.no_restart}))
        not_negative("backoff", self.backoff_s)
        if min(self.max_restarts, self.max_free_restarts) < 0:
            raise OptionError("--max-restarts", "and --max-free-restarts must be 0 or more")
        total = self.max_restarts + self.max_free_restarts
        if total >= MAX_ATTEMPTS:
            raise OptionError(
                "--max-restarts",
                f"and --max-free-restarts are {total:,} together, and must be "
                f"less than {MAX_ATTEMPTS:,}, the attempts that a state holds",
            )
        if self.reset_budget is not None and not self.reset_budget.strip():
            raise OptionError(
                "--reset-budget",
                "needs the reason why the budget is full again",
                instead="--reset-budget 'the node was replaced'",
            )

    def pause_s(self, used: Budget) -> float:
        """The pause before a restart, doubled for each one without progress before it."""
        doublings = max(0, min(max(used.spent, used.free) - 1, 20))
        return min(LONGEST_PAUSE_S, self.backoff_s * 2.0**doublings)


class RootState(NamedTuple):
    """The result of inspecting the roots: `pick`'s exit code, 2 for a wrong path."""

    code: int
    message: str
    step: int | None = None
    holds_steps: bool = False
    next_command: str | None = None


class AttemptEnd(NamedTuple):
    """How an attempt ended, and after how many seconds.

    `cause` is what its logs show, or what the scheduler states. It was ended for the `hang`,
    whatever its code; `lost_node` where that came of a node that is gone. A signal `asked` the job
    to end. Its last `n_not_finite` reported losses were NaN or infinite. `stopped` is why the
    scheduler ends the whole job, empty where it does not; `nodes_change` why the job goes on with
    other nodes, which costs nothing.
    """

    code: int
    seconds: float
    cause: Classification | None
    hang: Hang | None
    asked: bool
    stopped: str = ""
    n_not_finite: int = 0
    lost_node: bool = False
    nodes_change: str = ""

    @property
    def by_itself(self) -> bool:
        """Whether `run` did not end it: only then its code is a result."""
        return self.hang is None and not self.nodes_change

    @property
    def hung(self) -> Hang | None:
        """The hang, where that is its cause, and not a node that was lost."""
        return None if self.lost_node else self.hang


class Conclusion(NamedTuple):
    """What follows an attempt, why, and the exit code if nothing more is started."""

    decision: Decision
    reason: str
    exit_code: int
    free: bool = False


class Budget(NamedTuple):
    """The restarts that were used since the last progress."""

    spent: int
    free: int

    def left(self, options: BudgetOptions) -> int:
        """The restarts without progress that are left."""
        return max(0, options.max_restarts - self.spent)

    def exhausted(self, options: BudgetOptions) -> bool:
        """Whether nothing may be started any more."""
        return self.spent > options.max_restarts or self.free > options.max_free_restarts


def series(state: SupervisorDocument) -> Sequence[Attempt]:
    """The attempts since the last end with 0 and since the last reset of the budget."""
    after = max((reset["after"] for reset in state["resets"]), default=0)
    for attempt in state["attempts"]:
        if attempt.decision is Decision.DONE:
            after = max(after, attempt.number)
    return [attempt for attempt in state["attempts"] if attempt.number > after]


def since_progress(state: SupervisorDocument) -> Sequence[Attempt]:
    """The attempts that share the budget: from the last one that made progress on."""
    attempts = series(state)
    first = max((n for n, attempt in enumerate(attempts) if attempt.progress), default=0)
    return attempts[first:]


def is_progress(state: SupervisorDocument, step: int | None) -> bool:
    """Whether a usable step is newer than any before, and was not saved while losses were NaN."""
    best = state["best"]
    is_newer = step is not None and (best is None or step > best)
    return is_newer and step not in state["not_finite"]


def budget_of(attempts: Sequence[Attempt]) -> Budget:
    """What attempts without progress in between have used; one that runs is not counted."""
    ended = [attempt for attempt in attempts if attempt.decision is not None]
    free = sum(attempt.free for attempt in ended)
    return Budget(len(ended) - free, free)


def decide(
    past: Sequence[Attempt],
    ended: AttemptEnd,
    seen: RootState,
    best: int | None,
    options: BudgetOptions,
) -> Conclusion:
    """What follows an attempt that has ended.

    `past` are the attempts before it since the last progress; none of them where it made
    progress itself. `seen` is the root after it, `best` the newest step that was usable
    before it.
    """
    code = ended.code
    if ended.asked:
        return Conclusion(Decision.STOPPED, "a signal asked for it", code, free=True)
    if ended.stopped:
        failure = None if ended.cause is None else ended.cause.failure
        return stopped_by_scheduler(failure, ended.stopped, code)
    if ended.by_itself:
        if code == 0 and not ended.lost_node:
            return Conclusion(Decision.DONE, "the command succeeded", 0, free=True)
        if code in options.no_restart:
            return Conclusion(Decision.NEVER, _reason_of(code), code)
    if seen.code in NOT_INSPECTED:
        return Conclusion(Decision.NEVER, seen.message, seen.code, free=True)
    if seen.code != WRONG_PATH and best is not None and not seen.holds_steps:
        reason = f"step {best} was usable, but the root no longer contains a step"
        return Conclusion(Decision.NEVER, reason, NO_ANSWER)
    if seen.code == EXIT_NONE_USABLE:
        return Conclusion(Decision.NEVER, f"no step is usable: {seen.message}", EXIT_NONE_USABLE)
    if ended.by_itself and code == RERUN and any(attempt.exit_code == RERUN for attempt in past):
        return Conclusion(Decision.NEVER, "a rerun was asked for twice without a newer step", RERUN)
    free = bool(ended.nodes_change) or (
        ended.hung is None and _is_free(code if ended.by_itself else None, ended.cause)
    )
    before = budget_of(past)
    after = Budget(before.spent + (not free), before.free + free)
    if after.exhausted(options):
        which = "free restart" if free else "restart"
        reason = f"no {which} is left, and no newer step was saved"
        return Conclusion(Decision.GIVEN_UP, reason, GIVEN_UP, free)
    if ended.hung is None and ended.cause is not None and _comes_again(ended.cause, past):
        reason = f"{ended.cause.failure}: {ended.cause.message}"
        return Conclusion(Decision.NEVER, reason, code)
    if free:
        why = ended.nodes_change or "it cost nothing"
        reason = f"{why}; {after.left(options)} of {options.max_restarts} restarts left"
    else:
        left = after.left(options)
        reason = f"{left} of {options.max_restarts} restarts left without a newer step"
    return Conclusion(Decision.RESTART, reason, code, free)


def stopped_by_scheduler(failure: str | None, why: str, code: int) -> Conclusion:
    """The end of a job that the scheduler ends; `code` is that of its last attempt.

    What is to continue later, on other nodes or in another job, is 94: the code of tasks that were
    signalled does not tell a preemption from a job that was cancelled. It is never 0: tasks that
    end with 0 when they are ended have not done the job.
    """
    later = failure in ("preemption", "walltime")
    stopped = WAIT_FOR_CAPACITY if later else code or 128 + signal.SIGTERM
    return Conclusion(Decision.STOPPED, why, stopped, free=True)


def _reason_of(code: int) -> str:
    reasons = {
        VALIDATION_FAILED: "the job found its result to be wrong (exit code 17)",
        GIVEN_UP: "the job asks not to be restarted (exit code 93)",
        WAIT_FOR_CAPACITY: "the job waits for capacity (exit code 94)",
    }
    return reasons.get(code, f"exit code {code}: a restart would fail in the same way")


def _is_free(code: int | None, cause: Classification | None) -> bool:
    if code in (RERUN, NO_ANSWER):
        return True
    return cause is not None and cause.restart is Restart.FREE and cause.confidence != "low"


def _comes_again(cause: Classification, past: Sequence[Attempt]) -> bool:
    """Whether a restart would meet this failure again.

    A failure that a restart cannot remove stops at once where its class is certain. One of
    the job, and one that is less certain, stops when it came before without a newer step
    since: the reader of a log can be wrong, and a false stop costs more than a restart.
    """
    lasting = cause.restart is Restart.NO or cause.rule in _AT_ONCE
    if lasting and (cause.confidence == "high" or cause.domain is Domain.STOPPED):
        return True
    may_be_job = cause.domain is Domain.JOB and cause.restart is Restart.ONCE
    return (lasting or may_be_job) and any(each.cause == cause.failure for each in past)
