"""Which kind of train state an entry or a file is."""

import pytest

from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.state_keys import (
    Leaf,
    StateKind,
    kinds_of,
    leaves_of,
    optimizer_is_hollow,
    optimizer_steps,
)
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.model import Chunks, Metadata, TensorEntry


def kind_of(fqn: str, dtype: str = "", shape: tuple[int, ...] | None = None) -> StateKind:
    content = "unread" if shape is None else ""
    (kind,) = kinds_of([Leaf(fqn.split("."), dtype, shape, content)])
    return kind


def kinds(state: object) -> dict[str, str]:
    """The kind of each entry of a decoded file, by its key path."""
    leaves = [*leaves_of(state)]
    found = zip(leaves, kinds_of(leaves), strict=True)
    return {".".join(map(str, leaf.path)): kind.names[0] for leaf, kind in found}


def tensor(*shape: int, dtype: str = "float32") -> TensorStub:
    return TensorStub(dtype, shape, (1,) * len(shape), 0, "0", 1)


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
    is_tensor = fqn.endswith(("weight", "exp_avg", ".w"))
    found = kind_of(fqn, "float32", (4, 4)) if is_tensor else kind_of(fqn)
    assert found.names == (kind,)


def test_a_generator_state_is_known_by_its_size_whatever_it_is_called():
    assert kind_of("noise", "uint8", (5056,)).names == ("rng",)
    other = kind_of("noise", "uint8", (5055,))
    assert other.names == ("other",)
    assert "rng" in other.may_be


def test_generators_of_python_and_numpy_are_known_by_their_content():
    python = (3, tuple(range(625)), None)
    numpy = ("MT19937", tensor(624, dtype="uint32"), 4, 0, 0.0)
    device = tensor(16, dtype="uint8")
    state = {"model": {"w": tensor(2)}, "q": {"a": python, "b": numpy}, "device": device}
    assert kinds(state) == {"model.w": "model", "q.a": "rng", "q.b": "rng", "device": "other"}
    beside = {"q": {"a": tensor(5056, dtype="uint8"), "c": [device, device]}}
    assert {*kinds(beside).values()} == {"rng"}


def test_schedulers_and_data_loaders_are_known_by_keys_that_only_they_have_together():
    scheduler = {"last_epoch": 3, "_step_count": 4, "_last_lr": [0.1], "base_lrs": [0.1]}
    plateau = {"factor": 0.1, "best": 2.0, "num_bad_epochs": 1, "last_epoch": 3}
    loader = {"_snapshot": {"_main_snapshot": {"x": 1}}, "_steps_since_snapshot": 0}
    found = kinds({"a": scheduler, "b": plateau, "c": loader, "d": {"epoch": 1, "offset": 50}})
    of_key = {key: {found[path] for path in found if path[0] == key} for key in "abcd"}
    assert of_key == {
        "a": {"scheduler"},
        "b": {"scheduler"},
        "c": {"dataloader"},
        "d": {"dataloader"},
    }


def test_what_nothing_shows_may_be_what_its_form_allows():
    found = kinds_of([*leaves_of({"data_pos": 17, "run": "a", "ratio": 0.5, "flag": True})])
    assert [kind.may_be for kind in found] == [("step", "tokens", "dataloader"), (), (), ()]


def test_a_person_maps_what_is_not_recognized_by_whole_key_paths():
    leaves = [*leaves_of({"data_pos": {"a": 1}, "data_pos_2": 4})]
    found = kinds_of(leaves, (), [("dataloader", "data_pos")])
    assert [kind.names[0] for kind in found] == ["dataloader", "other"]


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
    assert kind_of(fqn).rank == rank


def test_an_adam_without_moments_is_hollow():
    groups = ("optimizer", "param_groups", 0)
    settings = [Leaf((*groups, "betas")), Leaf((*groups, "lr"))]
    assert optimizer_is_hollow(settings)
    moment = Leaf(("optimizer", "state", 0, "exp_avg"), "float32", (4,))
    assert not optimizer_is_hollow([*settings, moment])
    assert not optimizer_is_hollow([Leaf((*groups, "momentum"))])


def test_the_step_of_an_optimizer_is_not_the_step_of_the_run():
    paths = [("app", "optimizer", "state", "w", "step"), ("train_state", "step")]
    entries = {
        ".".join(path): TensorEntry(".".join(path), "int64", (), Chunks.of(0, []), path)
        for path in paths
    }
    metadata = Metadata(entries, {}, ())
    assert optimizer_steps(metadata) == {"app.optimizer.state.w.step": "app.optimizer"}


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


@pytest.mark.parametrize(
    "model",
    [
        {"a.m.weight": tensor(4, 4), "a.v.weight": tensor(4, 4), "a.q.weight": tensor(4, 4)},
        {"b.conv.weight": {"mask": tensor(4), "kept": tensor(4)}, "b.weight": tensor(4)},
        {"momentum_buffer.weight": tensor(4), "sum": tensor(4), "step": {"w": tensor(4)}},
        {"0": {"sum": tensor(4), "scale": tensor(4)}, "1": {"prev": tensor(4)}},
    ],
)
@pytest.mark.parametrize("key", ["model", "net", "state", "app"])
def test_modules_whose_names_are_those_of_moments_are_weights(key, model):
    assert {*kinds({key: model}).values()} == {"model"}


def test_a_file_with_the_state_of_a_scaler_leaves_nothing_unrecognized():
    scaler = {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    for state in (scaler, {"amp": scaler}):
        leaves = [*leaves_of(state)]
        assert [(kind.names, kind.may_be) for kind in kinds_of(leaves)] == [(("other",), ())] * 5
    beside = {**scaler, "step": 7, "epoch": 1}
    assert kinds(beside)["step"] == "step"
