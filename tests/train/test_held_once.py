"""What a step holds once is equal on all ranks, or refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from command_line import run_ckptctl  # noqa: E402
from train_ranks import ends, ranks  # noqa: E402

from ckptctl.errors import StateRefused, UsageError  # noqa: E402
from ckptctl.train import Checkpointer  # noqa: E402

pytestmark = pytest.mark.torch

COMMON = """
import numpy, random, torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchdata.stateful_dataloader import StatefulDataLoader
from ckptctl.errors import CkptctlError, UsageError
from ckptctl.train import Checkpointer, GlobalLoader

root = ROOT
torch.set_num_threads(1)

class Held:
    def __init__(self, value): self.value = value
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(2, 2)

def trained(model, make=torch.optim.AdamW):
    optimizer = make(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer
"""

REFUSED = (
    COMMON
    + """
import os
def attempt(name, step=2, how="save", about={}, **parts):
    # The same root for all: each attempt saves what no attempt before it has saved.
    options = {key: parts.pop(key) for key in ("per_rank", "dp_rank", "dp_size") if key in parts}
    with Checkpointer(f"{root}/{name}", tell=lambda _: None, **parts, **options) as ckpt:
        ckpt.resume()
        before = sorted(os.listdir(f"{root}/{name}"))
        try:
            getattr(ckpt, how)(step, **about)
            ckpt.flush()
            say(name, "saved")
        except CkptctlError as error:
            after = sorted(os.listdir(f"{root}/{name}"))
            say(name, error.exit_code, before == after, error.message)

def model_of(tensor):
    model = linear()
    model.register_buffer("held", tensor)
    return model

class Amax(nn.Linear):
    def get_extra_state(self): return {"amax": torch.tensor([1.0 + rank])}
    def set_extra_state(self, state): pass

stage = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
attempt("stages", model=stage, optimizer=trained(stage))
model = linear()
attempt("rates", model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1 + rank))
attempt("meter", model=model, extra={"meter": Held(rank)})
attempt("parameter", model=linear(rank))
attempt("parameter-async", model=linear(rank), how="save_async")
attempt("shape", model=model_of(torch.ones(2 + rank)))
attempt("dtype", model=linear().to(torch.bfloat16 if rank else torch.float32))
attempt("buffer", model=model_of(torch.tensor([1.0, rank])))
ignoring = nn.ModuleDict({"a": linear(), "own": linear(rank)})
ignoring._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]
attempt("ignored", model=nn.parallel.DistributedDataParallel(ignoring))
attempt("ema", model=model, extra={"ema": Held(torch.full((3,), 1.0 * rank))})
attempt("amax", model=Amax(2, 2))
optimizer = trained(model)
optimizer.state[model.bias]["exp_avg"].add_(rank)
attempt("moments", model=model, optimizer=optimizer)
attempt("scheduler", model=model, scheduler=Held(rank))
attempt("tokens", model=model, about={"tokens": 5 + rank})
attempt("samples", model=model, about={"samples": 5 + rank})
attempt("step", model=model, step=2 + rank)
data = list(range(24))
loader = StatefulDataLoader(data, batch_size=4)
for _, batch in zip(range(1 + rank), loader): pass
attempt("shared", model=model, dataloader=loader, dp_rank=0, dp_size=1)
attempt("seed", model=model, dataloader=GlobalLoader(data, 4, seed=rank))
attempt("length", model=model, dataloader=GlobalLoader(data[rank:], 4, seed=0))
mesh = init_device_mesh("cpu", (2,))
whole = DTensor.from_local(torch.full((4,), 1.0 * rank), mesh, [Replicate()])
attempt("replicated", model=model, extra={"whole": Held(whole)})
attempt("mixed", model=model, extra={"one": Held(whole if rank else torch.ones(4))})
for name in ("bfloat16", "float8_e4m3fn", "float16", "complex64", "complex128", "bool", "int64"):
    for shape in ((), (3, 5)):
        ones = torch.ones(shape)
        ones.view(-1)[-1] = 1 - rank
        attempt(f"{name}-{len(shape)}", model=model_of(ones.to(getattr(torch, name))))
quantized = torch.quantize_per_tensor(torch.ones(3), 0.1 + rank, 0, torch.qint8)
attempt("quantized", model=model_of(quantized))
attempt("pattern", model=model, per_rank=["expert.*"])

