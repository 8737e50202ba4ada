"""The grid of ranks that the names of rank files state."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from ckptctl.formats.families import grids_of
from ckptctl.formats.frameworks.file_names import rank_in_name
from ckptctl.model import FileInfo


def listed(*paths: str) -> list[FileInfo]:
    return [FileInfo(path, 100) for path in paths]


def missing(*paths: str, **stated: int) -> set[str]:
    return {path for grid in grids_of(listed(*paths), stated=stated) for path in grid.lost}


@pytest.mark.parametrize(
    ("paths", "gone"),
    [
        # verl states the world size in every name.
        (["actor/model_world_size_2_rank_0.pt"], {"actor/model_world_size_2_rank_1.pt"}),
        (
            [f"model_world_size_12_rank_{rank}.pt" for rank in range(12) if rank != 10],
            {"model_world_size_12_rank_10.pt"},
        ),
        # Of DeepSpeed, every kind of file states the length of the axes for the others.
        (
            [
                "mp_rank_00_model_states.pt",
                "zero_pp_rank_0_mp_rank_00_optim_states.pt",
                "zero_pp_rank_0_mp_rank_01_optim_states.pt",
                "zero_pp_rank_1_mp_rank_00_optim_states.pt",
            ],
            {"mp_rank_01_model_states.pt", "zero_pp_rank_1_mp_rank_01_optim_states.pt"},
        ),
        # A layer without parameters has no file.
        (
            [
                "layer_00-model_00-model_states.pt",
                "layer_02-model_00-model_states.pt",
                "layer_02-model_01-model_states.pt",
            ],
            {"layer_00-model_01-model_states.pt"},
        ),
        (
            ["mp_rank_00_000/model_optim_rng.pt", "mp_rank_01_001/model_optim_rng.pt"],
            {"mp_rank_00_001/model_optim_rng.pt", "mp_rank_01_000/model_optim_rng.pt"},
        ),
        (
            [
                "mp_rank_00/model_optim_rng.pt",
                "mp_rank_01/model_optim_rng.pt",
                "mp_rank_01/distrib_optim.pt",
            ],
            {"mp_rank_00/distrib_optim.pt"},
        ),
        # Alone, transformers writes `rng_state.pth`.
        (["rng_state_0.pth"], {"rng_state_1.pth"}),
        (["rng_state.pth"], set()),
        (["random_states_0.pkl"], set()),
        (["random_states_1.pkl"], {"random_states_0.pkl"}),
    ],
)
def test_the_files_that_exist_state_which_others_must(paths, gone):
    assert missing(*paths) == gone


def test_a_file_may_state_how_many_ranks_there_were():
    paths = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert missing(*paths) == set()
    assert missing(*paths, dp=2) == {"zero_pp_rank_1_mp_rank_00_optim_states.pt"}


def test_actor_and_critic_are_grids_of_their_own():
    paths = ["actor/model_world_size_1_rank_0.pt", "critic/model_world_size_2_rank_0.pt"]
    assert missing(*paths) == {"critic/model_world_size_2_rank_1.pt"}


def test_a_name_that_claims_a_huge_grid_is_counted_and_not_listed():
    (grid,) = grids_of(listed("zero_pp_rank_999999_mp_rank_999999_optim_states.pt"))
    assert grid.n_files == 10**12
    assert len(grid.lost) == 8


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("actor/optim_world_size_8_rank_3.pt", 3),
        ("rng_state_1.pth", 1),
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", None),
        ("model.pt", None),
        ("model_world_size_8_rank_.pt", None),
    ],
)
def test_the_rank_is_in_the_name(path, rank):
    assert rank_in_name(path) == rank


def test_the_generated_tables_are_up_to_date(monkeypatch):
    tool = Path(__file__).resolve().parent.parent.parent / "tools" / "framework_tables.py"
    monkeypatch.setattr("sys.argv", [tool.name, "--check"])
    assert runpy.run_path(str(tool))["main"]() == 0
