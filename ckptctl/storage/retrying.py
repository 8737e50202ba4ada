"""Retry requests after failures that may pass.

Only this module retries: clients make a single attempt, so that limits do not multiply.
Clients report a failure that may pass as `Transient`, and a request that was rejected
because of its rate as `Throttled`.
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
"""How many times longer the pauses are after a throttled request."""

SAVE_RETRY_S = 120.0
"""How long the requests of a save are retried. Object stores restart gateways, move
partitions and throttle for about a minute; a run that ends then loses more than that."""


class Transient(StorageUnavailable):
    """A request failed in a way that a retry may not; the message names only the failure."""


class Throttled(Transient):
    """The storage asked for a lower rate of requests (503 SlowDown, 429)."""


@dataclass(frozen=True, slots=True)
class Retries:
    """A failed request is retried `count` times, and then until `for_s` seconds have passed."""

    count: int = 4
    for_s: float = 0.0


def retried(once: Callable[[], T], *, what: str, retries: Retries) -> T:
    """The result of `once`, which is called again after each `Transient` within `retries`.

    Pauses double from `FIRST_PAUSE_S` to `LONGEST_PAUSE_S`, `THROTTLED` times as long after
    a `Throttled`. Each is shortened by a random share of up to a half, so that ranks that
    were throttled together do not retry together.

    Raises `StorageUnavailable` with the number of attempts and the elapsed seconds when the
    last attempt failed.
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
