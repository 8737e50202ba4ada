"""How many ranks wrote a step, and how many can load it."""

from dataclasses import replace

import pytest

from ckptctl.inspection.rank_files import check_saved_world_size, check_world_size, saved_world_size
from ckptctl.inspection.train_state import NO_STATE
from ckptctl.model import FileInfo, Part, PartFormat, StatePart, WorldSize


def part(path: str, *names: str, empty: tuple[str, ...] = (), kind=PartFormat.DCP) -> Part:
    files = [FileInfo(name, 10) for name in names] + [FileInfo(name, 0) for name in empty]
    return Part(path, kind, tuple(files))


def shards(*ranks: int) -> tuple[str, ...]:
    return tuple(f"__{rank}_0.distcp" for rank in ranks)


def test_every_rank_leaves_a_file_even_if_it_is_empty():
    made = part("", *shards(0, 1), empty=shards(2, 3))
    assert saved_world_size([made], {"": shards(0, 1)}, NO_STATE) == WorldSize(4, "shard-files")


def test_a_hole_among_the_ranks_makes_it_a_lower_bound():
    made = part("", *shards(0, 3))
    assert saved_world_size([made], {}, NO_STATE) == WorldSize(4, "shard-files", at_least=True)


def test_a_missing_file_that_the_metadata_names_counts():
    made = part("", *shards(0, 2))
    found = saved_world_size([made], {"": shards(0, 1, 2)}, NO_STATE)
    assert found == WorldSize(3, "shard-files")


def test_what_another_save_left_does_not_count_and_makes_it_uncertain():
    made = part("", *shards(0, 1, 2, 3))
    found = saved_world_size([made], {"": shards(0, 1)}, NO_STATE)
    assert found == WorldSize(2, "shard-files", at_least=True)


def test_pipeline_stages_add_up_and_other_parts_do_not():
    stages = [part("pp0", *shards(0, 1)), part("pp1", *shards(0, 1))]
    assert saved_world_size(stages, {}, NO_STATE).size == 4
    halves = [part("model", *shards(0, 1)), part("optim", *shards(0, 1))]
    assert saved_world_size(halves, {}, NO_STATE).size == 2


def test_state_per_rank_can_show_more_ranks_than_the_files():
    state = replace(NO_STATE, rng=StatePart(True, ("rng",), 8))
    found = saved_world_size([part("", *shards(0, 1))], {}, state)
    assert found == WorldSize(8, "train-state", at_least=True)


def test_a_folder_without_shard_files_says_nothing():
    assert saved_world_size([part("", "model.safetensors")], {}, NO_STATE) is None


def test_a_rank_that_left_no_file_is_missing_where_the_world_size_is_stated():
    made = part("", *shards(0, 2))
    (finding,) = check_saved_world_size([made], {}, 4, "root/step_1")
    assert finding.code == "shard.missing"
    assert "rank 1, 3" in finding.message
    assert list(check_saved_world_size([part("", *shards(0, 1))], {}, 2, "x")) == []


def test_stages_are_counted_together():
    stages = [part("pp0", *shards(0, 1)), part("pp1", *shards(0, 1))]
    assert list(check_saved_world_size(stages, {}, 4, "x")) == []
    (finding,) = check_saved_world_size(stages, {}, 8, "x")
    assert "4 ranks" in finding.message


def test_the_same_world_size_needs_nothing():
    state = replace(NO_STATE, dataloader=StatePart(True, ("d",), 2))
    made = [part("", *shards(0, 1, 2, 3))]
    assert list(check_world_size(made, state, WorldSize(4, "shard-files"), 4, "x")) == []


def test_another_world_size_is_resharded_while_loading():
    made = [part("", *shards(0, 1))]
    (finding,) = check_world_size(made, NO_STATE, WorldSize(2, "shard-files"), 8, "x")
    assert finding.code == "world-size.differs"


def test_state_per_rank_is_lost_at_another_world_size():
    state = replace(NO_STATE, rng=StatePart(True, ("r",), 2), dataloader=StatePart(True, ("d",), 2))
    made, saved = [part("", *shards(0, 1))], WorldSize(2, "shard-files")
    found = list(check_world_size(made, state, saved, 8, "x", ("optimizer",)))
    assert [finding.code for finding in found] == ["state.lost", "world-size.differs"]
    assert (found[0].where, found[0].unmet) == ("rng, dataloader", False)
    lost, differs = check_world_size(made, state, saved, 8, "x", ("dataloader",))
    assert (lost.unmet, differs.unmet) == (True, False)


@pytest.mark.parametrize("kind", [PartFormat.DCP_RANK_LOCAL, PartFormat.ZARR])
def test_what_cannot_be_resharded_loads_at_its_own_world_size_only(kind):
    made = [part("", *shards(0, 1), kind=kind)]
    (finding,) = check_world_size(made, NO_STATE, WorldSize(2, "shard-files"), 8, "x")
    assert finding.code == "world-size.fixed"
    assert list(check_world_size(made, NO_STATE, WorldSize(2, "shard-files"), 2, "x")) == []


def test_the_shards_of_the_hugging_face_writer_give_a_lower_bound():
    names = [f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)]
    made = part("", *names, kind=PartFormat.SAFETENSORS)
    assert saved_world_size([made], {}, NO_STATE) == WorldSize(2, "shard-files", at_least=True)
    (finding,) = check_saved_world_size([made], {}, 3, "x")
    assert "rank 2" in finding.message


def test_a_model_in_safetensors_does_not_make_a_clear_optimizer_unclear():
    shard = "shard-00001-model-00001-of-00001.safetensors"
    made = [part("model", shard, kind=PartFormat.SAFETENSORS), part("optim", *shards(0, 1))]
    assert saved_world_size(made, {}, NO_STATE) == WorldSize(2, "shard-files")
