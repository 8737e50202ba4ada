"""Times as people say them."""

import pytest

from ckptctl.goodput.durations import duration


@pytest.mark.parametrize(
    ("seconds", "whole", "exact"),
    [
        (-5, "0 s", "0 s"),
        (0.5, "0 s", "0.5 s"),
        (119, "119 s", "119 s"),
        (120, "2 min", "2 min"),
        (1905, "32 min", "31.8 min"),
        (7200, "2 h", "2 h"),
        (9000, "2 h", "2.5 h"),
        (300_000, "3 days", "3.47 days"),
        (1e9, "11,574 days", "11,574 days"),
    ],
)
def test_a_duration_is_in_one_unit_whole_or_with_the_digits_asked_for(seconds, whole, exact):
    assert duration(seconds) == whole
    assert duration(seconds, digits=3) == exact
