"""Steps of torch_checkpointing, written by the library itself: one file for each item and rank."""

import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
from command_line import run_ckptctl, run_program
from every_case import all_cases

import ckptctl
from ckptctl.findings import ClaimName, Severity

pytest.importorskip("torch_checkpointing", reason="needs torch 2.11 or newer and its package")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = Path(__file__).with_name("torch_checkpointing_job.py")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("torch_checkpointing") / "run"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_program(sys.executable, *launch, JOB, root, 10, 20, 30)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def faults(report: ckptctl.Report) -> list[str]:
    return [finding.code for finding in report.with_severity(Severity.FAULT)]


def test_steps_with_and_without_a_manifest_are_whole(root):
    assert (root / "step-10" / "metadata.pkl").exists()
    assert not (root / "step-30" / "metadata.pkl").exists()
    for step in (10, 20, 30):
        report = ckptctl.verify(str(root / f"step-{step}"))
        assert (report.exit_code, faults(report)) == (0, []), step
        assert report.claim(ClaimName.WHOLE).is_proven
    assert ckptctl.pick(str(root)).step == 30
    shutil.rmtree(root / "step-20")
    shutil.rmtree(root / "step-30")
    report = ckptctl.verify(str(root / "step-10"))
    assert (report.exit_code, report.claim(ClaimName.WHOLE).by) == (0, "metadata.pkl")
    assert (report.world_size.size, report.world_size.source) == (2, "manifest")


def test_each_file_that_is_lost_rules_its_step_out(root):
    with all_cases() as case:
        for step, before in ((30, 20), (10, None)):
            for name in sorted(os.listdir(root / f"step-{step}")):
                if name == "metadata.pkl":
                    continue
                path = root / f"step-{step}" / name
                aside = path.rename(root.parent / "aside")
                with case(f"{step} {name}"):
                    report = ckptctl.verify(str(path.parent), grace_s=0)
                    assert (report.exit_code, faults(report)) == (20, ["file.missing"])
                    if before is not None:
                        assert ckptctl.pick(str(root), grace_s=0).step == before
                aside.rename(path)


def test_a_part_of_a_tensor_that_no_file_holds_is_a_gap(root):
    import torch

    path = root / "step-10" / "model_1.pt"
    torch.save({f"{n}.{kind}": torch.ones(0) for n in (0, 1) for kind in ("weight", "bias")}, path)
    report = ckptctl.verify(str(path.parent), level="structure")
    assert (report.exit_code, faults(report)) == (20, ["coverage.gap"])


def test_a_manifest_that_would_run_code_is_unsafe_and_a_damaged_one_is_no_proof(root):
    manifest = root / "step-10" / "metadata.pkl"
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-20])
    assert ckptctl.verify(str(manifest.parent)).exit_code == 21
    manifest.write_bytes(pickle.dumps({"metadata": os.system, "world_size": 2}))
    assert ckptctl.verify(str(manifest.parent)).exit_code == 25


def test_a_temporary_folder_is_an_unfinished_save(root):
    shutil.copytree(root / "step-30", root / "tmp_step-40")
    chosen = ckptctl.pick(str(root), grace_s=0)
    assert (chosen.step, [over.report.number for over in chosen.passed_over]) == (30, [40])


def test_a_step_without_a_manifest_loads_only_on_as_many_ranks(root):
    code = run_ckptctl("verify", root / "step-30", "--world-size", 4).returncode
    assert code == 24
    assert run_ckptctl("verify", root / "step-30", "--world-size", 2).returncode == 0
    assert run_ckptctl("verify", root / "step-10", "--world-size", 4).returncode == 0
    shown = run_ckptctl("show", root / "step-30").stdout
    assert "metadata.pkl" in shown
