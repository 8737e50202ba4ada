"""Checkpoints of every torch version and every way to save: the sound ones draw no fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptctl
from ckptctl import Level, Severity, Verdict

# torch itself cannot load what it writes here.
UNSUPPORTED = {"safetensors_2"}
FLAT = {"flat_1"}


def steps_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("step_*") if path.is_dir())


def test_steps_of_older_versions_are_sound(dcp_versions):
    steps = steps_below(dcp_versions)
    assert len(steps) > 60
    for step in steps:
        report = ckptctl.verify(str(step), level=Level.STRUCTURE)
        assert report.verdict is Verdict.COMPLETE, (step, report.findings)
        assert report.with_severity(Severity.WARNING) == ()


def test_what_older_versions_saved_is_shown_as_it_was(dcp_versions):
    for step in steps_below(dcp_versions):
        told = json.loads(step.with_name(f"{step.name}.expected.json").read_text())
        shown = ckptctl.show(str(step))
        tensors = {row.fqn: row for row in shown.tensors}
        for fqn, entry in told["keys"].items():
            if entry["kind"] == "tensor":
                row = tensors[fqn]
                assert f"torch.{row.dtype}" == entry["dtype"]
                assert list(row.shape) == entry["shape"]
        assert shown.world_size is not None


@pytest.mark.torch
def test_every_way_to_save_today_is_sound(checkpoints):
    steps = [
        step for step in steps_below(checkpoints) if step.parent.name not in UNSUPPORTED | FLAT
    ]
    assert len(steps) > 25
    for step in steps:
        told = json.loads((step.parent / "expected.json").read_text())
        # The files of the Hugging Face writer do not state how many ranks wrote them.
        n_ranks = told["world_size"] if step.parent.name.startswith("hf_") else None
        report = ckptctl.verify(str(step), level=Level.STRUCTURE, saved_world_size=n_ranks)
        assert report.verdict is Verdict.COMPLETE, (step, report.findings)
        assert report.with_severity(Severity.WARNING) == ()
        assert report.world_size is None or report.world_size.size <= told["world_size"]


@pytest.mark.torch
def test_files_without_shards_can_be_loaded_at_any_world_size(checkpoints):
    report = ckptctl.verify(str(checkpoints / "flat_1" / "step_100"), world_size=7)
    assert report.exit_code == 0
    assert "world-size.fixed" not in [finding.code for finding in report.findings]


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_no_sharded_checkpoint_is_said_to_be_none(checkpoints, name):
    (step, *_) = sorted(
        path for path in (checkpoints / name).iterdir() if path.name != "expected.json"
    )
    report = ckptctl.verify(str(step))
    assert [f.code for f in report.with_severity(Severity.FAULT)] == ["format.unsupported"]
    assert report.exit_code == 22
    assert ckptctl.pick(str(checkpoints / name)).exit_code == 11
    assert ckptctl.pick(str(checkpoints / name), accept_unverifiable=True).exit_code == 0
