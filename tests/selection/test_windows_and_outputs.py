"""Files that come, go, move on or are copies without a loss, and what a stated size contradicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from every_case import all_cases
from made_saves import torch, write
from selection.test_whole import SCHEMES, names_of, save_step

import ckptctl
from ckptctl import Report, Severity, Verdict
from ckptctl.claims import ClaimName

numpy = pytest.importorskip("numpy")
dcp = pytest.importorskip("torch.distributed.checkpoint")


def of_ranks(step: Path, number: int) -> None:
    save_step(step, SCHEMES[0], number=number)


def single(step: Path, number: int) -> None:
    write(step / "net.pt", {"w": torch.full((8, 2), float(number))})
    moments = {"exp_avg": torch.full((8, 2), float(number)), "step": number}
    write(step / "adam.pt", {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]})


def sharded(step: Path, number: int) -> None:
    dcp.save({"w": torch.full((6,), float(number)), "step": number}, checkpoint_id=step)


def faults(report: Report) -> list[str]:
    return [finding.code for finding in report.with_severity(Severity.FAULT)]


OUTPUTS: dict[str, Callable[[Path], object]] = {
    "predictions.pt": lambda path: torch.save({"a": torch.ones(3, 4)}, path),
    "batch.pt": lambda path: torch.save({"logits": torch.ones(9, 4), "labels": [1]}, path),
    "predictions.npy": lambda path: numpy.save(path, numpy.ones(4)),
    "eval.json": lambda path: path.write_text(json.dumps({"accuracy": 0.5})),
    "metrics.csv": lambda path: path.write_text("a,b"),
    "report": lambda path: path.write_text("all is well"),
}


@pytest.mark.parametrize("save", [of_ranks, single, sharded])
def test_the_output_of_an_evaluation_that_has_not_run_yet_refuses_no_step(tmp_path, save):
    for number in (10, 20, 30):
        save(tmp_path / f"step-{number}", number)
    with all_cases() as case:
        for name, write_output in OUTPUTS.items():
            paths = [tmp_path / f"step-{number}" / name for number in (10, 20)]
            for path in paths:
                write_output(path)
            with case(name):
                chosen = ckptctl.pick(str(tmp_path), grace_s=0)
                assert (chosen.step, chosen.passed_over) == (30, ())
            for path in paths:
                path.unlink()


def test_the_outputs_of_some_ranks_refuse_no_step(tmp_path):
    for number in (10, 20, 30):
        of_ranks(tmp_path / f"step-{number}", number)
        for rank in range(4) if number < 30 else (0, 2):
            path = tmp_path / f"step-{number}" / f"preds_{rank}.pt"
            torch.save({"logits": torch.ones(3, 4)}, path)
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 30
    assert ckptctl.verify(f"{tmp_path}@30", grace_s=0).claim(ClaimName.WHOLE).is_proven


def test_parameters_in_a_file_that_is_called_a_result_are_missed(tmp_path):
    for number in (10, 20, 30):
        single(tmp_path / f"step-{number}", number)
        head = {"head.weight": torch.ones(5, 3)}
        torch.save(head, tmp_path / f"step-{number}" / "results.pt")
    (tmp_path / "step-30" / "results.pt").unlink()
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20


def replay(root: Path, first: int, stride: int) -> None:
    """Three steps with a window of eleven files each of a replay buffer."""
    for place, number in enumerate((10, 20, 30)):
        single(root / f"step-{number}", number)
        for n in range(first + place * stride, first + place * stride + 11):
            path = root / f"step-{number}" / f"buffer_{n:03}.pt"
            torch.save({"rows": torch.full((6,), float(n))}, path)


@pytest.mark.parametrize("first", [0, 100])
@pytest.mark.parametrize("stride", [1, 3, 10, 30])
def test_a_window_of_files_whose_numbers_move_on_is_whole(tmp_path, first, stride):
    replay(tmp_path, first, stride)
    chosen = ckptctl.pick(str(tmp_path), grace_s=0)
    assert (chosen.step, chosen.passed_over) == (30, ())
    for number in (10, 20, 30):
        assert faults(ckptctl.verify(f"{tmp_path}@{number}", grace_s=0)) == []
    lost = f"buffer_{first + 2 * stride + 4:03}.pt"
    (tmp_path / "step-30" / lost).unlink()
    report = ckptctl.verify(f"{tmp_path}@30", grace_s=0)
    assert [(f.code, f.where) for f in report.with_severity(Severity.FAULT)] == [
        ("file.missing", lost)
    ]


@pytest.mark.parametrize("states", ["nothing", "the number of ranks"])
def test_a_run_that_went_on_with_fewer_ranks_of_copies_is_whole(tmp_path, states):
    for number, ranks in ((10, 4), (20, 4), (30, 2), (40, 2), (50, 2)):
        for rank in range(ranks):
            state = {"model": {"w": torch.full((8, 2), float(number))}, "step": number}
            if states != "nothing":
                state |= {"world_size": ranks, "rank": rank}
            write(tmp_path / f"step-{number}" / f"state_{rank}.pt", state)
    chosen = ckptctl.pick(str(tmp_path), grace_s=0)
    assert (chosen.step, chosen.passed_over) == (50, ())
    assert chosen.chosen.claim(ClaimName.WHOLE).is_proven
    (tmp_path / "step-50" / "state_1.pt").unlink()
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 40


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[6], SCHEMES[15], SCHEMES[27]])
@pytest.mark.parametrize("n_steps", [1, 2])
def test_a_stated_size_below_that_of_the_files_is_contradicted(tmp_path, scheme, n_steps):
    for number in (10, 20)[:n_steps]:
        save_step(tmp_path / f"step-{number}", scheme, number=number)
    step = str(tmp_path / f"step-{10 * n_steps}")
    assert faults(ckptctl.verify(step, saved_world_size=4)) == []
    for ranks in (1, 3):
        report = ckptctl.verify(step, saved_world_size=ranks)
        assert {*faults(report)} == {"state.mixed"}, report.findings


def test_shards_of_more_ranks_than_are_stated_are_contradicted(checkpoints):
    step = checkpoints / "run_fsdp4" / "step_500"
    assert faults(ckptctl.verify(str(step), saved_world_size=4)) == []
    assert faults(ckptctl.verify(str(step), saved_world_size=2)) == ["state.mixed"]


@pytest.mark.parametrize(
    ("scheme", "rank", "message"),
    [
        (SCHEMES[27], 0, "missing: pytorch_model_fsdp_rank0.bin"),
        (("model_rank{r}.pt", "optim_rank{r}.pt"), 0, "missing: model_rank0.pt;"),
        (SCHEMES[0], 0, "missing: model_0.pt; 4 ranks wrote the step (model_4.pt, if they count"),
        (SCHEMES[14], 0, "missing: shard_1.pt"),
        (SCHEMES[14], 3, "missing: shard_0.pt; 4 ranks wrote the step (shard_4.pt, if they count"),
    ],
)
def test_the_file_that_a_stated_size_misses_is_named(tmp_path, scheme, rank, message):
    save_step(tmp_path / "step-10", scheme, number=10)
    for kind in ("model", "optimizer"):
        (tmp_path / "step-10" / names_of(scheme, 4)[kind, rank]).unlink()
    report = ckptctl.verify(str(tmp_path / "step-10"), saved_world_size=4, grace_s=0)
    assert report.verdict is Verdict.INCOMPLETE
    messages = [finding.message for finding in report.with_severity(Severity.FAULT)]
    assert any(message in text for text in messages), messages


def test_a_young_step_with_a_fault_that_no_running_save_explains_is_not_in_progress(tmp_path):
    for number in (10, 20):
        save_step(tmp_path / f"step-{number}", SCHEMES[1], number=number)
    step = tmp_path / "step-20"
    (step / names_of(SCHEMES[1], 4)["model", 2]).unlink()
    assert faults(ckptctl.verify(str(step))) == ["step.in-progress"]
    torch.save({"model": {}}, step / "model-0-of-9.pt")
    report = ckptctl.verify(str(step), saved_world_size=4)
    assert "step.in-progress" not in faults(report)
