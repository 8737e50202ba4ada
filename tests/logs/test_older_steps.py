"""A line that mentions the loss of an older step is no row; a process that resumes has rows."""

from __future__ import annotations

import math

import pytest
from test_reading_logs import read, steps

from ckptctl.logs.rows import Row
from ckptctl.loss.checking import check_loss


def loss(step: int) -> float:
    return 2 + 3 / math.sqrt(step) + 0.02 * math.sin(37 * step)


def rows(steps: range, form: str = "step {} loss {:.5f}", factor: float = 1) -> list[str]:
    return [form.format(step, factor * loss(step)) for step in steps]


MENTIONS = (
    "saved checkpoint step 160 (loss 2.23)",
    "best checkpoint: step 140 loss 2.26",
    "training finished at step 160, final loss 2.23",
    "[eval] step: 160 loss: 2.5",
    "step 160 dev loss 2.5",
    "step 160 running loss 2.3",
    "WARNING loss spike at step 150: loss 7.1",
)


@pytest.mark.parametrize("mention", MENTIONS)
def test_a_mention_of_the_loss_of_an_older_step_is_no_resume(tmp_path, mention):
    before, after = tmp_path / "a.log", tmp_path / "b.log"
    before.write_text("\n".join(rows(range(1, 113))))
    after.write_text("\n".join([*rows(range(101, 161)), mention]))
    report = check_loss([str(before), str(after)], resume_step=100)
    assert report.verdict.value == "continuous"
    assert report.n_resumes == 1


@pytest.mark.parametrize("mention", ["best checkpoint: step 140 loss 2.26", *MENTIONS[-2:]])
def test_a_wrong_resume_is_found_around_a_mention_of_an_older_step(tmp_path, mention):
    before, after = tmp_path / "a.log", tmp_path / "b.log"
    before.write_text("\n".join(rows(range(1, 113))))
    wrong = [*rows(range(101, 161), factor=1.003), mention, *rows(range(161, 181), factor=1.003)]
    after.write_text("\n".join(wrong))
    report = check_loss([str(before), str(after)], resume_step=100)
    assert report.verdict.value == "discontinuous"


@pytest.mark.parametrize(
    "form", ["saved checkpoint step {} (loss {:.3f})", "[eval] step: {} loss: {:.5f}"]
)
def test_mentions_every_ten_steps_are_no_rows(form):
    lines = []
    for step in range(1, 61):
        lines += rows(range(step, step + 1))
        if step % 10 == 0:
            lines += rows(range(step, step + 1), form)
    assert steps(read("\n".join(lines))) == list(range(1, 61))


def test_a_process_that_prints_another_form_is_read_from_its_first_row():
    lines = [*rows(range(1, 31)), *rows(range(21, 41), "step {} | loss {:.5f} | lr 1.0e-04")]
    assert steps(read("\n".join(lines))) == [*range(1, 31), *range(21, 41)]


def test_the_first_row_of_a_process_may_have_another_form():
    lines = [*rows(range(1, 31)), *rows(range(21, 22), "step {} loss {:.5f} (compiled)")]
    lines += rows(range(22, 41))
    assert steps(read("\n".join(lines))) == [*range(1, 31), *range(21, 41)]


def test_a_row_of_another_form_behind_a_line_that_announces_a_resume_is_a_row():
    lines = [*rows(range(1, 31)), "resuming from step 20", "step 21 loss 2.5 (compiled)"]
    found = [item for item in read("\n".join(lines)) if isinstance(item, Row)]
    assert steps(found) == [*range(1, 31), 21]


def test_values_and_their_units_do_not_make_another_form():
    form = "step {} loss {:.5f} eta {}"
    lines = [form.format(step, loss(step), "0:10:09") for step in range(1, 31)]
    lines += [form.format(21, math.nan, "59s"), form.format(22, 1e-7, "1.5h")]
    assert steps(read("\n".join(lines))) == [*range(1, 31), 21, 22]
