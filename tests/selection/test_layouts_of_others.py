"""Steps of frameworks that ckptctl does not integrate, under the names that their sources state.

nanotron `serialize/`; fairseq2 `checkpoint/manager.py`; InternEvo `checkpoint/components.py`;
ColossalAI `booster/booster.py`; OLMo 1 `checkpoint.py`; TinyLlama `pretrain/`; DiT `train.py`;
fvcore `checkpoint.py` (Detectron2, DINOv2); metaseq `checkpoint_utils.py`; nanochat
`checkpoint_manager.py`; VITS `train.py`; Composer 0.32 with `save_folder` and `save_filename` of
several ranks; Ray Train; llama-recipes `model_checkpointing/`; gsplat `simple_trainer.py`;
torchvision `references/`; EDM `training_loop.py`; YOLOX `core/trainer.py`; Ultralytics
`engine/trainer.py`; MMEngine `hooks/checkpoint_hook.py`; ESPnet `train/trainer.py`. The files are
written by `torch.save` and safetensors.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path

import pytest
from made_saves import LONG_AGO_S, optimizer, weights, whole, write

import ckptctl
from ckptctl.findings import Severity

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def nanotron(step: int) -> Iterator[tuple[str, object]]:
    """2 tensor-parallel ranks, 2 stages, 2 data-parallel ranks, ZeRO-1."""
    for pp, tp in product((0, 1), repeat=2):
        block = f"{step}/model/model/decoder/{pp}/pp_block"
        mesh = f"pp-rank-{pp}-of-2_tp-rank-{tp}-of-2"
        yield f"{block}/attn/qkv_proj/model_weight_{mesh}.safetensors", weights(step)
        yield f"{block}/input_layernorm/model_weight.safetensors", weights(step)
        for dp in (0, 1):
            named = [f"model.decoder.{pp}.pp_block.{leaf}.weight" for leaf in ("attn.qkv_proj",)]
            named.append(f"model.decoder.{pp}.pp_block.input_layernorm.weight")
            mesh = f"pp-{pp}-of-2_dp-{dp}-of-2_tp-{tp}-of-2_exp-0-of-1"
            held = {**optimizer(step), "names": dict(enumerate(named))}
            yield f"{step}/optimizer/optimizer_{mesh}.pt", held
            yield f"{step}/lr_scheduler/lr_scheduler_{mesh}.pt", {"last_epoch": step}
            states = {"torch_random_state": torch.get_rng_state()}
            yield f"{step}/random/tp-{tp}-of-2_dp-{dp}-of-2_pp-{pp}-of-2.pt", states
    yield f"{step}/optimizer/optimizer_config.json", {"type": "ZeroDistributedOptimizer"}
    metas = {"last_train_step": step, "consumed_train_samples": 8 * step, "data_stages": [1]}
    yield f"{step}/checkpoint_metadata.json", {"version": "1.4", "tp": 2, "dp": 2, "metas": metas}


def fairseq2(step: int) -> Iterator[tuple[str, object]]:
    for tp, dp in product((0, 1), repeat=2):
        yield f"step_{step}/model/pp_00/tp_{tp:02}/sdp_{dp:02}.pt", weights(step)
        yield f"step_{step}/optimizer/pp_00/tp_{tp:02}/sdp_{dp:02}.pt", optimizer(step)
        yield f"step_{step}/data_reader/dp_{dp:02}.pt", {"position": step}


def internevo(step: int) -> Iterator[tuple[str, object]]:
    for tp, pp in product((0, 1), repeat=2):
        yield f"{step}/model_tp{tp}_pp{pp}.pt", weights(step)
        for zo in (0, 1):
            yield f"{step}/optimizer_tp{tp}_pp{pp}_zo{zo}.pt", optimizer(step)
    yield f"{step}/context.pt", {"step_count": step}


def colossalai(step: int) -> Iterator[tuple[str, object]]:
    folder = f"epoch-0_step-{step}"
    index = dict.fromkeys(weights(step), "pytorch_model-00001.bin")
    yield f"{folder}/model/pytorch_model-00001.bin", weights(step)
    yield f"{folder}/model/pytorch_model.bin.index.json", {"weight_map": index}
    index = {"0": "pytorch_optim-00001.bin"}
    groups = {"param_groups": "pytorch_optim_group.bin"}
    document = {"metadata": groups, "weight_map": index}
    yield f"{folder}/optimizer/pytorch_optim.bin.index.json", document
    yield f"{folder}/optimizer/pytorch_optim-00001.bin", optimizer(step)["state"]
    yield f"{folder}/optimizer/pytorch_optim_group.bin", optimizer(step)["param_groups"]


def of_composers_ranks(step: int) -> Iterator[tuple[str, object]]:
    for rank in (0, 1):
        yield f"ep0-ba{step}/rank{rank}.pt", {"state": whole(step), "rng": [1, 2]}


def metaseq(step: int) -> Iterator[tuple[str, object]]:
    for part, shard in product((0, 1), repeat=2):
        yield f"checkpoint_{step}-model_part-{part}-shard{shard}.pt", whole(step)


def dinov2(step: int) -> Iterator[tuple[str, object]]:
    for rank in (0, 1):
        yield f"model_{step:07}.rank_{rank}.pth", whole(step)


def nanochat(step: int) -> Iterator[tuple[str, object]]:
    yield f"model_{step:06}.pt", weights(step)
    yield f"meta_{step:06}.json", {"step": step, "dataloader_state_dict": {"rg_idx": step}}
    for rank in (0, 1):
        yield f"optim_{step:06}_rank{rank}.pt", optimizer(step)


def vits(step: int) -> Iterator[tuple[str, object]]:
    for name in "GD":
        yield f"{name}_{step}.pth", whole(step)


def llama_recipes(epoch: int) -> Iterator[tuple[str, object]]:
    for name in ("meta-llama--Llama-3.1-8B", "optimizer-meta-llama--Llama-3.1-8B"):
        yield f"{name}-{epoch}.pt", (optimizer if "optim" in name else weights)(epoch)


def by_kind_and_epoch(epoch: int) -> Iterator[tuple[str, object]]:
    yield f"model_epoch_{epoch}.pth", weights(epoch)
    yield f"optimizer_epoch_{epoch}.pth", optimizer(epoch)
    yield f"scheduler_epoch_{epoch}.pth", {"last_epoch": epoch}


def by_rank(step: int) -> Iterator[tuple[str, object]]:
    for rank in (0, 1):
        yield f"ckpt_{step}_rank{rank}.pt", whole(step)


def one_file(name: str) -> Callable[[int], Iterator[tuple[str, object]]]:
    return lambda step: iter([(name.format(step), whole(step))])


TREES: Mapping[str, tuple[Callable[[int], Iterator[tuple[str, object]]], str]] = {
    "nanotron": (nanotron, "{}"),
    "fairseq2": (fairseq2, "step_{}"),
    "InternEvo": (internevo, "{}"),
    "ColossalAI": (colossalai, "epoch-0_step-{}"),
    "Composer": (of_composers_ranks, "ep0-ba{}"),
    "Ray Train": (one_file("checkpoint_{:06}/checkpoint.pt"), "checkpoint_{:06}"),
    "OLMo 1": (one_file("step{}-unsharded/model.pt"), "step{}-unsharded"),
    "TinyLlama": (one_file("iter-{:06}-ckpt.pth"), "iter-{:06}-ckpt.pth"),
    "DiT": (one_file("{:07}.pt"), "{:07}.pt"),
    "Detectron2": (one_file("model_{:07}.pth"), "model_{:07}.pth"),
    "metaseq": (metaseq, "@{}"),
    "DINOv2": (dinov2, "@{}"),
    "nanochat": (nanochat, "@{}"),
    "VITS": (vits, "@{}"),
    "llama-recipes": (llama_recipes, "@{}"),
    "files by kind and epoch": (by_kind_and_epoch, "@{}"),
    "gsplat": (by_rank, "@{}"),
    "torchvision": (one_file("model_{}.pth"), "model_{}.pth"),
    "EDM": (one_file("training-state-{:06}.pt"), "training-state-{:06}.pt"),
    "YOLOX": (one_file("epoch_{}_ckpt.pth"), "epoch_{}_ckpt.pth"),
    "Ultralytics": (one_file("epoch{}.pt"), "epoch{}.pt"),
    "MMEngine": (one_file("iter_{}.pth"), "iter_{}.pth"),
    "a loop of one's own": (one_file("gpt2-step-{}-loss=2.25.pt"), "gpt2-step-{}-loss=2.25.pt"),
}


def saved(root: Path, framework: str, *steps: int) -> Path:
    """A root with steps of a framework; the address of the last, as `pick` prints it."""
    files, name = TREES[framework]
    for step in steps:
        for path, value in files(step):
            write(root / path, value)
    named = name.format(steps[-1])
    return Path(f"{root}{named}") if named.startswith("@") else root / named


def files_of(root: Path, framework: str, step: int) -> list[Path]:
    """The files of a step that its address leads to."""
    files, name = TREES[framework]
    paths = [path for path, _ in files(step)]
    folder = name.format(step)
    return [root / path for path in paths if folder[0] == "@" or path.startswith(folder)]


def faults(report: ckptctl.Report) -> set[str]:
    return {finding.code for finding in report.with_severity(Severity.FAULT)}


@pytest.mark.parametrize("framework", TREES)
def test_a_sound_step_is_chosen_and_each_file_that_is_lost_or_cut_short_rules_it_out(
    tmp_path, framework
):
    newest = saved(tmp_path, framework, 10, 20)
    assert ckptctl.pick(str(tmp_path)).path == str(newest)
    files = files_of(tmp_path, framework, 20)
    kinds = [re.sub(r"\d+", "0", str(file.relative_to(tmp_path))) for file in files]
    for n, (file, kind) in enumerate(zip(files, kinds, strict=True)):
        data = file.read_bytes()
        damages = (None, b"", data[: len(data) // 2], bytes(len(data)))
        # Files of ranks differ in numbers only: of more than two, those between get one damage.
        between = kind in kinds[:n] and kind in kinds[n + 1 :]
        for damage in damages[n % 4 :][:1] if between else damages:
            file.unlink()
            if damage is not None:
                file.write_bytes(damage)
                os.utime(file, (LONG_AGO_S, LONG_AGO_S))
            chosen = ckptctl.pick(str(tmp_path), grace_s=0)
            assert chosen.path != str(newest), (file, damage and len(damage))
            if len(files) > 1:  # what is left of the step is reported
                assert [one.report.number for one in chosen.passed_over] == [20], file
            file.write_bytes(data)
            os.utime(file, (LONG_AGO_S, LONG_AGO_S))
    assert ckptctl.pick(str(tmp_path)).path == str(newest)


@pytest.mark.parametrize("framework", ["nanotron", "fairseq2", "InternEvo"])
def test_every_rank_of_a_mesh_is_missed(tmp_path, framework):
    step = saved(tmp_path, framework, 10, 20)
    assert ckptctl.verify(str(step)).exit_code == 0
    files = [path for path in step.rglob("*") if path.suffix in (".pt", ".safetensors")]
    for file in files:
        if file.parent.name == "data_reader" or file.name == "context.pt":
            continue  # no framework's names and no other kind state their number
        aside = file.rename(tmp_path / "aside")
        report = ckptctl.verify(str(step), grace_s=0)
        assert (report.exit_code, faults(report)) == (20, {"file.missing"}), file
        aside.rename(file)


def test_the_state_of_one_rank_alone_is_no_mesh(tmp_path):
    step = saved(tmp_path, "DiT", 10)
    folder = tmp_path / "step_20"
    folder.mkdir()
    step.rename(folder / "model.pt")
    write(folder / "tp_rank_3_pp_rank_1.pt", {"x": 1})
    assert ckptctl.verify(str(folder)).exit_code == 0


class PartialState:
    """Pickled as accelerate's, of which only the attributes are read."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes


def of_transformers(root: Path) -> tuple[Path, list[str]]:
    step = root / "checkpoint-10"
    write(step / "model.safetensors", weights(10))
    write(step / "optimizer.pt", optimizer(10))
    write(step / "trainer_state.json", {"global_step": 10})
    write(step / "training_args.bin", Namespace(distributed_state=PartialState(4)))
    for rank in range(4):
        write(step / f"rng_state_{rank}.pth", {"cpu": torch.get_rng_state()})
    return step, ["rng_state_3.pth"]


def of_megatron(root: Path) -> tuple[Path, list[str]]:
    step = root / "iter_0000010"
    args = Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    for tp, pp in product((0, 1), repeat=2):
        folder = step / f"mp_rank_{tp:02}_{pp:03}"
        write(folder / "model_optim_rng.pt", {**whole(10), "args": args})
        write(folder / "distrib_optim.pt", optimizer(10))
    last = [f"mp_rank_{tp:02}_001" for tp in (0, 1)]
    return step, [f"{one}/{name}" for one in last for name in os.listdir(step / one)]


def of_composer(root: Path) -> tuple[Path, list[str]]:
    for rank in range(3):
        write(root / f"ep0-ba10-rank{rank}.pt", {"state": whole(10), "rng": [1, 2, 3]})
    return root, ["ep0-ba10-rank2.pt"]


