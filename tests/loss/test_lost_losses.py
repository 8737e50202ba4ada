"""A loss that is in the log no more: null, an empty cell, `None`, another rank, a collapse."""

from __future__ import annotations

import json

import pytest
from made_losses import DIED, END, SAVED, loss_at

from ckptctl.loss.checking import check_loss
from ckptctl.loss.evidence import NOT_FINITE, WEIGHTS, FaultState

LOST = 225


def as_json(step, loss):
    return json.dumps({"step": step, "loss": loss})


def as_json_with_lr(step, loss):
    return json.dumps({"step": step, "loss": loss, "lr": 1e-4})


def as_cells(step, loss):
    return f"{step},{'' if loss is None else loss},0.1"


def as_text(step, loss):
    return f"step {step} loss {loss}"


HEADS = {as_cells: "step,train_loss,lr\n"}
KINDS = [as_json, as_json_with_lr, as_cells, as_text]


def two_logs(tmp_path, printed, loss=loss_at, earlier=loss_at, first=SAVED + 1):
    """The logs of a job that died at `DIED` and of the one that resumed."""
    parts = [(1, DIED, earlier), (first, END, loss)]
    names = []
    for number, (begin, end, of_step) in enumerate(parts, 1):
        path = tmp_path / f"{number}.log"
        lines = [printed(step, of_step(step)) for step in range(begin, end + 1)]
        path.write_text(HEADS.get(printed, "") + "\n".join(lines) + "\n")
        names.append(str(path))
    return names


def fault_of(report, name):
    (fault,) = [fault for fault in report.faults if fault.name == name]
    return fault


def codes(report):
    return {finding.code for each in report.assessments for finding in each.findings}


@pytest.mark.parametrize("printed", KINDS)
def test_rows_whose_loss_has_no_value_are_no_finite_losses(tmp_path, printed):
    logs = two_logs(tmp_path, printed, lambda step: loss_at(step) if step < LOST else None)
    report = check_loss(logs)
    assert report.verdict.value == "inconclusive"
    fault = fault_of(report, NOT_FINITE)
    assert fault.state is FaultState.OPEN
    assert f"36 rows after step {LOST - 1} have no loss" in fault.why
    assert report.message == fault.why


@pytest.mark.parametrize("printed", KINDS)
def test_a_loss_that_always_lacked_now_and_then_is_no_objection(tmp_path, printed):
    def sparse(step):
        return loss_at(step) if step % 10 else None

    report = check_loss(two_logs(tmp_path, printed, sparse, earlier=sparse))
    assert report.verdict.value == "continuous"
    assert fault_of(report, NOT_FINITE).excluded


@pytest.mark.parametrize("printed", KINDS)
def test_a_loss_that_always_lacked_now_and_then_may_not_lack_for_longer(tmp_path, printed):
    logs = two_logs(
        tmp_path,
        printed,
        lambda step: loss_at(step) if step % 10 and step < LOST else None,
        earlier=lambda step: loss_at(step) if step % 10 else None,
    )
    assert check_loss(logs).verdict.value == "inconclusive"


def test_rows_of_an_evaluation_lack_no_loss(tmp_path):
    def table(first, last):
        rows = [f"{step},{loss_at(step)},0.1," for step in range(first, last + 1)]
        return "\n".join(["step,train_loss,lr,val_loss", *rows, f"{last + 1},,,2.5"]) + "\n"

    logs = [tmp_path / "1.csv", tmp_path / "2.csv"]
    logs[0].write_text(table(1, DIED))
    logs[1].write_text(table(SAVED + 1, END))
    report = check_loss([str(log) for log in logs])
    assert report.verdict.value == "continuous"
    assert "loss.no-value" not in codes(report)


@pytest.mark.parametrize("spelling", ["1.#QNAN", "1.#IND", "-1.#IND", "1.#SNAN"])
def test_nan_of_the_old_windows_runtime_is_not_one(tmp_path, spelling):
    logs = two_logs(tmp_path, as_text, lambda step: loss_at(step) if step < LOST else spelling)
    report = check_loss(logs)
    assert report.verdict.value == "discontinuous"
    assert "loss.not-finite" in codes(report)


FALLS = {
    "zero": lambda step: 0.0,
    "half": lambda step: loss_at(step) / 2,
    "negative": lambda step: -loss_at(step),
    "constant": lambda step: loss_at(DIED),
    "zero later": lambda step: loss_at(step) if step < LOST else 0.0,
}


