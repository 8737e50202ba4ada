"""The formulas against numbers that others have published or that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.goodput.estimating import (
    daly_interval,
    effective_share,
)
from ckptctl.goodput.history import poisson_bounds

HOUR = 3600.0


@pytest.mark.parametrize(
    ("save", "mtbf", "daly"),
    [
        (60, 11124, 1115.7),
        (60, 8280, 957.2),
        (30, 86400, 2256.9),
        (120, 86400, 4474.0),
        (300, 86400, 7001.4),
        (120, 6480, 1168.4),
    ],
)
def test_the_best_interval(save, mtbf, daly):
    assert daly_interval(save, mtbf) == pytest.approx(daly, abs=0.06)


def test_saves_slower_than_two_failures_leave_one_a_failure():
    assert daly_interval(200, 100) == 100


def first_order_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """The share of training time in the first-order form in which it is published."""
    lost = save_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s
    return max(0.0, 1 - lost)


@pytest.mark.parametrize(
    ("interval", "mtbf", "exact"), [(1115.716, 11124, 0.87576), (957.196, 8280, 0.85293)]
)
def test_the_effective_share(interval, mtbf, exact):
    assert effective_share(interval, 60, mtbf, 300) == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize(("interval", "share"), [(3600, 0.6764), (300, 0.9307), (1800, 0.8151)])
def test_the_effective_share_of_a_published_job(interval, share):
    # 2,048 nodes, saves that do not block, five minutes to start again.
    mtbf = 24 * HOUR / (2048 * 6.5e-3)
    assert first_order_share(interval, 0, mtbf, 300) == pytest.approx(share, abs=1e-4)
    # To first order, a failure costs half an interval even where several fall into one.
    assert share <= effective_share(interval, 0, mtbf, 300) <= share + 0.05


@pytest.mark.parametrize(
    ("n", "low", "high"),
    [(0, 0, 3.6889), (1, 0.0253, 5.5716), (5, 1.6235, 11.6683), (100, 81.364, 121.627)],
)
def test_the_bounds_of_a_count_are_those_of_the_published_tables(n, low, high):
    assert poisson_bounds(n) == pytest.approx((low, high), abs=1e-3)


TIMES = st.floats(1e-3, 1e7)


@given(TIMES, TIMES, st.floats(0, 1e6), TIMES)
def test_a_share_lies_between_0_and_1_and_is_at_least_that_of_first_order(
    save, mtbf, restart, interval
):
    exact = effective_share(interval, save, mtbf, restart)
    assert 0 <= exact <= 1
    assert exact >= first_order_share(interval, save, mtbf, restart) - 1e-9


@given(st.floats(1, 1e4), st.floats(1e5, 1e7), st.floats(0, 1e4))
def test_no_interval_is_much_better_than_the_best(save, mtbf, restart):
    best = effective_share(daly_interval(save, mtbf), save, mtbf, restart)
    for factor in (0.3, 0.7, 1.5, 3.0):
        other = effective_share(daly_interval(save, mtbf) * factor, save, mtbf, restart)
        assert other <= best * 1.001


def test_what_never_comes_to_an_end_leaves_nothing():
    assert effective_share(1e6, 1, 1, 0) == 0
    assert effective_share(0, 1, 100, 0) == 0
    assert math.isfinite(effective_share(1, 1, 1e-3, 1e6))
