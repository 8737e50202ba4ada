"""Every tensor is the same after a step was resharded, whoever wrote it."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl.findings import Verdict
from ckptctl.model import Level

pytestmark = pytest.mark.torch

VARIANTS = (
    "async_2",
    "ddp_2",
    "dtypes_1",
    "files_2",
    "fsdp_1",
    "fsdp_2",
    "fsdp_8",
    "fsspec_2",
    "hsdp_2x2",
    "lowest_rank_2",
    "no_dist_1",
    "pipeline_2",
    "rank_local_2",
    "resaved_4",
    "run_bare4",
    "run_fsdp4",
    "shapes_2",
    "subgroup_4",
    "threads_2",
    "tp_fsdp_2x2",
    "uneven_4",
    "uneven_8",
    "zstd_2",
)


def loaded(step: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """The entries of a step as stock torch reads them, described as `expected.json` does."""
    import torch
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process alone, and of complex numbers
        state = {
            fqn: torch.zeros(e["shape"], dtype=getattr(torch, e["dtype"])) if "shape" in e else None
            for fqn, e in expected.items()
        }
        dcp.load(state, checkpoint_id=step, no_dist=True)
    return {fqn: described(value) for fqn, value in state.items()}


def described(value: Any) -> dict[str, Any]:
    import torch

    if not isinstance(value, torch.Tensor):
        return {"kind": "bytes", "repr": repr(value)}
    octets = bytes(value.contiguous().flatten().view(torch.uint8).numpy()) if value.numel() else b""
    return {
        "kind": "tensor",
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "sha256": hashlib.sha256(octets).hexdigest(),
    }


def expected_of(step: Path) -> dict[str, Any]:
    document = json.loads((step.parent / "expected.json").read_text())
    steps: dict[str, Any] = document["steps"]
    return dict(steps[step.name])


def check_whole(step: Path) -> None:
    report = ckptctl.verify(str(step), level=Level.CONTENT, require_seal=True)
    assert report.verdict is Verdict.COMPLETE, report.findings


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("n_ranks", [1, 3, 8])
def test_stock_torch_reads_the_same_values_from_a_step_that_was_cut_anew(
    checkpoints, tmp_path, variant, n_ranks
):
    source = sorted((checkpoints / variant).glob("step_*"))[-1]
    target = tmp_path / source.name
    done = ckptctl.reshard(str(source), str(target), world_size=n_ranks)
    assert (done.written, done.exit_code) == (True, 0), done.report.findings
    expected = expected_of(source)
    assert loaded(target, expected) == expected
    check_whole(target)
    assert len([*target.glob("__*_0.distcp")]) == n_ranks
    assert {*tmp_path.iterdir()} == {target, tmp_path / ".ckptctl"}


def test_a_step_goes_from_4_to_3_to_8_to_1_ranks_and_stays_the_same(checkpoints, tmp_path):
    step = checkpoints / "run_fsdp4" / "step_300"
    expected = expected_of(step)
    for n_ranks in (3, 8, 1, 4):
        target = tmp_path / str(n_ranks) / step.name
        target.parent.mkdir()
        assert ckptctl.reshard(str(step), str(target), world_size=n_ranks).written
        step = target
    assert loaded(step, expected) == expected
    check_whole(step)


def test_records_without_checksums_are_taken_on_request_only(checkpoints, tmp_path):
    source = checkpoints / "no_crc_2" / "step_100"
    target = tmp_path / "step_100"
    refused = ckptctl.reshard(str(source), str(target), world_size=3)
    assert (refused.written, refused.exit_code) == (False, 22)
    assert not target.exists()
    taken = ckptctl.reshard(str(source), str(target), world_size=3, accept_unverifiable=True)
    assert taken.written
    assert loaded(target, expected_of(source)) == expected_of(source)


@pytest.mark.parametrize("variant", ["flat_1", "hf_2"])
def test_what_is_no_sharded_dcp_is_refused(checkpoints, tmp_path, variant):
    source = checkpoints / variant / "step_100"
    with pytest.raises(ckptctl.UsageError, match="not sharded DCP"):
        ckptctl.reshard(str(source), str(tmp_path / "step_100"), world_size=3, apply=False)


FRAMEWORKS = {
    "kempnerforge": "checkpoints/step_10",
    "lightning": "trainer_mp/checkpoints/epoch=0-step=10.ckpt",
    "megatron-core": "torch_dist_0.16.1/iter_0000010",
    "olmo-core": "run/step10",
    "torchtitan": "sync/checkpoint/step-10",
    "transformers": "trainer_fsdp2/checkpoint-10",
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_step_of_a_framework_keeps_its_tensors_and_the_files_beside_them(
    framework_roots, tmp_path, name
):
    source = framework_roots / name / FRAMEWORKS[name]
    target = tmp_path / source.name
    done = ckptctl.reshard(str(source), str(target), world_size=3)
    assert done.written, (done.message, done.report.findings)
    check_whole(target)
    beside = [p.relative_to(source) for p in source.rglob("*") if p.is_file()]
    for path in beside:
        if path.suffix != ".distcp" and path.name != ".metadata":
            assert (target / path).read_bytes() == (source / path).read_bytes()
    before, after = ckptctl.show(str(source)), ckptctl.show(str(target))
    assert after.bytes_entries == before.bytes_entries
    assert [(t.fqn, t.dtype, t.shape) for t in after.tensors] == [
        (t.fqn, t.dtype, t.shape) for t in before.tensors
    ]
