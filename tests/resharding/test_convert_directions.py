"""DCP to one file and safetensors to DCP preserve every value."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, run_on_full_disk, validated
from command_line import run_ckptctl as run_alone
from damage import flip
from made_steps import grid, octets, read_step, write_step
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl.formats.archive.directory import parse_directory, tail_needed
from ckptctl.formats.archive.safetensors import NAMES
from ckptctl.formats.archive.writing import WRITABLE, Archive

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


def check_same(ours: object, theirs: object) -> None:
    import torch

    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(octets(ours), octets(theirs.contiguous()))
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            check_same(ours[key], value)
    elif isinstance(theirs, list | tuple):
        assert isinstance(ours, list | tuple)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            check_same(one, other)
    else:
        assert ours == theirs


def every_dtype(names: object) -> dict:
    import torch

    raw = torch.arange(4 * 6 * 16, dtype=torch.int64).to(torch.uint8)
    made = {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}
    for dtype in sorted(names):  # type: ignore[call-overload]
        data = raw % 2 if dtype == "bool" else raw
        made[dtype] = data.clone().view(getattr(torch, dtype)).reshape(4, -1)
    return made


def saved(folder: Path, tensors: dict, name: str = "model.safetensors") -> Path:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True, parents=True)
    save_file(tensors, folder / name, {"format": "pt"})
    return folder / name


@pytest.mark.parametrize("variant", ["run_fsdp4", "tp_fsdp_2x2", "uneven_8"])
def test_torch_reads_from_the_file_what_its_own_converter_gives(checkpoints, tmp_path, variant):
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    step = sorted((checkpoints / variant).glob("step_*"))[-1]
    answer = ckptctl.convert(str(step), str(tmp_path / "ours.pt"))
    assert (answer.written, answer.format, answer.n_left_out) == (True, "flat", 0)
    dcp_to_torch_save(step, tmp_path / "theirs.pt")
    ours = torch.load(tmp_path / "ours.pt", weights_only=True)
    check_same(ours, torch.load(tmp_path / "theirs.pt", weights_only=False))
    assert sorted(os.listdir(tmp_path)) == ["ours.pt", "theirs.pt"]


def test_every_dtype_and_cut_goes_there_and_back_with_the_same_bytes(tmp_path):
    import torch

    made = every_dtype(WRITABLE)
    tensors = {
        f"model.{name}": (tensor, grid(tensor.shape, [[1, 3], [2]][: tensor.dim()]))
        for name, tensor in made.items()
    }
    step = tmp_path / "a" / "step_1"
    write_step(step, tensors, {"step": 1200}, transposed=True)
    answer = ckptctl.convert(str(step), str(tmp_path / "flat.pt"))
    assert answer.written, answer.report.findings
    found = torch.load(tmp_path / "flat.pt", weights_only=True)
    check_same(found, {"step": 1200, "model": made})
    back = tmp_path / "b" / "step_1"
    assert ckptctl.convert(str(tmp_path / "flat.pt"), str(back), world_size=3).written
    assert ckptctl.diff(str(step), str(back), values=True).same


class _Hostile:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.canary,))


def test_values_that_are_plain_go_along_and_others_are_left_out_by_name(tmp_path):
    import torch

    plain = {
        "step": 1 << 70,
        "lr": 2.5,
        "name": "ünï\ud800",
        "raw": b"\xff\0",
        "dtype": torch.bfloat16,
        "list": [1, None, True, (1, "a")],
        "dict": {"a": {1: -3.0}},
    }
    canary = tmp_path / "canary"
    others = plain | {"set": {1}, "deep": [torch.ones(2)]}
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"model.w": (weight, grid((2, 3), [[1], []]))}
    write_step(tmp_path / "step_1", tensors, others)
    done = run_ckptctl("convert", tmp_path / "step_1", tmp_path / "flat.pt", "--json")
    document = validated(done.stdout)
    assert (done.returncode, document["n_left_out"]) == (0, 2)
    (finding,) = document["findings"]
    assert finding["code"] == "state.left-out"
    assert "set holds an object of" in finding["message"]
    write_step(tmp_path / "step_2", tensors, others | {"hostile": _Hostile(canary)})
    done = run_ckptctl("convert", tmp_path / "step_2", tmp_path / "hostile.pt", "--json")
    assert (done.returncode, validated(done.stdout)["written"]) == (25, False)
    found = torch.load(tmp_path / "flat.pt", weights_only=True)
    check_same(found, plain | {"model": {"w": weight}})
    assert not canary.exists()


def test_a_source_whose_name_is_no_unicode_is_converted_as_any_other(tmp_path):
    import torch

    weight = torch.arange(6.0).reshape(2, 3)
    strange = os.fsdecode(b"\xff")
    write_step(tmp_path / strange / "step_1", {"model.w": (weight, grid((2, 3), [[1], []]))})
    step = str(tmp_path / strange / "step_1")
    assert ckptctl.convert(step, str(tmp_path / f"{strange}.safetensors")).written
    assert ckptctl.convert(step, str(tmp_path / f"{strange}.pt")).written
    back = str(tmp_path / f"{strange} back" / "step_1")
    assert ckptctl.convert(str(tmp_path / f"{strange}.pt"), back).written
    assert ckptctl.diff(step, back, values=True).same
    model = str(tmp_path / f"{strange}.safetensors")
    made = str(tmp_path / f"{strange} made" / "step_1")
    assert ckptctl.convert(model, made, accept_unverifiable=True).written


@pytest.mark.parametrize("target", ["flat.pt", "one.safetensors"])
def test_damage_ends_it_before_the_file_appears(tmp_path, target):
    import torch

    weight = torch.arange(64 * 256, dtype=torch.float32).reshape(64, 256)
    write_step(tmp_path / "step_1", {"model.w": (weight, grid((64, 256), [[32], [100]]))})
    shard = tmp_path / "step_1" / "__0_0.distcp"
    flip(shard, 9000)
    answer = ckptctl.convert(str(tmp_path / "step_1"), str(tmp_path / target))
    assert answer.exit_code == 21
    assert "record.crc" in [finding.code for finding in answer.report.findings]
    assert not (tmp_path / target).exists()


def test_a_file_that_is_there_is_kept(checkpoints, tmp_path):
    (tmp_path / "flat.pt").write_text("mine")
    with pytest.raises(ckptctl.UsageError, match="already exists"):
        ckptctl.convert(str(checkpoints / "fsdp_2" / "step_100"), str(tmp_path / "flat.pt"))
    assert (tmp_path / "flat.pt").read_text() == "mine"


def test_a_disk_that_fills_up_meanwhile_leaves_no_file(checkpoints, tmp_path):
    done = run_on_full_disk(
        2_000, "convert", checkpoints / "run_fsdp4" / "step_300", tmp_path / "flat.pt"
    )
    assert done.returncode == 75, done.stderr
    assert "File too large" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.long
@pytest.mark.parametrize("target", ["flat.pt", "served"])
def test_killed_at_any_moment_what_is_there_is_whole(tmp_path, target):
    import torch

    weight = torch.arange(1 << 24, dtype=torch.float32).reshape(1 << 12, 1 << 12)
    step = tmp_path / "a" / "step_1"
    write_step(step, {f"model.{n}": (weight, grid(weight.shape, [[999], []])) for n in "abc"})
    words = ["convert", step, tmp_path / target, "--jobs", 1]
    chance = random.Random(3)
    n_killed = 0
    for _ in range(12):
        process = subprocess.Popen(
            [*COMMAND, *map(str, words)],
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(chance.uniform(0.1, 0.8))
        process.send_signal(signal.SIGKILL)
        n_killed += process.wait() == -signal.SIGKILL
        if (tmp_path / target).exists():
            break
    assert n_killed
    if not (tmp_path / target).exists():
        assert run_ckptctl(*words).returncode == 0
    if target == "flat.pt":
        found = torch.load(tmp_path / target, weights_only=True)["model"]
        assert all(torch.equal(tensor, weight) for tensor in found.values())
    back = tmp_path / "b" / "step_1"
    words = ["convert", tmp_path / target, back, "--accept-unverifiable"]
    assert run_ckptctl(*words).returncode == 0
    assert ckptctl.diff(str(step), str(back), values=True).same


@pytest.mark.parametrize(
    "paths", [[("a",), ("a", "b")], [("a", 0), ("a", "b")], [("a", 1 << 40)], [("a",) * 200]]
)
def test_key_paths_that_are_no_state_dict_are_refused(paths):
    from ckptctl.formats.archive.state_file import FlatEntry, NotPlain, nested

    with pytest.raises(NotPlain):
        nested([FlatEntry(path, 1) for path in paths])


@pytest.mark.parametrize("sizes", [[5 << 30, 3, 0, 7], [1] * 70_000])
def test_an_archive_of_any_length_says_where_each_storage_lies(sizes):
    archive = Archive(b"\x80\x02}.", sizes)
    tail = archive.between([7] * len(sizes))
    assert tail_needed(tail, archive.n_bytes) <= len(tail)
    members = parse_directory(tail, archive.n_bytes).members
    assert [m.size for m in members if m.name.startswith("data/")] == sizes
    assert all(m.start % 64 == 0 for m in members)


def test_stock_load_gives_every_tensor_of_a_model_in_safetensors(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    model = every_dtype(NAMES)
    source, step = saved(tmp_path / "model", model), tmp_path / "run" / "step_0"
    answer = ckptctl.convert(
        str(source), str(step), world_size=3, under="model", accept_unverifiable=True
    )
    assert (answer.written, answer.format, answer.n_tensors) == (True, "dcp", len(model))
    found = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.items()}}
    dcp.load(found, checkpoint_id=str(step))
    check_same(found, {"model": model})
    sealed = ckptctl.verify(str(step), level=ckptctl.Level.CONTENT, require_seal=True)
    assert sealed.exit_code == 0
    again = tmp_path / "again.safetensors"
    assert ckptctl.convert(str(step), str(again), strip="model.").written
    from safetensors.torch import load_file

    check_same(load_file(again), model)


def sharded(folder: Path) -> dict:
    """A model in two files with an index, and one file more that the index does not name."""
    import torch

    model = {f"layer.{n}": torch.arange(900.0).reshape(30, 30) + n for n in range(4)}
    files = {}
    for number, names in ((1, ["layer.0", "layer.1"]), (2, ["layer.2", "layer.3"])):
        name = f"model-0000{number}-of-00002.safetensors"
        saved(folder, {one: model[one] for one in names}, name)
        files |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": 14400}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    saved(folder, {"other": torch.ones(3)}, "consolidated.safetensors")
    (folder / "config.json").write_text("{}")
    return model


@pytest.mark.parametrize("named", ["", "model.safetensors.index.json"])
def test_a_sharded_model_is_what_its_index_names(tmp_path, named):
    import torch
    import torch.distributed.checkpoint as dcp

    model = sharded(tmp_path / "model")
    step = tmp_path / "run" / "step_0"
    source = tmp_path / "model" / named
    answer = ckptctl.convert(str(source), str(step), world_size=2, accept_unverifiable=True)
    assert (answer.written, answer.n_tensors) == (True, 4), answer.report.findings
    if not named:
        assert ["consolidated.safetensors" in one.message for one in answer.findings] == [True]
    found = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    dcp.load(found, checkpoint_id=str(step))
    check_same(found, model)


@pytest.mark.parametrize("in_safetensors", [True, False])
def test_the_files_of_one_save_become_a_step_that_a_checkpointer_resumes(tmp_path, in_safetensors):
    import torch

    from ckptctl.train import Checkpointer

    def parts():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def train(model, optimizer, scheduler):
        model(torch.randn(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    old = parts()
    for _ in range(3):
        train(*old)
    save = tmp_path / "run" / "checkpoint-3"
    save.mkdir(parents=True)
    if in_safetensors:
        saved(save, old[0].state_dict())
    else:
        torch.save(old[0].state_dict(), save / "pytorch_model.bin")
    torch.save(old[1].state_dict(), save / "optimizer.pt")
    torch.save(old[2].state_dict(), save / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, save / "rng_state.pth")
    (save / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    accept = ["--accept-unverifiable"] if in_safetensors else []
    target = tmp_path / "new" / "checkpoint-3"
    done = run_ckptctl("convert", save, target, *accept, "--json")
    assert (done.returncode, validated(done.stdout)["findings"]) == (0, [])
    assert {path.name for path in target.iterdir()} >= {"scheduler.pt", "trainer_state.json"}
    train(*old)
    new = parts()
    names = ("model", "optimizer", "scheduler")
    with Checkpointer(str(target.parent), **dict(zip(names, new, strict=True))) as ckpt:
        assert ckpt.resume("auto").step == 3
    train(*new)
    for ours, theirs in zip(new, old, strict=True):
        check_same(dict(ours.state_dict()), dict(theirs.state_dict()))


def save_of_accelerate(folder: Path, n_models: int, n_optimizers: int) -> Path:
    """A save of accelerate, whose models hold their numbers, as the optimizers' moments do."""
    import torch

    folder.mkdir(parents=True)
    for number in range(n_models):
        suffix = f"_{number}" if number else ""
        saved(folder, {"w": torch.full((3,), float(number))}, f"model{suffix}.safetensors")
    for number in range(n_optimizers):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=float(number), momentum=0.5)
        weight.grad = torch.full((3,), float(number))
        optimizer.step()
        suffix = f"_{number}" if number else ""
        torch.save(optimizer.state_dict(), folder / f"optimizer{suffix}.bin")
    states = {"step": 3, "torch_manual_seed": torch.get_rng_state()}
    torch.save(states, folder / "random_states_0.pkl")
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    return folder


