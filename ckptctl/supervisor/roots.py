"""Inspect the roots of a run before its first attempt and after each one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ckptctl.errors import StorageError, UsageError
from ckptctl.selection.history import begin_run, check_sentinel
from ckptctl.selection.picking import pick
from ckptctl.selection.results import Pick
from ckptctl.selection.targets import Roots
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.child import Signals
from ckptctl.supervisor.options import RunOptions
from ckptctl.supervisor.policy import NO_ANSWER, RootState

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class WatchedRoots:
    """The roots of the run, inspected before the first attempt and after each one."""

    def __init__(self, roots: Roots, options: RunOptions) -> None:
        self.url = roots.first
        self.words = roots.words
        self._roots = roots
        self._options = options
        self._used = False

    def _pick(self, **keywords: Any) -> Pick:
        options = self._options
        return pick(
            *self._roots.urls,
            optional_roots=self._roots.optional,
            policy=options.policy,
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
            if self._used and not holds_steps:
                self._check_mounted()
        except (StorageError, UsageError) as error:
            return RootState(error.exit_code, error.message)
        step = found.chosen.number if found.chosen else None
        return RootState(found.exit_code, found.message, step, holds_steps, found.next_command)

    def _check_mounted(self) -> None:
        """Raise `StorageUnavailable` where a root has lost its sentinel: it is not mounted."""
        for url in self._roots.mandatory:
            with open_store(url, self._options.storage) as store:
                check_sentinel(store)

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
