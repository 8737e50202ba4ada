"""The time of `loss` grows with the log, and no faster; a reader that is too slow stops."""

from __future__ import annotations

import pytest
from hostile_inputs import LOGS
from pattern_growth import MOST_GROWTH, TIMES_LONGER, growth, seconds

from ckptctl.logs.fields import parse_clock, parse_number, parse_step
from ckptctl.logs.log_lines import BYTES_PER_S, Deadline
from ckptctl.logs.reading import LogReader

N_BYTES = 10_000
"""The longest record that one of the logs repeats has 8,038 bytes."""
SHORT_S = 0.02
WITH_ROWS = [name for name in LOGS if " " in name and not name.startswith(("one line", "lines"))]


def read(data: bytes) -> object:
    reader = LogReader("train.log")
    return [*reader.feed(data), *reader.end()]


@pytest.mark.parametrize("name", [name for name in WITH_ROWS if "and" not in name])
def test_a_hostile_log_takes_linear_time(name):
    made = {n: LOGS[name](n) for n in (N_BYTES, TIMES_LONGER * N_BYTES)}
    short, long = made
    if seconds(lambda _: read(made[long]), "", 1) > SHORT_S:
        assert growth(lambda text: read(made[int(text)]), str(short), str(long)) < MOST_GROWTH


def test_after_the_deadline_no_line_is_read_and_the_damage_states_it():
    lines = b"".join(b"step %d loss 2.5\n" % n for n in range(1000))
    reader = LogReader("train.log", deadline=Deadline(limit_s=-1.0))
    rows = [*reader.feed(lines), *reader.end()]
    assert len(rows) < 100
    assert "reading stopped at line" in reader.log.damage
    whole = LogReader("train.log", deadline=Deadline())
    assert len([*whole.feed(lines), *whole.end()]) == 1000
    assert whole.log.damage is None


@pytest.mark.parametrize("row", [b"%d,2.%03d\n", b"step %d loss 2.%03d\n"])
def test_the_shortest_rows_of_a_long_log_take_a_part_of_the_time_for_their_bytes(row):
    lines = b"step,loss\n" + b"".join(row % (n, n % 1000) for n in range(20_000))
    assert seconds(lambda _: read(lines), "", 1) < len(lines) / BYTES_PER_S / 2


HOSTILE = (
    *("9" * n for n in (26, 5_000, 400_000)),
    *("1e999", "-1e999", "0e" + "9" * 5_000, "1e-" + "9" * 5_000, "9" * 300_000 + "x", "²"),
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_number_out_of_bounds_is_no_step_and_no_error(text):
    assert parse_step(text) in (None, 0)
    parse_number(text)
    parse_clock(text)


def test_a_number_is_read_as_printed():
    assert [parse_step(text) for text in ("1,200", "0012", "1200.0", "7/9")] == [1200, 12, 1200, 7]
    assert parse_number("1.2K").value == 1200
    assert parse_number("1e999").value == float("inf")
    assert parse_number("-1e999").value == float("-inf")
