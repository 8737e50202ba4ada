"""Shards of verl and DeepSpeed ZeRO put together, exact to the element."""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl.errors import UsageError
from ckptctl.resharding.shard_files import slices_of_range

torch = pytest.importorskip("torch")
format_utils = pytest.importorskip("torch.distributed.checkpoint.format_utils")
pytestmark = pytest.mark.torch

SHAPES = {"a.weight": (7, 5), "a.bias": (5,), "deep": (3, 2, 4), "one": (1,), "scale": ()}


def loaded(step: Path) -> Any:
    whole = step.parent / "whole.pt"
    format_utils.dcp_to_torch_save(str(step), str(whole))
    return torch.load(whole, weights_only=False)


@pytest.mark.parametrize("shape", [(), (6,), (4, 5), (3, 2, 4), (2, 1, 3, 2)])
def test_a_range_of_elements_is_cut_into_slices_in_order(shape):
    whole = torch.arange(prod(shape)).reshape(shape)
    for start, end in itertools.combinations(range(prod(shape) + 1), 2):
        found = []
        for part, before in slices_of_range(shape, start, end - start):
            assert before == len(found)
            ends = [o + n for o, n in zip(part.offsets, part.sizes, strict=True)]
            at = tuple(slice(o, end) for o, end in zip(part.offsets, ends, strict=True))
            found += whole[at].flatten().tolist()
        assert found == list(range(start, end))


def flat(values: dict[str, torch.Tensor], world: int) -> list[torch.Tensor]:
    """One vector of all values, padded, and cut for the ranks: stages 1 and 2."""
    vector = torch.cat([value.flatten() for value in values.values()])
    padded = torch.cat([vector, torch.zeros(-len(vector) % world)])
    return [part.clone() for part in padded.chunk(world)]


def each(values: dict[str, torch.Tensor], world: int) -> list[torch.Tensor]:
    """Each value padded and cut for the ranks, which keep their parts in a row: stage 3."""
    padded = [
        torch.cat([value.flatten(), torch.zeros(-value.numel() % world)])
        for value in values.values()
    ]
    return [torch.cat([value.chunk(world)[rank] for value in padded]) for rank in range(world)]


def random_values() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def write_zero(step: Path, stage: int, world: int) -> tuple[Any, Any, Any]:
    weights, exp_avg, exp_avg_sq = random_values(), random_values(), random_values()
    cut = each if stage == 3 else flat
    parts = [cut(values, world) for values in (weights, exp_avg, exp_avg_sq)]
    model = {
        "module": {"buffer": torch.arange(4), **{name: torch.zeros(0) for name in SHAPES}},
        "buffer_names": ["buffer"],
        "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
        "shared_params": {"tied": "a.weight"},
        "dp_world_size": world,
        "mp_world_size": 1,
    }
    step.mkdir(parents=True)
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world)]
    for name in names if stage == 3 else ["mp_rank_00_model_states.pt"]:
        torch.save(model, step / name)
    for rank in range(world):
        one, two, three = (part[rank] for part in parts)
        base = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": two, "exp_avg_sq": three}}}
        held = (
            {"fp32_flat_groups": [one], "optimizer_state_dict": base}
            if stage == 3
            else {"single_partition_of_fp32_groups": [one], "base_optimizer_state": base}
        )
        torch.save(
            {"optimizer_state_dict": {"zero_stage": stage, **held}},
            step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return weights, exp_avg, exp_avg_sq


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (2, 4), (3, 2), (3, 4), (1, 1)])
def test_partitions_of_zero_become_the_weights_and_moments_that_were_cut(tmp_path, stage, world):
    step = tmp_path / "run" / "global_step10"
    weights, exp_avg, exp_avg_sq = write_zero(step, stage, world)
    done = ckptctl.convert(str(step), str(tmp_path / "out" / "step_10"), world_size=2, grace_s=0)
    assert done.written, done.report
    found = loaded(tmp_path / "out" / "step_10")
    assert found["model"].keys() == {*weights, "buffer", "tied"}
    for name, weight in weights.items():
        assert found["model"][name].equal(weight), name
        state = found["optimizer"]["state"][name]
        assert state["exp_avg"].equal(exp_avg[name])
        assert state["exp_avg_sq"].equal(exp_avg_sq[name])
        assert state["step"] == 3
    assert found["model"]["tied"].equal(weights["a.weight"])
    assert found["model"]["buffer"].equal(torch.arange(4))


def test_a_flipped_bit_in_a_partition_ends_the_conversion(tmp_path):
    step = tmp_path / "run" / "global_step10"
    weights, *_ = write_zero(step, 2, 2)
    file = step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    at = data.index(flat(weights, 2)[1].numpy().tobytes())
    data[at + 9] ^= 1
    file.write_bytes(data)
    done = ckptctl.convert(str(step), str(tmp_path / "out" / "step_10"), grace_s=0)
    assert (done.written, done.report.exit_code) == (False, 21)
    assert not (tmp_path / "out" / "step_10").exists()


def test_partitions_of_several_model_parallel_ranks_are_left_to_deepspeed(tmp_path):
    step = tmp_path / "run" / "global_step10"
    write_zero(step, 1, 2)
    for file in sorted(step.iterdir()):
        copy = step / file.name.replace("mp_rank_00", "mp_rank_01")
        copy.write_bytes(file.read_bytes())
    with pytest.raises(UsageError) as caught:
        ckptctl.convert(str(step), str(tmp_path / "out" / "step_10"), grace_s=0)
    assert "ds_to_universal" in (caught.value.next_command or "")


def of_ranks(step: Path, kind: str) -> list[Any]:
    files = [step / "actor" / f"{kind}_world_size_2_rank_{rank}.pt" for rank in range(2)]
    return [torch.load(file, weights_only=False) for file in files]


def joined(parts: list[Any]) -> torch.Tensor:
    tensors = [getattr(part, "_local_tensor", part) for part in parts]
    return torch.cat(tensors) if tensors[0].ndim else tensors[0]


def test_the_shards_that_verl_saved_become_whole_tensors(rank_files, tmp_path):
    step = rank_files / "verl" / "global_step_30"
    done = ckptctl.convert(str(step), str(tmp_path / "out" / "step_30"), world_size=3)
    assert done.written, done.report
    found = loaded(tmp_path / "out" / "step_30" / "actor")
    models = of_ranks(step, "model")
    assert found["model"].keys() == models[0].keys()
    for name in models[0]:
        assert found["model"][name].equal(joined([model[name] for model in models])), name
    for number, state in of_ranks(step, "optim")[0]["state"].items():
        held = [one["state"][number] for one in of_ranks(step, "optim")]
        for key in state:
            whole = found["optimizer"]["state"][str(number)][key]
            assert whole.equal(joined([one[key] for one in held])), (number, key)


def test_the_weights_of_shards_become_a_file_of_safetensors(rank_files, tmp_path):
    from safetensors.torch import load_file

    step = rank_files / "zero3" / "global_step6"
    target = tmp_path / "model.safetensors"
    done = ckptctl.convert(str(step), str(target), only_model=True, strip="model.")
    assert done.written
    shapes = {name: tuple(value.shape) for name, value in load_file(target).items()}
    assert shapes == {"0.weight": (32, 16), "0.bias": (32,), "2.weight": (4, 32), "2.bias": (4,)}
