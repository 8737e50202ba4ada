"""Which kind of train state an entry or a file is."""

from array import array

import pytest

from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.state_keys import (
    is_optimizer_step,
    kind_of_entry,
    optimizer_is_hollow,
    optimizer_of,
)
from ckptctl.model import Chunks, RangeColumns, TensorEntry


def tensor(dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    empty = Chunks(len(shape), array("q"), array("q"), RangeColumns.missing(0))
    return TensorEntry("x", dtype, shape, empty)


@pytest.mark.parametrize(
    ("fqn", "kind"),
    [
        ("model.layers.0.weight", "model"),
        ("layers.0.weight", "model"),
        ("sampler.weight", "model"),
        ("sampler.epoch", "dataloader"),
        ("model.sampler.weight", "model"),
        ("optimizer.state.layers.0.weight.exp_avg", "optimizer"),
        ("optimizer.param_groups.0.lr", "optimizer"),
        ("optim.layers.0.weight.exp_avg", "optimizer"),
        ("state.0.exp_avg", "optimizer"),
        ("optimizer_0.state.w.step", "optimizer"),
        ("chained_0.optimizer.state.exp_avg.w", "optimizer"),
        ("state.optimizers.AdamW.state.w.exp_avg", "optimizer"),
        ("lr_scheduler.last_epoch", "scheduler"),
        ("opt_param_scheduler.lr", "scheduler"),
        ("sched._last_lr", "scheduler"),
        ("rng.torch", "rng"),
        ("rng_state/shard_0.1_1.2", "rng"),
        ("app.rng_rank_3.numpy", "rng"),
        ("dataloader.dp_rank_3._num_yielded", "dataloader"),
        ("state.dataset_state", "dataloader"),
        ("anything._sampler_iter_state.samples", "dataloader"),
        ("train_state.step", "step"),
        ("step", "step"),
        ("iteration", "step"),
        ("train_state.ntokens_seen", "tokens"),
        ("args.consumed_train_samples", "tokens"),
        ("run_name", "other"),
    ],
)
def test_an_entry_is_known_by_its_key(fqn, kind):
    weights = tensor("float32", (4, 4)) if fqn.endswith(("weight", "exp_avg", ".w")) else None
    assert kind_of_entry(fqn.split("."), weights).names == (kind,)


def test_a_generator_state_is_known_by_its_size_whatever_it_is_called():
    assert kind_of_entry(("noise",), tensor("uint8", (5056,))).names == ("rng",)
    assert kind_of_entry(("noise",), tensor("uint8", (5055,))).names == ("model",)


@pytest.mark.parametrize(
    ("fqn", "rank"),
    [
        ("dataloader.dp_rank_3.index", "3"),
        ("rng_rank.r2", "2"),
        ("rng.1.torch", "1"),
        ("rng.torch", None),
        ("rng_state/shard_0.1_1.2", "shard_0.1_1.2"),
    ],
)
def test_the_copies_of_state_per_rank_are_told_apart(fqn, rank):
    assert kind_of_entry(fqn.split(".")).rank == rank


def test_an_adam_without_moments_is_hollow():
    settings = [("optimizer", "param_groups", 0, "betas"), ("optimizer", "param_groups", 0, "lr")]
    assert optimizer_is_hollow(settings)
    assert not optimizer_is_hollow([*settings, ("optimizer", "state", 0, "exp_avg")])
    assert not optimizer_is_hollow([("optimizer", "param_groups", 0, "momentum")])


def test_the_step_of_an_optimizer_is_not_the_step_of_the_run():
    assert is_optimizer_step(("optimizer", "state", "layers.0.weight", "step"))
    assert not is_optimizer_step(("train_state", "step"))
    assert optimizer_of(("app", "optimizer", "state", "w", "step")) == "app.optimizer"


@pytest.mark.parametrize(
    ("layout", "path", "names", "rank"),
    [
        (
            "kempnerforge",
            "train_state.pt",
            ("step", "tokens", "rng", "scheduler", "dataloader"),
            None,
        ),
        ("megatron-bridge", "train_state.pt", ("step", "tokens"), None),
        ("olmo-core", "train/rank3.pt", ("step", "tokens", "rng", "dataloader"), "3"),
        ("transformers", "rng_state_1.pth", ("rng",), "1"),
        ("transformers", "rng_state.pth", ("rng",), None),
        ("transformers", "scheduler.pt", ("scheduler",), None),
        ("accelerate", "random_states_0.pkl", ("rng",), "0"),
        ("accelerate", "sampler.bin", ("dataloader",), None),
        ("dcp", "train_dataloader_dprank003.pt", ("dataloader",), "003"),
        ("automodel", "rng/rng_dp_rank_3.pt", ("rng",), "3"),
        ("automodel", "dataloader/dataloader_dp_rank_3.pt", ("dataloader",), "3"),
        ("automodel", "step_scheduler.pt", ("step",), None),
        ("dcp", "trainer/dataloader/rank_3.pt", ("dataloader",), "3"),
        ("nanotron", "random/tp-0-of-1_dp-1-of-2.pt", ("rng",), "tp-0-of-1_dp-1-of-2"),
        ("nemo", "weights/common.pt", ("step", "scheduler", "tokens", "dataloader"), None),
        ("verl", "actor/model_world_size_8_rank_3.pt", ("model", "step"), None),
        ("verl", "actor/optim_world_size_8_rank_3.pt", ("optimizer",), None),
        ("verl", "critic/extra_state_world_size_8_rank_3.pt", ("rng", "scheduler"), "3"),
        ("deepspeed", "mp_rank_00_model_states.pt", ("model", "step", "scheduler"), None),
        ("deepspeed", "zero_pp_rank_3_mp_rank_00_optim_states.pt", ("optimizer",), None),
        ("specforge", "training_state.pt", ("optimizer", "scheduler", "step"), None),
    ],
)
def test_a_file_beside_the_shards_is_known_by_its_name(layout, path, names, rank):
    kind = kind_of_file(layout, path)
    assert kind is not None
    assert (kind.names, kind.rank) == (names, rank)


@pytest.mark.parametrize("path", ["config.json", "tokenizer.model", "__0_0.distcp", "hparams.yaml"])
def test_a_file_without_train_state_is_none(path):
    assert kind_of_file("dcp", path) is None
