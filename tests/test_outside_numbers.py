"""Digits from outside become bounded numbers, or none."""

from __future__ import annotations

import math

import pytest

from ckptctl.outside_numbers import MOST, clamped, finite, moment, moment_of, whole, whole_of

DIGITS = ["9" * 19, "9" * 26, "9" * 400, "9" * 5_000, "9" * 1_000_000]
NO_NUMBERS = ["", " ", "-", "1e3", "0x10", "²", "1.5", "nan", "a"]


@pytest.mark.parametrize("text", [*DIGITS, *NO_NUMBERS, "-1"])
def test_what_is_out_of_bounds_or_no_number_is_none(text):
    assert whole(text) is None


def test_a_number_within_its_bounds_is_read():
    assert (whole("0017"), whole(b"42"), whole(str(MOST))) == (17, 42, MOST)
    assert (whole("12", 11), whole("-3", least=-5), whole(None)) == (None, -3, None)


def test_a_number_beyond_the_bound_is_the_bound_where_only_its_size_matters():
    assert [clamped(text, 100) for text in ("7", "101", "9" * 9999)] == [7, 100, 100]


def test_only_finite_numbers_are_floats():
    assert [finite(text) for text in ("1.5", "-2e3", " 1 ")] == [1.5, -2000.0, 1.0]
    for text in ("1e999", "-1e999", "nan", "inf", "9" * 500, "0." + "1" * 500, "", None):
        assert finite(text) is None


def test_a_float_without_a_fraction_is_an_integer():
    assert (whole_of(1200.0), whole_of(-3.0)) == (1200, -3)
    for value in (1.5, 1e300, -1e300, math.inf, -math.inf, math.nan):
        assert whole_of(value) is None


def test_a_time_that_no_clock_has_is_none():
    assert moment(1.5e9).isoformat() == "2017-07-14T02:40:00+00:00"
    for seconds in (-1.0, 1e12, 1e300, math.inf, math.nan):
        assert moment(seconds) is None
    assert moment_of(2026, 2, 28, (23, 59, 59), 3600).isoformat() == "2026-02-28T22:59:59+00:00"
    for date in ((2026, 2, 30), (0, 1, 1), (MOST, 1, 1), (2026, 1, MOST), (1, 1, 1)):
        assert moment_of(*date, (0, 0, 0), 86_400) is None
    assert moment_of(2026, 1, 1, (24, 0, 0)) is None
