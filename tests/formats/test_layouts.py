"""What the names under a root mean."""

import pytest

from ckptctl.errors import UsageError
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.layout_tables import TABLES
from ckptctl.formats.frameworks.layouts import compile_pattern, pointed_step, step_name
from ckptctl.formats.frameworks.parts import parts_of
from ckptctl.model import FileInfo, PartFormat


def files(*paths: str) -> tuple[FileInfo, ...]:
    return tuple(FileInfo(path, 10) for path in paths)


@pytest.mark.parametrize(
    ("name", "number", "layout"),
    [
        ("step_1200", 1200, "dcp"),
        ("step-1200", 1200, "torchtitan"),
        ("step1200", 1200, "olmo-core"),
        ("iter_0001200", 1200, "megatron"),
        ("checkpoint-1200", 1200, "transformers"),
        ("checkpoint_12", 12, "accelerate"),
        ("global_step1200", 1200, "deepspeed"),
        ("global_step_1200", 1200, "verl"),
        ("epoch_0_step_1200", 1200, "automodel"),
        ("checkpoint-epoch_00000050-step_00000200", 200, "dcp"),
        ("epoch=0-step=1200.ckpt", 1200, "lightning"),
        ("epoch=3-step=1200-v1.ckpt", 1200, "lightning"),
        ("run--val_loss=1.25-step=1200-last", 1200, "nemo"),
        ("ep0-ba1200", 1200, "composer"),
        ("ep0-ba1200-rank0.pt", 1200, "composer"),
        ("epoch_3", 3, "torchtune"),
        ("dist_epoch_3", 3, "torchtune"),
        ("ba1200-rank0.pt", 1200, "composer"),
        ("ep3.pt", 3, "composer-epochs"),
        ("last-epoch=1-global_step=1200.0.ckpt", 1200, "lightning"),
        ("epoch=03-val_loss=0.35.ckpt", 3, "lightning-epochs"),
        ("epoch=3.ckpt", 3, "lightning-epochs"),
        ("checkpoint_2_1200.pt", 1200, "fairseq"),
        ("checkpoint0003.pth", 3, "epochs"),
        ("epoch-3", 3, "epochs"),
        ("model_epoch_3.pth", 3, "epochs"),
        ("iter1200", 1200, "dcp"),
        ("step_1200.pth.tar", 1200, "dcp"),
        ("checkpoint-12.pth.tar", 12, "epochs"),
        ("step_1200.pt", 1200, "dcp"),
        ("step_007", 7, "dcp"),
        ("step_00000000000000000000000100", 100, "dcp"),
        ("step_0", 0, "dcp"),
    ],
)
def test_a_step_is_known_by_the_name_its_framework_gives_it(name, number, layout):
    named = step_name(name)
    assert named is not None
    assert (named.number, named.layout, named.unfinished) == (number, layout, False)


# What the number in the names of each layout counts.
COUNTED = {
    "torchtitan": "steps",
    "dcp": "steps",
    "olmo-core": "steps",
    "megatron": "steps",
    "automodel": "steps",
    "lightning": "steps",
    "nemo": "steps",
    "nemo-samples": "samples",
    "transformers": "steps",
    "accelerate": "saves",
    "deepspeed": "steps",
    "deepspeed-universal": "steps",
    "verl": "steps",
    "composer": "steps",
    "torchtune": "epochs",
    "lightning-epochs": "epochs",
    "composer-epochs": "epochs",
    "fairseq": "steps",
    "epochs": "epochs",
}


def test_every_layout_is_known_by_what_its_number_counts():
    layouts_with_names = {layout for layout, _ in TABLES.step_names}
    assert set(COUNTED) == layouts_with_names
    for layout, counted in COUNTED.items():
        assert layouts.counts_training_steps(layout) is (counted == "steps"), layout


def test_of_lightning_s_versions_the_highest_comes_first():
    from ckptctl.model import FileInfo
    from ckptctl.selection.roots import read_listing

    names = ["step=200.ckpt", "step=200-v1.ckpt", "step=200-v10.ckpt", "step=200-v2.ckpt"]
    for prefix in ("", "epoch=3-"):
        listing = read_listing(FileInfo(prefix + name, 0, kind="dir") for name in names)
        assert [step.name.removeprefix(prefix) for step in listing.steps] == [
            *("step=200-v10.ckpt", "step=200-v2.ckpt", "step=200-v1.ckpt", "step=200.ckpt")
        ]


@pytest.mark.parametrize(
    "name",
    [
        "old-step-100.bak",
        "my_step_100",
        "step_",
        "step_-5",
        "step_1e3",
        "step_١٢",
        "step_12 ",
        "STEP_12",
        "step_99999999999999999999",
        "latest",
        "logs",
        ".step_12",
        "step_12/x",
        "release",
        "",
    ],
)
def test_a_name_that_only_looks_like_a_step_is_none(name):
    assert step_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "step30-tmp",
        "tmp-checkpoint-30",
        "step_30.tmp",
        "step_30.partial",
        "30.orbax-checkpoint-tmp-1700000000",
        "checkpoint-30.incomplete",
    ],
)
def test_the_name_of_a_save_in_flight_is_a_step_that_is_unfinished(name):
    named = step_name(name)
    assert named is not None
    assert (named.number, named.unfinished) == (30, True)


