"""What a step and a job do not both hold: restored, stated, or refused, and never dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from small_job import Lines  # noqa: E402
from torch.optim import SGD, AdamW  # noqa: E402
from torch.optim.lr_scheduler import (  # noqa: E402
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    SequentialLR,
    StepLR,
)

from ckptctl.errors import ModelDiffers, StateRefused, UsageError  # noqa: E402
from ckptctl.train import Checkpointer, GlobalLoader  # noqa: E402
from ckptctl.train.state import joined, split  # noqa: E402

pytestmark = pytest.mark.torch

Parts = dict[str, Any]


class Layers(torch.nn.Sequential):
    """A few layers with one buffer, or more."""

    def __init__(self, n_layers: int = 2, *buffers: str, dtype: Any = torch.float32) -> None:
        super().__init__(*(torch.nn.Linear(4, 4, dtype=dtype) for _ in range(n_layers)))
        for name in buffers:
            self.register_buffer(name, torch.full((2,), float(n_layers)))


def train(model: Any, *optimizers: Any) -> None:
    for _ in range(2):
        model(torch.ones(1, 4)).pow(2).sum().backward()
        for one in optimizers:
            one.step()
        model.zero_grad()


def job(
    model: Any = None,
    optimizer: Callable[[Iterable[Any]], Any] | None = AdamW,
    scheduler: Callable[[Any], Any] | None = None,
    **others: Any,
) -> Parts:
    parts: Parts = {"model": Layers() if model is None else model}
    if optimizer is not None:
        parts["optimizer"] = optimizer(parts["model"].parameters())
    if scheduler is not None:
        parts["scheduler"] = scheduler(parts["optimizer"])
    return parts | others


def saved(root: Path, parts: Parts) -> Parts:
    with Checkpointer(str(root), tell=lambda _: None, **parts) as ckpt:
        ckpt.resume()
        train(parts["model"], *(parts[name] for name in parts if name == "optimizer"))
        if "scheduler" in parts:
            parts["scheduler"].step()
        ckpt.save(1)
    return parts


def resumed(root: Path, parts: Parts, **options: Any) -> tuple[dict[str, list[str]], list[str]]:
    """The inventory of a resume, and what was printed."""
    lines: list[str] = []
    with Checkpointer(str(root), tell=lines.append, **parts, **options) as ckpt:
        state = ckpt.resume().report["state"]
    return state, [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]


def groups(*sizes: int) -> Callable[[Iterable[Any]], Any]:
    def make(parameters: Iterable[Any]) -> Any:
        left = list(parameters)
        held = []
        for number, size in enumerate(sizes):
            held.append({"params": left[:size], "lr": 0.1 + number})
            left = left[size:]
        return AdamW(held)

    return make


class Counter:
    """A `Stateful` of which the state is what it was given last."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def counting(**state: Any) -> Parts:
    return job(extra={"counter": Counter(state)})


def cosine(optimizer: Any) -> Any:
    return CosineAnnealingLR(optimizer, 9)


