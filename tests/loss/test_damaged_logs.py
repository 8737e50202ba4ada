"""A log that is damaged in the middle is checked by the rows that can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import validated
from made_logs import VERSION_EVENT, scalar_event
from made_losses import loss_at
from next_commands import run_and_follow as run_ckptctl

from ckptctl.logs.reading import read_logs

SAVED = 60


def events(path: Path, first: int, last: int, *, damaged_at: float | None = None) -> Path:
    """An event file of the losses from one step to another; a byte of it may be flipped."""
    data = bytearray(VERSION_EVENT)
    for step in range(first, last + 1):
        data += scalar_event(step, {"loss": loss_at(step), "lr": 1e-3}, at=1.7e9 + first + step)
    if damaged_at is not None:
        data[int(len(data) * damaged_at)] ^= 0xFF
    path.write_bytes(data)
    return path


def judged(*args: object) -> tuple[int, str, list[str]]:
    done = run_ckptctl("loss", *args, "--json")
    found = validated(done.stdout)
    return done.returncode, found["verdict"], sorted(one["code"] for one in found["findings"])


@pytest.fixture
def before(tmp_path) -> Path:
    return tmp_path / "events.out.tfevents.1.host.1.0"


@pytest.fixture
def after(tmp_path) -> Path:
    return tmp_path / "events.out.tfevents.2.host.2.0"


def test_two_whole_logs_show_a_resume_that_is_right(before, after):
    events(before, 1, 100)
    events(after, SAVED + 1, 120)
    assert judged(before, after) == (0, "continuous", [])


def test_damage_in_the_log_of_before_is_a_remark_and_the_rows_up_to_it_count(before, after):
    events(before, 1, 100, damaged_at=0.8)
    events(after, SAVED + 1, 120)
    assert judged(before, after) == (0, "continuous", ["loss.damaged"])
    shown = run_ckptctl("loss", before, after).stdout
    assert "wrong CRC-32C; the rest was not read" in " ".join(shown.split())


def test_damage_that_no_row_follows_is_never_a_plain_yes(before, after):
    events(before, 1, 100)
    events(after, SAVED + 1, 120, damaged_at=0.8)
    assert judged(before, after) == (31, "inconclusive", ["loss.unread"])


def test_a_resume_behind_the_damage_is_not_mistaken_for_an_earlier_one(before, after):
    events(before, 1, 100)
    events(after, SAVED + 1, 200, damaged_at=0.3)
    answer = judged(before, after, "--resume-step", 150)
    assert answer == (31, "inconclusive", ["loss.no-resume", "loss.unread"])


def test_a_canary_is_proof_whatever_the_log_of_the_run_lacks_behind_it(before, after):
    events(before, 1, 100, damaged_at=0.8)
    events(after, SAVED + 1, SAVED + 8)
    assert judged("--canary", before, after) == (0, "continuous", ["loss.damaged"])


def test_a_log_that_is_damaged_before_its_first_loss_holds_none(before):
    events(before, 1, 100, damaged_at=0.01)
    assert judged(before) == (31, "inconclusive", ["loss.none", "loss.unread"])


def test_a_dictionary_whose_bar_was_never_drawn_does_not_take_the_step_of_another(tmp_path):
    log = tmp_path / "train.log"
    text = " 10%|# | 0/9 [00:00<00:00, 9.00it/s]\n"
    for step in (1, 2):
        text += f"{{'loss': '2.{step}'}}\n 10%|# | {step}/9 [00:00<00:00, 9.00it/s]\n"
    log.write_text(text + "{'loss': '2.3'}\n")
    assert [row.step for row in read_logs([str(log)])] == [1, 2]


def test_a_loss_without_its_bar_is_not_the_first_of_the_process_after_it(tmp_path):
    log = tmp_path / "train.log"
    text = ""
    for step in (4, 5):
        text += f"{{'loss': '2.{step}'}}\n 10%|# | {step}/9 [00:00<00:00, 9.00it/s]\n"
    text += "{'loss': '2.6'}\n 10%|# | 4/9 [00:00<00:00, 9.00it/s]\n"
    text += "{'loss': '2.5'}\n 10%|# | 5/9 [00:00<00:00, 9.00it/s]\n"
    log.write_text(text)
    rows = [(row.step, row.loss.value) for row in read_logs([str(log)])]
    assert rows == [(4, 2.4), (5, 2.5), (5, 2.5)]