def test_a_step_may_say_which_attempt_saved_it():
    named = step_name("step_1200.attempt-7")
    assert named is not None
    assert (named.number, named.layout, named.attempt) == (1200, "dcp", 7)
    for name in (
        "1200.attempt-7",
        "step_1200.attempt-0",
        "step_1.attempt-2.attempt-3",
        "step_1.attempt-",
    ):
        assert step_name(name) is None, name


@pytest.mark.parametrize(
    ("name", "number", "layout"),
    [
        ("model_12.pth", 12, "lone"),
        ("model-12.pt", 12, "lone"),
        ("gpt2_iter_1200.pth", 1200, "dcp"),
        ("llama-7b-step-1200-loss=2.25.pt", 1200, "dcp"),
        ("vqgan_epoch_12.pt", 12, "epochs"),
        ("lora-step00001200.safetensors", 1200, "dcp"),
        ("step_1200.safetensors", 1200, "dcp"),
    ],
)
def test_a_file_may_be_a_step_where_there_are_no_others(name, number, layout):
    named = step_name(name)
    assert named is not None
    assert (named.number, named.layout, named.lone) == (number, layout, True)


@pytest.mark.parametrize(
    "name", ["resnet-18.pth", "best_model_3.pt", "optimizer_3.pt", "data_step_3.pt", "12epoch.pth"]
)
def test_a_number_in_the_name_of_a_file_is_not_always_a_step(name):
    assert step_name(name) is None


def test_a_bare_number_needs_a_second_sign():
    named = step_name("1200")
    assert named is not None
    assert named.bare


def test_a_pattern_of_the_users_own_is_the_only_one_that_counts():
    pattern = compile_pattern(r"save-(?P<step>[0-9]+)")
    named = step_name("save-7", pattern)
    assert named is not None
    assert named.number == 7
    assert step_name("step_7", pattern) is None
    assert step_name("xsave-7", pattern) is None


@pytest.mark.parametrize("pattern", ["(", "save-[0-9]+"])
def test_a_pattern_that_cannot_work_is_a_usage_error(pattern):
    with pytest.raises(UsageError, match="--pattern"):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ("step_30", 30),
        ("step_30\n", 30),
        ("30", 30),
        ("/elsewhere/run/step_30/", 30),
        ("iter_0000030", 30),
        ("release", None),
        ("", None),
        ("9" * 40, None),
    ],
)
def test_a_pointer_names_a_step_by_number_name_or_path(content, number):
    assert pointed_step(content, {"step_30": 30}) == number


def test_every_folder_with_metadata_or_shards_is_a_part():
    parts = parts_of(
        files(
            "pp0/.metadata",
            "pp0/__0_0.distcp",
            "pp1/__0_0.distcp",
            "train_state.pt",
            "tokenizer/vocab.json",
        )
    )
    assert [(part.path, part.format) for part in parts] == [
        ("pp0", PartFormat.DCP),
        ("pp1", PartFormat.DCP),
    ]
    assert [file.path for file in parts[0].files] == [".metadata", "__0_0.distcp"]


def test_a_step_saved_without_collectives_is_rank_local():
    (part,) = parts_of(files("__0.metadata", "__0_0.distcp", "__1.metadata"))
    assert part.format is PartFormat.DCP_RANK_LOCAL


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("mp_rank_00_model_states.pt", PartFormat.RANK_FILES),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", PartFormat.RANK_FILES),
        ("mp_rank_00/model_optim_rng.pt", PartFormat.RANK_FILES),
        ("mp_rank_01_003/model_optim_rng.pt", PartFormat.RANK_FILES),
        ("model.weight/.zarray", PartFormat.ZARR),
        ("_CHECKPOINT_METADATA", PartFormat.ORBAX),
        (".snapshot_metadata", PartFormat.TORCHSNAPSHOT),
        ("metadata.pkl", PartFormat.UNKNOWN),
        ("training_state.pt", PartFormat.RANK_FILES),
        ("model.pt", PartFormat.RANK_FILES),
        ("weights.ckpt", PartFormat.RANK_FILES),
        ("shard-00001-model-00001-of-00001.safetensors", PartFormat.SAFETENSORS),
    ],
)
def test_another_format_is_known_by_its_files(path, expected):
    (part,) = parts_of(files(path))
    assert part.format is expected


def test_sidecars_beside_shards_do_not_make_a_step_flat():
    parts = parts_of(files(".metadata", "__0_0.distcp", "optimizer.pt"))
    assert [part.format for part in parts] == [PartFormat.DCP]


def test_a_model_in_safetensors_beside_an_optimizer_in_dcp_is_a_part():
    parts = parts_of(
        files(
            "optim/.metadata",
            "optim/__0_0.distcp",
            "model/shard-00001-model-00001-of-00001.safetensors",
            "model/consolidated/model-00001-of-00001.safetensors",
            "hf/model.safetensors",
        )
    )
    assert [(part.path, part.format) for part in parts] == [
        ("model", PartFormat.SAFETENSORS),
        ("optim", PartFormat.DCP),
    ]


