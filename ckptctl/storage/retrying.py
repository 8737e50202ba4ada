"""Repeat requests that failed in a way that may pass.

The one place that retries: clients are set to a single try, so that bounds do
not multiply. A client reports a failure that may pass as `Transient`, and a
request that the storage turned away because of its rate as `Throttled`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptctl.errors import StorageUnavailable
from ckptctl.storage.watchdog import busy

T = TypeVar("T")

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0
THROTTLED = 4
"""Pauses after a throttled request are so many times as long: the rate itself is the fault."""

SAVE_RETRY_S = 120.0
"""How long the requests of a save are repeated. Object stores restart gateways, move
partitions and throttle for a minute or so; a run that ends there loses more than that."""


class Transient(StorageUnavailable):
    """A try that failed in a way that another may not; the message names the failure only."""


class Throttled(Transient):
    """The storage asked for a lower rate of requests (503 SlowDown, 429)."""


@dataclass(frozen=True, slots=True)
class Retries:
    """A failed request is repeated `count` times, and then until `for_s` seconds have passed."""

    count: int = 4
    for_s: float = 0.0


def retried(once: Callable[[], T], *, what: str, retries: Retries) -> T:
    """What `once` returns, called again after each `Transient` as far as `retries` allows.

    Pauses double from `FIRST_PAUSE_S` to `LONGEST_PAUSE_S`, `THROTTLED` times as long
    after a `Throttled`, each shortened by up to half at random: ranks that were turned
    away together must not come back together.

    Raises `StorageUnavailable` when the last try failed too, with the number of tries
    and the seconds that they took.
    """
    began = time.monotonic()
    n_tries = 0
    while True:
        try:
            with busy(what):
                return once()
        except Transient as exc:
            failure = exc
        n_tries += 1
        if n_tries > retries.count and time.monotonic() - began >= retries.for_s:
            break
        longest = min(FIRST_PAUSE_S * 2 ** min(n_tries - 1, 30), LONGEST_PAUSE_S)
        if isinstance(failure, Throttled):
            longest *= THROTTLED
        time.sleep(longest * (1 + os.urandom(1)[0] / 255) / 2)
    tries = "1 try" if n_tries == 1 else f"{n_tries} tries"
    raise StorageUnavailable(
        f"{what}: no answer after {tries} in {time.monotonic() - began:.0f} s ({failure.message})"
    ) from failure
