"""A listing that shows an earlier, smaller size of a file is no proof that the file is short."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from made_saves import safetensors, torch, whole, write
from storage.faulty import FaultyStore

import ckptctl
from ckptctl import Answer, Level, Verdict
from ckptctl.model import FileInfo
from ckptctl.selection import targets, verifying
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store

Shorten = Callable[[str, int | None], None]


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shorten]:
    """A function that has every listing show a file with fewer bytes than it has."""

    def shows(name: str, size: int | None) -> None:
        def shown(listing: Sequence[FileInfo]) -> Sequence[FileInfo]:
            return [
                replace(file, size=file.size // 2 if size is None else size)
                if file.path.endswith(name)
                else file
                for file in listing
            ]

        def opened(url: str, *args: object, **kwargs: object) -> Store:
            store = FaultyStore(open_store(url, *args, **kwargs))
            store.show(shown)
            return store

        for module in (targets, verifying):
            monkeypatch.setattr(module, "open_store", opened)

    yield shows
    monkeypatch.undo()


@pytest.fixture
def sharded(checkpoints: Path, copy_of: Callable[[Path], Path]) -> Path:
    """Steps 10 and 20 of four ranks."""
    return copy_of(checkpoints / "run_bare4")


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Steps 10 and 20, each one file of `torch.save`."""
    for step in (10, 20):
        write(tmp_path / "run" / f"checkpoint_{step}.pt", whole(step))
    return tmp_path / "run"


@pytest.mark.parametrize("size", [None, 0])
@pytest.mark.parametrize("level", [Level.LISTING, Level.STRUCTURE])
def test_a_stale_size_of_a_shard_is_unknown_and_no_older_step_is_chosen(
    sharded, stale, size, level
):
    stale("step_20/__1_0.distcp", size)
    found = ckptctl.pick(str(sharded), level=level)
    assert (found.answer, found.exit_code, found.chosen) == (Answer.UNKNOWN, 75, None)
    assert found.next_command == f"ckptctl doctor storage {sharded}"
    report = ckptctl.verify(f"{sharded}@20", level=level)
    assert report.verdict is Verdict.UNKNOWN
    assert "step.unknown" in [one.code for one in report.findings]


def test_a_sealed_step_is_not_passed_over_for_a_stale_size(sharded, stale):
    ckptctl.seal(f"{sharded}@20")
    stale("step_20/__1_0.distcp", None)
    assert ckptctl.pick(str(sharded), level=Level.LISTING).exit_code == 75


@pytest.mark.parametrize("level", [Level.LISTING, Level.STRUCTURE])
def test_a_shard_that_is_short_is_damage(sharded, level):
    path = sharded / "step_20" / "__1_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    found = ckptctl.pick(str(sharded), level=level)
    assert (found.step, found.exit_code) == (10, 0)
    assert ckptctl.verify(f"{sharded}@20", level=level).verdict is Verdict.INCOMPLETE


def test_a_stale_size_of_an_archive_is_unknown(flat, stale):
    stale("checkpoint_20.pt", None)
    assert ckptctl.pick(str(flat)).exit_code == 75


def test_an_archive_that_is_short_is_damage(flat):
    path = flat / "checkpoint_20.pt"
    os.truncate(path, path.stat().st_size // 2)
    assert ckptctl.pick(str(flat)).step == 10


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    for step in (10, 20):
        folder = root / f"checkpoint-{step}"
        write(folder / "model.safetensors", {"w": torch.full((64, 64), float(step))})
        write(folder / "optimizer.pt", {"state": {}, "param_groups": []})
        write(folder / "trainer_state.json", {"global_step": step})
    return root


@pytest.mark.parametrize("size", [None, 0])
def test_a_stale_size_of_safetensors_is_unknown(hugging_face, stale, size):
    stale("checkpoint-20/model.safetensors", size)
    assert ckptctl.pick(str(hugging_face)).exit_code == 75


@pytest.mark.parametrize("size", [None, 0])
def test_a_stale_size_of_a_sidecar_is_unknown(hugging_face, stale, size):
    stale("checkpoint-20/optimizer.pt", size)
    assert ckptctl.pick(str(hugging_face)).exit_code == 75


def test_a_file_that_grows_is_a_save_in_progress(flat, stale, monkeypatch):
    source = flat / "checkpoint_20.pt"
    shutil.copy(source, flat / "checkpoint_30.pt")
    os.truncate(flat / "checkpoint_30.pt", source.stat().st_size // 2)
    report = ckptctl.verify(str(flat / "checkpoint_30.pt"))
    assert report.verdict is Verdict.IN_PROGRESS


assert safetensors is not None
