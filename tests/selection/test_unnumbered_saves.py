"""A save without a number in its name that is further than every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run_ckptctl
from made_saves import optimizer, torch, weights, write

import ckptctl

dcp = pytest.importorskip("torch.distributed.checkpoint")


def timm(root: Path, name: str, epoch: int) -> None:
    value = {"epoch": epoch, "arch": "vit", "state_dict": weights(epoch)}
    write(root / name, {**value, "optimizer": optimizer(epoch), "version": 2})


def lightning(root: Path, name: str, epoch: int) -> None:
    value = {"epoch": epoch, "global_step": 100 * epoch, "pytorch-lightning_version": "2.5.0"}
    state = {"state_dict": weights(epoch), "optimizer_states": [optimizer(epoch)]}
    write(root / name, {**value, **state, "loops": {}, "lr_schedulers": []})


def sharded(root: Path, name: str, step: int) -> None:
    state = {"model": weights(step), "optimizer": optimizer(step), "step": step}
    dcp.save(state, checkpoint_id=root / name, no_dist=True)


RUNS: dict[str, tuple[Callable[[Path, str, int], None], str, str, list[int]]] = {
    "timm": (timm, "checkpoint-{}.pth.tar", "last.pth.tar", [3, 5]),
    "lightning": (lightning, "epoch={0}-step={0}00.ckpt", "last.ckpt", [3, 5]),
    "a folder": (sharded, "step_{}", "last", [3, 5]),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_pick_names_a_save_that_counts_more(root, name):
    save, form, last, numbers = RUNS[name]
    for number in numbers:
        save(root, form.format(number), number)
    save(root, last, 9)
    found = ckptctl.pick(str(root))
    assert found.exit_code == 0
    (finding,) = found.findings
    assert (finding.code, finding.where) == ("root.further", last)
    assert "9" in finding.message
    done = run_ckptctl("pick", root, "--detailed-exitcode")
    assert done.returncode == 3
    assert last in done.stderr


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("count", [3, 5])
def test_a_copy_of_a_step_and_the_best_one_are_not_further(root, name, count):
    save, form, last, numbers = RUNS[name]
    for number in numbers:
        save(root, form.format(number), number)
    save(root, last, count)
    assert ckptctl.pick(str(root)).findings == ()
    assert run_ckptctl("pick", root, "--detailed-exitcode").returncode == 0


def test_weights_that_count_nothing_are_not_further(root):
    for number in (3, 5):
        timm(root, f"checkpoint-{number}.pth.tar", number)
    write(root / "last.pth", weights(9))
    assert ckptctl.pick(str(root)).findings == ()


def test_a_damaged_save_without_a_number_says_nothing(root):
    for number in (3, 5):
        timm(root, f"checkpoint-{number}.pth.tar", number)
    (root / "last.pth.tar").write_bytes(b"PK\x03\x04" + bytes(100))
    assert ckptctl.pick(str(root)).findings == ()


assert torch is not None
