"""Other readers find the same tensors in what was converted."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from command_line import validated
from damage import flip
from made_steps import grid, octets, read_step, write_step
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl.formats.archive.safetensors import NAMES

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:ComplexHalf support")]


def exported(folder: Path) -> dict:
    from safetensors.torch import load_file

    found: dict = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def check_same(step: Path, folder: Path) -> None:
    import torch

    theirs, ours = read_step(step), exported(folder)
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert (tensor.dtype, tensor.shape) == (ours[name].dtype, ours[name].shape)
        assert torch.equal(octets(tensor), octets(ours[name])), name


@pytest.mark.parametrize(
    "variant", ["tp_fsdp_2x2", "uneven_8", "fsdp_8", "run_fsdp4", "rank_local_2"]
)
def test_safetensors_reads_the_same_tensors(checkpoints, tmp_path, variant):
    source = sorted((checkpoints / variant).glob("step_*"))[-1]
    resharded = tmp_path / "one" / source.name
    resharded.parent.mkdir()
    assert ckptctl.reshard(str(source), str(resharded), world_size=1).written
    answer = ckptctl.convert(str(source), str(tmp_path / "out"))
    assert answer.written, answer.report.findings
    check_same(resharded, tmp_path / "out")


def test_every_dtype_that_the_format_has_goes_over(tmp_path):
    import torch

    raw = torch.arange(4 * 6 * 8, dtype=torch.int64).to(torch.uint8)
    tensors = {}
    for dtype in NAMES:
        data = raw % 2 if dtype == "bool" else raw
        tensor = data.view(getattr(torch, dtype)).reshape(4, -1)
        tensors[f"model.{dtype}"] = (tensor, grid(tensor.shape, [[1, 3], []]))
    tensors["model.scalar"] = (torch.tensor(3.0), [((), ())])
    tensors["model.empty"] = (torch.zeros(0, 4), [((0, 0), (0, 4))])
    write_step(tmp_path / "step_1", tensors, {"step": 1})
    answer = ckptctl.convert(str(tmp_path / "step_1"), str(tmp_path / "out"))
    assert (answer.written, answer.n_left_out) == (True, 1)
    check_same(tmp_path / "step_1", tmp_path / "out")


def test_files_stay_below_their_size_and_the_index_names_each(checkpoints, tmp_path):
    import json

    source = checkpoints / "run_fsdp4" / "step_300"
    answer = ckptctl.convert(
        str(source), str(tmp_path / "out"), only_model=True, strip="model.", file_bytes=1000
    )
    assert answer.n_files > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = exported(tmp_path / "out")
    assert index["weight_map"].keys() == found.keys()
    assert "up.weight" in found
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())


def test_damage_ends_it_and_no_folder_appears(tmp_path):
    import torch

    weight = torch.arange(64 * 256, dtype=torch.float32).reshape(64, 256)
    step = tmp_path / "step_1"
    write_step(step, {"model.w": (weight, grid((64, 256), [[32], []]))})
    flip(step / "__0_0.distcp", 9000)
    done = run_ckptctl("convert", step, tmp_path / "out", "--json")
    assert done.returncode == 21
    document = validated(done.stdout)
    assert not document["written"]
    assert "record.crc" in [finding["code"] for finding in document["report"]["findings"]]
    assert not (tmp_path / "out").exists()


def test_a_large_folder_as_the_target_is_refused_without_listing_it(checkpoints, tmp_path):
    deep = tmp_path / "out"
    for _ in range(120):  # a listing of all of it fails
        deep = deep / "a"
    deep.mkdir(parents=True)
    source = checkpoints / "fsdp_2" / "step_100"
    done = run_ckptctl("convert", source, f"{tmp_path}/out/")
    assert done.returncode == 2
    assert f"next:  ckptctl convert {shlex.quote(str(source))} {tmp_path}/out/model" in done.stderr


def test_a_folder_that_is_there_is_kept(checkpoints, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ckptctl.UsageError, match="already exists"):
        ckptctl.convert(str(checkpoints / "fsdp_2" / "step_100"), str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
