"""Saves of any name are found by their first bytes before a run is called fresh."""

from __future__ import annotations

import io
import pickle
import shutil
import uuid
import zipfile
from pathlib import Path

import numpy as np
import pytest
from next_commands import run_and_follow as run_ckptctl
from services.plugin import S3Server
from storage.faulty import FaultyStore

import ckptctl
from ckptctl import AccessDenied, Answer, StorageUnavailable, UsageError
from ckptctl.formats.archive.first_bytes import HEAD_BYTES, saved_format
from ckptctl.selection import targets, unknown_files
from ckptctl.selection.history import put_sentinel
from ckptctl.storage.contract import ShortRead, StoreKind
from ckptctl.storage.opening import open_store

torch = pytest.importorskip("torch")
safetensors_bytes = pytest.importorskip("safetensors.torch").save
pytestmark = pytest.mark.torch

STATE = {"model": {"w": torch.zeros(3)}, "step": 7}


def saved(name: str = "e3", **how: object) -> bytes:
    data = io.BytesIO()
    torch.save(STATE, data, **how)
    return data.getvalue()


def archive(first: str, content: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr(first, content)
    return data.getvalue()


def npz() -> bytes:
    data = io.BytesIO()
    np.savez(data, w=np.zeros(3))
    return data.getvalue()


def script() -> bytes:
    data = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(2)), data)
    return data.getvalue()


SAVES = {
    "torch": saved(),
    "torch before archives": saved(_use_new_zipfile_serialization=False),
    "torch before archives, protocol 4": saved(
        _use_new_zipfile_serialization=False, pickle_protocol=4
    ),
    "npz": npz(),
    "safetensors": safetensors_bytes({"w": torch.zeros(3)}),
    "safetensors without tensors": safetensors_bytes({}),
    "keras": archive("metadata.json", b'{"keras_version": "3.11.0"}'),
    "stable-baselines3": archive("data", b'{\n    "policy_class": {}}'),
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(500),
    "flax": b"\x82\xa4step\x07\xa6params\x81\xa1w\xc7",
    "mxnet": b"\x12\x01" + bytes(100),
    "darknet": bytes(4) + b"\x02\0\0\0\x05\0\0\0" + bytes(100),
    "gguf": b"GGUF\x03\0\0\0" + bytes(100),
    "xgboost": b"{L" + bytes(7) + b"\x07learner{",
    "xgboost before 2.0": b"binf" + bytes(100),
    "catboost": b"CBM1" + bytes(100),
    "lightgbm": b"tree\nversion=v4\nnum_class=1\n",
    "kaldi": b"\0B<TransitionModel> ",
    "julia": b"HDF5-based Julia Data Format, version 0.1.1\0",
    **{
        f"pickle, protocol {n}": pickle.dumps({"step": 7, "w": np.zeros(3)}, protocol=n)
        for n in range(2, 6)
    },
}

NO_SAVES = {
    "text": b"step 7 loss 2.5\n" * 100,
    "one byte": b"P",
    "zip of source": archive("project/train.py", b"import torch\n"),
    "zip of a repository": archive("metadata.json", b"{}"),
    "pickle of words": pickle.dumps(["a"] * 500),
    "pickle of a number": pickle.dumps({"loss": np.float64(2.5)}),
    "array": b"\x93NUMPY\x01\0" + bytes(200),
    "zeros": bytes(2000),
    "gzip": b"\x1f\x8b\x08" + bytes(200),
    "elf": b"\x7fELF\x02\x01\x01" + bytes(200),
    "json": b'{"step": 7}',
    "no header of that length": (1 << 40).to_bytes(8, "little") + b'{"w":1}',
}


@pytest.mark.parametrize("made", SAVES)
def test_each_format_is_recognized_by_its_first_bytes(made):
    data = SAVES[made]
    assert saved_format(data[:HEAD_BYTES], len(data)) is not None


@pytest.mark.parametrize("made", NO_SAVES)
def test_other_files_are_not_taken_for_saves(made):
    data = NO_SAVES[made]
    assert saved_format(data[:HEAD_BYTES], len(data)) is None


def test_no_file_of_an_installed_package_but_its_own_saves_is_taken_for_one():
    package = Path(np.__file__).parent
    files = [path for path in package.rglob("*") if path.is_file()]
    assert len(files) > 500
    found = {
        path.suffix
        for path in files
        if saved_format(path.read_bytes()[:HEAD_BYTES], path.stat().st_size)
    }
    assert found <= {".npz", ".pkl"}


ALL = (ckptctl.pick, ckptctl.scan, ckptctl.preflight)


