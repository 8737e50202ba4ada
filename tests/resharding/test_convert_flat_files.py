"""Stock torch loads from a converted step what was in the `torch.save` file."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import pytest
from command_line import validated
from made_steps import octets
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl.formats.archive.writing import WRITABLE

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:ComplexHalf support")]


def saved(folder: Path, state: object, **how: object) -> Path:
    import torch

    torch.save(state, folder / "model.pt", **how)
    return folder / "model.pt"


def trained() -> dict:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(31, 17), torch.nn.Linear(17, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 31)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 1200,
        "history": [0.5, None, True, (1, "a", b"\xff\0", -(1 << 70))],
        "callbacks": {"timer": {"elapsed": timedelta(days=-2, seconds=3, microseconds=70000)}},
        "mixed": [torch.arange(4), {"deep": 3}],
        "nested": {"pair": (OrderedDict(a=1), {"b": [2.5]}), "dtype": torch.bfloat16, "": {}},
    }


def loaded(step: Path, state: dict) -> dict:
    """What stock torch loads into a state of the same form, without any of its values."""
    import torch
    import torch.distributed.checkpoint as dcp

    def hollow(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value, memory_format=torch.contiguous_format)
        if isinstance(value, dict):
            return {key: hollow(item) for key, item in value.items()}
        if isinstance(value, list) and any(isinstance(v, torch.Tensor | dict) for v in value):
            return [hollow(item) for item in value]
        return None

    empty = hollow(state)
    assert isinstance(empty, dict)
    dcp.load(empty, checkpoint_id=str(step))
    return empty


def check_same(ours: object, theirs: object) -> None:
    import torch

    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(octets(ours), octets(theirs.contiguous()))
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            check_same(ours[key], value)
    elif isinstance(theirs, list):
        assert isinstance(ours, list)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            check_same(one, other)
    else:
        assert (type(ours), ours) == (type(theirs), theirs)


@pytest.mark.parametrize("n_ranks", [1, 4])
def test_stock_load_gives_every_tensor_and_value_of_the_file(tmp_path, n_ranks):
    state = trained()
    source, step = saved(tmp_path, state), tmp_path / "run" / "step_1200"
    answer = ckptctl.convert(str(source), str(step), world_size=n_ranks)
    assert answer.written, answer.report.findings
    check_same(loaded(step, state), state)
    assert len(list(step.glob("*.distcp"))) == n_ranks
    again = ckptctl.verify(str(step), level=ckptctl.Level.CONTENT, require_seal=True)
    assert again.exit_code == 0, again.findings
    assert again.records_proven == again.n_records


def test_every_dtype_goes_over(tmp_path):
    import torch

    raw = torch.arange(4 * 6 * 8, dtype=torch.int64).to(torch.uint8)
    state = {}
    for dtype in sorted(WRITABLE):
        if (known := getattr(torch, dtype, None)) is None:
            continue
        data = raw % 2 if dtype == "bool" else raw
        state[dtype] = data.clone().view(known).reshape(4, -1)
    assert len(state) > 15
    step = tmp_path / "run" / "step_1"
    assert ckptctl.convert(str(saved(tmp_path, state)), str(step), world_size=3).written
    check_same(loaded(step, state), state)


def test_views_of_one_storage_become_tensors_of_their_own(tmp_path):
    import torch

    base = torch.arange(60 * 70, dtype=torch.float32).reshape(60, 70)
    state = {
        "whole": base,
        "tied": base,
        "rows": base[10:20],
        "columns": base[:, 5:9],
        "transposed": base.T,
        "none": base[:0],
        "scalar": base[3, 4],
    }
    step = tmp_path / "run" / "step_1"
    answer = ckptctl.convert(str(saved(tmp_path, state)), str(step), world_size=2)
    assert answer.written, answer.report.findings
    check_same(loaded(step, state), state)


def test_what_cannot_be_carried_over_is_refused_by_its_key(tmp_path):
    import torch

    ones = torch.ones(3, dtype=torch.complex64)
    cases = {
        "args holds an object of argparse.Namespace": {"args": argparse.Namespace(lr=1)},
        "a.b is an expanded view": {"a": {"b": torch.ones(1).expand(4)}},
        "u is an expanded view": {"u": torch.arange(9.0).unfold(0, 4, 1)},
        "c holds a conjugated or negated tensor": {"c": ones.conj()},
        "p holds a tensor inside a value": {"p": (torch.ones(1),)},
        "s holds an object of __builtin__.set": {"s": {1, 2}},
        "f holds an object of pathlib": {"f": (Path("x"),)},
        "would be called 'a.b'": {"a.b": 1, "a": {"b": 2}},
        "no dict with named entries": [1, 2],
        "has the format from before torch 1.6": None,
    }
    for said, state in cases.items():
        old = {"_use_new_zipfile_serialization": False} if state is None else {}
        source = saved(tmp_path, state or {"a": 1}, **old)
        with pytest.raises(ckptctl.UsageError, match=said):
            ckptctl.convert(str(source), str(tmp_path / "run" / "step_1"))
        assert not (tmp_path / "run" / "step_1").exists()


class _Hostile:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.canary,))


def test_nothing_in_a_hostile_file_runs(tmp_path):
    canary = tmp_path / "canary"
    source = saved(tmp_path, {"step": 1, "model": _Hostile(canary)})
    done = run_ckptctl("convert", source, tmp_path / "run" / "step_1", "--json")
    assert done.returncode == 25
    assert "unsafe" in done.stderr + done.stdout
    assert not canary.exists()
    assert not (tmp_path / "run" / "step_1").exists()


def test_a_flipped_byte_anywhere_in_what_is_carried_ends_it_with_the_finding(tmp_path):
    import torch

    source = saved(tmp_path, {"model": {"w": torch.arange(3000.0)}, "step": 7})
    sound = source.read_bytes()
    for at in (70, 6000, sound.rindex(b"PK\5\6") - 40):
        damaged = bytearray(sound)
        damaged[at] ^= 0x40
        source.write_bytes(damaged)
        done = run_ckptctl("convert", source, tmp_path / "run" / "step_1", "--json")
        document = validated(done.stdout)
        assert done.returncode in (21, 25), done.stdout
        codes = {finding["code"] for finding in document["report"]["findings"]}
        assert codes <= {"record.crc", "record.framing", "record.mismatch", "record.unsafe"}
        assert codes
        assert not (tmp_path / "run" / "step_1").exists()


def test_a_file_cut_short_is_refused(tmp_path):
    import torch

    source = saved(tmp_path, {"w": torch.arange(3000.0)})
    source.write_bytes(source.read_bytes()[:-700])
    done = run_ckptctl("convert", source, tmp_path / "run" / "step_1", "--json")
    assert done.returncode == 21
    assert "record.framing" in done.stdout


@pytest.mark.parametrize("words", [("--only", "model"), ("--strip", "a"), ("--file-size", "1G")])
def test_what_is_meant_for_safetensors_is_refused_for_a_file(tmp_path, words):
    source = saved(tmp_path, {"a": 1})
    assert run_ckptctl("convert", source, tmp_path / "run" / "step_1", *words).returncode == 2
