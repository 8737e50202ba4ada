"""Start a job again after a failure, as long as it makes progress.

The budget of restarts is refilled only by a newer step that was inspected and is usable.
A job is not started where its exit code or its logs say that the same would happen again,
where no step is usable, where the steps of the run are gone, where the storage does not
answer within a bound, and after a signal that asks to end. `causes` classifies failures.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.errors import StorageError, UsageError
from ckptctl.failures.classes import Restart
from ckptctl.failures.results import Classification
from ckptctl.findings import EXIT_DENIED, EXIT_FRESH, EXIT_NONE_USABLE
from ckptctl.formats.frameworks.layouts import compile_pattern
from ckptctl.formats.own.files import time_now
from ckptctl.inspection.marks_file import check_marks_file
from ckptctl.model import ExitCode, NonNegative, Positive, Time
from ckptctl.options import PickKeywords, PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.selection.history import begin_run
from ckptctl.selection.picking import pick
from ckptctl.selection.results import Pick
from ckptctl.selection.tiers import Roots, roots_in
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.causes import Logs
from ckptctl.supervisor.child import Signals

if TYPE_CHECKING:
    from typing_extensions import Unpack


RESTART_COUNT = "CKPTCTL_RESTART_COUNT"
"""The variable by which a job learns how often it was started again."""

NO_RESTART = (2, 11, 23, 24, 25, 77, 93, 126, 127)
"""Exit codes after which the same would happen again: ckptctl's own, and the shell's."""

LONGEST_PAUSE_S = 300.0
WAIT_S = 900.0
"""How long a storage that does not answer is waited for: longer than `pick`'s grace."""

_GRACE_S = 600.0
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_GIVEN_UP = 93
_WRONG_PATH = UsageError.exit_code
_NO_ANSWER = StorageError.exit_code
_NOT_LOOKED = (_NO_ANSWER, EXIT_DENIED)


class Decision(str, Enum):
    """What became of one life of the job."""

    DONE = "done"
    RESTART = "restart"
    STOPPED = "stopped"
    NEVER = "never-restart"
    GIVEN_UP = "given-up"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One life of the job: when it began, how long it ran, how it ended, what came of it."""

    number: Positive
    """Counted from 1."""
    started_at: Time
    """When it was started."""
    seconds: NonNegative
    """How long it ran."""
    exit_code: int
    """The exit code of the job; 128 + N for signal N."""
    step: int | None
    """The newest usable step after it."""
    looked: bool
    """The root could be inspected after it."""
    progress: bool
    """That step is newer than any before."""
    left: int
    """Restarts without progress that are left."""
    decision: Decision
    """What the supervisor did next."""
    reason: str
    """Why, in one line."""
    failure: str | None
    """The class of failure in its logs."""


@dataclass(frozen=True, slots=True)
class Supervised:
    """How the job ended, after which lives; without any where it was not started."""

    command: tuple[str, ...]
    """The command of the job."""
    root: str
    """The root where progress was measured."""
    lives: tuple[Attempt, ...]
    """Every attempt of the job, in order; none where it was not started."""
    warnings: tuple[str, ...]
    """What prevents the progress of the job from being measured."""
    message: str
    """How it ended, in one line."""
    exit_code: ExitCode
    """The exit code of the command."""
    next_command: str | None
    """The command to run next; null where there is nothing to do."""


class _Seen(NamedTuple):
    """What one inspection of the root found: `pick`'s exit code, 2 for a wrong path."""

    code: int
    message: str
    step: int | None = None
    holds_steps: bool = False