@pytest.mark.parametrize(
    "name",
    [
        *("semi_best", "e3", "model_last.mdl", "scores.checkpoint_1000", "val_best", "last"),
        *("runs/7/semi_best", "a/b/c/e3", "last.pt.tmp", "model.pt.7f3a", "Epoch 3"),
    ],
)
def test_a_save_of_any_name_is_no_fresh_run(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(saved())
    for log in ("train.log", "events.out.tfevents.1.node1", "notes"):
        (tmp_path / log).write_text("step 7 loss 2.5\n")
    for ask in ALL:
        with pytest.raises(UsageError) as caught:
            ask(str(tmp_path))
        assert f"{name} looks like a checkpoint (a torch.save file)" in caught.value.message


def test_the_command_leads_to_one_that_works(tmp_path):
    (tmp_path / "semi_best").write_bytes(saved())
    done = run_ckptctl("pick", str(tmp_path), "--allow-fresh")
    assert done.returncode == 2
    assert "semi_best looks like a checkpoint" in done.stderr


def test_a_save_on_an_object_store_is_found_in_one_read_of_each_file(s3: S3Server):
    prefix = uuid.uuid4().hex
    for name in ("a", "b", "models/semi_best"):
        body = saved() if name == "models/semi_best" else b"text"
        s3.client.put_object(Bucket=s3.bucket, Key=f"{prefix}/{name}", Body=body)
    with pytest.raises(UsageError, match="models/semi_best looks like a checkpoint"):
        ckptctl.pick(f"s3://{s3.bucket}/{prefix}", storage_options=s3.options)


def test_a_save_behind_a_link_is_no_fresh_run(tmp_path):
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (root, elsewhere):
        folder.mkdir()
    (elsewhere / "e3").write_bytes(saved())
    (elsewhere / "notes").write_text("x")
    (root / "notes").symlink_to(elsewhere / "notes")
    assert ckptctl.pick(str(root)).answer is Answer.FRESH
    (root / "newest").symlink_to(elsewhere / "e3")
    with pytest.raises(UsageError, match="newest looks like a checkpoint"):
        ckptctl.pick(str(root))


def test_a_link_to_weights_that_are_gone_is_no_fresh_run(tmp_path):
    (tmp_path / "best.pt").symlink_to(tmp_path / "gone.pt")
    with pytest.raises(UsageError, match=r"best\.pt looks like a checkpoint"):
        ckptctl.pick(str(tmp_path))


@pytest.mark.parametrize("name", ["tokens.npz", "vocab", "train_features", "args", "x.npy"])
def test_data_by_its_name_leaves_a_run_fresh(tmp_path, name):
    (tmp_path / name).write_bytes(npz())
    assert ckptctl.pick(str(tmp_path)).answer is Answer.FRESH


@pytest.mark.parametrize("folder", ["data", "datasets", "cache/mnist", "train_features"])
def test_arrays_in_a_folder_of_data_leave_a_run_fresh_and_a_save_there_does_not(tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "mnist").write_bytes(npz())
    assert ckptctl.pick(str(tmp_path)).answer is Answer.FRESH
    (tmp_path / folder / "e3").write_bytes(saved())
    with pytest.raises(UsageError, match="e3 looks like a checkpoint"):
        ckptctl.pick(str(tmp_path))


def opened_by(monkeypatch, kind: StoreKind = StoreKind.LOCAL, **fails: object) -> list[FaultyStore]:
    stores: list[FaultyStore] = []

    def opened(url: str, *args: object, **about: object) -> FaultyStore:
        store = FaultyStore(open_store(url, *args, **about), kind=kind)
        if fails:
            store.fail("read_spans", **fails)
        stores.append(store)
        return store

    monkeypatch.setattr(targets, "open_store", opened)
    return stores


@pytest.mark.parametrize("kind", list(StoreKind))
def test_of_too_many_files_the_largest_are_read_and_the_others_are_no_proof(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(unknown_files, "MAX_READ", 4)
    for n in range(6):
        (tmp_path / f"part{n}").write_bytes(b"x" * (n + 1))
    stores = opened_by(monkeypatch, kind)
    with pytest.raises(UsageError, match="the 2 smallest were not read, and one of them may be"):
        ckptctl.pick(str(tmp_path))
    assert sum(store.calls["span"] for store in stores) == 4
    with open_store(str(tmp_path)) as store:
        put_sentinel(store)  # it is a root by its own record
    assert ckptctl.pick(str(tmp_path)).answer is Answer.FRESH
    (tmp_path / "e3").write_bytes(saved())
    with pytest.raises(UsageError, match="e3 looks like a checkpoint"):
        ckptctl.pick(str(tmp_path))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (AccessDenied("denied"), AccessDenied),
        (StorageUnavailable("Input/output error"), StorageUnavailable),
        (ShortRead("shorter", size=1), StorageUnavailable),
    ],
)
def test_a_file_that_cannot_be_read_is_unknown_and_no_fresh_run(
    tmp_path, monkeypatch, error, raised
):
    (tmp_path / "e3").write_bytes(saved())
    opened_by(monkeypatch, error=error, lasts=True)
    with pytest.raises(raised):
        ckptctl.pick(str(tmp_path))


def test_beside_valid_steps_no_other_file_is_read(tmp_path, framework_roots, monkeypatch):
    step = framework_roots / "torchtitan" / "sync" / "checkpoint" / "step-20"
    shutil.copytree(step, tmp_path / "step-20")
    stores = opened_by(monkeypatch)
    assert ckptctl.pick(str(tmp_path)).step == 20
    before = [store.calls for store in stores]
    (tmp_path / "semi_best").write_bytes(saved())
    stores.clear()
    assert ckptctl.pick(str(tmp_path)).step == 20
    assert [store.calls for store in stores] == before
