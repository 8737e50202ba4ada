"""A resume gives Adam and AdamW the tensors that a load fills, without running a step of theirs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.state_dict import _init_optim_state  # noqa: E402

from ckptctl.errors import ModelDiffers, StateRefused  # noqa: E402
from ckptctl.train import Checkpointer  # noqa: E402
from ckptctl.train.optimizers import allocate_state  # noqa: E402

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
    stepped: list[Any] = []
    ours.register_step_pre_hook(lambda *_: stepped.append(name))
    assert allocate_state(ours)
    assert bool(stepped) == (name in ("SGD", "derived"))
    _init_optim_state(theirs)
    assert form_of(ours) == form_of(theirs)


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


class TwoHeads(torch.nn.Module):
    """Two layers, of which a forward pass uses the first, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(4, 4)
        self.later = torch.nn.Linear(4, 4)
        self.uses_both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.used(x)
        return self.later(x) if self.uses_both else x


class Several(list):
    """Several optimizers of one model, as torch takes them."""

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()

    @property
    def state(self) -> dict[Any, Any]:
        return {key: held for optimizer in self for key, held in optimizer.state.items()}


def two_optimizers(parameters: Iterable[torch.nn.Parameter]) -> Several:
    held = [*parameters]
    momentum = torch.optim.SGD([one for one in held if one.dim() > 1], lr=0.1, momentum=0.9)
    return Several([momentum, torch.optim.AdamW([one for one in held if one.dim() == 1])])


BY_PARAMETERS = {
    "two": two_optimizers,
    "AdamW": torch.optim.AdamW,
    "derived": type("Own", (torch.optim.AdamW,), {}),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
}


