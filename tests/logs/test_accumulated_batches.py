"""Lightning's bars count batches; with accumulation, several make one step of the run."""

from __future__ import annotations

import ckptctl
from ckptctl.logs.reading import LogReader
from ckptctl.logs.rows import Row

SETTING = "trainer: {'max_epochs': 4, 'accumulate_grad_batches': 4, 'devices': 8}\n"
RESTORED = "Restored all states from the checkpoint at runs/epoch=0-step=10.ckpt\n"


def bars(batches: range, per: int = 60) -> str:
    return "".join(
        f"\rEpoch 0:  {100 * n // per}%|####      | {n}/{per} [00:0{n % 9}<00:09, 9.71it/s, "
        f"v_num=0, train_loss={9 - n / 50 + (n * 37 % 11) / 100:.3f}]"
        for n in batches
    )


def steps(text: str) -> list[int]:
    reader = LogReader("train.log")
    found = [*reader.feed(text.encode()), *reader.end()]
    return [item.step for item in found if isinstance(item, Row)]


def test_a_step_is_as_many_batches_as_the_log_states():
    assert steps(SETTING + bars(range(1, 61)) + "\n") == list(range(1, 16))


def test_without_the_setting_a_batch_is_a_step():
    assert steps(bars(range(1, 61)) + "\n") == list(range(1, 61))


def test_a_resume_inside_an_epoch_is_counted_in_steps_of_the_run(tmp_path):
    (tmp_path / "0.log").write_text(SETTING + bars(range(1, 49)) + "\n")
    (tmp_path / "1.log").write_text(SETTING + RESTORED + bars(range(41, 61)) + "\n")
    logs = [str(tmp_path / "0.log"), str(tmp_path / "1.log")]
    answer = ckptctl.check_loss(logs, resume_step=10)
    assert answer.verdict.value != "discontinuous"
    (assessment,) = answer.assessments
    assert assessment.resume.after[0].step == 11
    assert answer.exit_code != 30