def test_each_model_and_optimizer_of_accelerate_is_the_part_of_its_number(tmp_path):
    save = save_of_accelerate(tmp_path / "run" / "step_4", 2, 12)
    target = tmp_path / "new" / "step_4"
    assert ckptctl.convert(str(save), str(target), accept_unverifiable=True).written
    for number in range(12):
        held = read_step(target / f"optimizer_{number}")
        momentum = held["optimizer.state.0.momentum_buffer"]
        assert momentum.tolist() == [number] * 3
    for number in range(2):
        held = read_step(target / f"pytorch_model_fsdp_{number}")
        assert held["model.w"].tolist() == [number] * 3


@pytest.mark.parametrize("lost", ["optimizer.bin", "optimizer_1.bin", "model.safetensors"])
def test_a_save_of_accelerate_that_lacks_an_earlier_number_is_not_complete(tmp_path, lost):
    save = save_of_accelerate(tmp_path / "run" / "step_4", 2, 3)
    (save / lost).unlink()
    answer = ckptctl.convert(str(save), str(tmp_path / "new" / "step_4"), accept_unverifiable=True)
    assert (answer.written, answer.exit_code) == (False, 20)
    assert ("file.missing", lost) in [(one.code, one.where) for one in answer.report.findings]


def save_of_transformers(folder: Path, step: int) -> Path:
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    saved(folder, model.state_dict())
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def test_a_name_of_another_step_than_the_train_state_counts_is_refused(tmp_path):
    save = save_of_transformers(tmp_path / "run" / "checkpoint-4", 4)
    words = ("convert", save, tmp_path / "new" / "checkpoint-40", "--accept-unverifiable")
    done = run_alone(*words)
    assert done.returncode == 2
    assert "is a name for step 40, and the train state of" in done.stderr
    following = shlex.split(done.stderr.split("next:")[1])
    assert following[3] == str(tmp_path / "new" / "checkpoint-4")
    assert run_alone(*following[1:]).returncode == 0
    # What counts saves states no step, and a model alone begins a run.
    for name, only_model in (("checkpoint_0", False), ("step_0", True)):
        target = str(tmp_path / name / name)
        answer = ckptctl.convert(str(save), target, only_model=only_model, accept_unverifiable=True)
        assert answer.written


