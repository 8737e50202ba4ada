"""How often, and how long apart, is a storage asked again?

The one place that tries again: clients below are set to a single try, so that
bounds do not multiply. Which failures may heal is said by who knows the
storage, by raising `Transient`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from ckptctl.errors import StorageUnavailable
from ckptctl.storage.watchdog import busy

T = TypeVar("T")

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0


class Transient(StorageUnavailable):
    """A try that failed in a way that another may not; the message names the failure only."""


def retried(once: Callable[[], T], *, what: str, retries: int) -> T:
    """What `once` returns, asked again after each `Transient`, `retries` times at most.

    Pauses double from `FIRST_PAUSE_S` to `LONGEST_PAUSE_S`, each shortened by up to
    half at random: ranks that were turned away together must not come back together.

    Raises `StorageUnavailable` when the last try failed too; it says how often and
    how long the storage was asked.
    """
    began = time.monotonic()
    for n_before in range(retries + 1):
        try:
            with busy(what):
                return once()
        except Transient as exc:
            failure = exc
        if n_before < retries:
            longest = min(FIRST_PAUSE_S * 2**n_before, LONGEST_PAUSE_S)
            time.sleep(longest * (1 + os.urandom(1)[0] / 255) / 2)
    tries = "1 try" if retries == 0 else f"{retries + 1} tries"
    raise StorageUnavailable(
        f"{what}: no answer after {tries} in {time.monotonic() - began:.0f} s ({failure.message})"
    ) from failure
