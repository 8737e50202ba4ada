"""Logs of programs that no format is for: no rows, and the pattern that reads them."""

from __future__ import annotations

import shlex

import pytest

from ckptctl.logs.reading import LogFormat, LogReader, read_logs
from ckptctl.logs.rows import Row
from ckptctl.loss.checking import check_loss

FORMS = {
    "an epoch a line": "Epoch {step}/90, Loss: {loss:.4f}",
    "a program of one's own": "round={step} of 40 mean-loss~ 7, my_loss_a = {loss:.3f}, done",
    "a loss before the step": "loss {loss:.3f} at step {step}",
}


def lines(form: str) -> str:
    return "".join(form.format(step=step, loss=3 - step / 100) + "\n" for step in range(5, 40))


@pytest.mark.parametrize("name", FORMS)
def test_the_command_that_is_suggested_reads_the_log(name, tmp_path):
    log = tmp_path / "train.log"
    log.write_text(lines(FORMS[name]))
    report = check_loss([str(log)])
    assert report.exit_code == 31
    pattern = shlex.split(report.next_command)[-1]
    rows = [*read_logs([str(log)], LogFormat(pattern=pattern))]
    assert [row.step for row in rows] == [*range(5, 40)]
    assert [row.loss.value for row in rows] == pytest.approx([3 - n / 100 for n in range(5, 40)])


def test_the_command_that_is_suggested_for_a_named_format_reads_the_log(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(lines("loss {loss:.3f} at step {step}"))
    report = check_loss([str(log)], format="megatron")
    pattern = shlex.split(report.next_command)[-1]
    rows = [*read_logs([str(log)], LogFormat(pattern=pattern))]
    assert [row.step for row in rows] == [*range(5, 40)]


def test_the_losses_of_hifi_gan_are_those_of_a_loop_of_ones_own():
    text = lines("Steps : {step}, Gen Loss Total : {loss:.3f}, Mel-Spec. Error : 0.4")
    reader = LogReader("train.log")
    found = [*reader.feed(text.encode()), *reader.end()]
    assert [row.step for row in found if isinstance(row, Row)] == [*range(5, 40)]


def test_a_table_of_epochs_between_the_lines_of_steps_is_not_read():
    table = "| epoch | train_loss | val_loss |\n|---|---|---|\n| 1 | 2.5 | 2.6 |\n"
    steps = [f"step {n} loss {3 - n / 100:.4f}\n" for n in range(1, 30)]
    reader = LogReader("train.log")
    found = [*reader.feed("".join([*steps[:20], table, *steps[20:]]).encode()), *reader.end()]
    assert [row.step for row in found if isinstance(row, Row)] == [*range(1, 30)]
