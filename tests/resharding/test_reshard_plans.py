"""A plan places every byte, and names what it cannot split."""

from __future__ import annotations

from math import prod

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl.model import Chunks, TensorEntry
from ckptctl.records.ranges import Ranges
from ckptctl.records.slices import TensorSlice
from ckptctl.resharding.planning import TargetLayout, plan, shares
from ckptctl.resharding.sources import (
    Source,
    SourceChunk,
    SourceFiles,
    SourcePart,
    SourceTensor,
)
from ckptctl.storage.local import LocalStore

N_TENSORS, N_RANKS, ROWS = 2000, 256, 25_600


def large_source(report: ckptctl.Report) -> Source:
    """512,000 chunks: 2,000 tensors on 256 ranks, as an inspection of a step returns them."""
    each = ROWS // N_RANKS
    tensors = []
    for t in range(N_TENSORS):
        chunks = tuple(
            SourceChunk(TensorSlice((r * each, 0), (each, 8)), t * N_RANKS + r)
            for r in range(N_RANKS)
        )
        entry = TensorEntry(f"model.{t}.weight", "float32", (ROWS, 8), Chunks.of(2, []))
        tensors.append(SourceTensor(entry, chunks, "model", None, N_RANKS))
    files = SourceFiles(LocalStore("."), "", "ckpt/step_1", Ranges([]))
    part = SourcePart("", tuple(tensors), (), {}, ("d",), files)
    return Source("ckpt/step_1", report, (part,), (), tuple)


@pytest.mark.slow
def test_half_a_million_chunks_are_planned_and_every_byte_has_its_place(checkpoints):
    report = ckptctl.verify(str(checkpoints / "fsdp_2" / "step_100"))
    planned = plan(large_source(report), TargetLayout(192))
    of_ranks = [*shares(planned)]
    assert sum(share.bytes_read for share in of_ranks) == N_TENSORS * ROWS * 8 * 4
    assert len(of_ranks) == 192
    for file in planned.shards:
        at = 0
        for item in file.items:
            assert item.start == at
            at += item.length
        assert at == file.n_bytes
    for entry in planned.parts[0].entries:
        assert isinstance(entry, TensorEntry)
        assert sum(prod(chunk.sizes) for chunk in entry.chunks) == ROWS * 8


@pytest.fixture
def step(checkpoints):
    return str(checkpoints / "run_fsdp4" / "step_300")


def test_the_plan_is_shown_and_nothing_is_written(step, tmp_path):
    done = run_ckptctl("reshard", step, tmp_path / "step_300", "--world-size", 3, "--json")
    assert done.returncode == 0, done.stderr
    document = validated(done.stdout)
    assert (document["written"], document["world_size"]) == (False, 3)
    assert [share["rank"] for share in document["shares"]] == [0, 1, 2]
    assert document["next_command"].endswith("--apply --world-size 3")
    assert [*tmp_path.iterdir()] == []


def test_the_written_files_are_as_large_as_planned(step, tmp_path):
    target = tmp_path / "step_300"
    planned = ckptctl.reshard(step, str(target), world_size=5, apply=False)
    assert ckptctl.reshard(step, str(target), world_size=5).written
    for share in planned.shares:
        assert (target / share.file).stat().st_size == share.n_bytes


def test_state_of_each_rank_is_carried_along_with_a_finding(step, tmp_path):
    target = tmp_path / "step_300"
    answer = ckptctl.reshard(step, str(target), world_size=3)
    assert {finding.where for finding in answer.findings} == {"dataloader", "rng"}
    assert "exists once per rank, for 4 ranks" in answer.findings[0].message
    assert ckptctl.show(str(target)).state.rng.n_ranks == 4


def test_the_model_alone_is_taken_where_that_is_asked_for(step, tmp_path):
    target = tmp_path / "step_300"
    assert ckptctl.reshard(step, str(target), world_size=2, only_model=True).written
    assert ckptctl.show(str(target)).state.held == ("model",)


def test_no_more_memory_is_asked_for_than_can_be_worked_in(step, tmp_path):
    with pytest.raises(ckptctl.UsageError, match="at least 96 MiB"):
        ckptctl.reshard(step, str(tmp_path / "x"), world_size=3, memory=1 << 20, apply=False)


@pytest.mark.parametrize(
    ("words", "said", "better"),
    [
        ((), "the number of ranks of the new step is missing", "--world-size 8"),
        (("--world-size", "3", "--memory", "lots"), "is a size like 256M", "--memory 1G"),
        (("--world-size", "3", "--only", "optimizer"), "there is only model", "--only model"),
    ],
)
def test_what_cannot_be_meant_is_said_with_the_command_that_can(
    step, tmp_path, words, said, better
):
    done = run_ckptctl("reshard", step, tmp_path / "x", *words)
    assert done.returncode == 2
    assert said in done.stderr
    following = done.stderr.split("next:")[1].strip()
    assert step in following
    assert following.strip("'").endswith(better)
