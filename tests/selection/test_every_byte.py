"""Every byte is verified only where every file that may hold state was compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from damage import flip
from made_saves import optimizer, torch, weights, write

import ckptctl
from ckptctl import Level
from ckptctl.findings import ClaimName

dcp = pytest.importorskip("torch.distributed.checkpoint")


def bytes_of(step: Path) -> tuple[int, bool, set[str]]:
    """The exit code at level content, whether the bytes are proven, and what is wrong where."""
    report = ckptctl.verify(str(step), level=Level.CONTENT, grace_s=0, saved_world_size=2)
    faults = {one.where for one in report.findings if one.severity.value == "fault"}
    return report.exit_code, report.claim(ClaimName.BYTES).is_proven, faults


def of_ranks(step: Path) -> None:
    for rank in range(2):
        write(step / f"p{rank}.pth", {"model": weights(rank)})
        write(step / f"q{rank}.bin", {"anything": torch.full((64, 8), float(rank))})


def sharded(step: Path) -> None:
    state = {"model": weights(1), "optimizer": optimizer(1)}
    dcp.save(state, checkpoint_id=step, no_dist=True)
    for rank in range(2):
        write(step / "train" / f"rank{rank}.pt", {"anything": torch.full((64, 8), 2.0), "x": 1})


@pytest.mark.parametrize("name", ["q0.bin", "q1.bin", "p1.pth"])
def test_a_flipped_byte_in_a_file_that_no_name_shows_is_found(tmp_path, name):
    step = tmp_path / "step_10"
    of_ranks(step)
    assert bytes_of(step) == (0, True, set())
    flip(step / name, 1200)
    assert bytes_of(step) == (21, False, {name})


@pytest.mark.parametrize("name", ["train/rank0.pt", "train/rank1.pt"])
def test_a_flipped_byte_in_a_file_of_any_rank_beside_the_shards_is_found(tmp_path, name):
    step = tmp_path / "step_10"
    sharded(step)
    assert ckptctl.verify(str(step), level=Level.CONTENT).claim(ClaimName.BYTES).is_proven
    flip(step / name, 1200)
    report = ckptctl.verify(str(step), level=Level.CONTENT)
    assert report.exit_code == 21
    assert name in {finding.where for finding in report.findings}


def test_a_file_without_checksums_leaves_the_bytes_unknown(tmp_path):
    step = tmp_path / "step_10"
    sharded(step)
    (step / "moments.npz").write_bytes(b"no checksum that is known" * 40)
    report = ckptctl.verify(str(step), level=Level.CONTENT)
    claim = report.claim(ClaimName.BYTES)
    assert (report.exit_code, claim.is_proven) == (0, False)
    assert "moments.npz" in claim.by
    for path in step.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    assert ckptctl.seal(str(step)).exit_code == 0
    assert ckptctl.verify(str(step), level=Level.CONTENT).claim(ClaimName.BYTES).is_proven
