"""What a state holds is known by its content, under whatever keys, in every format."""

from collections.abc import Mapping
from pathlib import Path

import pytest

import ckptctl

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
save_file = pytest.importorskip("safetensors.torch").save_file
nn = torch.nn

KEYS = ("opt", "optim_state_dict", "last_optimizer_state", "adam", "x", "trainer.updates", "zz_9")
WRITERS = ("file", "ranks", "dcp", "dcp flattened", "safetensors")


class Net(nn.Module):
    """Parameters and buffers whose names mention train state, and are none."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer_head = nn.Linear(6, 4)
        self.step_embed = nn.Embedding(3, 4)
        self.rng_proj = nn.Linear(4, 4, bias=False)
        self.scheduler = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.zeros(len(x), dtype=torch.long)
        hidden = self.optimizer_head(x) + self.step_embed(index)
        return self.scheduler(self.norm(self.rng_proj(hidden))).sum()


class Matrices(nn.Module):
    """What Muon can optimize."""

    def __init__(self) -> None:
        super().__init__()
        self.step_embed = nn.Linear(6, 4, bias=False)
        self.out = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.step_embed(x)).sum()


class Sparse(nn.Module):
    """What SparseAdam can optimize."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, sparse=True)
        self.other = nn.Embedding(3, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(2)
        return (self.embed(index) + self.other(index)).sum() * x.sum()


def optimizers() -> dict[str, tuple[type[nn.Module], type, dict[str, object]]]:
    classes = [
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    ]
    model = {"SparseAdam": Sparse, "Muon": Matrices}
    settings: dict[str, dict[str, object]] = {"SGD": {"momentum": 0.9}}
    return {
        cls.__name__: (model.get(cls.__name__, Net), cls, settings.get(cls.__name__, {}))
        for cls in classes
        if cls is not torch.optim.Optimizer
    }


OPTIMIZERS = optimizers()


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    make, cls, settings = OPTIMIZERS[name]
    model = make()
    optimizer = cls(model.parameters(), lr=0.01, **settings)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return model, optimizer


def flat(value: object, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value.detach().clone().contiguous()}
    items = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    found: dict[str, torch.Tensor] = {}
    for key, item in items:
        found |= flat(item, f"{path}.{key}" if path else str(key))
    return found


def nested(key: str, value: object) -> dict[str, object]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def write(how: str, root: Path, state: dict[str, object]) -> str:
    """Save a state as step 20 of `root`."""
    step = root / "step_20"
    step.mkdir(parents=True)
    if how == "file":
        torch.save(state, step / "saved.pt")
    elif how == "ranks":
        for rank in range(2):
            torch.save(state, step / f"saved_rank_{rank}.pt")
    elif how == "dcp":
        dcp.save(state, checkpoint_id=step, no_dist=True)
    elif how == "dcp flattened":
        dcp.save(flat(state), checkpoint_id=step, no_dist=True)
    else:
        save_file(flat(state), step / "saved.safetensors")
    return str(step)


def held(how: str, root: Path, state: dict[str, object]) -> tuple[tuple[str, ...], set[str]]:
    """The kinds that the report of a step names, and those whose bytes `show` counts."""
    contents = ckptctl.show(write(how, root, state))
    return contents.state.held, {kind for kind, _ in contents.bytes_by_kind}


@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_is_known_under_any_key(name, how, tmp_path):
    model, optimizer = trained(name)
    first = (len(name) + len(how)) % len(KEYS)
    for number, key in enumerate((KEYS[first], KEYS[first - 1])):
        state = {"model": model.state_dict(), **nested(key, optimizer.state_dict())}
        found, by_bytes = held(how, tmp_path / str(number), state)
        assert "optimizer" in found, key
        assert "optimizer" in by_bytes, key


@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_by_the_names_of_parameters_is_known_under_any_key(name, how, tmp_path):
    model, optimizer = trained(name)
    if name == "LBFGS":
        pytest.skip("its state is of all parameters together")
    names = [key for key, _ in model.named_parameters()]
    by_number = optimizer.state_dict()["state"]
    state = {"net": model.state_dict(), "zz": {names[n]: by_number[n] for n in by_number}}
    found, by_bytes = held(how, tmp_path, state)
    assert "optimizer" in found
    assert by_bytes == {"model", "optimizer"}


@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("key", ["", "model", "optimizer", "opt", "net", "state", "ema", "rng"])
def test_weights_are_no_optimizer_under_any_key(key, how, tmp_path):
    weights = Net().state_dict()
    state = {key: weights} if key else dict(weights)
    found, by_bytes = held(how, tmp_path, state)
    assert "optimizer" not in found
    assert by_bytes == {"model"}
    assert found == ("model",)


@pytest.mark.parametrize("how", WRITERS)
def test_two_models_and_their_average_are_no_optimizer(how, tmp_path):
    weights = Net().state_dict()
    state = {"generator": weights, "discriminator": weights, "average": weights}
    found, by_bytes = held(how, tmp_path, state)
    assert (found, by_bytes) == (("model",), {"model"})


@pytest.mark.parametrize("how", WRITERS)
def test_averages_of_gradients_beside_parameters_are_an_optimizer(how, tmp_path):
    weights = Net().state_dict()
    state = {"model": weights, "own": {"m": weights, "v": weights}}
    found, by_bytes = held(how, tmp_path, state)
    assert (found, by_bytes) == (("model", "optimizer"), {"model", "optimizer"})


class Buffers(nn.Module):
    """Buffers that are called as an optimizer calls what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("step", torch.tensor(5))
        self.register_buffer("exp_avg", torch.zeros(4))
        self.register_buffer("momentum_buffer", torch.zeros(4, 4))


@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("key", ["", "model", "app", "trainer.model"])
def test_buffers_of_a_module_are_no_optimizer(key, how, tmp_path):
    weights = Buffers().state_dict()
    found, _ = held(how, tmp_path, nested(key, weights) if key else dict(weights))
    assert "model" in found
    assert "optimizer" not in found


@pytest.mark.parametrize("how", WRITERS)
def test_a_module_called_mu_beside_one_called_nu_is_no_optimizer(how, tmp_path):
    module = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    state = {"encoder": module, "mu": module, "nu": module, "decoder": module, "head": module}
    found, _ = held(how, tmp_path, {"model": state})
    assert found == ("model",)


@pytest.mark.parametrize("how", ["file", "ranks"])
def test_settings_hold_no_train_state(how, tmp_path):
    config = {"optimizer": {"lr": 0.1, "params": 9}, "scheduler": {"name": "cosine"}}
    state = {"model": Net().state_dict(), "config": config, "hyper_parameters": config}
    found, _ = held(how, tmp_path, state)
    assert found == ("model",)


@pytest.mark.parametrize("how", ["file", "ranks", "dcp"])
@pytest.mark.parametrize(
    "generator", [np.random.get_state(legacy=False), np.random.default_rng(1).bit_generator.state]
)
def test_generators_of_numpy_as_mappings_are_known(generator, how, tmp_path):
    found, _ = held(how, tmp_path, {"model": Net().state_dict(), "zz": generator})
    assert "rng" in found


@pytest.mark.parametrize("how", ["file", "ranks"])
def test_an_optimizer_that_keeps_nothing_is_known_by_its_groups(how, tmp_path):
    model = Net()
    state = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    both = {"model": model.state_dict(), "zz": [state["state"], state["param_groups"]]}
    found, _ = held(how, tmp_path, both)
    assert "optimizer" in found
