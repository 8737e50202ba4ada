"""The advice counts the bytes that stock loading reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_steps import grid, write_step

from ckptctl.inspection.open_step import OpenStep
from ckptctl.resharding import advising
from ckptctl.resharding.advising import ReadAdvice, advise
from ckptctl.storage.local import LocalStore

pytestmark = pytest.mark.torch


def advice(folder: Path, cuts: list[int], world_size: int) -> ReadAdvice:
    """For a matrix of 64 rows of 1,000 bytes, cut by its writers, and a vector that was not."""
    import torch

    tensors = {
        "model.w": (torch.zeros(64, 250), grid((64, 250), [cuts, []])),
        "model.bias": (torch.zeros(25), grid((25,), [[]])),
    }
    write_step(folder / "step_1", tensors, {"step": 1})
    found = advise(OpenStep(LocalStore(str(folder)), "step_1"), world_size)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("cuts", "world_size", "rows_read", "pays_from"),
    [
        ([16, 32, 48], 3, 6 * 16, 4),  # 22, 22 and 20 rows, each from two records
        ([16, 32, 48], 8, 8 * 16, 2),  # 8 rows, each half of a record
        ([16, 32, 48], 16, 16 * 16, 1),
        ([16, 32, 48], 2, 64, None),
        ([32], 16, 16 * 32, 1),
    ],
)
def test_what_each_rank_reads_is_every_record_that_it_needs_a_part_of(
    tmp_path, monkeypatch, cuts, world_size, rows_read, pays_from
):
    monkeypatch.setattr(advising, "MIN_GAIN_BYTES", 1)
    found = advice(tmp_path, cuts, world_size)
    everyone = 100 * world_size  # the vector, which all need
    assert found.needed_bytes == 64_000 + everyone
    assert found.stock_bytes == 1000 * rows_read + everyone
    assert found.pays_from == pays_from


def test_what_would_gain_little_is_loaded_as_it_is(tmp_path):
    found = advice(tmp_path, [32], 16)
    assert found.pays_from is None
    assert found.message == (
        "no need to reshard first: stock dcp.load would read 502 KiB for 64.1 KiB needed"
    )


def test_a_step_with_too_many_chunks_to_count_gets_no_advice(tmp_path, monkeypatch):
    advice(tmp_path, [32], 16)
    monkeypatch.setattr(advising, "MAX_METADATA_BYTES", 100)
    assert advise(OpenStep(LocalStore(str(tmp_path)), "step_1"), 16) is None
