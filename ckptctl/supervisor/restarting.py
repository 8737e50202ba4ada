"""Restart a job after a failure, as long as it makes progress.

Only a newer step that was inspected and is usable refills the restart budget. A job is not
restarted if its exit code or its logs show that it would fail again, if no step is usable,
if the steps of the run are gone, if the storage does not answer in time, or after a signal
that asks it to end. `causes` classifies failures.
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from signal import SIGTERM
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.distributed.launcher import RESTART_COUNT
from ckptctl.errors import StorageError, UsageError
from ckptctl.failures.classes import Restart
from ckptctl.failures.results import Classification
from ckptctl.findings import EXIT_DENIED, EXIT_FRESH, EXIT_NONE_USABLE
from ckptctl.formats.frameworks.layouts import compile_pattern
from ckptctl.formats.own.files import time_now
from ckptctl.inspection.marks_file import check_marks_file
from ckptctl.options import PickKeywords, PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.selection.history import begin_run
from ckptctl.selection.picking import pick
from ckptctl.selection.results import Pick
from ckptctl.selection.tiers import Roots, roots_in
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.causes import Logs
from ckptctl.supervisor.child import Signals
from ckptctl.supervisor.processes import MARKER
from ckptctl.supervisor.results import Attempt, Decision, Supervised
from ckptctl.supervisor.watching import Hang, Running, Watcher

if TYPE_CHECKING:
    from typing_extensions import Unpack

NO_RESTART = (2, 11, 23, 24, 25, 77, 93, 126, 127)
"""Exit codes of ckptctl and the shell after which a restart would fail in the same way."""

LONGEST_PAUSE_S = 300.0
WAIT_S = 900.0
"""How long to wait for a storage that does not answer: longer than `pick`'s grace."""

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_GIVEN_UP = 93
_WRONG_PATH = UsageError.exit_code
_NO_ANSWER = StorageError.exit_code
_NOT_INSPECTED = (_NO_ANSWER, EXIT_DENIED)


class _Seen(NamedTuple):
    """The result of inspecting the roots: `pick`'s exit code, 2 for a wrong path."""

    code: int
    message: str
    step: int | None = None
    holds_steps: bool = False


class _Roots:
    """The roots of the run, inspected before the first attempt and after each one."""

    def __init__(
        self,
        roots: Roots,
        inspect: Callable[..., Pick],
        opened: Callable[[str], Store],
        wait_s: float,
    ) -> None:
        self.url = roots.first
        self.words = roots.words
        self._mandatory = roots.mandatory
        self._inspect = inspect
        self._opened = opened
        self._wait_s = wait_s
        self._used = False

    def inspect(self) -> _Seen:
        """The newest usable step, without waiting for a storage that does not answer."""
        try:
            # No process saves between two attempts, so an unfinished save is not in progress.
            found = self._inspect(allow_fresh=True, **({"grace_s": 0.0} if self._used else {}))
        except (StorageError, UsageError) as error:
            return _Seen(error.exit_code, error.message)
        step = found.chosen.number if found.chosen else None
        if found.exit_code == EXIT_FRESH and self._used:
            return _Seen(_NO_ANSWER, f"{self.url} existed, but no longer exists")
        return _Seen(found.exit_code, found.message, step, bool(found.passed_over or found.chosen))

    def await_answer(self, signals: Signals, tell: Callable[[str], None]) -> _Seen:
        """The same, waiting for the storage to answer up to the limit."""
        until_s = time.monotonic() + self._wait_s
        pause_s = _FIRST_WAIT_S
        while (seen := self.inspect()).code == _NO_ANSWER and signals.asked is None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            if pause_s == _FIRST_WAIT_S:
                tell(f"waiting for {self.url}, at most {self._wait_s:.0f} s:  {seen.message}")
            signals.pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        return seen

    def use(self, seen: _Seen) -> None:
        """Write the sentinels, or record the usable step, before an attempt starts."""
        self._used = True
        with ExitStack() as stack:
            stores = [stack.enter_context(self._opened(url)) for url in self._mandatory]
            begin_run(stores, seen.step)