@pytest.mark.parametrize("made", [of_transformers, of_megatron, of_composer])
def test_the_loss_of_the_last_rank_is_proven_by_what_the_others_hold(tmp_path, made):
    step, last = made(tmp_path)
    name = f"{step}@10" if made is of_composer else str(step)
    assert ckptctl.verify(name).exit_code == 0
    for file in last:
        (step / file).unlink()
    report = ckptctl.verify(name, grace_s=0)
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})
    assert all(file in " ".join(f.message for f in report.findings) for file in last)


def test_no_older_step_without_an_optimizer_is_a_substitute_for_a_damaged_one(tmp_path):
    for step in (10, 20):
        write(tmp_path / f"step_{step}.pt", {"model": weights(step)})
    write(tmp_path / "step_30.pt", whole(30))
    assert ckptctl.pick(str(tmp_path)).step == 30
    flipped = bytearray((tmp_path / "step_30.pt").read_bytes())
    at = flipped.index(torch.full((8, 8), 30.0).numpy().tobytes())
    flipped[at] ^= 0xFF
    (tmp_path / "step_30.pt").write_bytes(flipped)
    chosen = ckptctl.pick(str(tmp_path), level="content", grace_s=0)
    assert (chosen.exit_code, chosen.chosen) == (11, None)
    assert "lacks the optimizer, which step 30" in chosen.passed_over[1].reason
    without = ckptctl.pick(str(tmp_path), level="content", grace_s=0, allow_missing_state=True)
    assert without.step == 20


