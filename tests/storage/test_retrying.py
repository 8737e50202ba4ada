"""How often a failed request is repeated, and how long the pauses are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptctl.errors import StorageUnavailable
from ckptctl.storage import waiting
from ckptctl.storage.waiting import Retries, Throttled, Transient, retried


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses taken; time passes in them alone."""
    pauses: list[float] = []
    monkeypatch.setattr(waiting.time, "sleep", pauses.append)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: sum(pauses))
    return pauses


def failing(error: Exception) -> Callable[[], None]:
    def once() -> None:
        raise error

    return once


def test_a_count_alone_bounds_the_tries(clock):
    with pytest.raises(StorageUnavailable, match=r"^it: no answer after 3 tries in \d+ s \(503\)$"):
        retried(failing(Transient("503")), what="it", retries=Retries(2))
    assert len(clock) == 2


@pytest.mark.parametrize("error", [Transient("500"), Throttled("503 SlowDown")])
def test_the_requests_of_a_save_are_repeated_for_at_least_two_minutes(clock, error):
    assert waiting.SAVE_RETRY_S >= 120
    with pytest.raises(StorageUnavailable):
        retried(failing(error), what="it", retries=Retries(0, waiting.SAVE_RETRY_S))
    assert sum(clock) >= waiting.SAVE_RETRY_S
    assert sum(clock[:-1]) < waiting.SAVE_RETRY_S


def test_pauses_double_up_to_a_bound_and_are_longer_where_the_rate_is_the_fault(clock):
    for error, factor in ((Transient("500"), 1), (Throttled("503"), waiting.THROTTLED)):
        clock.clear()
        with pytest.raises(StorageUnavailable):
            retried(failing(error), what="it", retries=Retries(9))
        for n, pause in enumerate(clock):
            longest = factor * min(waiting.FIRST_PAUSE_S * 2**n, waiting.LONGEST_PAUSE_S)
            assert longest / 2 <= pause <= longest


def test_what_is_no_passing_failure_is_raised_at_once(clock):
    with pytest.raises(StorageUnavailable, match=r"^refused$"):
        retried(failing(StorageUnavailable("refused")), what="it", retries=Retries(4, 100))
    assert clock == []