class _Root:
    """The roots of the run, as the supervisor sees them between the lives of the job."""

    def __init__(
        self, named: Roots, look: Callable[..., Pick], opened: Callable[[str], Store], wait_s: float
    ) -> None:
        self.url = named.first
        self._mandatory = named.mandatory
        self._look = look
        self._opened = opened
        self._wait_s = wait_s
        self._used = False

    def inspect(self) -> _Seen:
        """What it holds now, without waiting for a storage that does not answer."""
        try:
            # Between two lives nobody saves: what is unfinished then is not running.
            found = self._look(allow_fresh=True, **({"grace_s": 0.0} if self._used else {}))
        except (StorageError, UsageError) as error:
            return _Seen(error.exit_code, error.message)
        step = found.chosen.number if found.chosen else None
        if found.exit_code == EXIT_FRESH and self._used:
            return _Seen(_NO_ANSWER, f"{self.url} was there, and does not exist any more")
        return _Seen(found.exit_code, found.message, step, bool(found.passed_over or found.chosen))

    def await_answer(self, signals: Signals, tell: Callable[[str], None]) -> _Seen:
        """What it holds, once the storage answers or the bound is over."""
        until_s = time.monotonic() + self._wait_s
        pause_s = _FIRST_WAIT_S
        while (seen := self.inspect()).code == _NO_ANSWER and signals.asked is None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            if pause_s == _FIRST_WAIT_S:
                tell(f"waiting for {self.url}, {self._wait_s:.0f} s at most: {seen.message}")
            signals.pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        return seen

    def use(self, seen: _Seen) -> None:
        """Write the sentinels, or record the step that is usable, before a life begins."""
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
    on_life: Callable[[Attempt], None] | None = None,
    tell: Callable[[str], None] = lambda _message: None,
    stdout: int | None = None,
    policy: PickPolicy = PickPolicy(),
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[PickKeywords],
) -> Supervised:
    """Run a command, and start it again after a failure while it makes progress.

    `max_restarts` is how many restarts without progress are allowed; a usable step under
    `root`, or under one of several roots, that is newer than any before fills the budget
    again; `optional_roots` may be absent, as for `pick`. The pause before a restart
    begins at `backoff_s` and doubles without progress, up to 5 minutes. `no_restart` are
    exit codes to stop at besides `NO_RESTART`. `logs` are files that the command writes to:
    what each life adds to them is classified, and a failure that a restart does not help, or
    one of the job that comes twice in a row without progress, is not tried again. With
    `create` a root that does not exist is made. `wait_s` bounds how long a storage that does
    not answer is waited for, before the first life and after a failed one. `on_life` gets
    each life when it has ended, `tell` what happens between them. `stdout` is where the
    command's output goes, ours by default. The command finds in `CKPTCTL_RESTART_COUNT` how
    often it was started again. `policy` and `requirements` are those of `pick`; each field of
    the three options objects is a keyword of this function, too.

    The exit code is the command's when it is done, was told to stop, or must not be
    started again; 10 where the root does not exist; 11 where no step is usable; 75 where
    the storage did not answer in time, or the steps of the run are gone; 93 when the budget
    is spent. Where `pick` calls the root a wrong path, the command runs all the same, with a
    warning. Must be called in the main thread. Raises `UsageError` where the command cannot
    be started, `StorageError` where the sentinel cannot be written.
    """
    if not command:
        raise UsageError("no command is given", next_command="ckptctl run --root ROOT -- CMD")
    if max_restarts < 0 or not backoff_s >= 0 or not wait_s >= 0:
        raise UsageError("--max-restarts, --backoff and --wait-storage must be 0 or more")
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
    # What is wrong with the arguments themselves ends it here, and is no warning.
    compile_pattern(requirements.pattern)
    check_marks_file(requirements.marks)
    opened: Callable[[str], Store] = partial(open_store, storage=storage)
    named = roots_in(root, optional_roots)
    for url in named.urls:
        opened(url).close()
    look = partial(
        pick,
        *named.urls,
        optional_roots=named.optional,
        policy=policy,
        requirements=requirements,
        storage=storage,
    )
    place = _Root(named, look, opened, wait_s)

    lives: list[Attempt] = []
    warnings: list[str] = []
    signals = Signals()
    never = {*NO_RESTART, *no_restart}
    earlier = int(count) if (count := os.environ.get(RESTART_COUNT, "")).isdecimal() else 0
    left = max_restarts
    written = Logs(logs)
    with signals.listening():
        seen = place.await_answer(signals, tell)
        if seen.code == _WRONG_PATH:
            warnings.append(f"{seen.message}; the job runs, and its progress cannot be seen")
            tell(f"warning: {warnings[0]}")
        elif signals.asked is not None:
            return _not_started(command, named.first, 128 + signals.asked, "a signal asked to end")
        elif seen.code == EXIT_FRESH and not create:
            next_command = f"ckptctl pick {named.words} --allow-fresh --create"
            return _not_started(command, named.first, seen.code, seen.message, next_command)
        elif seen.code not in (0, EXIT_FRESH):
            next_command = f"ckptctl scan {named.words}"
            return _not_started(command, named.first, seen.code, seen.message, next_command)
        else:
            place.use(seen)
        best = seen.step
        ended = _Ended(Decision.RESTART, "", 0)
        while ended.decision is Decision.RESTART:
            if lives:
                signals.pause(_pause(backoff_s, max_restarts - left))
                if signals.asked is not None:
                    break
            began_s = time.monotonic()
            started_at = time_now()
            written.begin()
            code = signals.run(command, stdout, {RESTART_COUNT: str(earlier + len(lives))})
            told = signals.asked is not None
            again = code != 0 and not told and code not in never
            seen = place.await_answer(signals, tell) if again else place.inspect()
            progress = seen.step is not None and (best is None or seen.step > best)
            if progress:
                place.use(seen)
                left = max_restarts
            cause = written.cause(code) if code and logs else None
            ended = _decide(code, seen, best, left, never, told=told)
            last = None if progress or not lives else lives[-1].failure
            if ended.decision is Decision.RESTART:
                if cause and _in_vain(cause, last):
                    ended = _Ended(Decision.NEVER, f"{cause.failure}: {cause.message}", code)
                else:
                    left -= 1
                    reason = f"{left} of {max_restarts} restarts left without a newer step"
                    ended = ended._replace(reason=reason)
            best = seen.step if progress else best
            lives.append(
                Attempt(
                    number=len(lives) + 1,
                    started_at=started_at,
                    seconds=time.monotonic() - began_s,
                    exit_code=code,
                    step=seen.step,
                    looked=seen.code not in _NOT_LOOKED,
                    progress=progress,
                    left=left,
                    decision=ended.decision,
                    reason=ended.reason,
                    failure=cause.failure if cause else None,
                )
            )
            if on_life is not None:
                on_life(lives[-1])
    if ended.decision is Decision.RESTART and signals.asked is not None:
        ended = _Ended(Decision.RESTART, "a signal asked for it", 128 + signals.asked)
    return _supervised(command, named, logs, lives, warnings, ended)


