"""`diff` reports every difference, and none where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import validated
from made_steps import grid, write_step
from next_commands import run_and_follow as run_ckptctl

import ckptctl

pytestmark = pytest.mark.torch


def step(folder: Path, *, cuts: list[int], change: object = None) -> str:
    import torch

    weight = torch.arange(20 * 12, dtype=torch.float32).reshape(20, 12)
    if change == "value":
        weight[13, 7] += 1
    if change == "dtype":
        weight = weight.to(torch.float64)
    if change == "shape":
        weight = weight.reshape(12, 20)
    tensors = {"model.w": (weight, grid(weight.shape, [cuts, []]))}
    if change == "more":
        tensors["model.more"] = (weight, grid(weight.shape, [cuts, []]))
    write_step(folder / "step_1", tensors, {"step": 2 if change == "number" else 1})
    return str(folder / "step_1")


@pytest.mark.parametrize("cuts", [[10], [3, 8]], ids=["by-checksum", "by-bytes"])
def test_two_steps_of_the_same_values_are_the_same(tmp_path, cuts):
    a, b = step(tmp_path / "a", cuts=[10]), step(tmp_path / "b", cuts=cuts)
    found = ckptctl.diff(a, b, values=True)
    assert (found.same, found.exit_code) == (True, 0)
    assert [one.what for one in found.differences] == (["layout"] if cuts != [10] else [])
    assert (found.n_by_checksum, found.n_by_bytes) == ((1, 0) if cuts == [10] else (0, 1))


@pytest.mark.parametrize("cuts", [[10], [3, 8]], ids=["by-checksum", "by-bytes"])
def test_one_element_that_differs_is_found_by_values_alone(tmp_path, cuts):
    a = step(tmp_path / "a", cuts=[10])
    b = step(tmp_path / "b", cuts=cuts, change="value")
    assert ckptctl.diff(a, b).same
    found = ckptctl.diff(a, b, values=True)
    (one,) = [one for one in found.differences if one.what != "layout"]
    assert (one.fqn, one.what, found.exit_code) == ("model.w", "values", 28)
    assert cuts == [10] or one.a == "00002343 at (13, 7)"


@pytest.mark.parametrize(
    ("change", "fqn", "what"),
    [
        ("dtype", "model.w", "dtype"),
        ("shape", "model.w", "shape"),
        ("more", "model.more", "only-in-b"),
        ("number", "step", "values"),
    ],
)
def test_each_difference_has_a_word(tmp_path, change, fqn, what):
    a, b = step(tmp_path / "a", cuts=[10]), step(tmp_path / "b", cuts=[10], change=change)
    found = ckptctl.diff(a, b, values=True)
    assert [(one.fqn, one.what) for one in found.differences] == [(fqn, what)]
    assert not found.same


def test_a_step_that_was_resharded_is_the_same_step(checkpoints, tmp_path):
    source = checkpoints / "tp_fsdp_2x2" / "step_100"
    target = tmp_path / "step_100"
    assert ckptctl.reshard(str(source), str(target), world_size=3).written
    done = run_ckptctl("diff", source, target, "--values", "--json")
    assert done.returncode == 0, done.stderr
    document = validated(done.stdout)
    assert document["same"]
    assert document["n_by_bytes"] > 0


def test_the_command_says_what_differs_and_ends_with_28(tmp_path):
    a, b = step(tmp_path / "a", cuts=[10]), step(tmp_path / "b", cuts=[10], change="dtype")
    done = run_ckptctl("diff", a, b)
    assert done.returncode == 28
    assert "dtype: model.w: float32 in a, float64 in b" in done.stdout
    assert run_ckptctl("diff", a, b, "--quiet").stdout == "model.w\n"


@pytest.mark.parametrize("other", ["link@1", "link/latest", "link@latest"])
def test_a_step_compared_with_itself_is_one_step_and_leads_nowhere(tmp_path, other):
    a = step(tmp_path / "a", cuts=[10])
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "latest").symlink_to("step_1")
    for options in ((), ("--values",)):
        done = run_ckptctl("diff", a, tmp_path / other, *options)
        assert done.returncode == 0
        assert done.stdout.startswith("same: a and b are one step, with 2 entries\n")
        assert "next:" not in done.stdout
        assert "values" not in done.stdout


def test_a_folder_without_metadata_cannot_be_compared(tmp_path):
    a = step(tmp_path / "a", cuts=[10])
    (tmp_path / "b" / "step_1").mkdir(parents=True)
    (tmp_path / "b" / "step_1" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ckptctl.UsageError, match="no DCP metadata to compare"):
        ckptctl.diff(a, str(tmp_path / "b" / "step_1"))


STEPS = {
    "verl": ("global_step_20", "global_step_30"),
    "zero1": ("global_step4", "global_step6"),
    "zero3": ("global_step4", "global_step6"),
    "transformers": ("checkpoint-4", "checkpoint-6"),
    "accelerate": ("checkpoint_1", "checkpoint_2"),
    "lightning": ("epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt"),
}


@pytest.mark.parametrize("framework", STEPS)
def test_of_two_steps_of_rank_files_what_training_changed_differs(rank_files, framework):
    older, newer = (str(rank_files / framework / name) for name in STEPS[framework])
    assert ckptctl.diff(older, newer).same  # names, shapes and dtypes
    found = ckptctl.diff(older, newer, values=True)
    assert found.exit_code == 28
    assert found.n_by_checksum + found.n_by_bytes > 10
    alike = ckptctl.diff(newer, newer, values=True)
    assert (alike.same, alike.n_entries) == (True, found.n_entries)


def test_a_value_and_an_element_of_one_rank_file_that_differ_are_named(tmp_path):
    import torch

    steps = []
    for number, change in ((10, 0), (20, 1)):
        steps.append(folder := tmp_path / f"global_step{number}")
        (folder / "inner").mkdir(parents=True)
        held = torch.arange(8.0)
        held[5] += change
        whole = {"w": held, "rows": torch.zeros(4, 4).t(), "lr": [0.5], "opaque": {1 + 1j}}
        torch.save(whole, folder / "inner" / "mp_rank_00_model_states.pt")
        rest = {"v": held[:3], "lr": 0.5 + change}
        torch.save(rest, folder / "inner" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    found = ckptctl.diff(str(steps[0]), str(steps[1]), values=True)
    assert [(one.fqn, one.what) for one in found.differences] == [
        ("inner/mp_rank_00_model_states.pt: w", "values"),
        ("inner/zero_pp_rank_0_mp_rank_00_optim_states.pt: lr", "values"),
    ]


def test_a_damaged_rank_file_is_not_compared(tmp_path):
    import torch

    for number in (10, 20):
        torch.save({"model": {"w": torch.ones(3)}}, tmp_path / f"step_{number}.pt")
    path = tmp_path / "step_20.pt"
    path.write_bytes(path.read_bytes()[:-30])
    done = run_ckptctl("diff", str(tmp_path / "step_10.pt"), str(path))
    assert done.returncode == 21
    assert "step_20.pt" in done.stderr