# What is sound is saved.
nan = torch.tensor([float("nan"), -0.0])
attempt("nan", model=model_of(nan))
attempt("empty", model=model_of(torch.zeros(0, 3)))
attempt("conjugated", model=model_of(torch.ones(2, dtype=torch.complex64).conj()))
square = torch.arange(16.0).view(4, 4)
attempt("strides", model=model_of(square.t().contiguous().t() if rank else square))
attempt("view", model=model_of(torch.arange(32.0)[::2]))
attempt("sound-quantized", model=model_of(torch.quantize_per_tensor(square, 0.1, 0, torch.qint8)))
shards = DTensor.from_local(torch.full((4,), 1.0 * rank), mesh, [Shard(0)])
whole = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
attempt("shards", model=model, extra={"both": Held([shards, whole])})
attempt("declared-shards", model=model, extra={"both": Held([shards, whole])}, per_rank=["both"])
attempt("own-names", model=model, extra={f"meter_{rank}": Held(rank)})
attempt("loaders", model=model, dataloader=loader)
attempt("declared", model=linear(rank), per_rank=["weight", "bias"])
"""
)

REFUSALS = {
    "stages": "the options of the optimizer differ between ranks 0 and 1, as those of pipeline",
    "rates": "the options of the optimizer differ between ranks 0 and 1, as those of pipeline",
    "meter": "the state of extra meter differs between ranks 0 and 1, and a step holds it once: "
    "make it equal on all ranks, or pass per_rank=['meter']",
    "parameter": "the state of model.bias differs between ranks 0 and 1, and a step holds it once: "
    "make it equal on all ranks, or pass per_rank=['bias']; so do 1 more, such as model.weight",
    "parameter-async": "the state of model.bias differs between ranks 0 and 1",
    "shape": "the state of model.held differs",
    "dtype": "the state of model.bias differs",
    "buffer": "the state of model.held differs",
    "ignored": "the state of model.own.bias differs",
    "ema": "the state of extra ema.value differs between ranks 0 and 1, and a step holds it once: "
    "make it equal on all ranks, or pass per_rank=['ema.value']",
    "amax": "the state of model._extra_state.amax differs between ranks 0 and 1, and a step holds "
    "it once: make it equal on all ranks, or pass per_rank=['_extra_state']",
    "moments": "the state of optimizer.state.bias.exp_avg differs between ranks 0 and 1, and a "
    "step holds it once: make it equal on all ranks, or pass per_rank=['bias']",
    "scheduler": "the state of scheduler differs between ranks 0 and 1",
    "tokens": "tokens differs between ranks 0 and 1, and a step holds it once: give save() the",
    "samples": "samples differs between ranks 0 and 1",
    "step": "step differs between ranks 0 and 1",
    "shared": "the state of the dataloader (dp_rank_0) differs between ranks 0 and 1",
    "seed": "the state of the dataloader (global) differs between ranks 0 and 1, and a step holds "
    "it once: give all ranks the same data set, seed and global batch",
    "length": "the state of the dataloader (global) differs between ranks 0 and 1",
    "replicated": "the state of extra whole.value differs between ranks 0 and 1",
    "mixed": "the state of extra one.value differs between ranks 0 and 1",
    "quantized": "the state of model.held differs",
    "pattern": "per_rank has 'expert.*', which matches no state of this job",
}
SAVED = (
    "nan",
    "empty",
    "conjugated",
    "strides",
    "view",
    "sound-quantized",
    "shards",
    "own-names",
    "declared-shards",
)


def outputs(code: str, tmp_path: Path, n_ranks: int = 2) -> list[list[str]]:
    """The lines of each rank; each ends well."""
    with ranks(code.replace("ROOT", repr(str(tmp_path))), n_ranks, tmp_path) as started:
        ended = ends(started)
    assert [code for code, _, _ in ended] == [0] * n_ranks, ended
    return [out for _, out, _ in ended]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case came to, the same on both ranks."""
    first, second = outputs(REFUSED, tmp_path_factory.mktemp("refused"))
    assert first == second
    return dict(line.split(" ", 1) for line in first)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_differs_is_refused_on_every_rank_before_anything_is_written(
    name: str, answers: dict[str, str]
):
    assert answers[name].startswith(f"2 True {REFUSALS[name]}")


@pytest.mark.parametrize("shape", ["0", "2"])
@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "float16", "complex64", "complex128", "bool", "int64"]
)
def test_one_element_that_differs_is_refused_in_every_dtype(
    dtype: str, shape: str, answers: dict[str, str]
):
    assert answers[f"{dtype}-{shape}"].startswith("2 True the state of model.held differs")


