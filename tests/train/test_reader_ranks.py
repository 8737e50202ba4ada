"""Real processes over gloo load what four ranks of FSDP2 saved, and agree when they cannot."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import flip

pytestmark = [pytest.mark.torch, pytest.mark.slow]

RANKS = Path(__file__).with_name("reader_ranks.py")

SHARD = "__3_0.distcp"

Copy = Callable[[Path], Path]


def loaded(*loads: tuple[Path, int]) -> list[list[dict[str, Any]]]:
    """What each rank of each load prints."""
    arguments = [str(word) for load in loads for word in load]
    done = subprocess.run([sys.executable, str(RANKS), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_four_ranks_saved_and_one_two_or_three_load_the_same(checkpoints: Path):
    run = checkpoints / "run_fsdp4"
    saved = json.loads((run / "expected.json").read_text())["steps"]["step_500"]
    for answers in loaded(*((run / "step_500", size) for size in (1, 2, 3))):
        for answer in answers:
            assert set(answer) == {"entries", "read"}, answer
            assert len(answer["entries"]) > 40
            assert answer["entries"].items() <= saved.items()


def test_what_was_saved_without_collectives_loads_at_another_world_size(checkpoints: Path):
    """torch itself loads the part that the rank of the same number saved, and says nothing."""
    import torch
    import torch.distributed.checkpoint as dcp

    from ckptctl.train import Reader

    run = checkpoints / "rank_local_2"
    saved = json.loads((run / "expected.json").read_text())["steps"]["step_100"]
    step = run / "step_100"
    (fqn,) = (name for name in saved if name.endswith("weight"))
    state = {fqn: torch.full(saved[fqn]["shape"], -1.0)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=Reader(step), no_dist=True)
    assert not bool((state[fqn] == -1).any())


def test_damage_that_one_rank_reads_is_an_error_on_all_which_names_the_record(
    checkpoints: Path, copy_of: Copy
):
    step = copy_of(checkpoints / "run_fsdp4") / "step_500"
    saved = pickle.loads((step / ".metadata").read_bytes()).storage_data
    record = next(
        info
        for index, info in saved.items()
        if index.fqn == "optimizer.state.up.weight.exp_avg" and info.relative_path == SHARD
    )
    flip(step / SHARD, record.offset + 704 + 60)  # among its elements
    gone = copy_of(checkpoints / "run_fsdp4") / "step_500"
    (gone / ".metadata").unlink()
    damaged, missing = loaded((step, 2), (gone, 2))
    for answer in damaged:
        assert answer == damaged[0]
        ((name, code, text),) = answer["failures"].values()
        assert (name, code) == ("StepDamaged", "record.crc")
        assert f"{SHARD}: the record of optimizer.state.up.weight.exp_avg at (12, 0)" in text
        assert text.endswith(f"\nnext: ckptctl verify {step} --level content")
    for answer in missing:
        assert [code for _, code, _ in answer["failures"].values()] == ["metadata.missing"] * 2
