"""Is a job that has ended to be started again?

Yes, as long as it makes progress: a budget of restarts, which only a newer step that was
looked at and found whole fills again. Never where the exit code or the job's logs say that
the same would happen again, where no step is usable, or where we were told to stop. Why a
job failed is the question of `causes`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ckptctl.errors import StorageError, UsageError
from ckptctl.failures.classes import Restart
from ckptctl.failures.results import Classification
from ckptctl.findings import EXIT_DENIED, EXIT_NONE_USABLE
from ckptctl.formats.own_files import time_now
from ckptctl.judge.picking import pick
from ckptctl.supervise.causes import Logs
from ckptctl.supervise.child import Signals

NO_RESTART = (2, 11, 23, 24, 25, 77, 93, 126, 127)
"""Exit codes after which the same would happen again: ckptctl's own, and the shell's."""

LONGEST_PAUSE_S = 300.0
_GIVEN_UP = 93
_NOT_LOOKED = (StorageError.exit_code, EXIT_DENIED)


class Decision(str, Enum):
    """What became of one life of the job."""

    DONE = "done"
    RESTART = "restart"
    STOPPED = "stopped"
    NEVER = "never-restart"
    GIVEN_UP = "given-up"


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the job: when it began, how long it ran, how it ended, what came of it.

    `step` is the newest usable step after it, None where there is none or nobody could
    look (`looked` is false). `left` is how many restarts without progress the budget holds
    after it. `failure` is the class of failure that its logs tell of, None where there are
    none or they do not say.
    """

    number: int
    started_at: str
    seconds: float
    exit_code: int
    step: int | None
    looked: bool
    progress: bool
    left: int
    decision: Decision
    reason: str
    failure: str | None


@dataclass(frozen=True, slots=True)
class Supervised:
    """How the job ended, after which lives."""

    command: tuple[str, ...]
    root: str
    lives: tuple[Life, ...]
    message: str
    exit_code: int
    next_command: str | None


def keep_running(
    command: Sequence[str],
    root: str,
    *,
    max_restarts: int = 3,
    backoff_s: float = 10.0,
    no_restart: Collection[int] = (),
    logs: Sequence[str] = (),
    on_life: Callable[[Life], None] | None = None,
    stdout: int | None = None,
    pattern: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
) -> Supervised:
    """Run a command, and start it again after a failure while it makes progress.

    `max_restarts` is how many restarts without progress are allowed; a usable step under
    `root` that is newer than any before fills the budget again. The pause before a restart
    begins at `backoff_s` and doubles without progress, up to 5 minutes. `no_restart` are
    exit codes to stop at besides `NO_RESTART`. `logs` are files that the command writes to:
    what each life adds to them is classified, and a failure that a restart does not help, or
    one of the job that comes twice in a row without progress, is not tried again. `on_life` is
    told of each life when it has ended. `stdout` is where the command's output goes, ours by
    default.

    The exit code is the command's when it is done, was told to stop, or must not be
    started again; 11 where no step is usable; 93 when the budget is spent. Must be called
    in the main thread. Raises `UsageError` where the command cannot be started.
    """
    if not command:
        raise UsageError("no command is given", next_command="ckptctl run --root ROOT -- CMD")
    if max_restarts < 0 or not backoff_s >= 0:
        raise UsageError("--max-restarts and --backoff must be 0 or more")

    def newest() -> tuple[int | None, int]:
        """The newest usable step, and `pick`'s exit code."""
        try:
            found = pick(
                root,
                pattern=pattern,
                storage_options=storage_options,
                endpoint_url=endpoint_url,
                timeout_s=timeout_s,
            )
        except StorageError as error:
            return None, error.exit_code
        return (found.chosen.number if found.chosen else None), found.exit_code

    lives: list[Life] = []
    signals = Signals()
    never = {*NO_RESTART, *no_restart}
    best, _ = newest()
    left = max_restarts
    written = Logs(logs)
    with signals.listening():
        while not lives or lives[-1].decision is Decision.RESTART:
            if lives:
                signals.pause(_pause(backoff_s, max_restarts - left))
                if signals.asked is not None:
                    break
            began_s = time.monotonic()
            started_at = time_now()
            written.begin()
            code = signals.run(command, stdout)
            step, picked = newest()
            progress = step is not None and (best is None or step > best)
            best = step if progress else best
            left = max_restarts if progress else left
            cause = written.cause(code) if code and logs else None
            decision, reason = _decide(code, picked, left, never, told=signals.asked is not None)
            last = None if progress or not lives else lives[-1].failure
            if decision is Decision.RESTART and cause and _in_vain(cause, last):
                decision, reason = Decision.NEVER, f"{cause.failure}: {cause.message}"
            left -= decision is Decision.RESTART
            lives.append(
                Life(
                    number=len(lives) + 1,
                    started_at=started_at,
                    seconds=time.monotonic() - began_s,
                    exit_code=code,
                    step=step,
                    looked=picked not in _NOT_LOOKED,
                    progress=progress,
                    left=left,
                    decision=decision,
                    reason=reason,
                    failure=cause.failure if cause else None,
                )
            )
            if on_life is not None:
                on_life(lives[-1])
    told = 0 if signals.asked is None else 128 + signals.asked
    return _ended(command, root, logs, tuple(lives), told)


