"""What an optimizer keeps, in steps of real torch optimizers: sound, and broken before the save."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run_ckptctl

import ckptctl
from ckptctl import Level

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")
pytestmark = pytest.mark.torch

State = dict[str, dict[str, "torch.Tensor"]]


def train(
    root: Path,
    build: Callable,
    *,
    breaks: Callable | None = None,
    steps: int = 3,
    layers: list | None = None,
) -> Path:
    """Train, and save each step; `breaks` changes the state of the last one before its save."""
    torch.manual_seed(0)
    layers = layers or [torch.nn.Linear(16, 40), torch.nn.Linear(40, 4)]
    model = torch.nn.Sequential(*layers)
    optimizer = build(model.parameters())
    before: State = {}
    for step in range(1, steps + 1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        weights, held = state_dict.get_state_dict(model, optimizer)
        held = copy.deepcopy(held)
        if step == steps and breaks is not None:
            breaks(held["state"], before)
        before = copy.deepcopy(held["state"])
        state = {"model": weights, "optimizer": held, "step": 3 * step}
        dcp.save(state, checkpoint_id=root / f"step_{3 * step}", no_dist=True)
    return root


def found(root: Path, step: int) -> dict[str, str]:
    report = ckptctl.verify(f"{root}@{step}", level=Level.CONTENT, state_check=True)
    return {f.code: f.message for f in report.findings if f.code.startswith("optimizer.")}


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sound_state_has_no_finding(tmp_path, name):
    root = train(tmp_path, OPTIMIZERS[name])
    for step in (3, 6, 9):
        assert found(root, step) == {}


def zero(state: State, _before: State) -> None:
    for held in state.values():
        for key, tensor in held.items():
            if key != "step":
                tensor.zero_()


def zero_one(state: State, _before: State) -> None:
    zero({"0.bias": state["0.bias"]}, {})


def negative(state: State, _before: State) -> None:
    state["1.weight"]["exp_avg_sq"][0, 3] = -1e-9


def first_moment_as_second(state: State, _before: State) -> None:
    state["0.weight"]["exp_avg_sq"].copy_(state["0.weight"]["exp_avg"])


def of_another_parameter(state: State, _before: State) -> None:
    state["0.bias"], state["1.bias"] = state["1.bias"], state["0.bias"]


def negative_zeros(state: State, _before: State) -> None:
    for held in state.values():
        for key, tensor in held.items():
            if key != "step":
                tensor.fill_(-0.0)


def of_an_equal_parameter(state: State, _before: State) -> None:
    state["1.weight"], state["2.weight"] = state["2.weight"], state["1.weight"]


def begun_anew(state: State, _before: State) -> None:
    for held in state.values():
        held["exp_avg_sq"].mul_(1e-3)


def of_the_step_before(state: State, before: State) -> None:
    for name, held in before.items():
        for key, tensor in held.items():
            if key != "step":
                state[name][key].copy_(tensor)


@pytest.mark.parametrize(
    ("breaks", "code", "named"),
    [
        (zero, "optimizer.zero", "all 8 tensors"),
        (negative_zeros, "optimizer.zero", "all 8 tensors"),
        (begun_anew, "optimizer.discontinuous", "began anew"),
        (zero_one, "optimizer.idle", "2 of 8 tensors"),
        (negative, "optimizer.negative", "optimizer.state.1.weight.exp_avg_sq"),
        (first_moment_as_second, "optimizer.negative", "optimizer.state.0.weight.exp_avg_sq"),
        (of_another_parameter, "optimizer.shape", "0.bias"),
        (of_the_step_before, "optimizer.unchanged", "step_6"),
    ],
)
def test_broken_state_is_exactly_that_finding(tmp_path, breaks, code, named):
    root = train(tmp_path, torch.optim.AdamW, breaks=breaks)
    assert found(root, 6) == {}
    (only,) = (only for only in found(root, 9).items())
    assert only[0] == code
    assert named in only[1]


def test_moments_of_another_parameter_of_the_same_shape_are_found(tmp_path):
    layers = [torch.nn.Linear(16, 20), torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)]
    options = {"layers": [*layers, torch.nn.Linear(20, 4)], "breaks": of_an_equal_parameter}
    (only,) = found(train(tmp_path, torch.optim.Adam, **options), 9).items()
    assert only[0] == "optimizer.discontinuous"
    assert "1 of 8" in only[1] or "2 of 8" in only[1]
    assert "they are those of other parameters" in only[1]
    assert found(tmp_path, 6) == {}


def test_moments_are_not_compared_with_a_branch_that_the_run_has_left(tmp_path):
    root = train(tmp_path, torch.optim.AdamW, breaks=begun_anew)
    assert [*found(root, 9)] == ["optimizer.discontinuous"]
    ckptctl.mark(f"{root}@6", "superseded", reason="the run went back to step 3", by="a test")
    assert found(root, 9) == {}


def test_moments_of_projected_gradients_are_sound(tmp_path):
    """GaLore keeps those of a matrix in fewer dimensions, and those of a vector whole."""
    moments = {
        "up": {"exp_avg": torch.ones(8, 40), "exp_avg_sq": torch.ones(8, 40)},
        "down": {"exp_avg": torch.ones(40, 8), "exp_avg_sq": torch.ones(40, 8)},
        "norm": {"exp_avg": torch.ones(40), "exp_avg_sq": torch.ones(40)},
    }
    shapes = {"up": (16, 40), "down": (40, 16), "norm": (40,)}
    model = {name: torch.ones(shape) for name, shape in shapes.items()}
    state = {"model": model, "optimizer": {"state": moments}}
    dcp.save(state, checkpoint_id=tmp_path / "step_5", no_dist=True)
    assert found(tmp_path, 5) == {}


def test_negative_zero_and_a_first_moment_below_zero_are_sound(tmp_path):
    def breaks(state: State, _before: State) -> None:
        state["1.weight"]["exp_avg_sq"][0, 3] = -0.0
        state["1.weight"]["exp_avg"].neg_()

    assert found(train(tmp_path, torch.optim.AdamW, breaks=breaks), 9) == {}


def test_two_networks_with_parameters_of_one_name_are_sound(tmp_path):
    torch.manual_seed(0)
    state = {}
    for name, n_in in (("generator", 3), ("critic", 7)):
        net = torch.nn.Sequential(torch.nn.Linear(n_in, 5))
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.randn(2, n_in)).sum().backward()
        optimizer.step()
        state[name], state[f"optim_{name}"] = state_dict.get_state_dict(net, optimizer)
    dcp.save({**state, "step": 1}, checkpoint_id=tmp_path / "step_1", no_dist=True)
    assert found(tmp_path, 1) == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_moments_of_every_width_are_read(tmp_path, dtype):
    moments = {"exp_avg": torch.ones(9, dtype=dtype), "exp_avg_sq": torch.ones(9, dtype=dtype)}
    moments["exp_avg_sq"][7] = -1
    state = {"model": {"w": torch.ones(9)}, "optimizer": {"state": {"w": moments}}}
    dcp.save(state, checkpoint_id=tmp_path / "step_5", no_dist=True)
    assert "1 value" in found(tmp_path, 5)["optimizer.negative"]


def test_state_that_was_not_looked_at_is_named_as_such(tmp_path):
    (tmp_path / "step_5").mkdir()
    state = {"state": {0: {"momentum": torch.zeros(3), "step": 5}}, "param_groups": [{"lr": 1}]}
    torch.save(state, tmp_path / "step_5" / "optim.pt")
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "step_5", no_dist=True)
    assert [*found(tmp_path, 5)] == ["optimizer.unseen"]


def break_files(*names: str, breaks: Callable) -> Callable[[Path], None]:
    """Change the state of the optimizer in some files of a step."""

    def act(step: Path) -> None:
        for name in names:
            state = torch.load(step / name, weights_only=True)
            breaks(state["state"], {})
            torch.save(state, step / name)

    return act


def negative_in_a_number(state: State, _before: State) -> None:
    state[1]["exp_avg_sq"][2] = -1.0


@pytest.mark.parametrize(
    ("breaks", "code", "named"),
    [
        (None, None, ""),
        (break_files("rank_0.pt", "rank_1.pt", breaks=zero), "optimizer.zero", "all 8 tensors"),
        (break_files("rank_1.pt", breaks=zero), "optimizer.idle", "4 of 8 tensors"),
        (
            break_files("rank_1.pt", breaks=negative_in_a_number),
            "optimizer.negative",
            "rank_1.pt: state.1.exp_avg_sq",
        ),
    ],
)
def test_state_in_files_of_ranks_is_read(tmp_path, breaks, code, named):
    step = tmp_path / "step_3"
    step.mkdir()
    for rank in range(2):
        torch.manual_seed(rank)
        layer = torch.nn.Linear(8, 5)
        optimizer = torch.optim.AdamW(layer.parameters())
        for _ in range(3):
            layer(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        torch.save(optimizer.state_dict(), step / f"rank_{rank}.pt")
    if breaks is not None:
        breaks(step)
    findings = found(tmp_path, 3)
    assert [*findings] == ([] if code is None else [code])
    assert named in "".join(findings.values())


def test_watch_says_what_is_wrong_with_the_optimizer_of_a_step_that_it_seals(tmp_path):
    root = train(tmp_path, torch.optim.AdamW, breaks=zero)
    run_ckptctl("watch", root, "--once", "--grace", 0)
    done = run_ckptctl("watch", root, "--once", "--grace", 0)
    assert "sealed" in done.stdout
    assert "zero at train step 9" in done.stdout, done.stdout + done.stderr


def test_the_option_is_one_of_level_content(tmp_path):
    root = train(tmp_path, torch.optim.AdamW, steps=1)
    with pytest.raises(ckptctl.errors.UsageError, match="state-check is for level content"):
        ckptctl.verify(f"{root}@3", state_check=True)