def test_a_pointer_in_the_form_of_a_checkpoint_is_one_only_as_a_link():
    assert layouts.is_pointer(FileInfo("last.ckpt", 0, kind="link", link="step_3"))
    assert not layouts.is_pointer(FileInfo("last.ckpt", 10))
    assert not layouts.is_pointer(FileInfo("latest-rank0.pt", 10))
    assert layouts.is_pointer(FileInfo("latest-rank0.symlink", 10))


def test_what_ckptctl_writes_is_no_part():
    assert parts_of(files(".ckptctl/__0_0.distcp")) == ()


def test_a_stage_that_is_missing_below_the_highest_is_named():
    parts = parts_of(files("pp0/.metadata", "pp3/.metadata"))
    assert layouts.missing_stages(parts) == ("pp1", "pp2")


@pytest.mark.parametrize(
    ("name", "paths", "layout", "missing"),
    [
        (
            "step30",
            ["model_and_optim/.metadata"],
            "olmo-core",
            (".metadata.json", "train/rank0.pt"),
        ),
        ("step30", [".metadata"], "dcp", ()),
        ("epoch=0-step=30.ckpt", [".metadata"], "lightning", ("meta.pt",)),
        ("checkpoint-30", ["optimizer_0/.metadata", "trainer_state.json"], "transformers", ()),
        (
            "checkpoint-30",
            ["pytorch_model_fsdp_0/.metadata"],
            "transformers",
            ("trainer_state.json",),
        ),
        (
            "checkpoint-30",  # the usual name of `save_state` in diffusers and many scripts
            ["pytorch_model_fsdp_0/.metadata", "random_states_0.pkl"],
            "accelerate",
            (),
        ),
        (
            "checkpoint-30",  # a Trainer that keeps such a file beside its own
            ["pytorch_model_fsdp_0/.metadata", "random_states_0.pkl", "trainer_state.json"],
            "transformers",
            (),
        ),
        ("checkpoint-30", [".metadata"], "dcp", ()),
        (
            "checkpoint_30",
            ["pytorch_model_fsdp_0/.metadata"],
            "accelerate",
            ("random_states_0.pkl",),
        ),
        ("checkpoint_30", [".metadata"], "dcp", ()),
        ("step_30", [".metadata", "train_state.pt"], "kempnerforge", ()),
        (
            "iter_0000030",
            [".metadata", "train_state.pt"],
            "megatron-bridge",
            ("run_config.yaml",),
        ),
        (
            "iter_0000030",
            [".metadata", "run_config.yaml"],
            "megatron-bridge",
            ("train_state.pt",),
        ),
        ("iter_0000030", [".metadata", "common.pt"], "megatron", ("metadata.json",)),
        ("iter_0000030", [".metadata"], "megatron", ()),
        ("step-30", [".metadata", "__0_0.distcp"], "torchtitan", ()),
        ("step-30", ["__0_0.distcp"], "torchtitan", ()),
        ("step-30", [], "torchtitan", ()),
        ("step-30", ["model.pt"], "plain-files", ()),
        ("step-30.pt", ["step-30.pt"], "plain-files", ()),
        ("step_30", ["meta.pt", "model.pt"], "plain-files", ()),
        ("step_30", ["train_state.pt", "model.pt"], "plain-files", ()),
        ("iter_30.pth", ["iter_30.pth"], "plain-files", ()),  # mmengine
        ("global_step30.pt", ["global_step30.pt", ".ckptctl/seal.json"], "plain-files", ()),
        ("global_step_30.pt", ["global_step_30.pt"], "plain-files", ()),
        ("epoch_3.pth", ["epoch_3.pth"], "epochs", ()),  # mmengine
        ("epoch=3-step=30.ckpt", ["epoch=3-step=30.ckpt"], "lightning", ()),
        ("checkpoint-3.pth.tar", ["checkpoint-3.pth.tar"], "epochs", ()),  # timm
        ("step_30", ["model.safetensors", ".ckptctl/seal.json"], "plain-files", ()),
        ("step_30", ["shard-00001-model-00001-of-00001.safetensors"], "dcp", ()),
        ("step_30", [".snapshot_metadata", "0/model"], "torchsnapshot", ()),
    ],
)
def test_what_a_framework_writes_last_is_missed(name, paths, layout, missing):
    named = step_name(name)
    assert named is not None
    listed = files(*paths)
    assert layouts.layout_of(named, listed) == layout
    last = layouts.written_last(layout, parts_of(listed), listed)
    assert tuple(name for name in last if name not in paths) == missing


@pytest.mark.parametrize(
    ("name", "rank"),
    [("__0_0.distcp", 0), ("__12_3.distcp", 12), ("__x_0.distcp", None), ("0_0.distcp", None)],
)
def test_the_rank_is_in_the_name_of_a_shard_file(name, rank):
    assert layouts.shard_rank(name) == rank