@pytest.mark.parametrize("export", ["lora-step00000030.safetensors", "model_30.pth"])
def test_exports_are_steps_only_where_a_root_has_no_others(tmp_path, export):
    value = weights(30) if export.endswith(".safetensors") else whole(30)
    write(tmp_path / export, value)
    assert ckptctl.pick(str(tmp_path)).path == str(tmp_path / export)
    step = "checkpoint-20.pth.tar"
    write(tmp_path / step, whole(20))
    assert ckptctl.pick(str(tmp_path)).path == str(tmp_path / step)
    assert any(export in finding.message for finding in ckptctl.scan(str(tmp_path)).findings)


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (("ckpt-ep1-iter5.pth", "ckpt-ep1-iter9.pth", "ckpt-ep2-iter5.pth"), "ckpt-ep2-iter5.pth"),
        (("m_epoch_0_step_900.pt", "m_epoch_1_step_100.pt"), "m_epoch_1_step_100.pt"),
        (("m_epoch_0_step_900.pt", "m_epoch_1_step_1000.pt"), "m_epoch_1_step_1000.pt"),
        (("m_epoch_2_step_3.pt", "m_epoch_2_step_7.pt"), "m_epoch_2_step_7.pt"),
    ],
)
def test_a_step_that_is_counted_from_the_begin_of_its_epoch_follows_those_of_earlier_epochs(
    tmp_path, names, newest
):
    for name in names:
        write(tmp_path / name, whole(1))
    assert ckptctl.pick(str(tmp_path)).path == str(tmp_path / newest)
    (tmp_path / newest).write_bytes(b"")
    older = ckptctl.pick(str(tmp_path), grace_s=0)
    assert older.path == str(tmp_path / names[-2])