@pytest.mark.parametrize("other", ["adapter_model.safetensors", "ema.safetensors"])
def test_other_safetensors_beside_a_save_are_not_of_its_model(tmp_path, other):
    import torch

    save = save_of_transformers(tmp_path / "run" / "checkpoint-4", 4)
    saved(save, {"other": torch.ones(3)}, other)
    for only_model in (False, True):
        with pytest.raises(ckptctl.UsageError, match=f"{other} beside the train state"):
            ckptctl.convert(
                str(save),
                str(tmp_path / "new" / "checkpoint-4"),
                only_model=only_model,
                accept_unverifiable=True,
            )


@pytest.mark.parametrize("other", ["pytorch_model.bin", "optimizer_1.bin"])
def test_train_state_is_left_out_on_demand_only(tmp_path, other):
    import torch

    save = save_of_transformers(tmp_path / "run" / "checkpoint-4", 4)
    torch.save({"other": torch.ones(3)}, save / other)
    done = run_alone("convert", save, tmp_path / "new" / "checkpoint-4", "--accept-unverifiable")
    assert done.returncode == 2
    assert other in done.stderr
    following = shlex.split(done.stderr.split("next:")[1])
    assert following[-2:] == ["--only", "model"]
    assert run_alone(*following[1:]).returncode == 0
    assert read_step(tmp_path / "new" / "checkpoint-4").keys() == {"weight", "bias"}