def keep_running(
    command: Sequence[str],
    root: str | Sequence[str],
    *,
    optional_roots: Collection[str] = (),
    max_restarts: int = 3,
    backoff_s: float = 10.0,
    no_restart: Collection[int] = (),
    logs: Sequence[str] = (),
    create: bool = False,
    wait_s: float = WAIT_S,
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
    `optional_roots` may be absent, as for `pick`. The pause before a restart starts at
    `backoff_s` and doubles without progress, up to 5 minutes. `no_restart` are exit codes
    to stop at in addition to `NO_RESTART`. `logs` are files that the command writes to:
    what each attempt adds to them is classified. A failure that a restart cannot remove
    ends the run, and so does a failure of the job that occurs twice in a row without
    progress. With `create`, a missing root is created. `wait_s` bounds the wait for a
    storage that does not answer, before the first attempt and after a failed one.
    `on_attempt` gets each attempt when it has ended, `tell` the messages between them.
    `stdout` is the descriptor for the command's output, by default the one of this process.
    The command finds the number of its restarts in `CKPTCTL_RESTART_COUNT`. `policy` and
    `requirements` are those of `pick`; each field of the three options objects is also a
    keyword.

    The exit code is the command's when it is done, was asked to stop, or must not be
    restarted; 10 if the root does not exist; 11 if no step is usable; 75 if the storage did
    not answer in time, or the steps of the run are gone; 93 when the budget is spent. If
    `pick` reports the root as a wrong path, the command runs anyway, with a warning. Must
    be called in the main thread. Raises `UsageError` if the command cannot be started,
    `StorageError` if the sentinel cannot be written.
    """
    if not command:
        raise UsageError("the command is missing", next_command="ckptctl run --root ROOT -- CMD")
    if max_restarts < 0 or not backoff_s >= 0 or not wait_s >= 0:
        raise UsageError("--max-restarts, --backoff and --wait-storage must be 0 or more")
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
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
    supervisor = _Supervisor(
        _Job(tuple(command), tuple(logs), stdout),
        _Roots(roots, inspect, opened, wait_s),
        _Budget(max_restarts, backoff_s, frozenset({*NO_RESTART, *no_restart})),
        tell,
    )
    return supervisor.run(on_attempt, create=create)


class _Job(NamedTuple):
    """The command, the logs that it writes to, and the descriptor for its output."""

    command: tuple[str, ...]
    logs: tuple[str, ...]
    stdout: int | None


class _Budget:
    """The restarts without progress that are left, and the exit codes that allow none."""

    def __init__(self, max_restarts: int, backoff_s: float, never: Collection[int]) -> None:
        self.never = never
        self.left = max_restarts
        self._max = max_restarts
        self._backoff_s = backoff_s

    def refill(self) -> None:
        """Allow all restarts again, after progress."""
        self.left = self._max

    def spend(self) -> str:
        """Use one restart; what is left, as text."""
        self.left -= 1
        return f"{self.left} of {self._max} restarts left without a newer step"

    @property
    def pause_s(self) -> float:
        """The pause before a restart, doubled for each restart without progress before it."""
        doublings = max(0, min(self._max - self.left - 1, 20))
        return min(LONGEST_PAUSE_S, self._backoff_s * 2.0**doublings)


class _Ended(NamedTuple):
    """What follows an attempt, why, and the exit code if no further attempt is started."""

    decision: Decision
    reason: str
    exit_code: int


class _Supervisor:
    """Runs the attempts of one job, one after the other."""

    def __init__(
        self, job: _Job, roots: _Roots, budget: _Budget, tell: Callable[[str], None]
    ) -> None:
        self._job = job
        self._roots = roots
        self._budget = budget
        self._tell = tell
        self._signals = Signals()
        self._logs = Logs(job.logs)
        self._attempts: list[Attempt] = []
        self._warnings: list[str] = []
        self._best: int | None = None
        self._watchers: tuple[Watcher, ...] = ()
        self._marker = f"{secrets.token_hex(16)}@{roots.url}"
        # `run` may itself run in a restarted job.
        count = os.environ.get(RESTART_COUNT, "")
        self._earlier = int(count) if count.isdecimal() else 0

    def run(self, on_attempt: Callable[[Attempt], None], *, create: bool) -> Supervised:
        """Inspect the roots, then run attempts until one decides that none follows."""
        with self._signals.listening():
            not_started = self._prepare(create=create)
            if not_started is not None:
                return not_started
            ended = _Ended(Decision.RESTART, "", 0)
            while ended.decision is Decision.RESTART:
                if self._attempts:
                    self._signals.pause(self._budget.pause_s)
                    if self._signals.asked is not None:
                        reason = "a signal asked for it"
                        ended = _Ended(Decision.RESTART, reason, 128 + self._signals.asked)
                        break
                ended = self._run_attempt()
                on_attempt(self._attempts[-1])
        return self._summary(ended)

    def _prepare(self, *, create: bool) -> Supervised | None:
        """Inspect the roots before the first attempt; the result if none is started."""
        seen = self._roots.await_answer(self._signals, self._tell)
        self._best = seen.step
        if seen.code == _WRONG_PATH:
            self._warnings.append(
                f"{seen.message}; the job runs, but its progress cannot be measured"
            )
            self._tell(f"warning: {self._warnings[0]}")
        elif self._signals.asked is not None:
            return self._not_started(128 + self._signals.asked, "a signal asked to end", None)
        elif seen.code == EXIT_FRESH and not create:
            next_command = f"ckptctl pick {self._roots.words} --allow-fresh --create"
            return self._not_started(seen.code, seen.message, next_command)
        elif seen.code not in (0, EXIT_FRESH):
            next_command = f"ckptctl scan {self._roots.words}"
            return self._not_started(seen.code, seen.message, next_command)
        else:
            self._roots.use(seen)
        return None

    def _run_attempt(self) -> _Ended:
        """Run one attempt to its end, inspect the roots, and decide what follows."""
        began_s = time.monotonic()
        started_at = time_now()
        self._logs.begin()
        count = str(self._earlier + len(self._attempts))
        variables = {RESTART_COUNT: count, MARKER: self._marker}
        for watcher in self._watchers:
            variables |= watcher.prepare(len(self._attempts) + 1)
        code, hang = self._signals.run(self._job.command, self._job.stdout, variables, self._poll)
        for watcher in self._watchers:
            watcher.finish()
        if hang is not None:
            self._tell(f"ended the job: {hang.message}")
        asked = self._signals.asked is not None and hang is None
        may_restart = bool(hang) or (code != 0 and not asked and code not in self._budget.never)
        # Only a restart needs the answer, so wait for it only then.
        seen = (
            self._roots.await_answer(self._signals, self._tell)
            if may_restart
            else self._roots.inspect()
        )
        progress = seen.step is not None and (self._best is None or seen.step > self._best)
        if progress:
            self._roots.use(seen)
            self._budget.refill()
        cause = self._logs.cause(code) if code and self._job.logs else None
        # A job that was ended for a hang can end with any code, 0 too.
        ended = self._decide(
            128 + SIGTERM if hang else code, seen, cause, asked=asked, progress=progress
        )
        if ended.decision is Decision.RESTART:
            ended = ended._replace(reason=self._budget.spend())
        if progress:
            self._best = seen.step
        self._attempts.append(
            Attempt(
                number=len(self._attempts) + 1,
                started_at=started_at,
                seconds=time.monotonic() - began_s,
                exit_code=code,
                step=seen.step,
                inspected=seen.code not in _NOT_INSPECTED,
                progress=progress,
                left=self._budget.left,
                decision=ended.decision,
                reason=ended.reason,
                cause="hang" if hang else cause.failure if cause else None,
                section=hang.section if hang else None,
                ranks=hang.ranks if hang else (),
                nodes=hang.nodes if hang else cause.nodes if cause else (),
            )
        )
        return ended

    def _poll(self, running: Running) -> Hang | None:
        now_s = time.monotonic()
        return next(filter(None, (each.poll(running, now_s) for each in self._watchers)), None)

    def _decide(
        self,
        code: int,
        seen: _Seen,
        cause: Classification | None,
        *,
        asked: bool,
        progress: bool,
    ) -> _Ended:
        if code == 0:
            return _Ended(Decision.DONE, "the command succeeded", code)
        if asked:
            return _Ended(Decision.STOPPED, "a signal asked for it", code)
        if code in self._budget.never:
            reason = f"exit code {code}: a restart would fail in the same way"
            return _Ended(Decision.NEVER, reason, code)
        if seen.code in _NOT_INSPECTED:
            return _Ended(Decision.NEVER, seen.message, seen.code)
        answered = seen.code != _WRONG_PATH
        if answered and self._best is not None and not seen.holds_steps:
            reason = f"step {self._best} was usable, but the root no longer contains a step"
            return _Ended(Decision.NEVER, reason, _NO_ANSWER)
        if seen.code == EXIT_NONE_USABLE:
            return _Ended(Decision.NEVER, f"no step is usable: {seen.message}", EXIT_NONE_USABLE)
        if self._budget.left == 0:
            reason = "no restart is left, and no newer step was saved"
            return _Ended(Decision.GIVEN_UP, reason, _GIVEN_UP)
        last = None if progress or not self._attempts else self._attempts[-1].cause
        if cause is not None and _happens_again(cause, last):
            return _Ended(Decision.NEVER, f"{cause.failure}: {cause.message}", code)
        return _Ended(Decision.RESTART, "", code)

    def _not_started(self, code: int, why: str, next_command: str | None) -> Supervised:
        message = f"not started: {why}"
        return Supervised(self._job.command, self._roots.url, (), (), message, code, next_command)

    def _summary(self, ended: _Ended) -> Supervised:
        last = self._attempts[-1]
        next_command: str | None = None
        if ended.decision in (Decision.GIVEN_UP, Decision.NEVER):
            next_command = f"ckptctl scan {self._roots.words}"
            of_storage = (EXIT_NONE_USABLE, *_NOT_INSPECTED)
            if last.cause is not None and ended.exit_code not in of_storage:
                words = ["ckptctl", "classify", *self._job.logs]
                next_command = shlex.join([*words, "--exit-code", str(last.exit_code)])
        word = {
            Decision.DONE: "done",
            Decision.STOPPED: "stopped",
            Decision.RESTART: "stopped before a restart",
            Decision.NEVER: "not restarted",
            Decision.GIVEN_UP: "given up",
        }[ended.decision]
        n = len(self._attempts)
        return Supervised(
            self._job.command,
            self._roots.url,
            tuple(self._attempts),
            tuple(self._warnings),
            f"{word} after {n} attempt{'' if n == 1 else 's'}: {ended.reason}",
            ended.exit_code,
            next_command,
        )


def _happens_again(cause: Classification, last: str | None) -> bool:
    """Whether a restart would fail in the same way; `last` is the previous failure."""
    return cause.restart is Restart.NO or (cause.restart is Restart.ONCE and cause.failure == last)