class _Ended(NamedTuple):
    """What follows from the end of a life, why, and the exit code where nothing follows."""

    decision: Decision
    reason: str
    exit_code: int


def _decide(
    code: int, seen: _Seen, best: int | None, left: int, never: Collection[int], *, told: bool
) -> _Ended:
    if code == 0:
        return _Ended(Decision.DONE, "it ended by itself", code)
    if told:
        return _Ended(Decision.STOPPED, "a signal asked for it", code)
    if code in never:
        reason = f"after exit code {code} the same would happen again"
        return _Ended(Decision.NEVER, reason, code)
    if seen.code in _NOT_LOOKED:
        return _Ended(Decision.NEVER, seen.message, seen.code)
    answered = seen.code != _WRONG_PATH
    if answered and best is not None and not seen.holds_steps:
        reason = f"step {best} was usable, and the root holds no step any more"
        return _Ended(Decision.NEVER, reason, _NO_ANSWER)
    if seen.code == EXIT_NONE_USABLE:
        return _Ended(Decision.NEVER, f"no step is usable: {seen.message}", EXIT_NONE_USABLE)
    if left == 0:
        reason = "no restart is left, and no newer step came"
        return _Ended(Decision.GIVEN_UP, reason, _GIVEN_UP)
    return _Ended(Decision.RESTART, "", code)


def _in_vain(cause: Classification, last: str | None) -> bool:
    """Whether a start after this failure meets it again; `last` is that of the life before."""
    return cause.restart is Restart.NO or (cause.restart is Restart.ONCE and cause.failure == last)


def _not_started(
    command: Sequence[str], root: str, code: int, why: str, next_command: str | None = None
) -> Supervised:
    return Supervised(tuple(command), root, (), (), f"not started: {why}", code, next_command)


def _supervised(
    command: Sequence[str],
    named: Roots,
    logs: Sequence[str],
    lives: Sequence[Attempt],
    warnings: Sequence[str],
    ended: _Ended,
) -> Supervised:
    last = lives[-1]
    next_command: str | None = None
    if ended.decision in (Decision.GIVEN_UP, Decision.NEVER):
        next_command = f"ckptctl scan {named.words}"
        of_storage = (EXIT_NONE_USABLE, *_NOT_LOOKED)
        if last.failure is not None and ended.exit_code not in of_storage:
            words = ["ckptctl", "classify", *logs, "--exit-code", str(last.exit_code)]
            next_command = shlex.join(words)
    word = {
        Decision.DONE: "done",
        Decision.STOPPED: "stopped",
        Decision.RESTART: "stopped before a restart",
        Decision.NEVER: "not restarted",
        Decision.GIVEN_UP: "given up",
    }[ended.decision]
    times = f"{len(lives)} {'life' if len(lives) == 1 else 'lives'}"
    return Supervised(
        tuple(command),
        named.first,
        tuple(lives),
        tuple(warnings),
        f"{word} after {times}: {ended.reason}",
        ended.exit_code,
        next_command,
    )


def _pause(backoff_s: float, n_without: int) -> float:
    """The pause before a restart: doubled for each one before it that brought nothing."""
    return min(LONGEST_PAUSE_S, backoff_s * 2.0 ** max(0, min(n_without - 1, 20)))
