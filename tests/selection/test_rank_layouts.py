"""Layouts of rank files that a framework spreads over folders, or writes in an older format.

The files are made by `torch.save` under the names that the sources of the frameworks state:
NVRx 0.4.1 `local_manager.py`, Composer 0.32 `checkpoint_saver.py`, transformers 5.23.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckptctl
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


def test_a_file_from_before_torch_1_6_is_framed_and_its_bytes_are_unverifiable(tmp_path):
    path = save(tmp_path / "step_30.pt", state(30), legacy=True)
    report = ckptctl.verify(str(path), level="structure")
    assert (report.exit_code, faults(report), report.state.step.value) == (0, set(), 30)
    assert report.state.optimizer.found
    report = ckptctl.verify(str(path), level="content")
    assert (report.exit_code, faults(report)) == (22, {"record.unverifiable"})
    assert ckptctl.seal(str(path), accept_unverifiable=True).exit_code == 0
    assert ckptctl.verify(str(path), level="content", require_seal=True).exit_code == 0


@pytest.mark.parametrize("keep", [20, 100, 400, 0.5, -1, -8])
def test_a_file_from_before_torch_1_6_that_is_cut_short_is_damaged(tmp_path, keep):
    path = save(tmp_path / "step_30.pt", state(30), legacy=True)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    report = ckptctl.verify(str(path), level="structure", grace_s=0)
    assert (report.exit_code, faults(report)) == (21, {"record.framing"})


def test_a_file_from_before_torch_1_6_runs_nothing(tmp_path):
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    path = save(tmp_path / "step_30.pt", {"model": {"w": torch.ones(2)}, "x": Evil()}, legacy=True)
    assert ckptctl.verify(str(path), level="content").exit_code == 22
    assert not (tmp_path / "ran").exists()


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
