"""Logs of gradient boosting, darknet and printed tables: their losses, and no false verdicts."""

from __future__ import annotations

from random import Random

import pytest

from ckptctl.loss.checking import LossReport, check_loss
from ckptctl.loss.reading import LogReader
from ckptctl.loss.rows import Row

Form = tuple[str, str]
"""The lines in front of a training, and the line of a step with its loss."""

FORMS: dict[str, Form] = {
    "xgboost": ("", "[{step}]\ttrain-rmse:{loss:.5f}\teval-rmse:{other:.5f}"),
    "xgboost in SageMaker": (
        "",
        "[{step}]#011train-rmse:{loss:.5f}#011validation-rmse:{other:.5f}",
    ),
    "lightgbm": (
        "[LightGBM] [Info] Total Bins 25500",
        "[{step}]\ttraining's l2: {loss:.6f}\tvalid_1's l2: {other:.6f}",
    ),
    "xgboost with a metric that rises": ("", "[{step}]\ttrain-auc:{gain:.6f}\teval-auc:0.801112"),
    "lightgbm with a metric that rises": (
        "",
        "[{step}]\ttraining's ndcg@10: {gain:.6f}\tvalid_1's ndcg@10: 0.7",
    ),
    "xgboost with both": ("", "[{step}]\ttrain-auc:0.8\ttrain-logloss:{loss:.5f}\teval-auc:0.7"),
    "spacy": (
        (
            "E    #       LOSS TOK2VEC  LOSS TAGGER  LOSS NER  TAG_ACC  SCORE \n"
            "---  ------  ------------  -----------  --------  -------  ------"
        ),
        "  {step}  {step:6}         12.50        {big:8.2f}  {big:8.2f}    0.61    0.55",
    ),
    "spacy 2": (
        (
            "Itn  Dep Loss  NER Loss  UAS     NER P   Token %  CPU WPS\n"
            "---  --------  --------  ------  ------  -------  -------"
        ),
        "{step:3}     0.000  {big:8.3f}   0.000  51.123  100.000    14123",
    ),
    "catboost": (
        "Learning rate set to 0.08",
        "{step}:\tlearn: {loss:.7f}\ttest: {other:.7f}\tbest: {other:.7f} ({step})\ttotal: 52.1ms",
    ),
    "darknet": (
        "Loaded: 0.000031 seconds",
        " {step}: {loss:.6f}, {other:.6f} avg loss, 0.001000 rate, 2.912311 seconds, 192 images",
    ),
    "hifi-gan": (
        "Epoch: 1",
        "Steps : {step}, Gen Loss Total : {big:.3f}, Mel-Spec. Error : 0.4",
    ),
    "fastai": (
        "epoch     train_loss  valid_loss  accuracy  time",
        "{step:<9} {loss:.6f}    {other:.6f}    0.612345  01:24",
    ),
    "markdown": (
        "| epoch | train_loss | val_loss | time |\n|-------|------|------|------|",
        "| {step} | {loss:.6f} | {other:.6f} | 01:24 |",
    ),
}


def trained(form: Form, first: int, last: int, seed: int = 0) -> list[str]:
    heading, line = form
    lines = heading.splitlines()
    for step in range(first, last):
        noise = Random(f"{step} {seed}")
        loss = 3 - step / 200 + noise.gauss(0, 0.01)
        other = loss + 0.1 + noise.gauss(0, 0.01)
        lines.append(
            line.format(step=step, loss=loss, other=other, big=loss * 20, gain=1 - loss / 6)
        )
    return lines


def rows(lines: list[str]) -> list[Row]:
    reader = LogReader("train.log")
    found = [*reader.feed("".join(f"{line}\n" for line in lines).encode()), *reader.end()]
    return [row for row in found if isinstance(row, Row)]


@pytest.fixture
def check(tmp_path):
    def checked(*logs: list[str]) -> LossReport:
        paths = [tmp_path / f"{number}.log" for number, _ in enumerate(logs)]
        for path, lines in zip(paths, logs, strict=True):
            path.write_text("".join(f"{line}\n" for line in lines))
        return check_loss([str(path) for path in paths])

    return checked


@pytest.mark.parametrize("name", FORMS)
def test_every_step_is_read_with_the_loss_of_the_training(name):
    found = rows(trained(FORMS[name], 0, 40))
    assert [row.step for row in found] == [*range(40)]
    assert all(row.loss is not None and row.loss.value < 140 for row in found)


@pytest.mark.parametrize("name", FORMS)
def test_a_resume_from_a_checkpoint_is_continuous(name, check):
    form = FORMS[name]
    assert check(trained(form, 0, 130), trained(form, 121, 200)).verdict.value == "continuous"


@pytest.mark.parametrize("name", FORMS)
def test_a_new_log_that_begins_at_the_beginning_is_a_restart(name, check):
    form = FORMS[name]
    found = check(trained(form, 0, 130), trained(form, 0, 40, seed=1))
    assert found.verdict.value == "discontinuous"


@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("darknet", "hifi-gan")])
def test_folds_and_phases_of_one_process_are_no_restart(name, check):
    folds = [line for fold in range(5) for line in trained(FORMS[name], 0, 40, seed=fold)]
    assert check(folds).verdict.value == "inconclusive"


@pytest.mark.parametrize(
    "lines",
    [
        ["[0]\ttrain-logloss-mean:0.61+0.01\ttest-logloss-mean:0.62+0.02"],
        ["[0]\teval-auc:0.80111", "[1]\teval-auc:0.81"],
        ["[0]\ttrain-auc:0.812+0.01\ttest-auc:0.80+0.02"],
        ["E    #       LOSS TOK2VEC  ENTS_F", "  0       0          0.00    0.00"],
        ["each epoch train_loss is printed below", "0 1.5 2.5 3.5 4.5 6.5"],
        ["epoch train_loss valid_loss", "see the file for 3 values", "1 of 3 done"],
        ["| epoch | train_loss | note |", "| 1 | 2.5 | best so far |"],
        ["12: 3.5, 2.5 mean, 0.1 rate"],
    ],
)
def test_what_only_resembles_such_lines_is_no_row(lines):
    assert rows(lines * 5) == []


def test_a_table_of_epochs_between_the_lines_of_steps_is_not_read():
    table = ["| epoch | train_loss | val_loss |", "|---|---|---|", "| 1 | 2.5 | 2.6 |"]
    lines = [f"step {n} loss {3 - n / 100:.4f}" for n in range(1, 30)]
    assert [row.step for row in rows([*lines[:20], *table, *lines[20:]])] == [*range(1, 30)]


@pytest.mark.parametrize("prefix", ["0: ", "[rank0]:", "3: "])
@pytest.mark.parametrize("name", ["catboost", "darknet", "xgboost"])
def test_the_prefix_of_a_launcher_is_not_the_step(name, prefix):
    found = rows([prefix + line for line in trained(FORMS[name], 5, 30)])
    assert [row.step for row in found] == [*range(5, 30)]
