"""Numbered files that are the saves of one run, of several runs, or the shards of one save."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from made_saves import LONG_AGO_S, optimizer, weights, whole, write

import ckptctl

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def made(root: Path, files: Mapping[str, object]) -> str:
    for path, value in files.items():
        if isinstance(value, bytes):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(value)
            os.utime(root / path, (LONG_AGO_S, LONG_AGO_S))
        else:
            write(root / path, value)
    return str(root)


def refused(root: str) -> ckptctl.UsageError:
    with pytest.raises(ckptctl.UsageError) as caught:
        ckptctl.pick(root)
    with pytest.raises(ckptctl.UsageError):
        ckptctl.scan(root)
    return caught.value


def of_epoch(epoch: int) -> dict[str, object]:
    """A save of SGD, whose optimizer counts nothing."""
    momentum = {"state": {0: {"momentum_buffer": torch.ones(8, 8)}}, "param_groups": [{"lr": 0.1}]}
    return {"epoch": epoch, "model": weights(epoch), "optimizer": momentum, "epochs": 90}


def adam(step: int) -> dict[str, object]:
    return {**optimizer(step), "state": {0: {"step": torch.tensor(float(step))}}}


SHARDS = {
    "with equal keys": {f"model_{n}.pt": weights(n) for n in range(4)},
    "with keys of their own": {f"model_{n}.pt": {f"layers.{n}.w": torch.ones(8)} for n in range(4)},
    "that count one step": {f"checkpoint_{n}.pt": whole(7) for n in range(4)},
    "whose scheduler is in the first": {
        "model_0.pt": {**whole(7), "scheduler": {"last_epoch": 8}},
        "model_1.pt": whole(7),
    },
    "from 1": {f"model_{n}.pt": weights(n) for n in range(1, 5)},
    "of which one is lost": {f"model_{n}.pt": weights(n) for n in (0, 1, 3)},
    "in safetensors": {f"model_{n}.safetensors": weights(n) for n in range(2)},
    "with a dot": {f"ckpt.{n}.pt": weights(n) for n in range(2)},
    "named by a number": {f"{n}.pt": weights(n) for n in range(4)},
    "of two kinds": {
        f"{kind}_{n}.pt": value(7)
        for n in range(2)
        for kind, value in {"model": weights, "optimizer": adam}.items()
    },
}


@pytest.mark.parametrize("files", SHARDS.values(), ids=SHARDS)
def test_files_that_may_be_the_shards_of_one_save_are_no_steps(tmp_path, files):
    error = refused(made(tmp_path, files))
    assert error.exit_code == 2
    assert "of unknown content" in error.message


def test_a_person_may_state_that_such_files_are_saves(tmp_path):
    root = made(tmp_path, SHARDS["with equal keys"])
    error = refused(root)
    assert "whether they are saves or the shards of one" in error.message
    pattern = r"model_(?P<step>[0-9]+).*"
    assert error.next_command == f"ckptctl scan {root} --pattern '{pattern}'"
    assert ckptctl.pick(root, pattern=pattern).step == 3


SAVES = {
    "by epoch": ({f"model_{n}.pth": of_epoch(n) for n in range(4)}, "model_3.pth"),
    "by the steps of Adam": (
        {f"model_{n}.pt": {"net": weights(n), "opt": adam(10 * n)} for n in range(3)},
        "model_2.pt",
    ),
    "of fairseq": (
        {
            f"checkpoint{n}.pt": {
                "model": weights(n),
                "optimizer_history": [{"num_updates": 100 * n}],
                "extra_state": {"train_iterator": {"epoch": n}},
            }
            for n in (1, 2)
        },
        "checkpoint2.pt",
    ),
    "of several kinds": (
        {
            f"{kind}_{n}.pt": value
            for n in range(3)
            for kind, value in {"model": weights(n), "optimizer": adam(10 * n)}.items()
        },
        "@2",
    ),
    "of weights, at intervals": (
        {f"model_{n}.pt": weights(n) for n in (0, 1000, 2000)},
        "model_2000.pt",
    ),
    "named by a number": ({f"{n}.pt": of_epoch(n) for n in (11, 12)}, "12.pt"),
    "named by a number and a word": (
        {f"{n:06}_ckpt.pt": of_epoch(n) for n in (11, 12)},
        "000012_ckpt.pt",
    ),
    "named by a number, the first": ({"12.pt": of_epoch(12)}, "12.pt"),
    "that name the next epoch": ({f"{n}.pt": of_epoch(n + 1) for n in (0, 1)}, "1.pt"),
    "by their run": ({f"runA_{n}.pt": whole(n) for n in (1000, 2000)}, "runA_2000.pt"),
    "of Lightning without names of metrics": (
        {f"transformer-{n}-1.78.ckpt": of_epoch(n) for n in (8, 59)},
        "transformer-59-1.78.ckpt",
    ),
}


@pytest.mark.parametrize(("files", "newest"), SAVES.values(), ids=SAVES)
def test_files_that_count_their_numbers_or_different_ones_are_saves(tmp_path, files, newest):
    root = made(tmp_path, files)
    chosen = ckptctl.pick(root)
    assert chosen.path == (f"{root}{newest}" if newest.startswith("@") else f"{root}/{newest}")
    assert ckptctl.verify(chosen.path).exit_code == 0


def test_of_saves_named_by_a_number_the_one_before_a_damaged_one_is_chosen(tmp_path):
    root = made(tmp_path, {"10.pt": of_epoch(10), "11.pt": of_epoch(11), "12.pt": b"PK"})
    chosen = ckptctl.pick(root, grace_s=0)
    assert (chosen.step, [one.report.number for one in chosen.passed_over]) == (11, [12])


@pytest.mark.parametrize(
    "files",
    [
        {"resnet-18.pth": of_epoch(90), "resnet-50.pth": of_epoch(89)},
        {f"{n}.pt": torch.ones(3) for n in (17, 33)},
        {"model_world_size_2_rank_0.pt": whole(1), "model_world_size_2_rank_1.pt": whole(2)},
        {"seed_42.pt": of_epoch(42)},
    ],
)
def test_a_number_that_a_file_does_not_count_is_no_step(tmp_path, files):
    refused(made(tmp_path, files))


RUNS = {
    "by prefix": ("runA_step_1000.pt", "runB_step_2000.pt"),
    "that differ by a digit": ("gpt2_step_1000.pt", "gpt3_step_2000.pt"),
    "of sd-scripts": ("a-step00000010.safetensors", "b-step00000020.safetensors"),
    "of sd-scripts, with state": (
        "a-step00000010-state/model.safetensors",
        "b-step00000020-state/model.safetensors",
    ),
    "of Composer": ("a-ep0-ba10-rank0.pt", "b-ep0-ba20-rank0.pt"),
    "of Composer's ranks": ("a-ep0-ba10-rank0.pt", "b-ep0-ba10-rank1.pt"),
    "of NeMo": ("a--step=10/weights/model.pt", "b--step=20/weights/model.pt"),
    "of several kinds": tuple(
        f"{run}_{kind}_{n}.pt"
        for run, n in {"runA": 1000, "runB": 2000}.items()
        for kind in ("model", "optimizer")
    ),
    "of several kinds, at one step": tuple(
        f"{run}_{kind}_1000.pt" for run in ("runA", "runB") for kind in ("model", "optimizer")
    ),
    "whose numbers nothing explains": ("runA_1000.pt", "runB_2000.pt"),
    "by epochs and by steps": ("gpt_epoch_3.pt", "gpt_step_1000.pt"),
}


@pytest.mark.parametrize("names", RUNS.values(), ids=RUNS)
def test_the_files_of_two_runs_in_one_folder_are_no_series_of_steps(tmp_path, names):
    values = {n: weights(1) if n.endswith(".safetensors") else whole(1) for n in names}
    error = refused(made(tmp_path, values))
    assert names[0] in error.message or names[0].partition("/")[0] in error.message


def of_lightning(step: int, **changes: object) -> dict[str, object]:
    return {
        "state_dict": weights(step),
        "optimizer_states": [adam(step)],
        "lr_schedulers": [{"last_epoch": step}],
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        **changes,
    }


def test_a_save_of_an_epoch_that_is_further_than_the_newest_step_is_not_passed_over(tmp_path):
    root = made(
        tmp_path, {"step=1000.ckpt": of_lightning(1000), "epoch=4.ckpt": of_lightning(1150)}
    )
    error = refused(root)
    assert error.exit_code == 2
    assert "step=1000.ckpt counts steps and epoch=4.ckpt counts epochs" in error.message
    assert "epoch=4.ckpt is of training step 1,150" in error.message
    pattern = "epoch=(?P<step>[0-9]+).*"
    assert error.next_command == f"ckptctl scan {root} --pattern '{pattern}'"
    assert ckptctl.pick(root, pattern=pattern).path == f"{root}/epoch=4.ckpt"


@pytest.mark.parametrize(
    "epoch",
    [
        of_lightning(900),
        of_lightning(1000),
        of_lightning(1150, optimizer_states=[]),
        b"cut off",
    ],
    ids=["before it", "of the same step", "of weights alone", "damaged"],
)
def test_a_save_of_an_epoch_that_is_no_further_does_not_stand_in_the_way(tmp_path, epoch):
    files = {"step=1000.ckpt": of_lightning(1000), "epoch=4.ckpt": epoch}
    assert ckptctl.pick(made(tmp_path, files)).path == f"{tmp_path}/step=1000.ckpt"


@pytest.mark.parametrize("later_s", [-60, 60])
def test_the_times_decide_where_a_save_of_an_epoch_states_no_step(tmp_path, later_s):
    epoch = of_lightning(0)
    del epoch["global_step"]
    root = made(tmp_path, {"step=1000.ckpt": of_lightning(1000), "epoch=4.ckpt": epoch})
    os.utime(tmp_path / "epoch=4.ckpt", (LONG_AGO_S, LONG_AGO_S + later_s))
    if later_s > 0:
        assert "was written at 2023-11-14" in refused(root).message
    else:
        assert ckptctl.pick(root).path == f"{root}/step=1000.ckpt"


def test_one_of_two_runs_is_chosen_by_a_pattern(tmp_path):
    root = made(tmp_path, {n: whole(1) for n in RUNS["by prefix"]})
    error = refused(root)
    assert "runA_step_1000.pt and runB_step_2000.pt are of different runs" in error.message
    assert error.next_command == f"ckptctl scan {root} --pattern 'runB_step_(?P<step>[0-9]+).*'"
    assert ckptctl.pick(root, pattern="runA_step_(?P<step>[0-9]+).*").step == 1000


@pytest.mark.parametrize(
    "names",
    [
        ("gpt_step_1000.pt", "gpt_last_step_2000.pt"),
        ("gpt_epoch_0_step_1000.pt", "gpt_epoch_1_step_2000.pt"),
        ("gpt-loss=2.5-step=1000.pt", "gpt-loss=2.1-step=2000.pt"),
        ("model_epoch_3_loss_0.25.pt", "model_epoch_4_loss_0.21.pt"),
        ("net_epoch_9_acc_95.pth", "net_epoch_12_acc_93.pth"),
        ("epoch9-0.31.pth", "epoch12-0.25.pth"),
        ("emergency_step_900.pt", "model_step_1000.pt"),
        ("a--val_loss=2.34-step=10/weights/model.pt", "a--val_loss=2.30-step=20/weights/model.pt"),
        (
            "a--train_loss=0.4-epoch=0-consumed_samples=80.0/weights/model.pt",
            "a--train_loss=0.3-epoch=0-consumed_samples=160.0-last/weights/model.pt",
        ),
    ],
)
def test_the_names_of_one_run_may_differ_by_epoch_and_metrics(tmp_path, names):
    root = made(tmp_path, {name: whole(1) for name in names})
    assert ckptctl.pick(root).path == f"{root}/{names[-1].partition('/')[0]}"


@pytest.mark.parametrize("name", ["runA.pt", "agent.pt", "net/sac_policy.pt", "x_1000.pt"])
def test_a_file_of_torch_under_any_name_is_no_fresh_run(tmp_path, name):
    refused(made(tmp_path, {name: {"a": torch.ones(2)}}))


@pytest.mark.parametrize(
    "name",
    [
        *("step_500.tar.gz", "archive/run1-checkpoint-500.tgz", "global_step500.zip"),
        *("tokenizer.pt", "data/train.pt", "dataset_0.pt", "samples_step_500.zip", "code.zip"),
    ],
)
def test_packed_files_and_data_are_named_and_accepted_by_a_person(tmp_path, name):
    root = made(tmp_path, {name: b"content"})
    assert f"1 entry of unknown content ({name})" in refused(root).message
    assert ckptctl.pick(root, ignore=[name]).exit_code == 10


# What is refused leads to what can be done


@pytest.mark.parametrize(
    "inside",
    [
        {"pretrained_model/model.safetensors": {"a": torch.ones(2)}},
        {"_CHECKPOINT_METADATA": b"{}", "default/manifest.ocdbt": b"x"},
    ],
)
def test_the_folder_above_steps_that_are_numbers_is_not_their_root(tmp_path, inside):
    files = {f"checkpoints/{n}/{path}": v for n in (5000, 10000) for path, v in inside.items()}
    error = refused(made(tmp_path, files))
    assert error.message == f"{tmp_path} holds no steps itself, but checkpoints in it does"
    assert error.next_command == f"ckptctl scan {tmp_path}/checkpoints"


def test_the_folders_of_ranks_are_not_named_as_roots(tmp_path):
    name = "gpt--val_loss=2.30-step=200-consumed_samples=1600.0.ckpt"
    error = refused(made(tmp_path, {f"mp_rank_{n:02}/{name}": whole(200) for n in (0, 1)}))
    assert "mp_rank_00, mp_rank_01 in it, which are the folders of ranks" in error.message
    assert error.next_command == "ckptctl explain format.unsupported"


def test_steps_of_a_format_that_is_not_inspected_do_not_lead_to_a_check_of_the_storage(tmp_path):
    files = {"_CHECKPOINT_METADATA": b"{}", "default/manifest.ocdbt": b"x"}
    found = ckptctl.pick(made(tmp_path, {f"1000/{path}": value for path, value in files.items()}))
    assert (found.exit_code, found.next_command) == (11, "ckptctl explain format.unsupported")


def test_folders_that_have_names_of_files_are_no_shards_of_one_save(tmp_path):
    files = {f"checkpoint-{epoch}.pth.tar/state.pt": of_epoch(epoch) for epoch in (1, 2)}
    chosen = ckptctl.pick(made(tmp_path, files))
    assert (chosen.exit_code, chosen.step) == (0, 2)
