"""Files that come, go, move on or are copies without a loss, and what a stated size contradicts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from every_case import all_cases
from made_saves import torch, write
from safetensors.torch import save_file
from selection.test_whole import SCHEMES, names_of, save_step

import ckptctl
from ckptctl import Report, Severity, Verdict
from ckptctl.findings import ClaimName

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
    "predictions.pt": lambda path: torch.save(torch.ones(3, 4), path),
    "eval_3.pt": lambda path: torch.save({"top_preds": torch.ones(3), "epoch": 3}, path),
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


def test_lost_ranks_after_the_number_of_ranks_grew_are_no_window(tmp_path):
    for number, ranks in ((10, 4), (20, 4), (30, 8)):
        for rank in range(ranks):
            state = {"model": {"w": torch.full((8, 2), float(number + rank))}, "step": number}
            write(tmp_path / f"step-{number}" / f"state_{rank}.pt", state)
    for rank in range(4):
        (tmp_path / "step-30" / f"state_{rank}.pt").unlink()
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20
    assert faults(ckptctl.verify(f"{tmp_path}@30", grace_s=0)) == ["file.missing"]


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("score_net_{}.pt", {"flat_param": torch.ones(6)}),
        ("score_model_rank_{}.pt", {"_flat_param": torch.ones(6)}),
        ("outputs/shard_{}.pt", {"flat_param": torch.ones(6)}),
        ("pseudo_{}.pt", {"pseudo_labels": torch.ones(6)}),
        ("eval_net_{}.pt", torch.ones(6)),
    ],
)
def test_state_under_the_name_of_an_output_is_missed(tmp_path, name, state):
    for number in (10, 20, 30):
        single(tmp_path / f"step-{number}", number)
        for rank in range(4):
            write(tmp_path / f"step-{number}" / name.format(rank), state)
    (tmp_path / "step-30" / name.format(2)).unlink()
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20


@pytest.mark.parametrize("is_written_again", [True, False])
def test_a_slow_evaluation_neither_refuses_a_save_nor_hides_a_second_one(
    tmp_path, is_written_again
):
    for place, number in enumerate((10, 20, 30, 40)):
        step = tmp_path / f"step-{number}"
        single(step, number)
        write(step / "predictions.pt", {"logits": torch.ones(4), "labels": torch.ones(4)})
        at_s = 1e9 + 7200 * place
        for file in step.iterdir():
            os.utime(file, (at_s, at_s))
        evaluated_s = at_s + (3000 if is_written_again or number == 40 else 300)
        os.utime(step / "predictions.pt", (evaluated_s, evaluated_s))
    if is_written_again:
        os.utime(tmp_path / "step-40" / "net.pt", (at_s + 4000, at_s + 4000))
    codes = faults(ckptctl.verify(f"{tmp_path}@40", grace_s=0))
    assert codes == (["step.two-saves"] if is_written_again else [])


def test_ranks_of_equal_tensors_that_have_a_place_in_the_data_are_no_copies(tmp_path):
    for number, ranks in ((10, 4), (20, 4), (30, 3), (40, 3)):
        for rank in range(ranks):
            state = {"model": {"w": torch.full((8, 2), float(number))}, "step": number}
            state |= {"loader": {"offset": 100 * rank}}
            write(tmp_path / f"step-{number}" / f"state_{rank}.pt", state)
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20


def test_a_model_that_is_one_file_now_needs_no_index(tmp_path):
    for number in (10, 20, 30):
        step = tmp_path / f"checkpoint-{number}"
        single(step, number)
        for rank in range(4):
            write(step / f"replay_{rank}.pt", {"rows": torch.full((6,), float(rank))})
        names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)] if number < 30 else []
        for name in names or ["model.safetensors"]:
            save_file({name: torch.ones(4)}, step / name)
        if names:
            index = {"weight_map": {name: name for name in names}}
            (step / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "file.missing" not in faults(ckptctl.verify(f"{tmp_path}@30", grace_s=0))


@pytest.mark.parametrize("lost", ["optimizer.bin", "scheduler_1.bin", "model.safetensors"])
def test_an_object_of_accelerate_before_a_further_one_is_missed_without_a_step_beside(
    tmp_path, lost
):
    step = tmp_path / "checkpoint_0"
    for end in ("", "_1", "_2"):
        write(step / f"optimizer{end}.bin", {"state": {}, "param_groups": []})
        write(step / f"scheduler{end}.bin", {"last_epoch": 3})
        save_file({"w": torch.ones(4)}, step / f"model{end}.safetensors")
    write(step / "random_states_0.pkl", {"torch_manual_seed": torch.get_rng_state()})
    assert "file.missing" not in faults(ckptctl.verify(str(step), grace_s=0))
    (step / lost).unlink()
    report = ckptctl.verify(str(step), grace_s=0)
    assert ("file.missing", lost) in [(finding.code, finding.where) for finding in report.findings]