def test_the_file_of_an_optimizer_is_never_given_as_one_of_the_whole_state(tmp_path):
    import torch

    folder = tmp_path / "run" / "step_4"
    folder.mkdir(parents=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in (1, 2):
        name = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({f"layer.{number}": torch.ones(3)}, folder / name)
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    done = run_alone("convert", folder, tmp_path / "new" / "step_4")
    assert done.returncode == 2
    assert done.stderr.split("next:")[1].split() == ["ckptctl", "show", str(folder)]


def test_a_damaged_file_of_one_save_ends_its_conversion(tmp_path):
    import torch

    save = tmp_path / "run" / "checkpoint-3"
    save.mkdir(parents=True)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), save / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), save / "optimizer.pt")
    (save / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    flip(save / "optimizer.pt", (save / "optimizer.pt").stat().st_size // 2)
    for file in save.iterdir():
        os.utime(file, (1e9, 1e9))
    done = run_ckptctl("convert", save, tmp_path / "new" / "checkpoint-3", "--json")
    document = validated(done.stdout)
    assert (done.returncode, document["written"]) == (21, False)
    assert "optimizer.pt" in document["report"]["findings"][0]["where"]
    assert not (tmp_path / "new" / "checkpoint-3").exists()


def test_without_a_seal_nothing_proves_safetensors_and_with_one_every_byte(tmp_path):
    sharded(tmp_path / "model")
    words = ("convert", tmp_path / "model", tmp_path / "run" / "step_0", "--json")
    done = run_ckptctl(*words)
    document = validated(done.stdout)
    assert (done.returncode, document["report"]["verdict"]) == (22, "unverifiable")
    assert document["next_command"].endswith(" --accept-unverifiable")
    assert not (tmp_path / "run").exists()
    ckptctl.seal(str(tmp_path / "model"), accept_unverifiable=True)
    assert ckptctl.convert(str(words[1]), str(words[2])).written
    path = tmp_path / "model" / "model-00001-of-00002.safetensors"
    flip(path, -5)
    again = ckptctl.convert(str(words[1]), str(tmp_path / "run" / "step_1"))
    assert again.exit_code == 21
    assert "seal.digest" in [finding.code for finding in again.report.findings]


def test_boxes_that_ranks_wrote_in_safetensors_are_put_together(checkpoints, tmp_path):
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    step = tmp_path / "run" / "step_0"
    source = checkpoints / "hf_2" / "step_100"
    assert ckptctl.convert(str(source), str(step), accept_unverifiable=True).written
    import torch
    import torch.distributed.checkpoint as dcp

    reader = HuggingFaceStorageReader(str(source))
    shapes = {fqn: e.size for fqn, e in reader.read_metadata().state_dict_metadata.items()}
    ours, theirs = ({fqn: torch.zeros(size) for fqn, size in shapes.items()} for _ in range(2))
    dcp.load(ours, checkpoint_id=str(step))
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(source)))
    assert ours
    check_same(ours, theirs)


