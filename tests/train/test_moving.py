"""Steps of other programs continue in a plain `Checkpointer` as in the script that saved them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from command_line import run_ckptctl  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.optim.lr_scheduler import (  # noqa: E402
    CosineAnnealingLR,
    LinearLR,
    MultiStepLR,
    SequentialLR,
)
from train_ranks import ends, ranks  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import StateRefused, UsageError  # noqa: E402
from ckptctl.formats.dcp.metadata import decode_metadata  # noqa: E402
from ckptctl.train import Checkpointer  # noqa: E402

pytestmark = pytest.mark.torch

State = dict[str, Any]


class Position:
    """The place in the data that an old script kept as a number."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> Any:
        return self.position

    def load_state_dict(self, state: Any) -> None:
        self.position = state


class Job:
    """A model with dropout, its optimizer, a schedule, and a place in the data."""

    def __init__(self, schedule: Callable[[Any], Any] = lambda one: CosineAnnealingLR(one, 9)):
        torch.manual_seed(5)
        random.seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        decayed = [one for one in self.model.parameters() if one.dim() > 1]
        others = [one for one in self.model.parameters() if one.dim() < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.scheduler = schedule(self.optimizer)
        self.data = Position()
        self.step = 0

    def train(self, n_steps: int) -> Job:
        for _ in range(n_steps):
            batch = torch.arange(4.0) + self.data.position
            self.model(batch).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.data.position += 4
            self.step += 1
        return self

    @property
    def bits(self) -> list[Any]:
        moments = [one for held in self.optimizer.state.values() for one in held.values()]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [*self.model.state_dict().values(), *moments, torch.tensor(rates)]


def named(job: Job) -> State:
    """Each state as torch's `get_..._state_dict` gives it, under short names."""
    return {
        "model": get_model_state_dict(job.model),
        "optim": get_optimizer_state_dict(job.model, job.optimizer),
        "sched": job.scheduler.state_dict(),
        "step": job.step,
        "data_pos": job.data.position,
    }


def numbered(job: Job) -> State:
    """Each state as the object gives it: that of the optimizer is by number."""
    return {
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "scheduler": job.scheduler.state_dict(),
        "dataloader": {"position": job.data.position, "epoch": 0},
        "global_step": job.step,
        "rng": torch.get_rng_state(),
        "config": {"lr": 1e-2, "name": "a run"},
    }


def nested(job: Job) -> State:
    """All in one `Stateful`, as in torch's tutorial, and more generators."""
    return {
        "app": {
            "model": get_model_state_dict(job.model),
            "optim": get_optimizer_state_dict(job.model, job.optimizer),
            "lr_scheduler": job.scheduler.state_dict(),
            "loader": {"position": job.data.position, "epoch": 0},
            "progress": {"step": job.step, "tokens": 4 * job.step},
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        }
    }


def flat(job: Job) -> State:
    """As torchtitan saves: the model in the middle, and options of each parameter."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        **get_model_state_dict(job.model),
        "optimizer": get_optimizer_state_dict(job.model, job.optimizer, options=options),
        "lr_scheduler": job.scheduler.state_dict(),
        "train_state": {"step": torch.tensor(job.step, dtype=torch.int32)},
        "dataloader": {"dp_rank_0": {"position": job.data.position}, "dp_world_size": 1},
    }


def wrapped(job: Job) -> State:
    """Of a model in DDP that is compiled, whose wrappers are in the names."""
    model = {f"module._orig_mod.{name}": one for name, one in job.model.state_dict().items()}
    state = named(job)
    state["optim"]["state"] = {
        f"module._orig_mod.{name}": one for name, one in state["optim"]["state"].items()
    }
    for group in state["optim"]["param_groups"]:
        group["params"] = [f"module._orig_mod.{name}" for name in group["params"]]
    return {**state, "model": model}


def in_a_module(job: Job) -> State:
    """As Lightning names them: the model is a part of a module."""
    state = named(job)
    optimizer = state.pop("optim")
    optimizer["state"] = {f"network.{name}": one for name, one in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        group["params"] = [f"network.{name}" for name in group["params"]]
    weights = {f"network.{name}": one for name, one in state.pop("model").items()}
    return {**state, "state_dict": weights, "optimizer_0": optimizer}


class Place(Position):
    """The same, of a script that saved a dict."""

    def state_dict(self) -> Any:
        return {"position": self.position, "epoch": 0}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


LAYOUTS: Mapping[str, tuple[Callable[[Job], State], type[Position], State]] = {
    "named": (named, Position, {"names": {"dataloader": "data_pos"}}),
    "numbered": (numbered, Place, {}),
    "nested": (nested, Place, {}),
    "flat": (flat, Place, {}),
    "in a module": (in_a_module, Position, {"names": {"dataloader": "data_pos"}}),
    "wrapped": (wrapped, Position, {"names": {"dataloader": "data_pos"}}),
}


def old_save(root: Path, layout: Callable[[Job], State], job: Job) -> Job:
    dcp.save(layout(job), checkpoint_id=str(root / f"step_{job.step}"))
    return job


def moved(root: Path, job: Job, **options: Any) -> tuple[Job, dict[str, Any]]:
    """The job after a resume by `Checkpointer`, and the report."""
    with Checkpointer(
        str(root),
        model=job.model,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        dataloader=job.data,
        tell=lambda _: None,
        **options,
    ) as ckpt:
        start = ckpt.resume()
        job.step = start.step
    return job, dict(start.report)


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


SCHEDULES = {
    "cosine": lambda one: CosineAnnealingLR(one, 9),
    "milestones": lambda one: MultiStepLR(one, [2, 4]),
    "sequence": lambda one: SequentialLR(one, [LinearLR(one), CosineAnnealingLR(one, 9)], [2]),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_steps_after_a_move_are_those_of_the_old_script(tmp_path, name, schedule):
    layout, data, options = LAYOUTS[name]
    old = Job(SCHEDULES[schedule]).train(3)
    at_save = torch.get_rng_state()
    old_save(tmp_path, layout, old)
    job = Job(SCHEDULES[schedule])
    job.data = data()
    begun = torch.get_rng_state()
    new, report = moved(tmp_path, job, **options)
    assert (new.step, new.data.position, report["state"]["lost"]) == (3, 12, [])
    random_state = torch.get_rng_state()
    assert torch.equal(random_state, at_save if name in ("numbered", "nested") else begun)
    new.train(2)
    torch.set_rng_state(random_state)
    old.train(2)
    assert same(old.bits, new.bits)


def refused(root: Path, job: Job, **options: Any) -> str:
    with pytest.raises(StateRefused) as error:
        moved(root, job, **options)
    assert "accept_lost" not in error.value.message
    return error.value.message


def test_an_entry_that_is_not_recognized_is_refused_with_the_mapping_that_loads_it(tmp_path):
    old_save(tmp_path, named, Job().train(3))
    message = refused(tmp_path, Job())
    assert "data_pos, which is not recognized" in message
    assert "names={'dataloader': 'data_pos'} maps it" in message
    assert "extra={'data_pos': ...}" in message


def test_a_part_that_no_entry_is_recognized_as_may_be_one_of_the_others(tmp_path):
    job = Job().train(3)
    state = named(job)
    state["num_batches"] = state.pop("data_pos") // 4
    dcp.save(state, checkpoint_id=str(tmp_path / "step_3"))
    with pytest.raises(StateRefused) as error:
        moved(tmp_path, Job())
    assert "dataloader under no known name, beside num_batches" in error.value.message
    new, _ = moved(tmp_path, Job(), names={"dataloader": "num_batches"})
    assert new.data.position == 3


def test_a_part_that_the_script_does_not_give_is_refused_under_its_name_in_the_step(tmp_path):
    old_save(tmp_path, named, Job().train(3))
    job = Job()
    job.scheduler = None
    message = refused(tmp_path, job, names={"dataloader": "data_pos"})
    assert "scheduler as sched (pass scheduler= to Checkpointer)" in message


def test_a_key_that_the_step_does_not_hold_is_refused_with_those_that_it_holds(tmp_path):
    old_save(tmp_path, named, Job().train(3))
    message = refused(tmp_path, Job(), names={"dataloader": "position"})
    assert "names maps dataloader to 'position', which the step does not hold; it holds" in message
    assert "data_pos" in message


def test_a_kind_of_state_that_is_not_known_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="names maps 'optim', which is not a kind of state"):
        moved(tmp_path, Job(), names={"optim": "optimizer"})
    with pytest.raises(UsageError, match=r"names maps optimizer to \['a'\]; expected a key"):
        moved(tmp_path, Job(), names={"optimizer": ["a"]})


def test_names_and_state_keys_are_one_mapping_for_the_choice_and_for_the_load(tmp_path):
    old_save(tmp_path, named, Job().train(3))
    for mapping in ({"names": {"dataloader": "data_pos"}}, {"state_keys": "dataloader=data_pos"}):
        new, _ = moved(tmp_path, Job(), require=["dataloader"], **mapping)
        assert new.data.position == 12


def test_a_name_that_counts_epochs_is_no_step(tmp_path):
    state = numbered(Job().train(3))
    del state["global_step"]
    dcp.save(state | {"n_done": 3}, checkpoint_id=str(tmp_path / "epoch_1"))
    new = Job()
    new.data = Place()
    message = refused(tmp_path, new)
    assert "a number in its name that counts saves or epochs" in message
    new, _ = moved(tmp_path, new, names={"step": "n_done"})
    assert new.step == 3


def test_what_lies_beside_a_state_in_one_folder_is_not_part_of_it(tmp_path):
    job = Job().train(3)
    state = named(job)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run = {"sched": state.pop("sched"), "scaler": scaler.state_dict()}
    run["n_done"] = state.pop("step")
    dcp.save({**state, "app": {"run": run}}, checkpoint_id=str(tmp_path / "epoch_1"))
    new, other = Job(), torch.amp.GradScaler("cpu")
    names = {"dataloader": "data_pos", "step": "run.n_done"}
    new, report = moved(tmp_path, new, names=names, grad_scaler=other)
    assert (new.step, report["state"]["lost"]) == (3, [])
    assert other.state_dict() == scaler.state_dict()
    assert same(new.bits, job.bits)


def test_a_buffer_that_is_called_as_a_count_belongs_to_the_model(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("step", torch.tensor(7))
    dcp.save({"net": model.state_dict(), "step": 3}, checkpoint_id=str(tmp_path / "step_3"))
    new = torch.nn.Linear(2, 2)
    new.register_buffer("step", torch.tensor(0))
    with Checkpointer(str(tmp_path), model=new, tell=lambda _: None) as ckpt:
        assert ckpt.resume().step == 3
    assert new.step == 7


def test_all_generators_of_a_dict_are_restored(tmp_path):
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(3)
    job = Job().train(3)
    state = numbered(job)
    draws = (random.random, numpy.random.rand, lambda: torch.rand(1).item())
    held = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["rng"] = held | {"numpy": numpy.random.get_state()}
    dcp.save(state, checkpoint_id=str(tmp_path / "step_3"))
    drawn = [draw() for draw in draws]
    new = Job()
    new.data = Place()
    moved(tmp_path, new)
    assert [draw() for draw in draws] == drawn
    state["rng"] = held | {"numpy": numpy.random.get_state(legacy=False)}
    dcp.save(state, checkpoint_id=str(tmp_path / "step_4"))
    assert "random states as rng.numpy" in refused(tmp_path, new)


def test_averages_beside_the_model_are_an_extra_state(tmp_path):
    job = Job().train(3)
    averages = {name: one + 1 for name, one in job.model.state_dict().items()}
    dcp.save({**numbered(job), "ema": averages}, checkpoint_id=str(tmp_path / "step_3"))
    new = Job()
    new.data = Place()
    assert "weights as ema (pass extra={'ema': ...}" in refused(tmp_path, new)
    for names in ({}, {"shadow": "ema"}):
        ema = Job().model
        new, _ = moved(tmp_path, new, extra={"shadow" if names else "ema": ema}, names=names)
        assert same([*ema.state_dict().values()], [*averages.values()])
        assert same(new.bits, job.bits)


def test_a_second_optimizer_is_chosen_by_name_and_the_other_is_an_extra_state(tmp_path):
    job, other = Job().train(3), Job().train(1)
    state = numbered(job) | {"other_optimizer": other.optimizer.state_dict()}
    dcp.save(state, checkpoint_id=str(tmp_path / "step_3"))
    new, second = Job(), Job()
    new.data = Place()
    message = refused(tmp_path, new)
    assert "optimizer as optimizer, other_optimizer" in message
    moved(
        tmp_path,
        new,
        names={"optimizer": "optimizer"},
        extra={"other_optimizer": second.optimizer},
    )
    assert same(new.bits, job.bits)
    held = (one.optimizer.state_dict()["state"] for one in (second, other))
    ours, theirs = ([*each.values()] for each in held)
    assert [*map(str, ours)] == [*map(str, theirs)]


def test_further_models_and_optimizers_of_accelerate_are_extra_states(tmp_path):
    jobs = [Job().train(3), Job().train(1)]
    save = tmp_path / "old" / "step_3"
    save.mkdir(parents=True)
    for job, suffix in zip(jobs, ("", "_1"), strict=True):
        torch.save(job.model.state_dict(), save / f"pytorch_model{suffix}.bin")
        torch.save(job.optimizer.state_dict(), save / f"optimizer{suffix}.bin")
    torch.save(
        {"step": 3, "torch_manual_seed": torch.get_rng_state()}, save / "random_states_0.pkl"
    )
    assert ckptctl.convert(str(save), str(tmp_path / "run" / "step_3")).written
    new, second = Job(), Job()
    extra = {"pytorch_model_fsdp_1": second.model, "optimizer_1": second.optimizer}
    with Checkpointer(
        str(tmp_path / "run"), model=new.model, optimizer=new.optimizer, extra=extra
    ) as ckpt:
        assert ckpt.resume().step == 3
    for ours, theirs in zip((new, second), jobs, strict=True):
        assert same([*ours.model.state_dict().values()], [*theirs.model.state_dict().values()])
        held, expected = (one.optimizer.state_dict()["state"] for one in (ours, theirs))
        assert str(held) == str(expected)


@pytest.mark.parametrize("names", [{}, {"grad_scaler": "scaler.pt"}])
def test_the_values_of_a_scaler_in_a_file_are_one_scaler(tmp_path, names):
    job = Job().train(3)
    old_save(tmp_path, numbered, job)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    torch.save(scaler.state_dict(), tmp_path / "step_3" / "scaler.pt")
    new, other = Job(), torch.amp.GradScaler("cpu")
    new.data = Place()
    moved(tmp_path, new, grad_scaler=other, names=names)
    assert other.state_dict() == scaler.state_dict()
    assert same(new.bits, job.bits)


def test_of_two_scalers_in_files_the_remedy_maps_one(tmp_path):
    old_save(tmp_path, numbered, Job().train(3))
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 16.0)]
    for number, scaler in enumerate(scalers):
        state = {"amp": scaler.state_dict(), "note": "one of two"}
        torch.save(state, tmp_path / "step_3" / f"scaler_{number}.pt")
    new, other = Job(), torch.amp.GradScaler("cpu")
    new.data = Place()
    with pytest.raises(StateRefused) as error:
        moved(tmp_path, new, grad_scaler=other)
    key = re.search(r"names={'grad_scaler': '([^']+)'}", error.value.message)
    assert key is not None
    names = {"grad_scaler": key[1]}
    moved(tmp_path, new, grad_scaler=other, names=names, accept_lost=["extra"])
    assert other.state_dict() == scalers[0].state_dict()


def test_settings_are_left_in_the_step_with_a_note(tmp_path):
    old_save(tmp_path, numbered, Job().train(3))
    lines: list[str] = []
    job = Job()
    with Checkpointer(
        str(tmp_path),
        model=job.model,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        dataloader=Place(),
        tell=lines.append,
    ) as ckpt:
        ckpt.resume()
    (note,) = [line for line in lines if "left in the step" in line]
    assert "config" in note


def test_the_next_resume_is_from_a_step_of_the_checkpointer_whatever_the_names(tmp_path):
    old_save(tmp_path, named, Job().train(3))
    job = Job()
    options: State = {"names": {"dataloader": "data_pos"}, "tell": lambda _: None}
    parts: State = {
        "model": job.model,
        "optimizer": job.optimizer,
        "scheduler": job.scheduler,
        "dataloader": job.data,
    }
    with Checkpointer(str(tmp_path), **parts, **options) as ckpt:
        assert ckpt.resume().step == 3
        job.train(1)
        ckpt.save(4)
    new, report = moved(tmp_path, Job(), names={"dataloader": "data_pos"})
    assert (new.step, new.data.position, report["state"]["lost"]) == (4, 16, [])
    assert same(new.bits, job.bits)


def test_an_optimizer_by_number_of_other_parameters_is_refused(tmp_path):
    old_save(tmp_path, numbered, Job().train(3))
    new = Job()
    new.data = Place()
    new.optimizer = torch.optim.AdamW(new.model[0].parameters(), lr=1e-2)
    new.scheduler = CosineAnnealingLR(new.optimizer, 9)
    message = refused(tmp_path, new)
    assert "optimizer of 4 parameters by number (this job's has 2;" in message
    new, report = moved(tmp_path, new, accept_lost=["optimizer"])
    assert report["state"]["lost"] == ["optimizer (optimizer of 4 parameters by number)"]
    assert not new.optimizer.state


RANKS = """
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from ckptctl.train import Checkpointer

torch.set_num_threads(1)

class Place:
    def __init__(self): self.position = 0
    def state_dict(self): return {"position": self.position}
    def load_state_dict(self, state): self.position = state["position"]

class Job:
    def __init__(self):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.place = Place()
        torch.manual_seed(10 + rank)
    def train(self):
        noise = torch.rand(4)
        self.model(noise + self.place.position).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.place.position += 1 + rank

old = Job()
for _ in range(3):
    old.train()
state = {
    "model": old.model.state_dict(),
    "optim": old.optimizer.state_dict(),
    "sched": old.scheduler.state_dict(),
    "step": 3,
    "dataloader": {f"dp_rank_{rank}": old.place.state_dict()},
    f"rng_state_{rank}": torch.get_rng_state(),
}
dcp.save(state, checkpoint_id=ROOT + "/step_3")
new = Job()
with Checkpointer(
    ROOT, model=new.model, optimizer=new.optimizer, scheduler=new.scheduler, dataloader=new.place,
    tell=lambda _: None,
) as ckpt:
    start = ckpt.resume()
    drawn = torch.get_rng_state()
    new.train()
    torch.set_rng_state(state[f"rng_state_{rank}"])
    old.train()
    pairs = zip(old.model.parameters(), new.model.parameters(), strict=True)
    equal = all(torch.equal(one.to_local(), two.to_local()) for one, two in pairs)
    say(start.step, new.place.position == old.place.position, equal, start.report["state"]["lost"])
    ckpt.save(4)
"""


MORE_RANKS = """
import torch
from ckptctl.train import Checkpointer

class Place:
    def state_dict(self): return {"position": 0}
    def load_state_dict(self, state): say("loaded", state)

torch.manual_seed(9)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
with Checkpointer(
    ROOT, model=model, optimizer=optimizer, dataloader=Place(), accept_repetition=True,
    tell=lambda _: None,
) as ckpt:
    state = ckpt.resume().report["state"]
    say(state["derived"], state["lost"], len(optimizer.state), model.weight.sum().item() == TOTAL)
"""


def test_more_ranks_than_saved_derive_the_state_of_each_rank(tmp_path):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "step": 1,
        "dataloader": {"dp_rank_0": {"position": 3}},
        "rng_state_0": torch.get_rng_state(),
    }
    dcp.save(state, checkpoint_id=str(tmp_path / "run" / "step_1"))
    values = f"ROOT, TOTAL = {str(tmp_path / 'run')!r}, {model.weight.sum().item()!r}\n"
    with ranks(values + MORE_RANKS, 2, tmp_path) as started:
        found = ends(started)
        assert [lines for _, lines, _ in found] == [["['rng'] ['dataloader'] 2 True"]] * 2, found


def test_each_rank_continues_with_its_own_state(tmp_path):
    code = f"ROOT = {str(tmp_path / 'run')!r}\n{RANKS}"
    with ranks(code, 2, tmp_path) as started:
        assert [lines for _, lines, _ in ends(started)] == [["3 True True []"]] * 2


# Steps of frameworks


def model_in(step: Path, front: str, of: str = "") -> Any:
    """A module with the parameters of a model in a step, whose names begin with `front`."""
    metadata = decode_metadata((step / of / ".metadata").read_bytes())
    model = torch.nn.Module()
    for name, entry in metadata.tensors.items():
        if name.startswith(front) and ".state." not in name:
            *owners, last = name.removeprefix(front).split(".")
            module = model
            for owner in owners:
                if not hasattr(module, owner):
                    module.add_module(owner, torch.nn.Module())
                module = getattr(module, owner)
            zeros = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
            module.register_parameter(last, torch.nn.Parameter(zeros))
    return model


def two_groups(model: Any) -> Any:
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors}])


def held_by_torch(step: Path, model: Any, front: str, of: str = "") -> State:
    """The weights in a step as torch loads them."""
    weights = {front + name: torch.empty_like(one) for name, one in model.state_dict().items()}
    dcp.load(weights, checkpoint_id=str(step / of))
    return {name.removeprefix(front): one for name, one in weights.items()}


def resumed_from(step: Path, root: Path, copy_of: Any, job: State) -> tuple[Any, list[str]]:
    lines: list[str] = []
    root.mkdir()
    folder = copy_of(step).rename(root / step.name)
    with Checkpointer(str(root), tell=lines.append, **job) as ckpt:
        return ckpt.resume(str(folder)), lines


class Held:
    def __init__(self) -> None:
        self.state: Any = {}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_a_step_of_kempnerforge_with_its_file_of_train_state_loads(
    framework_roots, copy_of, tmp_path
):
    step = framework_roots / "kempnerforge/checkpoints/step_20"
    model = model_in(step, "model.")
    optimizer = two_groups(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    job = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": Held()}
    start, _ = resumed_from(step, tmp_path / "run", copy_of, job)
    assert (start.step, start.tokens, start.report["state"]["lost"]) == (20, 5120, [])
    assert "rng" in start.report["state"]["restored"]
    theirs = held_by_torch(step, model, "model.")
    assert all(torch.equal(one, theirs[name]) for name, one in model.state_dict().items())
    assert scheduler.last_epoch == 20
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    assert job["dataloader"].state["batches_yielded"] == 20


def test_a_step_of_lightning_with_its_scheduler_in_a_file_loads(framework_roots, copy_of, tmp_path):
    step = framework_roots / "lightning/trainer_mp/checkpoints/epoch=0-step=20.ckpt"
    model = model_in(step, "state_dict.")
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    job = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    start, lines = resumed_from(step, tmp_path / "run", copy_of, job)
    assert (start.step, start.report["state"]["lost"]) == (20, [])
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (20, [1e-05])
    assert any("the step holds no random states" in line for line in lines)
    theirs = held_by_torch(step, model, "state_dict.")
    assert all(torch.equal(one, theirs[name]) for name, one in model.state_dict().items())


def test_a_step_of_transformers_in_two_parts_loads(framework_roots, copy_of, tmp_path):
    step = framework_roots / "transformers/trainer_fsdp2/checkpoint-20"
    model = model_in(step, "model.", "pytorch_model_fsdp_0")
    optimizer = two_groups(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    job = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    start, _ = resumed_from(step, tmp_path / "run", copy_of, job)
    assert start.step == 20
    assert start.report["state"]["derived"] == ["rng"]  # of two ranks
    theirs = held_by_torch(step, model, "model.", "pytorch_model_fsdp_0")
    assert all(torch.equal(one, theirs[name]) for name, one in model.state_dict().items())
    assert len(optimizer.state) == len([*model.parameters()])
    assert scheduler.last_epoch == 20


def test_a_file_of_torch_save_is_refused_and_loads_once_it_is_converted(tmp_path):
    job = Job().train(3)
    (tmp_path / "run").mkdir()
    torch.save(numbered(job), tmp_path / "run" / "ckpt_3.pt")
    random_state = torch.get_rng_state()
    new = Job()
    new.data = Place()
    with pytest.raises(UsageError, match=r"ckpt_3\.pt is one file of torch\.save") as error:
        moved(tmp_path / "run", new)
    done = run_ckptctl(*error.value.next_command.split()[1:])
    assert done.returncode == 0, done.stderr
    moved(tmp_path / "run-dcp", new)
    assert same(new.bits, job.bits)
    assert new.data.position == job.data.position
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_file_beside_the_shards_that_asks_for_a_class_is_refused_and_not_run(tmp_path):
    job = Job().train(3)
    old_save(tmp_path, numbered, job)
    torch.save({"model": Held()}, tmp_path / "step_3" / "train_state.pt")
    new = Job()
    new.data = Place()
    message = refused(tmp_path, new)
    assert "train_state.pt, which asks for test_moving.Held and was not loaded" in message
    _, report = moved(tmp_path, new, accept_lost=["extra"])
    assert report["state"]["lost"] == [
        "extra (train_state.pt, which asks for test_moving.Held and was not loaded)"
    ]
