"""Layouts of rank files that a framework spreads over folders, or writes in an older format.

The files are made by `torch.save` under the names that the sources of the frameworks state:
NVRx 0.4.1 `local_manager.py`, Composer 0.32 `checkpoint_saver.py`, transformers 5.23; verl 0.3
`megatron_checkpoint_manager.py`, `megatron_utils.py`; DeepSpeed 0.19.8 `engine.py`
(`_get_expert_ckpt_name`, `_get_all_zero_checkpoint_state_dicts`); accelerate 1.15 `fsdp_utils.py`;
diffusers' training scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl.cli.pictures import rank_states
from ckptctl.errors import UsageError
from ckptctl.findings import Severity

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LONG_AGO_S = 1_700_000_000


def state(step: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.ones(8, 8) * step, "b": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(8, 8)}}, "param_groups": []},
        "iteration": step,
    }


def save(path: Path, value: object, *, legacy: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    return path


def nvrx(root: Path, step: int, ranks: int = 4, folder: str = "s0/r{}") -> Path:
    for rank in range(ranks):
        save(root / folder.format(rank) / f"iter_{step:07d}_{rank}_local.pt", state(step))
    return root


def faults(report: ckptctl.Report) -> set[str]:
    return {finding.code for finding in report.with_severity(Severity.FAULT)}


@pytest.mark.parametrize("folder", ["s0/r{}", "{}", "session/{}"])
def test_a_step_that_lies_in_a_folder_for_each_rank_is_named_by_its_root_and_number(
    tmp_path, folder
):
    root = nvrx(nvrx(tmp_path / "local", 20, folder=folder), 30, folder=folder)
    chosen = ckptctl.pick(str(root))
    assert (chosen.exit_code, chosen.path) == (0, f"{root}@30")
    report = ckptctl.verify(f"{root}@30", level="content")
    assert (report.exit_code, faults(report), report.url) == (0, set(), f"{root}@30")
    assert report.world_size is not None
    assert report.world_size.size == 4


def test_the_set_of_ranks_decides_which_step_of_nvrx_is_complete(tmp_path):
    root = nvrx(nvrx(tmp_path, 20), 30)
    (root / "s0/r2/iter_0000030_2_local.pt").unlink()
    report = ckptctl.verify(f"{root}@30")
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})
    assert "s0/r2/iter_0000030_2_local.pt" in report.findings[0].message
    assert ckptctl.pick(str(root)).path == f"{root}@20"


def test_a_rank_of_nvrx_whose_folder_is_empty_has_lost_its_file(tmp_path):
    root = nvrx(tmp_path, 30)
    (root / "s0/r3/iter_0000030_3_local.pt").unlink()
    report = ckptctl.verify(f"{root}@30", grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})
    # A job that went on with fewer ranks leaves older steps in the folders of the others.
    save(root / "s0/r3/iter_0000010_3_local.pt", state(10))
    assert ckptctl.pick(str(root)).path == f"{root}@30"


def test_a_file_that_nvrx_did_not_rename_is_of_an_interrupted_save(tmp_path):
    root = nvrx(nvrx(tmp_path, 20), 30)
    whole = root / "s0/r1/iter_0000030_1_local.pt"
    whole.rename(whole.with_name("iter_0000030_1_local.dirty.pt"))
    report = ckptctl.verify(f"{root}@30", grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"file.missing", "step.unfinished"})


def test_a_replica_of_another_ranks_file_is_no_rank(tmp_path):
    root = nvrx(tmp_path, 30, ranks=2)
    for rank in (0, 1):
        save(root / f"s0/r{rank}/iter_0000030_{1 - rank}_local.pt", state(30))
    report = ckptctl.verify(f"{root}@30")
    assert report.world_size is not None
    assert (report.exit_code, report.world_size.size) == (0, 2)


def test_a_step_without_a_folder_is_sealed_rejected_and_removed(tmp_path):
    root = nvrx(nvrx(tmp_path / "local", 20), 30)
    assert ckptctl.seal(f"{root}@20").exit_code == 0
    assert (root / ".ckptctl/steps/@20/seal.json").is_file()
    assert ckptctl.verify(f"{root}@20", level="content", require_seal=True).exit_code == 0
    ckptctl.mark(f"{root}@30", "rejected", reason="the loss rose")
    assert ckptctl.pick(str(root)).path == f"{root}@20"
    ckptctl.mark(f"{root}@30", "accepted", reason="it did not")
    ckptctl.prune(str(root), keep=1, apply=True, unsealed=True)
    left = sorted(path.name for path in root.rglob("*.pt"))
    assert left == [f"iter_0000030_{rank}_local.pt" for rank in range(4)]
    assert not (root / ".ckptctl/steps/@20/seal.json").exists()


def test_composers_files_of_several_ranks_are_one_step(tmp_path):
    held = {"state": state(1), "rng": [{"torch": torch.get_rng_state()}]}
    for batch in (10, 20):
        for rank in (0, 1):
            save(tmp_path / f"ep1-ba{batch}-rank{rank}.pt", held)
    (tmp_path / "latest-rank0.pt").symlink_to("ep1-ba20-rank0.pt")
    assert ckptctl.pick(str(tmp_path)).path == f"{tmp_path}@20"
    (tmp_path / "ep1-ba20-rank0.pt").rename(tmp_path / "ep1-ba20-rank2.pt")
    report = ckptctl.verify(f"{tmp_path}@20")
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})


def test_composers_file_of_rank_0_alone_is_the_step(tmp_path):
    timestamp = {"Timestamp": {"batch": 20, "token": 640}}
    held = {"state": {**state(1), "timestamp": timestamp}, "rng": [1]}
    save(tmp_path / "ep0-ba10-rank0.pt", held)
    path = save(tmp_path / "ep1-ba20-rank0.pt", held)
    (tmp_path / "latest-rank0.pt").symlink_to(path.name)
    assert ckptctl.pick(str(tmp_path)).path == str(path)
    report = ckptctl.verify(str(path), level="structure")
    assert (report.state.step.value, report.state.tokens.value) == (20, 640)
    assert report.world_size is None


def test_a_file_from_before_torch_1_6_is_not_supported(tmp_path):
    path = save(tmp_path / "step_30.pt", state(30), legacy=True)
    report = ckptctl.verify(str(path), level="structure")
    assert (report.exit_code, faults(report)) == (22, {"format.unsupported"})


def test_a_file_from_before_torch_1_6_runs_nothing(tmp_path):
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    path = save(tmp_path / "step_30.pt", {"model": {"w": torch.ones(2)}, "x": Evil()}, legacy=True)
    assert ckptctl.verify(str(path), level="content").exit_code == 25
    assert not (tmp_path / "ran").exists()


def by_rank(root: Path, step: int, names: Sequence[str], ranks: int = 4) -> Path:
    folder = root / f"ckpt-{step:06}"
    for rank in range(ranks):
        for name in names:
            save(folder / name.format(rank), state(step))
    return folder


NAMED_BY_RANK = [
    ("model-rank-{}.bin", "optimizer-rank-{}.bin"),
    ("model_step7_rank{}.pt",),
    ("rank_{}/model.pt", "rank_{}/optimizer.pt"),
    ("rank_{}/model.pt", "rank_{}/optim.pt"),
]


@pytest.mark.parametrize("names", NAMED_BY_RANK)
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_that_left_no_file_is_missed_under_names_of_no_framework(tmp_path, names, lost):
    by_rank(tmp_path, 20, names)
    step = by_rank(tmp_path, 30, names)
    assert ckptctl.verify(str(step)).exit_code == 0
    for name in names:
        (step / name.format(lost)).unlink()
    report = ckptctl.verify(str(step), level="content", grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})
    missing = {f.where for f in report.findings if f.code == "file.missing"}
    assert missing == {name.format(lost) for name in names}
    states = ["missing" if rank == lost else "verified" for rank in range(4)]
    assert rank_states(report) == {"": states}
    assert ckptctl.pick(str(tmp_path), grace_s=0).path == str(tmp_path / "ckpt-000020")


def test_a_kind_of_file_has_as_many_ranks_as_the_others(tmp_path):
    names = NAMED_BY_RANK[0]
    by_rank(tmp_path, 20, names)
    step = by_rank(tmp_path, 30, names)
    for rank in (2, 3):
        (step / f"model-rank-{rank}.bin").unlink()
    report = ckptctl.verify(str(step), level="content", grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})
    for rank in (2, 3):
        (step / f"optimizer-rank-{rank}.bin").unlink()
    report = ckptctl.verify(str(step), grace_s=0)
    assert (report.exit_code, faults(report)) == (22, {"file.fewer"})


def by_axes(root: Path, step: int, names: Sequence[str], ranks: int = 4) -> Path:
    folder = root / f"epoch=0-step={step}.ckpt"
    for name, rank in ((name, rank) for name in names for rank in range(ranks)):
        save(folder / name.format(rank), {"w": torch.ones(4) * rank, "step": step})
    return folder


@pytest.mark.parametrize("optimizer", ["dp_rank_00_tp_rank_{:02}", "dp_rank_{:02}_tp_rank_00"])
def test_a_kind_with_fewer_files_than_before_is_damage_where_another_kind_has_as_many(
    tmp_path, optimizer
):
    model = "model/dp_rank_00_tp_rank_{:02}_pp_rank_00.pt"
    names = (model, f"optim/{optimizer}_pp_rank_00.pt")
    by_axes(tmp_path, 20, names)
    step = by_axes(tmp_path, 30, names)
    assert ckptctl.verify(str(step)).exit_code == 0
    (step / names[1].format(3)).unlink()
    report = ckptctl.verify(str(step), grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})
    (step / model.format(3)).unlink()
    report = ckptctl.verify(str(step), grace_s=0)
    assert (report.exit_code, faults(report)) == (22, {"file.fewer"})


@pytest.mark.parametrize("rows", [4, 8])
def test_a_kind_of_fewer_ranks_is_whole_where_its_files_are_larger_by_as_much(tmp_path, rows):
    names = ("model/tp_rank_{:02}_pp_rank_00.pt", "optim/dp_rank_{:02}_tp_rank_00.pt")
    by_axes(tmp_path, 20, names)
    step = by_axes(tmp_path, 30, names[:1])
    for rank in range(2):
        save(step / names[1].format(rank), {"w": torch.ones(rows) * rank, "step": 30})
    report = ckptctl.verify(str(step), grace_s=0)
    assert report.exit_code == (0 if rows == 8 else 20), report.findings


def test_the_arguments_of_megatron_count_the_shards_that_dlrover_saves(tmp_path):
    arguments = argparse.Namespace(world_size=4, tensor_model_parallel_size=2)
    step = tmp_path / "iter_0000100"
    for rank in range(4):
        save(step / f"rank_{rank:05}" / "distrib_optim.pt", {"w": torch.ones(4) * rank})
    for rank in range(2):
        saved = {"model": {"w": torch.ones(4)}, "iteration": 100, "args": arguments}
        save(step / f"mp_rank_{rank:02}" / "model_optim_rng.pt", saved)
    assert ckptctl.verify(str(step)).exit_code == 0
    (step / "rank_00003" / "distrib_optim.pt").unlink()
    report = ckptctl.verify(str(step), grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_rank_0_alone_writes_is_missed_of_no_other_rank(tmp_path, ranks):
    (model, optimizer) = NAMED_BY_RANK[0]
    for step in (20, 30):
        by_rank(tmp_path, step, (optimizer,), ranks)
        by_rank(tmp_path, step, (model,), ranks=1)
    assert ckptctl.verify(f"{tmp_path}@30").exit_code == 0
    assert ckptctl.pick(str(tmp_path)).step == 30
    # Only the step before shows that the other ranks wrote none.
    by_rank(tmp_path, 20, (model,), ranks)
    assert ckptctl.verify(f"{tmp_path}@30", grace_s=0).exit_code == 20


@pytest.mark.parametrize(
    "beside",
    [
        "rng_dp_rank_3.pt",
        "dataloader_rank_6.pt",
        "state_local_rank_5.pt",
        "lora_rank_8.pt",
        "tp_rank_3_pp_rank_1.pt",
    ],
)
def test_numbers_that_do_not_count_every_rank_are_no_grid(tmp_path, beside):
    for number in (20, 30):
        step = by_rank(tmp_path, number, NAMED_BY_RANK[0])
        save(step / beside, {"x": 1})
    report = ckptctl.verify(str(step))
    assert (report.exit_code, faults(report)) == (0, set())
    assert report.world_size is not None
    assert report.world_size.size == 4


def test_files_of_one_rank_alone_are_no_grid(tmp_path):
    step = by_rank(tmp_path, 20, NAMED_BY_RANK[0], ranks=1)
    report = ckptctl.verify(str(step))
    assert (report.exit_code, faults(report)) == (22, {"format.unlisted"})
    by_rank(tmp_path, 30, NAMED_BY_RANK[0], ranks=1)
    assert ckptctl.verify(str(step)).exit_code == 0


def hugging_face(root: Path, step: int) -> Path:
    folder = root / f"checkpoint-{step}"
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for number, name in enumerate(names):
        save(folder / name, {f"w.{number}": torch.ones(50, 50)})
    index = {f"w.{number}": name for number, name in enumerate(names)}
    stated = {"metadata": {"total_size": 20_000.0}, "weight_map": index}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(stated))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save(folder / "optimizer.pt", {"state": {}, "param_groups": []})
    return folder


@pytest.mark.parametrize("has_index", [True, False])
def test_a_file_that_the_index_or_the_names_of_others_count_is_missed(tmp_path, has_index):
    step = hugging_face(tmp_path, 30)
    assert ckptctl.verify(str(step)).exit_code == 0
    (step / "pytorch_model-00002-of-00002.bin").unlink()
    if not has_index:
        (step / "pytorch_model.bin.index.json").unlink()
    report = ckptctl.verify(str(step), grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"shard.missing"})


def test_a_model_in_several_files_with_an_index_loads_on_any_number_of_ranks(tmp_path):
    from safetensors.torch import save_file

    step = tmp_path / "checkpoint-30"
    save(step / "optimizer.pt", state(30)["optimizer"])
    (step / "trainer_state.json").write_text(json.dumps({"global_step": 30}))
    index = {}
    for number in (1, 2, 3):
        name = f"model-0000{number}-of-00003.safetensors"
        save_file({f"w.{number}": torch.ones(50, 50)}, step / name)
        index[f"w.{number}"] = name
    (step / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for world_size in (3, 8):
        report = ckptctl.verify(str(step), world_size=world_size)
        assert (report.exit_code, faults(report)) == (0, set())
    assert "world-size.bound" not in {f.code for f in ckptctl.verify(str(step)).findings}


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 3)])
def test_a_step_of_the_trainer_on_another_number_of_ranks_lacks_nothing(tmp_path, ranks):
    for step, n_ranks in zip((10, 20), ranks, strict=True):
        folder = hugging_face(tmp_path, step)
        for rank in range(n_ranks):  # one rank alone writes no number
            name = "rng_state.pth" if n_ranks == 1 else f"rng_state_{rank}.pth"
            save(folder / name, {"python": (3, (1, 2), None), "cpu": torch.get_rng_state()})
    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.step, chosen.passed_over) == (20, ())


def test_the_folder_that_latest_names_has_to_be_there(tmp_path):
    step = tmp_path / "checkpoint-30"
    save(step / "global_step30" / "mp_rank_00_model_states.pt", {"module": {"w": torch.ones(4)}})
    (step / "trainer_state.json").write_text(json.dumps({"global_step": 30}))
    (step / "latest").write_text("global_step30\n")
    assert ckptctl.verify(str(step)).exit_code == 0
    (step / "latest").write_text("global_step31")
    report = ckptctl.verify(str(step), grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})


def test_a_step_that_lacks_a_kind_of_rank_file_of_the_one_before_is_passed_over(tmp_path):
    kinds = ("model", "optim", "extra_state")
    for step in (10, 20):
        for part in ("actor", "critic"):
            for kind, rank in ((kind, rank) for kind in kinds for rank in (0, 1)):
                name = f"{kind}_world_size_2_rank_{rank}.pt"
                save(tmp_path / f"global_step_{step}" / part / name, {"w": torch.ones(4)})
    newest = tmp_path / "global_step_20"
    assert ckptctl.pick(str(tmp_path)).path == str(newest)
    for rank in (0, 1):
        (newest / "critic" / f"optim_world_size_2_rank_{rank}.pt").unlink()
    chosen = ckptctl.pick(str(tmp_path))
    assert chosen.path == str(tmp_path / "global_step_10")
    assert "critic/optimizer" in str(chosen.passed_over)


def universal(root: Path) -> Path:
    step = root / "global_step6_universal"
    for name in ("a", "b"):
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            save(step / "zero" / name / f"{kind}.pt", {"param": torch.ones(4)})
    stated = {"param_shapes": [{"a": (4,), "b": (4,)}], "dp_world_size": 2, "mp_world_size": 1}
    save(step / "mp_rank_00_model_states.pt", {"global_steps": 6, **stated})
    return step


def test_a_universal_checkpoint_loads_on_any_number_of_ranks(tmp_path):
    report = ckptctl.verify(str(universal(tmp_path)), level="content", world_size=4)
    assert (report.exit_code, faults(report)) == (0, set())
    assert {"model", "optimizer", "step"} <= set(report.state.held)


@pytest.mark.parametrize("gone", ["zero/a/exp_avg.pt", "zero/b"])
def test_a_universal_checkpoint_has_every_file_of_every_parameter(tmp_path, gone):
    step = universal(tmp_path)
    shutil.rmtree(step / gone) if (step / gone).is_dir() else (step / gone).unlink()
    report = ckptctl.verify(str(step), level="structure", grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})
    assert gone in " ".join(finding.where for finding in report.findings)


def of_verl_with_megatron(step: Path) -> str:
    for pp, tp in ((0, 0), (0, 1), (1, 0), (1, 1)):
        save(step / f"actor/model/mp_rank_{tp:02}_{pp:03}/model.pt", [{"w": torch.ones(4)}])
        # The first of the data-parallel ranks saves the optimizer, each one its RNG states.
        save(step / f"actor/optim/distrib_optim_pp{pp}_tp{tp}_cp0_dp0.pt", {0: torch.ones(4)})
        for dp in (0, 1):
            name = f"rng_states_pp{pp}_tp{tp}_cp0_dp{dp}.pt"
            save(step / "actor/rng_states" / name, [{"torch_rng_state": torch.get_rng_state()}])
    return "actor/optim/distrib_optim_pp1_tp0_cp0_dp0.pt"


def of_deepspeed(step: Path) -> str:
    stated = {"module": {"w": torch.ones(4)}, "dp_world_size": 2, "global_steps": 7}
    save(step / "mp_rank_00_model_states.pt", stated)
    moments = {"optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(4)}}}}
    for rank in (0, 1):
        save(step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", moments)
    return "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def of_old_deepspeed(step: Path) -> str:
    newer = [step / of_deepspeed(step), step / "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    older = [path.with_name(path.name.replace("_optim", "optim")) for path in newer]
    for one, other in zip(newer, older, strict=True):
        one.rename(other)
    for expert in range(4):
        save(step / f"expert_{expert}_mp_rank_00_model_states.pt", {"w": torch.ones(4)})
    return "expert_2_mp_rank_00_model_states.pt"


def of_fsdp_without_dcp(step: Path) -> str:
    for rank in (0, 1, 2):
        save(step / f"pytorch_model_fsdp_0_rank{rank}.bin", {"w": torch.ones(4)})
        save(step / f"optimizer_0_rank{rank}.bin", {"state": {0: {"exp_avg": torch.ones(4)}}})
        save(step / f"random_states_{rank}.pkl", {"torch_manual_seed": torch.get_rng_state()})
    return "optimizer_0_rank1.bin"


def of_diffusers(step: Path) -> str:
    from safetensors.torch import save_file

    for folder in ("unet", "unet_ema"):
        (step / folder).mkdir(parents=True)
        path = step / folder / "diffusion_pytorch_model.safetensors"
        save_file({"w": torch.ones(4)}, path)
        save_file({"w": torch.ones(4)}, path.with_suffix(".fp16.safetensors"))
    save_file({"lora": torch.ones(4)}, step / "pytorch_lora_weights.safetensors")
    save(step / "optimizer.bin", {"state": {0: {"exp_avg": torch.ones(4)}}})
    save(step / "random_states_0.pkl", {"torch_manual_seed": torch.get_rng_state()})
    return "unet"


@pytest.mark.parametrize(
    ("name", "write", "layout"),
    [
        ("global_step_{}", of_verl_with_megatron, "verl"),
        ("global_step{}", of_old_deepspeed, "deepspeed"),
        ("step_{}", of_deepspeed, "deepspeed"),
        ("iter-{}", of_deepspeed, "deepspeed"),
        ("epoch{}", of_deepspeed, "epochs"),
        ("checkpoint_{}", of_fsdp_without_dcp, "accelerate"),
        ("checkpoint-{}", of_fsdp_without_dcp, "accelerate"),
        ("checkpoint-{}", of_diffusers, "accelerate"),
    ],
)
def test_a_step_by_names_of_older_and_rarer_kinds_is_picked_and_misses_a_file(
    tmp_path, name, write, layout
):
    for number in (10, 20):
        lost = write(tmp_path / name.format(number))
    newest = tmp_path / name.format(20)
    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.exit_code, chosen.path, chosen.chosen.layout) == (0, str(newest), layout)
    report = ckptctl.verify(str(newest), level="structure")
    assert {"model", "optimizer"} <= set(report.state.held)
    if (newest / lost).is_dir():  # no name states it: the step before shows it
        shutil.rmtree(newest / lost)
        assert ckptctl.pick(str(tmp_path)).path == str(tmp_path / name.format(10))
        return
    (newest / lost).unlink()
    report = ckptctl.verify(str(newest), level="structure", grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})
    assert lost in " ".join(finding.message for finding in report.findings)


@pytest.mark.parametrize("name", ["last.ckpt", "ckpt.pt", "step_30.pth.tar", "20.pt", "e20.pt"])
def test_a_file_without_a_step_number_is_verified_and_no_sign_of_a_fresh_run(tmp_path, name):
    path = save(tmp_path / name, state(30))
    report = ckptctl.verify(str(path), level="content")
    assert (report.exit_code, faults(report), report.state.step.value) == (0, set(), 30)
    if not name.startswith("step"):
        with pytest.raises(UsageError):
            ckptctl.pick(str(tmp_path))
    path.write_bytes(path.read_bytes()[:-1])
    report = ckptctl.verify(str(path), level="content", grace_s=0)
    assert (report.exit_code, faults(report)) == (21, {"record.framing"})


def test_a_bare_state_dict_restores_a_model(tmp_path):
    path = save(tmp_path / "step_30.pt", torch.nn.Linear(4, 4).state_dict())
    assert ckptctl.verify(str(path), level="structure").state.held == ("model",)


def torchtune(root: Path, *, epochs: int = 3, epochs_run: int = 3) -> Path:
    """Weights of each epoch, and beside them the train state of the last."""
    for epoch in range(epochs):
        save(root / f"epoch_{epoch}" / "model-00001-of-00001.bin", {"w": torch.ones(8, 8)})
    recipe = {"optimizer": state(1)["optimizer"], "epochs_run": epochs_run, "seed": 1}
    return save(root / "recipe_state" / "recipe_state.pt", recipe)


def test_torchtunes_train_state_is_of_the_epoch_that_it_was_saved_with(tmp_path):
    torchtune(tmp_path)
    scanned = ckptctl.scan(str(tmp_path))
    found = {report.number: report.state.optimizer.found for report in scanned.reports}
    assert found == {2: True, 1: False, 0: False}
    assert not scanned.findings
    newest = ckptctl.verify(f"{tmp_path}@2", level="content")
    assert (newest.exit_code, newest.records_proven) == (0, 2)
    shown = ckptctl.show(f"{tmp_path}@2")
    (moment,) = (row for row in shown.tensors if row.kind == "optimizer")
    assert moment.file == "../recipe_state/recipe_state.pt"
    # The next save replaces it: a seal of the step stays valid.
    assert ckptctl.seal(f"{tmp_path}@2").exit_code == 0
    torchtune(tmp_path, epochs=4, epochs_run=4)
    assert ckptctl.verify(f"{tmp_path}@2", level="content", require_seal=True).exit_code == 0


def test_an_epoch_whose_train_state_torchtune_did_not_save_is_passed_over(tmp_path):
    # Killed between its two files, torchtune loads new weights with the optimizer of old ones.
    torchtune(tmp_path, epochs=4)
    chosen = ckptctl.pick(str(tmp_path))
    assert chosen.step == 2
    assert chosen.required == ("model", "optimizer", "scheduler", "dataloader", "step")
    assert ckptctl.pick(str(tmp_path), allow_missing_state=True).step == 3


@pytest.mark.parametrize("how", ["halved", "emptied", "flipped"])
def test_damage_in_torchtunes_train_state_is_that_of_the_epoch(tmp_path, how):
    path = torchtune(tmp_path)
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 0xFF
    else:
        del data[len(data) // 2 if how == "halved" else 0 :]
    path.write_bytes(data)
    report = ckptctl.verify(f"{tmp_path}@2", level="content", grace_s=0)
    (fault,) = report.with_severity(Severity.FAULT)
    assert fault.where == "../recipe_state/recipe_state.pt"
    assert report.exit_code == 21
    # The epochs before it are weights alone: none is taken in its place without a person's word.
    chosen = ckptctl.pick(str(tmp_path), level="content", grace_s=0)
    assert (chosen.exit_code, chosen.chosen) == (11, None)
    weights = ckptctl.pick(str(tmp_path), level="content", grace_s=0, allow_missing_state=True)
    assert weights.step == 1
    young = ckptctl.verify(f"{tmp_path}@2", level="content")
    assert {one.code for one in young.with_severity(Severity.FAULT)} in (
        {"step.in-progress"},
        {"record.crc"},
    )


# Folders of frameworks without a page of their own: files of step 30, one that is lost, and
# the verdict without it.
FOLDERS = {
    "step-00000030": (("lit_model.pth",), "", 0),
    "step30": (
        tuple(f"{kind}/rank{rank}.pt" for kind in ("model", "optim", "train") for rank in range(4)),
        "optim/rank2.pt",
        20,
    ),
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_of_litgpt_or_olmo_is_a_step_and_a_lost_rank_is_named(tmp_path, folder):
    names, lost, expected = FOLDERS[folder]
    for step in ("step-00000020" if folder[4] == "-" else "step20", folder):
        for name in names:
            save(tmp_path / step / name, state(int(step.removeprefix("step").strip("-"))))
    assert ckptctl.pick(str(tmp_path)).path == str(tmp_path / folder)
    if lost:
        (tmp_path / folder / lost).unlink()
    report = ckptctl.verify(str(tmp_path / folder), grace_s=0)
    assert report.exit_code == expected
    assert {finding.where for finding in report.findings if finding.code == "file.missing"} == (
        {lost} if lost else set()
    )


@pytest.mark.parametrize("names", [("epoch={}-step={}.ckpt",), ("step_{1}/model-epoch{0}.pt",)])
def test_an_epoch_in_a_name_counts_no_ranks(tmp_path, names):
    """The first epochs have the numbers of first ranks; no later one lacks a kind of file."""
    for epoch, step in enumerate((12, 24, 36, 48)):
        for name in names:
            save(tmp_path / name.format(epoch, step), state(step))
    assert ckptctl.pick(str(tmp_path)).step == 48