@pytest.mark.parametrize("fall", FALLS)
def test_a_loss_that_collapses_is_suspect(tmp_path, fall):
    report = check_loss(two_logs(tmp_path, as_text, FALLS[fall], first=DIED + 1))
    assert report.verdict.value == "suspect"
    assert "loss.collapse" in codes(report)


@pytest.mark.parametrize("since", [SAVED + 4, DIED + 1])
@pytest.mark.parametrize("fall", [0.0, 1.5])
def test_a_loss_that_is_constant_behind_equal_steps_is_suspect(tmp_path, fall, since):
    logs = two_logs(tmp_path, as_text, lambda step: loss_at(step) if step < since else fall)
    report = check_loss(logs)
    assert report.verdict.value == "suspect"
    assert codes(report) & {"loss.later", "loss.collapse"}


def test_a_loss_that_was_zero_before_may_be_zero(tmp_path):
    def rewarded(step):
        return loss_at(step) if step % 40 < 20 else 0.0

    report = check_loss(two_logs(tmp_path, as_text, rewarded, rewarded, first=DIED + 1))
    assert "loss.collapse" not in codes(report)


def test_a_loss_that_falls_fast_all_along_is_no_collapse(tmp_path):
    def falling(step):
        return 10 * 0.97**step * (loss_at(step) / loss_at(1_000_000))

    report = check_loss(two_logs(tmp_path, as_text, falling, falling, first=DIED + 1))
    assert "loss.collapse" not in codes(report)


def test_steps_in_no_log_are_named_and_nothing_is_recomputed(tmp_path):
    report = check_loss(two_logs(tmp_path, as_text, first=DIED + 20))
    assert report.recomputed is None
    assert "loss.not-logged" in codes(report)
    (note,) = [each for each in report.assessments[0].findings if each.code == "loss.not-logged"]
    assert "these 19 steps" in note.message


def rank_logs(tmp_path, printed, change):
    """The logs of four ranks with their own losses; `change` is what rank 2 logs after the resume.

    Rank 0 writes first.
    """
    names = []
    for number, (begin, end) in enumerate([(1, DIED), (SAVED + 1, END)], 1):
        path = tmp_path / f"{number}.log"
        lines = []
        for step in range(begin, end + 1):
            for rank in range(4):
                loss = round(loss_at(step) + rank / 100, 5)
                is_changed = number == 2 and rank == 2
                lines.append(printed(rank, step, change(step, loss) if is_changed else loss))
        path.write_text("\n".join(lines) + "\n")
        names.append(str(path))
    return names


def ranked_text(rank, step, loss):
    return f"[rank{rank}] step {step} loss {loss}"


def ranked_json(rank, step, loss):
    return json.dumps({"rank": rank, "step": step, "loss": loss})


def hosted_text(rank, step, loss):
    return f"node{rank}: step {step} loss {loss} lr 1e-4"


RANKED = [ranked_text, ranked_json, hosted_text]


@pytest.mark.parametrize("printed", RANKED)
@pytest.mark.parametrize("since", [SAVED + 1, LOST])
def test_a_loss_of_any_rank_that_is_not_finite_is_suspect(tmp_path, printed, since):
    def lost(step, loss):
        return loss if step < since else float("nan")

    report = check_loss(rank_logs(tmp_path, printed, lost))
    assert report.verdict.value == "suspect"
    assert "loss.rank-not-finite" in codes(report)
    assert not fault_of(report, NOT_FINITE).excluded


@pytest.mark.parametrize("printed", RANKED)
def test_steps_of_another_rank_that_differ_are_no_proof(tmp_path, printed):
    report = check_loss(rank_logs(tmp_path, printed, lambda _step, loss: loss + 1.5))
    assert report.verdict.value == "inconclusive"
    assert "loss.rank-differs" in codes(report)
    assert not fault_of(report, WEIGHTS).excluded


@pytest.mark.parametrize("printed", RANKED)
def test_what_was_not_compared_of_other_ranks_is_stated(tmp_path, printed):
    report = check_loss(rank_logs(tmp_path, printed, lambda _step, loss: loss))
    assert report.verdict.value == "continuous"
    (note,) = [each for each in report.assessments[0].findings if each.code == "loss.one-rank"]
    assert "3 other ranks logged other losses" in note.message
