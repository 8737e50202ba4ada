"""Sizes, times and names as people read them."""

import pytest

from ckptctl.cli.rendering import cell_width
from ckptctl.formatting import age, counted, duration, exact_size, listed, safe, size, utc


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (102_400, "100 KiB"),
        (1_023_999, "1.0 MiB"),
        (1_288_490_188, "1.2 GiB"),
        (5 * 1024**6, "5120 PiB"),
    ],
)
def test_a_size_has_three_digits_and_a_unit(n_bytes, shown):
    assert size(n_bytes) == shown


def test_a_large_size_is_readable_and_exact():
    assert exact_size(1_288_490_188) == "1.2 GiB (1,288,490,188 bytes)"
    assert exact_size(1) == "1 byte"


def test_a_storage_without_times_gives_no_age():
    assert age(None, 100.0) == "-"
    assert age(40.0, 100.0) == "60 s"


def test_times_are_in_utc():
    assert utc(1_800_000_000) == "2027-01-15 08:00:00 UTC"


def test_one_thing_is_not_several():
    assert counted(1, "step") == "1 step"
    assert counted(1200, "step") == "1,200 steps"


def test_words_are_listed_as_one_says_them():
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"], "or") == "a, b or c"


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x1b[31mred", "\\x1b[2J\\x1b[31mred"),
        ("line\nnext: rm -rf /", "line\\nnext: rm -rf /"),
        ("gnp.\u202etxt", "gnp.\\u202etxt"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u2028b", "a\\u2028b"),
        ("undecodable \udcff", "undecodable \\udcff"),
    ],
)
def test_what_a_terminal_would_obey_is_spelled_out(hostile, shown):
    assert safe(hostile) == shown


def test_names_in_any_script_stay_as_they_are():
    assert safe("модель/層.0.weight ✓") == "модель/層.0.weight ✓"


def test_wide_letters_take_two_cells_and_accents_none():
    assert cell_width("層.0") == 4
    assert cell_width("e\u0301") == 1


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