def warm(then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda one: SequentialLR(one, [LinearLR(one), then(one)], milestones=[3])


LOST = {
    # What saves, what resumes, what is lost
    "layer of the step": (
        lambda: job(Layers(3), None),
        lambda: job(optimizer=None),
        "model (2 entries of the step that this job does not have, such as 2.weight)",
    ),
    "layer of the job": (
        lambda: job(optimizer=None),
        lambda: job(Layers(3), None),
        "model (2 entries of this job that the step does not have, such as 2.bias)",
    ),
    "buffer": (
        lambda: job(Layers(2, "mean"), None),
        lambda: job(optimizer=None),
        "model (1 entry of the step that this job does not have, such as mean)",
    ),
    "model": (
        lambda: job(optimizer=None),
        lambda: {"model": None},
        "model (the step has it, and the script gives none)",
    ),
    "optimizer": (
        job,
        lambda: job(optimizer=None),
        "optimizer (the step has it, and the script gives none)",
    ),
    "another optimizer": (
        job,
        lambda: job(optimizer=lambda held: SGD(held, lr=0.1, momentum=0.9)),
        "optimizer (the step's has no 0.bias.momentum_buffer)",
    ),
    "fewer groups": (
        lambda: job(optimizer=groups(2, 2)),
        lambda: job(optimizer=groups(4)),
        "optimizer options (the step has 2 groups of parameters, and this job 1)",
    ),
    "more groups": (
        lambda: job(optimizer=groups(4)),
        lambda: job(optimizer=groups(1, 3)),
        "optimizer options (the step has 1 group of parameters, and this job 2)",
    ),
    "other groups": (
        lambda: job(optimizer=groups(2, 2)),
        lambda: job(optimizer=groups(1, 3)),
        "optimizer options (the step divides the parameters into other groups)",
    ),
    "scheduler": (
        lambda: job(scheduler=cosine),
        job,
        "scheduler (the step has it, and the script gives none)",
    ),
    "new scheduler": (job, lambda: job(scheduler=cosine), "scheduler"),
    "another scheduler": (
        lambda: job(scheduler=cosine),
        lambda: job(scheduler=lambda one: StepLR(one, 3)),
        "scheduler (the step's has T_max, and this job's gamma: it was saved by another class)",
    ),
    "a part of a scheduler": (
        lambda: job(scheduler=warm(cosine)),
        lambda: job(scheduler=warm(lambda one: ExponentialLR(one, 0.9))),
        (
            "scheduler (the step's has _schedulers.1.T_max, and this job's _schedulers.1.gamma: it "
            "was saved by another class)"
        ),
    ),
    "scaler without state": (
        lambda: job(grad_scaler=torch.amp.GradScaler("cpu", enabled=False)),
        lambda: job(grad_scaler=torch.amp.GradScaler("cpu")),
        (
            "grad_scaler (the step's has no state, and this job's _growth_tracker: it was saved by "
            "another class)"
        ),
    ),
    "extra": (
        lambda: counting(n=1),
        job,
        "extra counter (the step has it, and the script gives none)",
    ),
    "extra with tensors": (
        lambda: counting(w=torch.ones(2)),
        job,
        "extra counter (the step has it, and the script gives none)",
    ),
    "new extra": (job, lambda: counting(n=1), "extra counter"),
    "tensor of an extra": (
        lambda: counting(w=torch.ones(2)),
        lambda: counting(w=torch.ones(2), v=torch.ones(2)),
        "extra counter (1 entry of this job that the step does not have, such as v)",
    ),
    "data": (
        lambda: job(dataloader=GlobalLoader(Lines(), 8, seed=1)),
        job,
        "dataloader (the step has it, and the script gives none)",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_state_that_only_the_step_or_only_the_job_has_is_refused_unless_accepted(
    name: str, tmp_path: Path
):
    save, resume, lost = LOST[name]
    saved(tmp_path / "run", save())
    with pytest.raises(StateRefused) as refused:
        resumed(tmp_path / "run", resume())
    assert refused.value.message.startswith(f"step 1 cannot restore {lost}: a resume would ")
    assert refused.value.next_command == f"ckptctl show {tmp_path}/run/step_1"
    state, _ = resumed(tmp_path / "run", resume(), accept_lost=[lost.split()[0]])
    assert state["lost"] == [lost]


class Tied(Layers):
    """Two layers of one weight, or of two."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        if tied:
            self[1].weight = self[0].weight


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_tied_weights_are_restored(value: float, tmp_path: Path):
    first, second = job(Tied(tied=True)), job(Tied(tied=True))
    with torch.no_grad():
        first["model"][0].weight[0] = value
    saved(tmp_path / "run", first)
    assert resumed(tmp_path / "run", second)[0]["lost"] == []
    weights = [one["model"][0].weight for one in (first, second)]
    assert torch.equal(*(one.detach().view(torch.int32) for one in weights))
    assert second["model"][0].weight is second["model"][1].weight


def test_a_second_name_of_tied_weights_may_be_absent_from_the_step(tmp_path: Path):
    """safetensors stores one of the names of tied weights."""
    first, second = Tied(tied=True), Tied(tied=True)
    with torch.no_grad():
        first[0].weight.fill_(3.0)
    state = {"model": {name: t for name, t in first.state_dict().items() if name != "1.weight"}}
    dcp.save({**state, "step": 1}, checkpoint_id=tmp_path / "run" / "step_1")
    with Checkpointer(str(tmp_path / "run"), model=second) as ckpt:
        assert ckpt.resume("auto").step == 1
    assert torch.equal(second[1].weight, first[1].weight)
    with (
        Checkpointer(str(tmp_path / "run"), model=Tied(tied=False)) as ckpt,
        pytest.raises(StateRefused, match=r"1 entry of this job .* such as 1\.weight"),
    ):
        ckpt.resume("auto")


def test_weights_that_differ_in_the_step_and_are_one_in_the_job_are_refused(tmp_path: Path):
    first, second = job(Tied(tied=False), None), job(Tied(tied=True), None)
    saved(tmp_path / "run", first)
    lost = (
        "model (model.0.weight and model.1.weight are one tensor in this job, and differ in the "
        "step)"
    )
    with pytest.raises(StateRefused) as refused:
        resumed(tmp_path / "run", second)
    assert refused.value.message.startswith(f"step 1 cannot restore {lost}: a resume would ")
    state, _ = resumed(tmp_path / "run", second, accept_lost=["model"])
    assert state["lost"] == [lost]
    assert torch.equal(second["model"][1].weight, first["model"][0].weight)


def test_a_refused_resume_loads_nothing(tmp_path: Path):
    saved(tmp_path / "run", job(Layers(3)))
    fewer = job()
    before = [one.clone() for one in fewer["model"].parameters()]
    with pytest.raises(StateRefused, match="2 entries of the step"):
        resumed(tmp_path / "run", fewer)
    assert all(map(torch.equal, fewer["model"].parameters(), before))
    assert not fewer["optimizer"].state


def test_new_layers_keep_the_values_that_they_begin_with_and_the_rest_is_restored(tmp_path: Path):
    first = saved(tmp_path / "run", job())
    more = job(Layers(3))
    new = [one.clone() for one in more["model"][2].parameters()]
    _, notes = resumed(tmp_path / "run", more, accept_lost=["model"])
    assert all(map(torch.equal, more["model"][2].parameters(), new))
    pairs = zip(first["model"].parameters(), more["model"].parameters(), strict=False)
    for theirs, ours in pairs:
        assert torch.equal(theirs, ours)
        held = first["optimizer"].state[theirs]["exp_avg"]
        assert torch.equal(held, more["optimizer"].state[ours]["exp_avg"])
    assert len(more["optimizer"].state) == 4
    assert notes[0].startswith("the step has no optimizer state of 2 parameters, such as 2.")
    train(more["model"], more["optimizer"])


@pytest.mark.parametrize("sizes", [(4,), (1, 3)])
def test_where_groups_differ_the_state_is_restored_and_the_options_are_those_of_the_job(
    sizes: tuple[int, ...], tmp_path: Path
):
    first = saved(tmp_path / "run", job(optimizer=groups(2, 2)))
    other = job(optimizer=groups(*sizes))
    resumed(tmp_path / "run", other, accept_lost=["optimizer"])
    for theirs, ours in zip(*(one["model"].parameters() for one in (first, other)), strict=True):
        held = first["optimizer"].state[theirs]["exp_avg_sq"]
        assert torch.equal(held, other["optimizer"].state[ours]["exp_avg_sq"])
    rates = [group["lr"] for group in other["optimizer"].param_groups]
    assert rates == [0.1, 1.1][: len(sizes)]
    train(other["model"], other["optimizer"])


def test_groups_in_another_order_take_their_own_options(tmp_path: Path):
    def backwards(parameters: Iterable[Any]) -> Any:
        return AdamW(groups(2, 2)(parameters).param_groups[::-1], lr=9.0)

    saved(tmp_path / "run", job(optimizer=groups(2, 2)))
    other = job(optimizer=backwards)
    for group in other["optimizer"].param_groups:
        group["lr"] = 5.0
    assert resumed(tmp_path / "run", other)[0]["lost"] == []
    assert [group["lr"] for group in other["optimizer"].param_groups] == [1.1, 0.1]


NOTED = {
    "option of the step": (
        lambda: job(optimizer=lambda held: AdamW([{"params": list(held), "name": "all"}])),
        job,
        "the step has an option of the optimizer that this job's has not: name",
    ),
    "option of the job": (
        job,
        lambda: job(optimizer=lambda held: AdamW([{"params": list(held), "name": "all"}])),
        "this job's optimizer has an option that the step's has not, and keeps its value: name",
    ),
    "setting of a scheduler": (
        lambda: job(scheduler=lambda one: StepLR(one, 3)),
        lambda: job(scheduler=lambda one: ExponentialLR(one, 0.9)),
        "scheduler: only the step's has step_size",
    ),
    "dtype": (
        lambda: job(optimizer=None),
        lambda: job(Layers(dtype=torch.bfloat16), None),
        "model: float32 in the step is bfloat16 in this job, and was cast",
    ),
}


@pytest.mark.parametrize("name", NOTED)
def test_a_smaller_difference_is_printed(name: str, tmp_path: Path):
    save, resume, note = NOTED[name]
    saved(tmp_path / "run", save())
    parts = resume()
    state, notes = resumed(tmp_path / "run", parts)
    assert (state["lost"], notes) == ([], [note])
    if name == "option of the job":
        assert parts["optimizer"].param_groups[0]["name"] == "all"


# `extra`


def gan() -> Parts:
    """A second model with an optimizer of its own, which has no state before its first step."""
    other = Layers(1)
    optimizers = {"adam": AdamW(other.parameters()), "sgd": SGD(other.parameters(), 0.1, 0.9)}
    return job(extra={"other": other, **optimizers})


def test_a_second_optimizer_that_has_no_state_yet_is_restored(tmp_path: Path):
    first, second = gan(), gan()
    train(first["extra"]["other"], first["extra"]["adam"], first["extra"]["sgd"])
    saved(tmp_path / "run", first)
    resumed(tmp_path / "run", second)
    for name in ("adam", "sgd"):
        theirs, ours = (one["extra"][name].state_dict() for one in (first, second))
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys() == {0, 1}
        for key, held in theirs["state"].items():
            assert all(torch.equal(held[each], ours["state"][key][each]) for each in held)


STATES: dict[str, dict[Any, Any]] = {
    "keys that are numbers": {3: {"w": torch.ones(2), "n": 5}, "none": None},
    "what is empty": {"w": torch.ones(1), "list": [], "dict": {}, "tuple": ()},
    "tensors in lists": {"all": [torch.ones(1), 2, (torch.zeros(2), {"x": torch.ones(3)})]},
    "no tensors": {1: [2, {}], "a": {"b": None}},
    "nothing": {},
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("before", ["nothing", "other tensors", "the same"])
def test_an_extra_gets_its_state_in_the_form_in_which_it_was_saved(
    name: str, before: str, tmp_path: Path
):
    state = STATES[name]
    saved(tmp_path / "run", job(extra={"counter": Counter(state)}))
    shapes = {"nothing": {}, "other tensors": {3: {"w": torch.zeros(7)}}, "the same": state}
    held = {key: value for key, value in shapes[before].items() if key in state}
    counter = Counter(held)
    resumed(tmp_path / "run", job(extra={"counter": counter}))
    assert split(counter.state, "counter")[0] == split(state, "counter")[0]
    ours, theirs = (split(one, "counter")[1] for one in (counter.state, state))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


# Steps of other programs


def of_torch() -> Parts:
    """Model and optimizer as torch's functions return them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    parts = job()
    train(parts["model"], parts["optimizer"])
    return dict(
        zip(("model", "optimizer"), get_state_dict(parts["model"], parts["optimizer"]), strict=True)
    )


FOREIGN: dict[str, tuple[Callable[[Parts], Parts], str]] = {
    # What another program saves instead, and what is lost
    "options without values": (
        lambda one: {"optimizer": one["optimizer"] | {"param_groups": [3, 4]}},
        "optimizer as optimizer.param_groups",
    ),
    "options that are a tensor": (
        lambda one: {"optimizer": one["optimizer"] | {"param_groups": torch.ones(2)}},
        "optimizer as optimizer.param_groups, in another",
    ),
    "a tensor for each parameter": (
        lambda one: {"optimizer": one["optimizer"] | {"state": {"0.weight": torch.ones(4)}}},
        "optimizer as optimizer.state.0.weight, in another",
    ),
    "one tensor for all state": (
        lambda one: {"optimizer": one["optimizer"] | {"state": torch.ones(4)}},
        "optimizer as optimizer.state, in another",
    ),
    "more beside the state": (
        lambda one: {"optimizer": one["optimizer"] | {"scale": 2.0}},
        "optimizer as optimizer.scale, in another",
    ),
    "an extra that is a tensor": (
        lambda one: {"extra": {"counter": torch.ones(2)}},
        "weights as extra (pass extra=",
    ),
}


def others_of(names: Iterable[str]) -> Parts:
    """The parts of a job of which a step has these kinds of state."""
    parts = job()
    more = {
        "scheduler": lambda: StepLR(parts["optimizer"], 3),
        "grad_scaler": lambda: torch.amp.GradScaler("cpu"),
        "extra": lambda: {"counter": Counter({"n": 1})},
        "dataloader": lambda: GlobalLoader(Lines(), 8, seed=1),
    }
    return parts | {name: make() for name, make in more.items() if name in names}


@pytest.mark.filterwarnings("ignore::UserWarning")  # a save without a process group
@pytest.mark.parametrize("name", FOREIGN)
def test_state_in_another_form_than_that_of_a_checkpointer_is_refused_unless_accepted(
    name: str, tmp_path: Path
):
    change, lost = FOREIGN[name]
    state = of_torch()
    state |= change(state)
    dcp.save(state, checkpoint_id=str(tmp_path / "step_1"))
    kind = lost.split()[0].replace("weights", "extra")
    with pytest.raises(StateRefused) as refused:
        resumed(tmp_path, others_of(state))
    assert f"would not load: {lost}" in refused.value.message
    assert "accept_lost" not in refused.value.message
    parts = others_of(state)
    inventory, _ = resumed(tmp_path, parts, accept_lost=[kind])
    assert kind not in inventory["restored"]
    train(parts["model"], parts["optimizer"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scheduler", 5),
        ("scheduler", ({"last_epoch": 1}, 2)),
        ("rng", {"rank_0": 5}),
        ("rng", {"rank_0": ({"state": 3},)}),
        ("dataloader", {"global": ({},)}),
        ("dataloader", {"global": 7}),
        ("extra", {"counter": 3}),
        ("train_state", {"step": 1, "tokens": "many"}),
    ],
)
def test_a_value_that_an_object_does_not_load_is_refused_by_its_name(
    name: str, value: Any, tmp_path: Path
):
    state = of_torch() | {name: value}
    dcp.save(state, checkpoint_id=str(tmp_path / "step_1"))
    with pytest.raises(StateRefused, match=rf"this job would not load: .*{name}"):
        resumed(tmp_path, others_of(state))


def test_two_tensors_of_an_extra_with_one_name_are_refused():
    with pytest.raises(UsageError, match=r"extra meter has two tensors of the name 'a\.b'"):
        split({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "meter")
    assert joined(*split({"a": 1}, "meter")) == {"a": 1}


def test_an_extra_that_does_not_accept_its_state_is_of_another_model(tmp_path: Path):
    saved(tmp_path / "run", job(extra={"other": Layers(2)}))
    with pytest.raises(ModelDiffers, match=r"extra other does not accept its state.*RuntimeError"):
        resumed(tmp_path / "run", job(extra={"other": Layers(1)}))


# The loader


def stateful(_: Path) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(Lines(), batch_size=8)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "GlobalLoader": lambda _: GlobalLoader(Lines(), 8, seed=1),
    "StatefulDataLoader": stateful,
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        ("GlobalLoader", "StatefulDataLoader", "by a GlobalLoader, and this job has a Stateful"),
        ("StatefulDataLoader", "GlobalLoader", "by another loader than GlobalLoader, and this"),
    ],
)
def test_the_position_of_a_loader_of_another_kind_is_refused_unless_repetition_is_accepted(
    first: str, then: str, why: str, tmp_path: Path
):
    saved(tmp_path / "run", job(dataloader=LOADERS[first](tmp_path)))
    with pytest.raises(StateRefused, match=why):
        resumed(tmp_path / "run", job(dataloader=LOADERS[then](tmp_path)))
    parts = job(dataloader=LOADERS[then](tmp_path))
    state, notes = resumed(tmp_path / "run", parts, accept_repetition=True)
    assert state["lost"] == ["dataloader"]
    assert "the data would restart, repeating" in notes[0]


class Drawn(torch.utils.data.Sampler):
    """A sampler of the script's own, with an order that a resume draws anew."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(96).tolist())

    def __len__(self) -> int:
        return 96


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
@pytest.mark.parametrize(
    ("sampler", "n_notes"),
    [
        (Drawn, 1),
        (lambda: torch.utils.data.SequentialSampler(Lines()), 0),
        (lambda: torch.utils.data.DistributedSampler(Lines(), 1, 0), 0),
    ],
)
def test_a_sampler_whose_order_is_not_saved_is_named_at_a_resume(
    sampler: Callable[[], Any], n_notes: int, tmp_path: Path
):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loading() -> Parts:
        return job(dataloader=loaders.StatefulDataLoader(Lines(), batch_size=8, sampler=sampler()))

    saved(tmp_path / "run", loading())
    _, notes = resumed(tmp_path / "run", loading())
    assert len(notes) == n_notes
    assert all(one.startswith("the order of Drawn is not saved") for one in notes)
