"""What a long-running command reports."""

import io
from itertools import pairwise

import pytest

from ckptctl.cli import output
from ckptctl.cli.output import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def told(clock, *, terminal: bool, until_s: float, every_s: float = 0.05, width: int = 80) -> str:
    stream = io.StringIO()
    bar = Progress(stream.write, terminal=terminal, width=width)
    for turn in range(int(until_s / every_s) + 1):
        clock[0] = 1000.0 + turn * every_s
        bar.update(f"{turn} steps looked at", turn, int(until_s / every_s))
    bar.clear()
    return stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_quick_is_done_without_a_word(clock, terminal):
    assert told(clock, terminal=terminal, until_s=0.9) == ""


def test_a_terminal_gets_one_line_that_is_taken_away_at_the_end(clock):
    shown = told(clock, terminal=True, until_s=5)
    assert "\n" not in shown
    assert "[############............] " in shown
    assert shown.endswith("\r\x1b[K")
    assert all(len(each) < 80 for each in shown.split("\r\x1b[K"))


def test_a_narrow_terminal_gets_one_row(clock):
    shown = told(clock, terminal=True, until_s=5, width=40)
    assert max(len(each) for each in shown.split("\r\x1b[K")) == 39


def test_a_terminal_is_not_flooded(clock):
    assert told(clock, terminal=True, until_s=11, every_s=0.001).count("\r") <= 102


def test_a_log_gets_a_plain_line_every_half_minute(clock):
    lines = told(clock, terminal=False, until_s=100).splitlines()
    assert len(lines) == 3
    assert all("\x1b" not in each and "\r" not in each for each in lines)
    counts = [int(each.split()[0]) for each in lines]
    assert all(later - earlier >= 600 for earlier, later in pairwise(counts))


def test_how_long_it_will_take_is_told_where_the_end_is_known(clock):
    assert ", 50 %, 50 s left" in told(clock, terminal=True, until_s=100)


def test_what_is_left_is_shown_however_long_the_message_is(clock):
    stream = io.StringIO()
    bar = Progress(stream.write, terminal=True, width=80)
    clock[0] += 50
    bar.update("compared with the checksums of the records", 5 << 40, 10 << 40, unit="B")
    assert stream.getvalue().endswith(", 50 %, 50 s left")
    assert len(stream.getvalue().split("\x1b[K")[1]) == 79