def steps_of(model: TwoHeads, optimizer: Any, n_steps: int) -> None:
    for _ in range(n_steps):
        model(torch.ones(1, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", BY_PARAMETERS)
def test_a_parameter_without_a_gradient_so_far_has_no_state_after_a_resume(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        model = TwoHeads()
        optimizer = BY_PARAMETERS[name](model.parameters())
        ckpt = Checkpointer(str(tmp_path / "run"), model=model, optimizer=optimizer)
        start = ckpt.resume()
        if not start.step:
            steps_of(model, optimizer, 2)
            ckpt.save(2)
        ckpt.close()
        made.append((model, optimizer))
    (model, optimizer), (resumed, of_resumed) = made
    assert len(of_resumed.state) == len(optimizer.state)
    if name != "Adagrad":  # which has its state from the beginning
        assert len(optimizer.state) == 2
        assert "no optimizer state of 2 parameters, such as later." in capsys.readouterr().err
    for one in (model, resumed):
        one.uses_both = True
    steps_of(model, optimizer, 3)
    steps_of(resumed, of_resumed, 3)
    for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_of_an_optimizer_without_state_is_of_another_one(tmp_path: Path):
    model = torch.nn.Linear(4, 4)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(str(tmp_path / "run"), model=model, optimizer=plain) as ckpt:
        ckpt.resume()
        ckpt.save(1)
    with pytest.raises(StateRefused, match=r"the step's has no bias\.exp_avg"):
        Script(tmp_path / "run").ckpt.resume()


def amsgrad(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, amsgrad=True)


def of_weights(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in parameters if one.dim() > 1])


SAVED_AND_RESUMED = {
    # Made by, resumed with, what is lost, and of how many of the 4 parameters the state is restored
    "amsgrad": (amsgrad, torch.optim.AdamW, "optimizer", 0),
    "amsgrad, derived": (amsgrad, type("Own", (torch.optim.AdamW,), {}), "optimizer", 0),
    "momentum": (BY_PARAMETERS["SGD"], lambda held: torch.optim.SGD(held, lr=0.1), "optimizer", 0),
    "fewer parameters": (torch.optim.AdamW, of_weights, "optimizer state of 2 parameters", 2),
}


@pytest.mark.parametrize("name", SAVED_AND_RESUMED)
def test_state_that_only_the_optimizer_of_the_step_had_is_lost_as_the_script_allows(
    name: str, tmp_path: Path
):
    before, after, lost, n_restored = SAVED_AND_RESUMED[name]
    model = TwoHeads()
    model.uses_both = True
    optimizer = before(model.parameters())
    with Checkpointer(str(tmp_path / "run"), model=model, optimizer=optimizer) as ckpt:
        ckpt.resume()
        steps_of(model, optimizer, 2)
        ckpt.save(2)
    optimizer = after(model.parameters())
    refusing = Checkpointer(str(tmp_path / "run"), model=model, optimizer=optimizer)
    with pytest.raises(StateRefused, match=f"cannot restore {lost}") as refused:
        refusing.resume()
    assert refused.value.exit_code == 23
    options = dict(optimizer.param_groups[0])
    accepting = Checkpointer(
        str(tmp_path / "run"), model=model, optimizer=optimizer, accept_lost=["optimizer"]
    )
    (reported,) = accepting.resume().report["state"]["lost"]
    assert reported.startswith(lost)
    assert len(optimizer.state) == n_restored
    assert all(held["step"] == 2 for held in optimizer.state.values())
    assert n_restored or optimizer.param_groups[0].items() == options.items()
    steps_of(model, optimizer, 1)
    accepting.close()


def test_an_optimizer_without_state_beside_one_with_state_is_resumed(tmp_path: Path):
    def script() -> tuple[TwoHeads, Several]:
        model = TwoHeads()
        model.uses_both = True
        plain = torch.optim.SGD(model.used.parameters(), lr=0.1)
        return model, Several([plain, torch.optim.AdamW(model.later.parameters())])

    saving, resuming = script(), script()
    for model, optimizers in (saving, resuming):
        with Checkpointer(str(tmp_path / "run"), model=model, optimizer=optimizers) as ckpt:
            if ckpt.resume().fresh:
                steps_of(model, optimizers, 2)
                ckpt.save(2)
    for model, optimizers in (saving, resuming):
        steps_of(model, optimizers, 2)
    pairs = zip(saving[0].parameters(), resuming[0].parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


class OwnRate(torch.optim.Optimizer):
    """Changes the parameters in every step, whatever `lr` is, as some kinds of Adafactor do."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": None, "decay": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.mul_(1 - group["decay"]).sub_(one.grad)


LATER = {
    "AdamW": torch.optim.AdamW,
    "own rate": OwnRate,
    "momentum": lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("other", ["one that steps", "none"])
@pytest.mark.parametrize("save", ["save", "save_async"])
def test_a_save_changes_nothing_of_an_optimizer_that_has_not_stepped_yet(
    name: str, other: str, save: str, tmp_path: Path
):
    def script() -> tuple[TwoHeads, Several]:
        torch.manual_seed(1)
        model = TwoHeads()
        model.uses_both = True
        later = LATER[name](model.later.parameters())
        first = [torch.optim.AdamW(model.used.parameters())] if other == "one that steps" else []
        return model, Several([*first, later])

    unsaved, saving, resuming = script(), script(), script()
    with Checkpointer(str(tmp_path / "run"), model=saving[0], optimizer=list(saving[1])) as ckpt:
        ckpt.resume()
        for model, optimizers in (unsaved, saving):
            steps_of(model, Several(optimizers[:-1]), 2)
            model.zero_grad()
        getattr(ckpt, save)(2)
    assert not saving[1][-1].state
    with Checkpointer(str(tmp_path / "run"), model=resuming[0], optimizer=resuming[1]) as ckpt:
        ckpt.resume()
    assert not resuming[1][-1].state
    for model, optimizers in (unsaved, saving, resuming):
        steps_of(model, optimizers, 2)
    for one in (saving, resuming):
        pairs = zip(one[0].parameters(), unsaved[0].parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


class Growing(torch.optim.Optimizer):
    """Keeps values that have another form after some steps than after the first."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "empty": {}, "none": None})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    basis = [torch.zeros_like(one), None]
                    state.update(n=0, basis=basis, sums=[], rows=[], last=None)
                state["n"] += 1
                state["basis"][0].add_(one.grad)
                state["sums"].append(float(one.grad.sum()))
                state["rows"].append(one.grad.clone())
                if state["n"] > 1:
                    state["basis"][1] = one.grad * 2
                    state["last"] = sum(state["sums"])
                    one.sub_(state["basis"][1] * state["last"], alpha=0.01)
                one.sub_(state["basis"][0] + sum(state["rows"]), alpha=0.01)


class WithClosure(Growing):
    """Demands a closure, as optimizers that evaluate the loss several times do."""

    def step(self, closure=None):
        closure()
        super().step()


FORMS = {
    "values that grow": Growing,
    "values that grow, with a closure": WithClosure,
    "LBFGS": lambda held: torch.optim.LBFGS(held, max_iter=3),
}


@pytest.mark.parametrize("name", FORMS)
def test_state_that_has_another_form_after_some_steps_is_restored_in_that_of_the_step(
    name: str, tmp_path: Path
):
    def run(n_steps: int, path: Path) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = TwoHeads()
        optimizer = FORMS[name](model.parameters())

        def loss() -> torch.Tensor:
            model.zero_grad()
            loss = model.later(model.used(torch.ones(1, 4))).pow(2).sum()
            loss.backward()
            return loss

        with Checkpointer(str(path), model=model, optimizer=optimizer) as ckpt:
            for step in range(ckpt.resume().step + 1, n_steps + 1):
                loss()
                optimizer.step(loss)
                ckpt.save(step)
        assert optimizer.param_groups[0]["lr"] == FORMS[name](model.parameters()).defaults["lr"]
        return list(model.parameters())

    unbroken = run(6, tmp_path / "unbroken")
    run(3, tmp_path / "run")
    resumed = run(6, tmp_path / "run")
    assert all(map(torch.equal, resumed, unbroken))


def test_a_tensor_in_place_of_another_value_is_of_another_optimizer(tmp_path: Path):
    class Counting(Growing):
        def __init__(self, parameters: Iterable[torch.nn.Parameter], **more: Any) -> None:
            super().__init__(parameters)
            self.param_groups[0].update(more)
            self.state[self.param_groups[0]["params"][0]] = {"n": torch.zeros(()) if more else 0}

    model = TwoHeads()
    with Checkpointer(
        str(tmp_path / "run"), model=model, optimizer=Counting(model.parameters())
    ) as ckpt:
        ckpt.resume()
        ckpt.save(1)
    other = Counting(model.parameters(), word="other")
    with pytest.raises(
        ModelDiffers, match=r"used\.weight\.n is a Tensor here and another value in"
    ):
        Checkpointer(str(tmp_path / "run"), model=model, optimizer=other).resume()


class OfManyTypes(torch.optim.Optimizer):
    """Keeps float32 weights of bfloat16 parameters, and values that are no such tensors."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            if one.grad is None:
                continue
            state = self.state[one]
            if not state:
                state.update(phase="warm", names=("a", ["b"]), seen=torch.tensor(0))
                state.update(inner={"weight": one.float()}, last=[one.float(), b"12"])
                state.update(bytes=torch.full_like(one, 200, dtype=torch.uint8))
            state["seen"] += 1
            state["bytes"] += 1
            state["last"][0] = one.grad.float() + state["last"][0] / 3
            state["inner"]["weight"] -= state["last"][0] * 1e-3
            one.copy_(state["inner"]["weight"])


def values_of(state: Any) -> Any:
    """What a state consists of, with the dtypes and all digits of its tensors."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), state.tolist()
    if isinstance(state, dict):
        return {name: values_of(one) for name, one in state.items()}
    return type(state)(map(values_of, state)) if isinstance(state, list | tuple) else state


OTHER_DTYPES = {
    "of many types": OfManyTypes,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OTHER_DTYPES)
@pytest.mark.parametrize("where", ["optimizer", "extra"])
def test_state_of_another_dtype_than_its_parameter_is_restored_as_it_was_saved(
    name: str, where: str, tmp_path: Path
):
    def run(n_steps: int, path: Path) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(1)
        model = TwoHeads().bfloat16()
        optimizer = OTHER_DTYPES[name](model.parameters())
        given = {"extra": {"other": optimizer}} if where == "extra" else {"optimizer": optimizer}
        with Checkpointer(str(path), model=model, **given) as ckpt:
            for step in range(ckpt.resume().step + 1, n_steps + 1):
                model(torch.ones(1, 4, dtype=torch.bfloat16) * step).pow(2).sum().backward()
                optimizer.step()
                model.zero_grad()
                ckpt.save(step)
        return list(map(values_of, model.parameters())), [*map(values_of, optimizer.state.values())]

    unbroken = run(4, tmp_path / "unbroken")
    run(2, tmp_path / "run")
    assert run(4, tmp_path / "run") == unbroken


def test_an_optimizer_that_keeps_no_state_lacks_none(tmp_path: Path):
    said: list[str] = []
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        root = str(tmp_path / "run")
        with Checkpointer(root, model=model, optimizer=optimizer, tell=said.append) as ckpt:
            step = ckpt.resume().step + 1
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ckpt.save(step)
    assert not [line for line in said if "no optimizer state" in line]