def test_files_side_by_side_of_one_step_in_several_epochs_are_not_mixed(tmp_path):
    for epoch, step in ((1, 5), (2, 3), (2, 5)):
        for kind in ("model", "optimizer"):
            write(tmp_path / f"{kind}_ep{epoch}_iter{step}.pt", whole(1))
    found = ckptctl.pick(str(tmp_path))
    assert (found.step, found.path) == (2, f"{tmp_path}@2")
    shown = ckptctl.show(found.path)
    assert {tensor.file for tensor in shown.tensors} == {
        "model_ep2_iter5.pt",
        "optimizer_ep2_iter5.pt",
    }


@pytest.mark.parametrize(
    "names",
    [
        ("resnet-18.pth", "resnet-50.pth", "vit_base_patch16_224.pth"),
        ("best_model_10.pth", "model_best.pth.tar"),
        ("optimizer.bin", "optimizer_1.bin", "scheduler.bin", "scheduler_1.bin", "model.bin"),
        ("model_world_size_2_rank_0.pt", "optim_world_size_2_rank_0.pt"),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("12epoch.pth", "checkpoint.pth"),
        ("last.pt", "best.pt"),
        ("1000.pdparams", "1000.pdopt"),
        ("rl_model_1000_steps.zip",),
        ("streaming_train_state_1000",),
        ("g_00001000",),
        ("epoch_12.pkl",),
        ("predictions_epoch_3.pt", "predictions_epoch_4.pt"),
        ("loss_step_100.pt",),
        ("grads-step-100.pt",),
    ],
)
def test_weights_without_the_number_of_a_step_are_neither_a_step_nor_a_fresh_run(tmp_path, names):
    for name in names:
        value = weights(1) if name.endswith(".safetensors") else whole(1)
        write(tmp_path / name, value)
    with pytest.raises(ckptctl.UsageError):
        ckptctl.pick(str(tmp_path))


def test_a_file_of_another_step_among_those_side_by_side_is_found_by_what_it_counts(tmp_path):
    saved(tmp_path, "VITS", 5, 10)
    paths = {step: files_of(tmp_path, "VITS", step)[-1] for step in (5, 10)}
    paths[10].write_bytes(paths[5].read_bytes())
    chosen = ckptctl.pick(str(tmp_path), level="structure", grace_s=0)
    assert (chosen.step, chosen.path) == (5, f"{tmp_path}@5")
    report = ckptctl.verify(f"{tmp_path}@10", grace_s=0)
    assert (report.exit_code, faults(report)) == (21, {"state.mixed"})


def test_what_is_left_of_files_that_differ_by_kind_is_reported(tmp_path):
    saved(tmp_path, "files by kind and epoch", 1, 2)
    write(tmp_path / "model_epoch_3.pth", weights(3))
    chosen = ckptctl.pick(str(tmp_path), grace_s=0)
    assert chosen.path == f"{tmp_path}@2"
    assert "optimizer" in chosen.passed_over[0].reason


@pytest.mark.parametrize("is_there", [True, False])
def test_the_pointer_of_mmengine_is_a_hint_and_proves_a_save(tmp_path, is_there):
    (tmp_path / "last_checkpoint").write_text("/elsewhere/work_dirs/run/iter_30.pth")
    if is_there:
        write(tmp_path / "iter_20.pth", whole(20))
        assert ckptctl.pick(str(tmp_path)).step == 20
        (finding,) = ckptctl.scan(str(tmp_path)).findings
        assert finding.code == "pointer.differs"
    else:
        assert ckptctl.pick(str(tmp_path)).exit_code == 11
