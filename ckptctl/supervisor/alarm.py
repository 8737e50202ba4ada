"""Raise an alarm where an attempt saves no newer usable step for several save intervals.

A thread lists the root: one that does not answer must not delay the supervisor, and saves nothing
either. A step is inspected only where its number is newer than any before. How often the job
saves is learned from the steps that appear meanwhile, also where they are removed again: the
files of a root that was copied are seconds apart, whatever the job needs between two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from ckptctl.errors import CkptctlError
from ckptctl.formats.frameworks.layouts import compile_pattern
from ckptctl.selection.overdue import overdue, pauses_s, save_interval_s, written_s
from ckptctl.selection.roots import list_all
from ckptctl.selection.watching import Watched, overdue_event
from ckptctl.storage.opening import open_store
from ckptctl.storage.waiting import leave_unwatched, start_daemon
from ckptctl.supervisor.child import Hang, JobLog, Running, Watcher
from ckptctl.supervisor.options import RunOptions
from ckptctl.supervisor.policy import RootState
from ckptctl.unexpected import guarded

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
        """The steps by number, and when each of the newest was written last."""
        with open_store(self._url, self._options.storage) as store:
            listing, trees = list_all(store, compile_pattern(self._options.requirements.pattern))
            written = written_s(store, listing, trees)
        return {step.number: written.get(step.number) for step in listing.steps}
