"""Logs as programs printed them: `tests/logs/data` holds what a real training job wrote.

The jobs of Lightning 2.6 train 23 steps in epochs of 10, and resume from step 15, in the
middle of an epoch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl.logs.reading import read_logs
from ckptctl.logs.rows import Marker, Row
from ckptctl.loss.checking import check_loss

DATA = Path(__file__).parent / "data"


def read(*names: str) -> list[Row | Marker]:
    return list(read_logs([str(DATA / name) for name in names]))


def steps(items: list[Row | Marker]) -> list[int]:
    return [each.step for each in items if isinstance(each, Row)]


def test_the_bar_of_lightning_is_read_step_by_step():
    items = read("lightning-2.6-tqdm-1.txt")
    assert steps(items) == list(range(1, 24))
    assert [row.loss.value for row in items][:3] == [5.98, 3.15, 1.38]


def test_the_bar_after_a_resume_inside_an_epoch_goes_on_from_the_step_that_was_restored():
    marker, *rows = read("lightning-2.6-tqdm-2.txt")
    assert isinstance(marker, Marker)
    assert marker.step == 15
    # The bar begins at batch 6 of an epoch that it does not name, and has no total.
    assert steps(rows) == list(range(16, 37))


def test_a_resume_of_lightning_is_compared_over_the_steps_that_were_trained_again():
    names = [str(DATA / f"lightning-2.6-tqdm-{number}.txt") for number in (1, 2)]
    report = check_loss(names)
    (assessment,) = report.assessments
    assert assessment.resume.first_step == 16
    # The loader of this job starts its epoch again, which Lightning warns of.
    assert report.verdict.value == "inconclusive"
    assert "other batches" in report.message or "different batches" in report.message


def test_one_log_of_both_processes_of_lightning_reads_the_same(tmp_path):
    parts = [DATA / f"lightning-2.6-tqdm-{number}.txt" for number in (1, 2)]
    both = tmp_path / "train.log"
    both.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert steps(list(read_logs([str(both)]))) == [*range(1, 24), *range(16, 37)]


def test_the_last_bar_of_a_process_that_died_is_left_out_where_it_has_the_loss_before_it(tmp_path):
    bars = (DATA / "lightning-2.6-tqdm-1.txt").read_bytes().split(b"\r")
    at = next(i for i, bar in enumerate(bars) if b" 5/10 " in bar)
    log = tmp_path / "train.log"
    log.write_bytes(b"\r".join(bars[: at + 1]) + b"\n")
    assert steps(list(read_logs([str(log)]))) == [1, 2, 3, 4]


def test_abbreviated_steps_of_levanter_stand_for_the_last_row_of_each(tmp_path):
    log = tmp_path / "train.log"
    shown = [("999", 1.5), ("12.3k", 1.4), ("12.3k", 1.3), ("12.4k", 1.2)]
    log.write_text(
        "".join(
            f"Progress on:train {step}it/70.0kit rate:76.8s/it remaining:1:05 elapsed:31:40 "
            f"postfix:loss={loss}\n"
            for step, loss in shown
        )
    )
    rows = list(read_logs([str(log)]))
    assert [(row.step, row.loss.value) for row in rows] == [(999, 1.5), (12300, 1.3), (12400, 1.2)]


def test_the_epochs_of_torchvision_go_on(tmp_path):
    log = tmp_path / "train.log"
    line = "Epoch: [{epoch}][{batch:4d}/40]\tTime  0.512 ( 0.612)\tLoss {loss:.4e} (6.9e+00)\n"
    done = [(epoch, batch) for epoch in range(3) for batch in range(10, 41, 10)]
    log.write_text(
        "".join(
            line.format(epoch=e, batch=b, loss=7 - e - b / 100)
            + f"Test: [{b:4d}/40]\tTime 0.1 (0.1)\tLoss 9.9e+00 (9.9e+00)\n"
            for e, b in done
        )
    )
    rows = list(read_logs([str(log)]))
    assert [row.step for row in rows] == [40 * e + b for e, b in done]
    assert max(row.loss.value for row in rows) < 7


@pytest.mark.parametrize(
    ("line", "is_resume"),
    [
        ("ckptctl: loss after the resume from step 36: 8 steps were logged twice and agree", False),
        ("a resume from step 36 would repeat data", False),
        ("this resume at step 36 took 12 s", False),
        ("Resume training from checkpoint-36", True),
        ("resume from run/step_36", True),
    ],
)
def test_a_line_that_tells_of_a_resume_is_none(tmp_path, line, is_resume):
    log = tmp_path / "train.log"
    log.write_text(f"step 37 loss 2.5\n{line}\nstep 37 loss 2.5\n")
    markers = [each for each in read_logs([str(log)]) if isinstance(each, Marker)]
    assert bool(markers) is is_resume