@pytest.mark.parametrize("broken", ["short", "header"])
def test_safetensors_that_are_not_whole_are_refused(tmp_path, broken):
    path = saved(tmp_path, every_dtype({"float32"}))
    data = path.read_bytes()
    path.write_bytes(data[:-3] if broken == "short" else data[:9] + b"\xff" + data[10:])
    answer = ckptctl.convert(str(path), str(tmp_path / "step_0"), accept_unverifiable=True)
    assert answer.exit_code == (20 if broken == "short" else 21), answer.report.findings
    assert not (tmp_path / "step_0").exists()


def test_links_are_not_followed_and_the_way_round_them_is_told(tmp_path):
    import torch

    sharded(tmp_path / "blobs")
    (tmp_path / "model").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    answer = ckptctl.convert(str(tmp_path / "model"), str(tmp_path / "run" / "step_0"))
    assert (answer.exit_code, answer.written) == (2, False)
    assert answer.next_command is not None
    subprocess.run(shlex.split(answer.next_command), check=True)
    copied = ckptctl.convert(
        f"{tmp_path}/model-copy", str(tmp_path / "run" / "step_0"), accept_unverifiable=True
    )
    assert copied.written
    assert torch.is_tensor(read_step(tmp_path / "run" / "step_0")["layer.0"])


