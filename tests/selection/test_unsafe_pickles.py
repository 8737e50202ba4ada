"""A pickle that would run code where a framework loads it makes a step unsafe."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import pytest
from every_case import all_cases

import ckptctl
from ckptctl import Level, Severity, Verdict

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = pytest.mark.torch


class Call:
    """An object whose pickle calls `os.system` where it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def put(value: object, path: Path, how: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if how in ("zip", "legacy"):
        torch.save(value, path, _use_new_zipfile_serialization=how == "zip")
    else:
        path.write_bytes(pickle.dumps(value, int(how)))


def dcp_root(root: Path, extra: object = None) -> Path:
    for n in (20, 40):
        state = {"model": {"w": torch.full((8, 8), float(n))}, "step": n}
        if n == 40 and extra is not None:
            state["extra"] = extra
        state["optimizer"] = {"state": {"w": {"exp_avg": torch.ones(8, 8)}}}
        dcp.save(state, checkpoint_id=root / f"step_{n}", no_dist=True)
    return root


def chosen(root: str) -> int | None:
    report = ckptctl.pick(root).chosen
    return None if report is None else report.number


FORMS = ("zip", "legacy", "0", "1", "2", "4", "5")
SIDECARS = (
    "train_state.pt",
    "meta.pt",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "random_states_0.pkl",
    "training_args.bin",
    "scheduler.pt",
    "nobody_knows_this",
    "sub/folder/thing.dat",
)


@pytest.mark.parametrize("how", FORMS)
def test_a_file_beside_the_shards_that_would_run_code_is_unsafe(tmp_path, how):
    root = dcp_root(tmp_path / "run")
    marker = tmp_path / "ran"
    with all_cases() as case:
        for name in SIDECARS:
            path = root / "step_40" / name
            for value, verdict in (
                ({"args": [collections.deque([1], 3)], "step": 40}, Verdict.COMPLETE),
                ({"args": {"deep": [Call(marker)]}, "step": 40}, Verdict.UNSAFE),
            ):
                put(value, path, how)
                for level in Level:
                    with case(f"{name} {verdict} {level}"):
                        report = ckptctl.verify(str(root / "step_40"), level=level)
                        faults = report.with_severity(Severity.FAULT)
                        assert report.verdict is verdict, report.findings
                        codes = {"file.unsafe"} if verdict is Verdict.UNSAFE else set()
                        assert {one.code for one in faults} == codes
                        assert not report.with_severity(Severity.WARNING)
                with case(f"{name} {verdict} pick"):
                    expected = 20 if verdict is Verdict.UNSAFE else 40
                    assert chosen(str(root)) == expected
            path.unlink()
    assert not marker.exists()


def odd_files(marker: Path) -> dict[str, bytes]:
    """Files that run a call in `torch.load`, in forms that no writer uses."""
    call = pickle.dumps(Call(marker), 2)
    compressed, tape = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/Data.pkl", call)
        archive.writestr("archive/version", b"3\n")
    with tarfile.open(fileobj=tape, mode="w") as tar:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(call)
            tar.addfile(member, io.BytesIO(call))
    plain = call[2:]
    return {
        "zip": compressed.getvalue(),
        "tar": tape.getvalue(),
        "no protocol": b"\x8f0" + plain,
        "bytes first": b"C\x01a0" + plain,
        "a frame first": b"\x95" + (1).to_bytes(8, "little") + b"N0" + plain,
        "a memo slot out of order": b"\x80\x02Nq\x050" + plain,
        "a state for a list": b"\x80\x02]Nb0" + plain,
    }


def test_files_in_forms_that_no_writer_uses_are_read_as_torch_reads_them(tmp_path):
    root = dcp_root(tmp_path / "run")
    marker = tmp_path / "ran"
    with all_cases() as case:
        for what, data in odd_files(marker).items():
            for name in ("train_state.pt", "training_args.bin", "nobody_knows_this"):
                path = root / "step_40" / name
                path.write_bytes(data)
                with case(f"{name} {what}"):
                    report = ckptctl.verify(str(root / "step_40"))
                    assert report.verdict is Verdict.UNSAFE, report.findings
                    assert chosen(str(root)) == 20
                path.unlink()
            (root / "odd").write_bytes(data)
            with contextlib.suppress(Exception):  # torch may fail after the call
                torch.load(root / "odd", weights_only=False)
            with case(f"torch runs it: {what}"):
                assert marker.exists()
                marker.unlink()
            (root / "odd").unlink()


def test_a_pickle_that_is_too_long_to_be_read_is_named(tmp_path):
    root = dcp_root(tmp_path / "run")
    path = root / "step_40" / "train_state.pt"
    for head, tail, codes in (
        (b"", pickle.dumps(Call(tmp_path / "ran"), 2)[2:], {"pickle.unknown"}),
        (pickle.dumps(Call(tmp_path / "ran"), 2)[2:-1] + b"0", b"N.", {"file.unsafe"}),
    ):
        with path.open("wb") as file:
            file.write(b"\x80\x02" + head + b"B" + (66 << 20).to_bytes(4, "little"))
            file.seek(66 << 20, os.SEEK_CUR)
            file.write(b"0" + tail)
        report = ckptctl.verify(str(root / "step_40"))
        assert {one.code for one in report.findings} & {"pickle.unknown", "file.unsafe"} == codes


def test_an_entry_of_a_shard_that_would_run_code_is_unsafe(tmp_path):
    with all_cases() as case:
        for name, extra in {
            "a value": Call(tmp_path / "ran"),
            "deep": [{"a": (1, Call(tmp_path / "ran"))}],
            "in bytes": pickle.dumps({"rank": Call(tmp_path / "ran")}),
            "in a tensor": torch.frombuffer(
                bytearray(pickle.dumps([Call(tmp_path / "ran"), *range(2_000)])), dtype=torch.uint8
            ),
            "long": [Call(tmp_path / "ran"), *("x" * 200_000)],
        }.items():
            root = dcp_root(tmp_path / name.replace(" ", "-"), extra)
            for level in (Level.STRUCTURE, Level.CONTENT):
                with case(f"{name} {level}"):
                    report = ckptctl.verify(str(root / "step_40"), level=level)
                    assert report.verdict is Verdict.UNSAFE, report.findings
                    assert report.pickles_unread == 0
            with case(f"{name} listing"):
                report = ckptctl.verify(str(root / "step_40"), level=Level.LISTING)
                assert report.pickles_unread > 0 or report.verdict is Verdict.UNSAFE
            with case(f"{name} pick"):
                assert chosen(str(root)) == 20
    assert not (tmp_path / "ran").exists()


def test_sound_entries_are_read_and_counted(tmp_path):
    held = {"data": pickle.dumps({"position": collections.deque([3])}), "more": [1, {"a": {2}}]}
    root = dcp_root(tmp_path / "run", held)
    report = ckptctl.verify(str(root / "step_40"), level=Level.STRUCTURE)
    assert report.verdict is Verdict.COMPLETE
    assert report.pickles_read >= 2
    assert report.pickles_unread == 0


def deepspeed(root: Path, value: object, how: str) -> None:
    for n in (10, 20):
        step = root / f"global_step{n}"
        held = {"module": {"w": torch.randn(8)}, "global_steps": n, "dp_world_size": 1}
        held |= {"mp_world_size": 1, "args": value if n == 20 else 1}
        put(held, step / "mp_rank_00_model_states.pt", how)
        optimizer = {"optimizer_state_dict": {"state": torch.randn(8)}, "ds_version": "0.15"}
        put(optimizer, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zip")
    (root / "latest").write_text("global_step20")


@pytest.mark.parametrize("how", ["zip", "legacy"])
def test_a_rank_file_that_would_run_code_is_unsafe(tmp_path, how):
    deepspeed(tmp_path / "run", {"a": [Call(tmp_path / "ran")]}, how)
    report = ckptctl.verify(
        str(tmp_path / "run" / "global_step20"), level=Level.STRUCTURE, grace_s=0
    )
    assert report.verdict is Verdict.UNSAFE, report.findings
    assert chosen(str(tmp_path / "run")) == (10 if how == "zip" else None)
    assert not (tmp_path / "ran").exists()


def test_a_rank_file_with_what_frameworks_store_is_sound(tmp_path):
    value = {"d": collections.defaultdict(list, a=[1]), "q": collections.deque([1], 5)}
    deepspeed(tmp_path / "run", value, "zip")
    report = ckptctl.verify(str(tmp_path / "run" / "global_step20"), level=Level.STRUCTURE)
    assert report.verdict is Verdict.COMPLETE, report.findings
    assert not report.with_severity(Severity.WARNING)
    assert chosen(str(tmp_path / "run")) == 20


@pytest.fixture
def foreign_class(monkeypatch):
    """A class of a package that no process of ckptctl can import."""
    module = types.ModuleType("shop.config")
    cls = type("Config", (), {"__module__": "shop.config"})
    module.Config = cls
    monkeypatch.setitem(sys.modules, "shop", types.ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.config", module)
    return cls


def test_an_unknown_class_is_named_and_refuses_nothing(tmp_path, foreign_class):
    root = dcp_root(tmp_path / "run")
    put({"config": foreign_class(), "step": 40}, root / "step_40" / "train_state.pt", "zip")
    report = ckptctl.verify(str(root / "step_40"))
    assert report.usable
    (warning,) = report.with_severity(Severity.WARNING)
    assert warning.code == "pickle.unknown"
    assert "shop.config.Config" in warning.message
    assert chosen(str(root)) == 40


def test_an_allowed_class_is_recorded_and_not_reported(tmp_path, foreign_class):
    root = dcp_root(tmp_path / "run")
    put({"config": foreign_class()}, root / "step_40" / "train_state.pt", "zip")
    names = "shop.config.Config,shop.Other"
    report = ckptctl.verify(str(root / "step_40"), allow_globals=names)
    assert report.with_severity(Severity.WARNING) == ()
    assert report.allowed_globals == ("shop.config.Config",)


def test_what_can_act_is_never_allowed(tmp_path):
    root = dcp_root(tmp_path / "run")
    put({"config": Call(tmp_path / "ran")}, root / "step_40" / "train_state.pt", "zip")
    names = ("posix.system", "os.system")
    report = ckptctl.verify(str(root / "step_40"), allow_globals=names)
    assert report.verdict is Verdict.UNSAFE
    assert report.exit_code == 25


def test_an_unsafe_step_is_not_sealed(tmp_path):
    root = dcp_root(tmp_path / "run")
    put({"config": Call(tmp_path / "ran")}, root / "step_40" / "train_state.pt", "zip")
    assert ckptctl.seal(str(root / "step_40")).exit_code == 25
    assert not (root / "step_40" / ".ckptctl").exists()


def test_a_shard_under_another_name_is_read_as_far_as_it_is_an_archive(checkpoints, copy_of):
    step = copy_of(checkpoints / "tp_fsdp_2x2") / "step_100"
    (step / "__3_0.distcp").rename(step / "__3_0.distcp.old")
    report = ckptctl.verify(str(step), level="content", grace_s=0)
    assert report.exit_code == 20
    assert "shard.missing" in {finding.code for finding in report.findings}