def _decide(
    code: int, picked: int, left: int, never: Collection[int], *, told: bool
) -> tuple[Decision, str]:
    if code == 0:
        return Decision.DONE, "it ended by itself"
    if told:
        return Decision.STOPPED, "a signal asked for it"
    if code in never:
        return Decision.NEVER, f"after exit code {code} the same would happen again"
    if picked == 11:
        return Decision.NEVER, "steps exist, and none is usable"
    if left == 0:
        return Decision.GIVEN_UP, "no restart is left, and no newer step came"
    return Decision.RESTART, f"{left} restart{'' if left == 1 else 's'} left without a newer step"


def _in_vain(cause: Classification, last: str | None) -> bool:
    """Whether a start after this failure meets it again; `last` is that of the life before."""
    return cause.restart is Restart.NO or (cause.restart is Restart.ONCE and cause.failure == last)


def _ended(
    command: Sequence[str], root: str, logs: Sequence[str], lives: tuple[Life, ...], told: int
) -> Supervised:
    last = lives[-1]
    code = last.exit_code
    next_command: str | None = None
    times = f"{len(lives)} {'life' if len(lives) == 1 else 'lives'}"
    if last.decision is Decision.GIVEN_UP:
        code = _GIVEN_UP
    elif last.decision is Decision.NEVER and last.reason.startswith("steps exist"):
        code = 11
    elif last.decision is Decision.RESTART:
        code = told  # told to stop while it waited for the restart
    if last.decision in (Decision.GIVEN_UP, Decision.NEVER):
        next_command = f"ckptctl scan {shlex.quote(root)}"
        if last.failure is not None and code != EXIT_NONE_USABLE:
            words = ["ckptctl", "classify", *logs, "--exit-code", str(last.exit_code)]
            next_command = shlex.join(words)
    word = {
        Decision.DONE: "done",
        Decision.STOPPED: "stopped",
        Decision.RESTART: "stopped before a restart",
        Decision.NEVER: "not restarted",
        Decision.GIVEN_UP: "given up",
    }[last.decision]
    reason = "a signal asked for it" if last.decision is Decision.RESTART else last.reason
    message = f"{word} after {times}: {reason}"
    return Supervised(tuple(command), root, lives, message, code, next_command)


def _pause(backoff_s: float, n_without: int) -> float:
    """The pause before a restart: doubled for each one before it that brought nothing."""
    return min(LONGEST_PAUSE_S, backoff_s * 2.0 ** max(0, min(n_without - 1, 20)))