@pytest.mark.parametrize("name", [*SAVED, "loaders", "declared"])
def test_equal_values_shards_and_what_is_declared_are_saved(name: str, answers: dict[str, str]):
    assert answers[name] == "saved"


BUFFERS = (
    COMMON
    + """
model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
model = nn.parallel.DistributedDataParallel(model)
torch.manual_seed(rank)
for n_steps in (3, 0):
    with Checkpointer(f"{root}/run", model=model, tell=lambda _: None) as ckpt:
        ckpt.resume()
        for _ in range(n_steps):
            model(torch.randn(4, 2)).sum().backward()
        if n_steps:
            ckpt.save(1)
    say([one.tolist() for one in model.module[1].buffers()])
"""
)


def test_buffers_that_ddp_copies_from_its_lowest_rank_are_saved_from_it(tmp_path: Path):
    (own, after), (other, after_other) = outputs(BUFFERS, tmp_path)
    assert own != other
    assert after == after_other == own


OWN = (
    COMMON
    + """
class Numpy(Held):
    def __init__(self, seed): self.generator = numpy.random.default_rng(seed)
    def state_dict(self): return {"state": self.generator.bit_generator.state, "n": 7}
    def load_state_dict(self, state): self.generator.bit_generator.state = state["state"]
    def next(self): return self.generator.random()

class Python(Held):
    def __init__(self, seed): self.generator = random.Random(seed)
    def state_dict(self): return {"state": self.generator.getstate()}
    def load_state_dict(self, state): self.generator.setstate(state["state"])
    def next(self): return self.generator.random()

class Torch(Held):
    def __init__(self, seed): self.generator = torch.Generator().manual_seed(seed)
    def state_dict(self): return {"state": self.generator.get_state(), "n": torch.tensor(7)}
    def load_state_dict(self, state): self.generator.set_state(state["state"])
    def next(self): return torch.rand(1, generator=self.generator).item()

def life(seed):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"trunk": nn.Linear(2, 2)})
    torch.manual_seed(100 * seed + rank)
    model["experts"] = nn.Linear(2, 2)
    optimizer = trained(model)
    for name, parameter in model.named_parameters():
        if name.startswith("experts"):
            optimizer.state[parameter]["exp_avg"].add_(rank + seed)
    drawn = {kind.__name__: kind(100 * seed + rank) for kind in (Numpy, Python, Torch)}
    scheduler = Held(10 * seed + rank)
    extra = {**drawn, "shared": Torch(seed), "meter": Held({"n": 10 * seed + rank})}
    return drawn, extra, dict(model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)

def shown(drawn, parts):
    model, optimizer = parts["model"], parts["optimizer"]
    weights = [one.tolist() for one in model.parameters()]
    moments = [optimizer.state[one]["exp_avg"].tolist() for one in model.parameters()]
    numbers = [one.next() for one in (*drawn.values(), parts["extra"]["shared"])]
    values = parts["scheduler"].value, parts["extra"]["meter"].value
    return repr((weights, moments, numbers, values))

options = dict(per_rank=["experts.*", "scheduler", "meter"], tell=lambda _: None)
if SAVES:
    drawn, extra, parts = life(1)
    with Checkpointer(f"{root}/run", **parts, **options) as ckpt:
        ckpt.resume()
        ckpt.save(SAVES)
        if SAVES > 1:
            ckpt.save_async(SAVES + 1)
    say(shown(drawn, parts))
drawn, extra, parts = life(2)
with Checkpointer(f"{root}/run", **parts, tell=lambda _: None) as ckpt:
    try:
        start = ckpt.resume()
        say(shown(drawn, parts))
    except CkptctlError as error:
        say(type(error).__name__, error.message)
"""
)


def test_each_rank_gets_its_own_state_back_and_the_step_is_sound(tmp_path: Path):
    for own, after in outputs(OWN.replace("SAVES", "1"), tmp_path):
        assert own == after
    step = f"{tmp_path}/run@1"
    assert run_ckptctl("verify", step, "--level", "content", "--require-seal").returncode == 0
    told = json.loads(run_ckptctl("show", step, "--json").stdout)
    assert "shared" in json.dumps(told)
    names = run_ckptctl("show", step, "--tensors").stdout
    assert "model.experts.weight@rank_1" in names
    assert "extra_tensors.shared.state@rank_1" not in names
    assert "extra_tensors.Torch.n@rank_1" not in names


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_state_of_each_rank_is_refused_at_another_number_of_ranks(n_ranks: int, tmp_path: Path):
    outputs(OWN.replace("SAVES", "2"), tmp_path)
    (tmp_path / "meet").unlink()
    for (said,) in outputs(OWN.replace("SAVES", "0"), tmp_path, n_ranks):
        assert said.startswith("StateRefused step 3 cannot restore ")
        for part in ("model (", "optimizer ", "scheduler (", "extra meter (", "extra Torch ("):
            assert part in said


