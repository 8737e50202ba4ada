"""Steps that several processes write: one of them absent, or of another step.

The steps have the shapes of verl (`verl/utils/checkpoint/fsdp_checkpoint_manager.py`), NeMo-RL
(`nemo_rl/utils/checkpoint.py`, `native_checkpoint.py`), prime-rl (`trainer/ckpt.py`,
`orchestrator/ckpt.py`) and RLinf (`rlinf/hybrid_engines/fsdp`), and are written by torch.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run_ckptctl

import ckptctl
from ckptctl import Severity
from ckptctl.findings import ClaimName

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

pytestmark = pytest.mark.torch

NUMBERS = (10, 20, 30, 40)
_BETWEEN_S = 1000.0


class Learner:
    """A small model with its optimizer, which really steps."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self) -> None:
        for _ in range(3):
            self.model(torch.randn(4, 8)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def put(path: Path, state: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def loader(number: int) -> dict[str, Any]:
    return {"_snapshot": {"_num_yielded": number}, "_iterator_finished": False}


def verl(step: Path, number: int, actor: Learner, critic: Learner) -> None:
    for name, learner in (("actor", actor), ("critic", critic)):
        for rank in range(2):
            ranks = f"world_size_2_rank_{rank}.pt"
            put(step / name / f"model_{ranks}", learner.model.state_dict())
            put(step / name / f"optim_{ranks}", learner.optimizer.state_dict())
            extra = {"lr_scheduler": {"last_epoch": number}, "rng": torch.get_rng_state()}
            put(step / name / f"extra_state_{ranks}", extra)
        (step / name / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    put(step / "data.pt", loader(number))


def nemo_rl(step: Path, number: int, policy: Learner, value: Learner) -> None:
    for name, learner in (("policy", policy), ("value", value)):
        state = {"model": learner.model.state_dict()}
        dcp.save(state, checkpoint_id=step / name / "weights")
        state = {"optim": learner.optimizer.state_dict(), "scheduler": {"last_epoch": number}}
        dcp.save(state, checkpoint_id=step / name / "optimizer")
    info = {"step": number, "consumed_samples": 8 * number, "val_reward": 0.5}
    (step / "training_info.json").write_text(json.dumps(info))
    put(step / "train_dataloader.pt", loader(number))


def prime_rl(step: Path, number: int, trainer: Learner, _: Learner) -> None:
    progress = {"step": number, "total_tokens": 100 * number}
    state = {"model": trainer.model.state_dict(), "optimizers": trainer.optimizer.state_dict()}
    dcp.save({"app": {**state, "progress": progress}}, checkpoint_id=step / "trainer")
    put(step / "orchestrator" / "progress.pt", progress)


def rlinf(step: Path, number: int, actor: Learner, critic: Learner) -> None:
    for name, learner in (("actor", actor), ("critic", critic)):
        state = {
            "model": learner.model.state_dict(),
            "optimizers": learner.optimizer.state_dict(),
            "lr_schedulers": {"last_epoch": number},
        }
        dcp.save({"fsdp_checkpoint": state}, checkpoint_id=step / name / "dcp_checkpoint")
        put(step / name / "model_state_dict" / "full_weights.pt", learner.model.state_dict())
    put(step / "data" / "data.pt", loader(number))


Write = Callable[[Path, int, Learner, Learner], None]
LAYOUTS: dict[str, tuple[Write, str, tuple[str, ...]]] = {
    "verl": (verl, "global_step_", ("actor", "critic")),
    "nemo-rl": (nemo_rl, "step_", ("policy", "value")),
    "prime-rl": (prime_rl, "step_", ("trainer", "orchestrator")),
    "rlinf": (rlinf, "global_step_", ("actor", "critic", "data")),
}
OWNERS = [(name, owner) for name, (_, _, owners) in LAYOUTS.items() for owner in owners]


def set_times(step: Path, written_s: float) -> None:
    for file in step.rglob("*"):
        os.utime(file, (written_s, written_s))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A root of each layout, its steps saved with training between them."""
    folder = tmp_path_factory.mktemp("owners")
    first_s = time.time() - 20 * _BETWEEN_S
    torch.manual_seed(7)
    for name, (write, prefix, _) in LAYOUTS.items():
        learners = Learner(), Learner()
        for place, number in enumerate(NUMBERS):
            for learner in learners:
                learner.train()
            step = folder / name / f"{prefix}{number}"
            step.mkdir(parents=True)
            write(step, number, *learners)
            set_times(step, first_s + place * _BETWEEN_S)
    return folder


@pytest.fixture
def root_of(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(made / name, tmp_path / name))


def step_in(root: Path, number: int) -> Path:
    return root / f"{LAYOUTS[root.name][1]}{number}"


def faults(root: Path, number: int = 40, **asked: object) -> list[str]:
    report = ckptctl.verify(f"{root}@{number}", **asked)
    assert (report.exit_code == 0) == report.usable
    return [one.code for one in report.with_severity(Severity.FAULT)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_whole_root_is_chosen_and_none_of_its_steps_has_a_fault(root_of, name):
    root = root_of(name)
    assert ckptctl.pick(str(root)).step == 40
    for number in NUMBERS:
        assert faults(root, number) == []


@pytest.mark.parametrize(("name", "owner"), OWNERS)
def test_an_owner_that_the_steps_before_hold_is_missed(root_of, name, owner):
    root = root_of(name)
    shutil.rmtree(step_in(root, 40) / owner)
    report = ckptctl.verify(f"{root}@40")
    assert (report.exit_code, report.claim(ClaimName.WHOLE).state.value) == (20, "contradicted")
    missing = [one for one in report.findings if one.code == "file.missing"]
    assert len(missing) == 1
    assert f"nothing of {owner} is there, and the 3 steps before hold it" in missing[0].message
    for given in ({}, {"accept_unverifiable": True, "allow_missing_state": True}):
        assert ckptctl.pick(str(root), **given).step == 30


@pytest.mark.parametrize(("name", "owner"), OWNERS)
def test_an_owner_of_the_step_before_contradicts_one_save(root_of, name, owner):
    root = root_of(name)
    place = step_in(root, 40) / owner
    written_s = next(file for file in step_in(root, 40).rglob("*.*")).stat().st_mtime
    shutil.rmtree(place)
    shutil.copytree(step_in(root, 30) / owner, place)
    report = ckptctl.verify(f"{root}@40")
    assert report.exit_code in (20, 21)
    assert report.claim(ClaimName.ONE_SAVE).state.value == "contradicted"
    assert ckptctl.pick(str(root)).step == 30
    if owner == "data":
        return  # a data loader counts no steps: with new times nothing shows where it is from
    set_times(step_in(root, 40), written_s)
    assert ckptctl.verify(f"{root}@40").exit_code == 21
    assert ckptctl.pick(str(root)).step == 30


def test_a_part_of_an_owner_that_is_gone_leaves_open_whether_the_step_is_whole(root_of):
    root = root_of("nemo-rl")
    shutil.rmtree(step_in(root, 40) / "value" / "optimizer")
    report = ckptctl.verify(f"{root}@40")
    assert report.claim(ClaimName.WHOLE).state.value == "unknown"
    assert "file.dropped" in {one.code for one in report.findings}
    assert ckptctl.pick(str(root)).step == 30
    assert ckptctl.pick(str(root), allow_missing_state=True).step == 40


# What is not learned


def test_one_step_before_shows_no_owner(root_of):
    root = root_of("prime-rl")
    for number in (10, 20):
        shutil.rmtree(step_in(root, number))
    shutil.rmtree(step_in(root, 40) / "orchestrator")
    assert faults(root) == []


def test_an_owner_that_one_of_the_steps_before_lacks_is_not_of_each_step(root_of):
    root = root_of("prime-rl")
    for number in (10, 40):
        shutil.rmtree(step_in(root, number) / "orchestrator")
    assert faults(root) == []


def test_an_owner_with_a_new_name_is_not_missed(root_of):
    root = root_of("prime-rl")
    (step_in(root, 40) / "orchestrator").rename(step_in(root, 40) / "scheduler_process")
    assert faults(root) == []


def test_an_owner_that_came_later_is_missed_in_no_older_step(root_of):
    root = root_of("rlinf")
    for number in (10, 20):
        shutil.rmtree(step_in(root, number) / "critic")
    for number in NUMBERS:
        assert "file.missing" not in faults(root, number)


def test_the_sole_step_without_an_owner_is_not_followed_by_others(root_of):
    """The run ended it: from then on no step before holds it in each step."""
    root = root_of("nemo-rl")
    for number in (30, 40):
        shutil.rmtree(step_in(root, number) / "value")
    assert faults(root, 30) == ["file.missing"]
    assert faults(root, 40) == []


def test_an_export_of_weights_that_is_not_written_each_time_is_no_owner(root_of):
    root = root_of("prime-rl")
    for number in (10, 20, 30):
        export = step_in(root, number) / "export"
        put(export / "model.pt", {"w": torch.ones(4)})
        set_times(export, (step_in(root, number) / "trainer" / ".metadata").stat().st_mtime)
    assert "file.missing" not in faults(root)


# Stated owners


def test_stated_owners_are_required_of_the_first_step_too(root_of):
    root = root_of("verl")
    (step_in(root, 10) / "data.pt").unlink()
    assert faults(root, 10) == []
    assert faults(root, 10, owners=["actor", "critic", "data.pt"]) == ["file.missing"]
    assert faults(root, 20, owners="actor,critic,data.pt") == []
    assert faults(root, 20, owners=["actor", "critic", "reference/"]) == ["file.missing"]


def test_where_owners_are_stated_none_is_learned(root_of):
    root = root_of("prime-rl")
    shutil.rmtree(step_in(root, 40) / "orchestrator")
    assert faults(root, owners=["trainer"]) == []
    assert ckptctl.pick(str(root), owners=["trainer"]).step == 40


def test_a_seal_does_not_stand_for_a_stated_owner(root_of):
    root = root_of("prime-rl")
    shutil.rmtree(step_in(root, 10) / "orchestrator")
    ckptctl.seal(f"{root}@10")
    assert faults(root, 10, owners=["trainer", "orchestrator"]) == ["file.missing"]


def test_owners_are_stated_once_in_the_settings(root_of):
    root = root_of("verl")
    (root / "ckptctl.toml").write_text('owners = ["actor", "critic", "data.pt"]\n')
    (step_in(root, 40) / "data.pt").unlink()
    done = run_ckptctl("pick", ".", cwd=root)
    assert (done.returncode, done.stdout) == (0, "global_step_30\n"), done.stderr
    done = run_ckptctl("verify", ".@40", cwd=root)
    assert done.returncode == 20
    assert "nothing of data.pt is there, which the setting owners names" in done.stdout
