"""A resume gives Adam and AdamW the tensors that a load fills, without running a step of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.state_dict import _init_optim_state  # noqa: E402

from ckptctl.errors import ModelDiffers  # noqa: E402
from ckptctl.train import Checkpointer  # noqa: E402
from ckptctl.train.restoring import allocate_state  # noqa: E402

pytestmark = pytest.mark.torch

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "foreach": lambda groups: torch.optim.Adam(groups, foreach=True),
    "tensor as rate": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1)),
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "derived": type("Own", (torch.optim.AdamW,), {}),
}


def groups_of() -> list[dict[str, Any]]:
    """Parameters of many forms, one of them frozen, in two groups with names of their own."""
    made = [
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(3).bfloat16(),
    ]
    made += [torch.tensor(1.0), torch.empty(0, 5), torch.randn(6, 4).t(), torch.randn(2).double()]
    parameters = [torch.nn.Parameter(one) for one in made]
    parameters[2].requires_grad_(False)
    return [
        {"params": parameters[:3], "lr": 0.5, "name": "first"},
        {"params": parameters[3:], "initial_lr": 0.1},
    ]


def form_of(optimizer: Any) -> list[dict[str, object]]:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return [
        {
            name: (value.dtype, value.device, value.shape, value.stride(), value.requires_grad)
            for name, value in optimizer.state.get(parameter, {}).items()
        }
        for parameter in parameters
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_tensors_have_the_form_of_those_that_torch_makes_by_a_step(name):
    ours, theirs = (OPTIMIZERS[name](groups_of()) for _ in range(2))
    undo = allocate_state(ours)
    made = bool(ours.state)
    assert made == (name not in ("SGD", "derived"))
    _init_optim_state(ours)
    _init_optim_state(theirs)
    assert form_of(ours) == form_of(theirs)
    undo()
    assert bool(ours.state) != made


class Script:
    """A model with AdamW that counts the steps of its optimizer."""

    def __init__(self, root: Path, width: int = 4) -> None:
        self.model = torch.nn.Linear(width, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.n_steps = 0
        self.optimizer.register_step_pre_hook(self._count)
        self.ckpt = Checkpointer(str(root), model=self.model, optimizer=self.optimizer)

    def _count(self, *_: object) -> None:
        self.n_steps += 1

    def train(self) -> None:
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def saved(tmp_path: Path) -> Script:
    """A script that has saved step 1 in the root `run`."""
    script = Script(tmp_path / "run")
    script.ckpt.resume()
    script.train()
    script.ckpt.save(1)
    script.ckpt.close()
    return script


def test_a_resume_runs_no_step_and_restores_every_bit(saved: Script, tmp_path: Path):
    script = Script(tmp_path / "run")
    script.ckpt.resume()
    assert script.n_steps == 0
    assert all(parameter.grad is None for parameter in script.model.parameters())
    states = zip(saved.optimizer.state.values(), script.optimizer.state.values(), strict=True)
    for before, after in states:
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    script.ckpt.close()


def test_an_optimizer_has_no_state_after_a_load_that_failed(saved: Script, tmp_path: Path):
    script = Script(tmp_path / "run", width=5)
    with pytest.raises(ModelDiffers):
        script.ckpt.resume()
    assert not script.optimizer.state


def test_an_optimizer_that_the_step_lacks_stays_without_state(tmp_path: Path):
    script = Script(tmp_path / "run")
    weights = Checkpointer(str(tmp_path / "run"), model=script.model)
    weights.resume()
    weights.save(1)
    weights.close()
    resumed = Script(tmp_path / "run")
    resumed.ckpt = Checkpointer(
        str(tmp_path / "run"),
        model=resumed.model,
        optimizer=resumed.optimizer,
        accept_lost=["optimizer"],
    )
    resumed.ckpt.resume()
    assert not resumed.optimizer.state
    assert resumed.n_steps == 0
    resumed.ckpt.close()