TOLD = (
    COMMON
    + """
def told(name, *words, **keywords):
    options = keywords.pop("options", {})
    with Checkpointer(f"{root}/run", model=linear(), tell=lambda _: None, **options) as ckpt:
        try:
            ckpt.resume(*words, **keywords)
            if name == "save": ckpt.save(1)
        except CkptctlError as error:
            say(name, type(error).__name__, error.message)

told("save", "auto")
told("step", 1 if rank else "auto")
told("replay", replay=1 if rank else None)
told("options", options={"step_format": "step_{}" if rank else "checkpoint-{}"})
told("equal", "1" if rank else 1, options={"per_rank": {"weight", "bias"}})
"""
)


def test_ranks_that_are_told_different_things_are_an_error_on_all(tmp_path: Path):
    first, second = outputs(TOLD, tmp_path)
    assert first == second
    assert [line.split(" ")[0] for line in first] == ["step", "replay", "options"]
    for line, told in zip(
        first,
        (
            "resume_from is auto on rank 0 and 1 on rank 1",
            "replay is None on rank 0 and 1 on rank 1",
            "step_format is checkpoint-{} on rank 0 and step_{} on rank 1",
        ),
        strict=True,
    ):
        assert line.endswith(f" UsageError {told}: it must be the same on every rank")


class Stateless:
    pass


class Counter:
    """A scheduler that counts."""

    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


LOADERS = "use ckptctl.train.GlobalLoader or torchdata's StatefulDataLoader"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (
            {"dataloader": torch.utils.data.DataLoader([1, 2])},
            f"dataloader is a DataLoader, which .*{LOADERS}",
        ),
        ({"dataloader": [1, 2]}, f"dataloader is a list, which .*{LOADERS}"),
        ({"scheduler": [Counter(1), Stateless()]}, "scheduler is a Stateless, which does not have"),
        (
            {"grad_scaler": Stateless()},
            "grad_scaler is a Stateless, which does not have state_dict",
        ),
        (
            {"extra": {"noise": torch.Generator()}},
            "extra noise is a Generator, which does not have",
        ),
    ],
)
def test_an_object_without_state_is_refused_when_it_is_given(parts: dict, why: str, tmp_path: Path):
    with pytest.raises(UsageError, match=why):
        Checkpointer(str(tmp_path / "run"), **parts)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the module of torch
@pytest.mark.parametrize("where", ["optimizer", "extra optimizer"])
def test_an_optimizer_that_holds_the_state_of_some_parameters_is_refused(
    where: str, tmp_path: Path
):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class Sharing(ZeroRedundancyOptimizer):
        def __init__(self) -> None:
            pass  # without a process group

    model = torch.nn.Linear(2, 2)
    extra = {"extra": {"optimizer": Sharing()}}
    parts = {"optimizer": Sharing()} if where == "optimizer" else extra
    with pytest.raises(UsageError, match=f"{where} is a Sharing, of which each rank holds"):
        Checkpointer(str(tmp_path / "run"), model=model, **parts)


def test_a_list_of_schedulers_is_saved_and_restored_as_a_list_of_optimizers_is(tmp_path: Path):
    def resumed(*numbers: int) -> list[Counter]:
        schedulers = [*map(Counter, numbers)]
        with Checkpointer(str(tmp_path / "run"), scheduler=schedulers, tell=lambda _: None) as ckpt:
            if ckpt.resume().fresh:
                ckpt.save(1)
        return schedulers

    resumed(3, 4)
    assert [one.n for one in resumed(0, 0)] == [3, 4]
    with pytest.raises(StateRefused, match=r"scheduler \(the step has 2, and this job 1\)"):
        resumed(0)


def test_one_scheduler_is_a_list_of_one(tmp_path: Path):
    for name, saver, loader in (("a", 5, [0]), ("b", [5], 0)):
        for given in (saver, loader):
            listed = [*map(Counter, given)] if isinstance(given, list) else Counter(given)
            with Checkpointer(str(tmp_path / name), scheduler=listed, tell=lambda _: None) as ckpt:
                if ckpt.resume().fresh:
                    ckpt.save(1)
        assert (listed[0] if isinstance(listed, list) else listed).n == 5