def test_a_step_is_sealed_with_the_key_that_is_given(tmp_path):
    path = saved(tmp_path, every_dtype({"float32"}))
    step = str(tmp_path / "run" / "step_0")
    assert ckptctl.convert(str(path), step, accept_unverifiable=True, key=b"secret" * 3).written
    assert ckptctl.verify(step, require_seal=True, key=b"secret" * 3).exit_code == 0
    assert ckptctl.verify(step, require_seal=True, key=b"others" * 3).exit_code == 22


def test_a_folder_in_which_two_files_hold_one_tensor_is_refused(tmp_path):
    for name in ("model.safetensors", "model.fp16.safetensors"):
        saved(tmp_path / "both", every_dtype({"float32"}), name)
    with pytest.raises(ckptctl.UsageError, match=r"is in model.fp16.safetensors and model.safe"):
        ckptctl.convert(
            str(tmp_path / "both"), str(tmp_path / "run" / "step_0"), accept_unverifiable=True
        )


def test_a_file_that_is_written_to_while_it_is_copied_is_told(tmp_path):
    path = saved(tmp_path, every_dtype({"float32"}))
    stat = path.stat()

    def write_to(*_: int) -> None:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))

    target = str(tmp_path / "run" / "step_0")
    answer = ckptctl.convert(str(path), target, accept_unverifiable=True, on_progress=write_to)
    assert (answer.written, answer.exit_code) == (False, 26)
    assert "step.changed" in [finding.code for finding in answer.report.findings]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("STEP", "out/step_7"), "is a step's name"),
        (("STEP", "a.pt", "--world-size", "2"), "use reshard for another world size"),
        (("STEP", "a.pt", "--strip", "model."), "is named as a file of torch.save"),
        (("STEP", "a.safetensors", "--file-size", "2G"), "is named as one file"),
        (("STEP", "out", "--under", "model"), "--under is for safetensors"),
        (("model.safetensors", "a.pt", "--accept-unverifiable"), "create the step first"),
        (
            ("model.safetensors", "run/step_1", "--strip", "x", "--accept-unverifiable"),
            "--strip and --file-size are for a step",
        ),
        (("model.pt", "b.safetensors"), "create the step first"),
        (("STEP/.metadata", "a.pt"), "is a part of the step"),
        (("model.pt", "run/step_1", "--under", "model"), "is a torch.save file"),
    ],
)
def test_what_the_names_do_not_say_is_refused_with_the_command_that_does_it(
    checkpoints, tmp_path, monkeypatch, words, said
):
    import torch

    monkeypatch.chdir(tmp_path)
    saved(tmp_path, every_dtype({"float32"}))
    torch.save({"a": torch.ones(3)}, "model.pt")
    step = str(checkpoints / "fsdp_2" / "step_100")
    done = run_alone("convert", *(word.replace("STEP", step) for word in words))
    assert done.returncode == 2
    assert said in done.stderr
    following = shlex.split(done.stderr.split("next:")[1])
    assert following[:2] == ["ckptctl", "convert"]
    assert run_alone(*following[1:]).returncode == 0
