"""What can be loaded again can be saved, and nothing else."""

from __future__ import annotations

import sys
import threading
import uuid
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from damage import flip
from services.counting_proxy import CountingProxy
from services.plugin import S3Server

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from one_process import Job  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import UsageError  # noqa: E402
from ckptctl.train import Checkpointer, Reader  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def quantized(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    values = torch.randn(64, 48)
    if kind == "per channel":
        scales, zeros = torch.rand(64) + 0.1, torch.arange(64) % 5
        return torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    dtype = {"qint8": torch.qint8, "quint8": torch.quint8, "qint32": torch.qint32}[kind]
    return torch.quantize_per_tensor(values, 0.03 + seed, 3, dtype)


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


class Config:
    """No plain value."""


def model_with(buffer: Any) -> Any:
    model = torch.nn.Linear(4, 4)
    model.register_buffer("table", buffer)
    return model


KINDS = ["qint8", "quint8", "qint32", "per channel"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_tensor_loads_as_stock_dcp_loads_it(tmp_path: Path, kind: str):
    saved = quantized(kind)
    dcp.save({"w": saved}, checkpoint_id=str(tmp_path / "step_1"))
    stock, ours = ({"w": quantized(kind, 1)} for _ in range(2))
    dcp.load(stock, checkpoint_id=str(tmp_path / "step_1"))
    dcp.load(ours, storage_reader=Reader(tmp_path / "step_1"))
    assert torch.equal(ours["w"].int_repr(), stock["w"].int_repr())
    assert torch.equal(ours["w"].int_repr(), saved.int_repr())
    # Stock `dcp.load` keeps the scales of the tensor that it loads into.
    assert torch.equal(ours["w"].dequantize(), saved.dequantize())
    assert ours["w"].qscheme() == saved.qscheme()
    for level in ("structure", "content"):
        assert ckptctl.verify(str(tmp_path / "step_1"), level=level).usable


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_a_quantized_buffer_resumes(tmp_path: Path, kind: str):
    saved = quantized(kind)
    with Checkpointer(str(tmp_path), model=model_with(saved), tell=print) as ckpt:
        ckpt.resume()
        ckpt.save(1)
    model = model_with(quantized(kind, 1))
    with Checkpointer(str(tmp_path), model=model, tell=print) as ckpt:
        assert ckpt.resume().step == 1
    assert torch.equal(model.table.dequantize(), saved.dequantize())


def test_a_damaged_quantized_record_is_damage(tmp_path: Path):
    dcp.save({"w": quantized("qint8")}, checkpoint_id=str(tmp_path / "step_1"))
    shard = tmp_path / "step_1" / "__0_0.distcp"
    flip(shard)
    with pytest.raises(dcp.api.CheckpointException, match="checksum"):
        dcp.load({"w": quantized("qint8")}, storage_reader=Reader(tmp_path / "step_1"))


class WithState(torch.nn.Linear):
    """A model whose extra state is whatever it was given."""

    def __init__(self, state: Any) -> None:
        super().__init__(4, 4)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("save", ["save", "save_async"])
@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: model_with(torch.ones(3).as_subclass(Plain)), r"model\.table is a Plain"),
        (lambda: model_with(torch.eye(3).to_sparse()), r"model\.table is a Tensor of layout"),
        (lambda: WithState(Config()), r"model\._extra_state is a Config"),
    ],
    ids=["subclass", "sparse", "extra state"],
)
def test_what_could_never_be_loaded_is_refused_when_it_is_saved(
    tmp_path: Path, model: Callable[[], Any], named: str, save: str
):
    with Checkpointer(str(tmp_path), model=model(), tell=print) as ckpt:
        ckpt.resume()
        with pytest.raises(UsageError, match=f"{named}.*can be saved but not loaded"):
            getattr(ckpt, save)(1)
    assert not list(tmp_path.glob("step_*"))


def test_an_optimizer_with_state_that_could_not_be_loaded_is_refused(tmp_path: Path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["note"] = Config()
    ckpt = Checkpointer(str(tmp_path), model=model, optimizer=optimizer, tell=print)
    ckpt.resume()
    with pytest.raises(UsageError, match=r"optimizer\..*note is a Config"):
        ckpt.save(1)
    ckpt.close()


def test_a_state_that_turns_unreadable_later_is_refused_then(tmp_path: Path):
    class Meter:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {"n": 1}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    meter = Meter()
    job = Job(tmp_path / "run", extra={"meter": meter})
    job.resume()
    job.train(1, 3)
    meter.state = {"n": Config()}
    with pytest.raises(UsageError, match=r"extra\.meter is a dict, .*asks for .*Config"):
        job.train(4, 6)
    job.die()


@pytest.mark.parametrize(
    "state", [{"scale": torch.ones(2), "name": "x", "sizes": (1, 2)}, torch.ones(2), None]
)
def test_plain_extra_state_comes_back(tmp_path: Path, state: Any):
    with Checkpointer(str(tmp_path), model=WithState(state), tell=print) as ckpt:
        ckpt.resume()
        ckpt.save(1)
    model = WithState(state)
    with Checkpointer(str(tmp_path), model=model, tell=print) as ckpt:
        assert ckpt.resume().step == 1


GENERATORS: dict[str, Callable[[Any], Any]] = {
    "default": lambda np: np.random.default_rng(3),
    "of arrays": lambda np: np.random.Generator(np.random.MT19937(3)),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_numpy_continues(tmp_path: Path, kind: str):
    """As `docs/train.md` shows it."""

    class Numbers:
        def __init__(self) -> None:
            self.generator = GENERATORS[kind](pytest.importorskip("numpy"))

        def state_dict(self) -> dict[str, Any]:
            return {"state": self.generator.bit_generator.state}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.generator.bit_generator.state = state["state"]

    saved, resumed = Numbers(), Numbers()
    saved.generator.random(5)
    for numbers in (saved, resumed):
        with Checkpointer(str(tmp_path), extra={"numbers": numbers}, tell=print) as ckpt:
            if ckpt.resume().fresh:
                ckpt.save(1)
    assert resumed.generator.random() == saved.generator.random()


@pytest.mark.server
def test_the_timeout_of_a_checkpointer_reaches_the_load(
    s3_moto: S3Server, counting_proxy: Callable[[str], CountingProxy]
):
    root = f"s3://{s3_moto.bucket}/{uuid.uuid4().hex}"
    proxy = counting_proxy(s3_moto.endpoint)
    job = Job(root, storage_options=s3_moto.options)
    job.resume()
    job.train(1, 3)
    job.die()
    released = threading.Event()
    # No answer within the timeout, once: a load that waits for the default would hold it.
    proxy.break_request("GET", released.wait, path="/__0_0.distcp", lasts=True)
    later = Job(root, storage_options=s3_moto.options, endpoint_url=proxy.url, timeout_s=0.5)
    with pytest.raises(ckptctl.CkptctlError, match=r"5 tries|no answer"):
        later.resume()
    released.set()
    later.die()


class Held:
    """A state of a script, as it gives it and gets it back."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


Pair = namedtuple("Pair", "mean count")
ONES = torch.ones(2)


def containing_itself() -> list[Any]:
    state: list[Any] = [ONES]
    state.append(state)
    return state


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"a": Pair(ONES, 1)}, r"a Pair with tensors in it \(a\)"),
        (defaultdict(list, a=[ONES]), "a defaultdict with tensors in it"),
        ({"a": {"ckptctl: tensor": "b"}, "b": ONES}, "the key 'ckptctl: tensor'"),
        ({1: ONES, "1": ONES}, "two tensors of the name '1'"),
        (containing_itself(), "contains itself"),
        ({"a@rank_1": ONES}, "name of one rank's own state"),
    ],
    ids=["named tuple", "default dict", "marker", "two names", "circle", "name of a rank"],
)
def test_an_extra_that_would_load_as_another_value_is_refused(tmp_path: Path, state: Any, why: str):
    with Checkpointer(str(tmp_path), extra={"meter": Held(state)}, tell=print) as ckpt:
        ckpt.resume()
        with pytest.raises(UsageError, match=why):
            ckpt.save(1)
    assert not list(tmp_path.glob("step_*"))


@pytest.mark.parametrize(
    "state",
    [
        OrderedDict(b=torch.ones(2), a=1),
        {"a": (torch.ones(2), [1])},
        torch.ones(1).expand(5),
        {"a": torch.ones(2), "b": Counter(a=1)},
    ],
    ids=["ordered dict", "nested", "expanded", "counter beside a tensor"],
)
def test_an_extra_loads_as_it_was(tmp_path: Path, state: Any):
    with Checkpointer(str(tmp_path), extra={"meter": Held(state)}, tell=print) as ckpt:
        ckpt.resume()
        ckpt.save(1)
    held = Held(state)
    Checkpointer(str(tmp_path), extra={"meter": held}, tell=print).resume()
    assert repr(held.state) == repr(state)
    assert held.state is not state


def test_a_buffer_that_could_not_be_loaded_into_is_refused_when_it_is_saved(tmp_path: Path):
    model = model_with(torch.ones(1).expand(3))
    with Checkpointer(str(tmp_path), model=model, tell=print) as ckpt:
        ckpt.resume()
        with pytest.raises(UsageError, match=r"model\.table is an expanded view"):
            ckpt.save(1)


class Interrupted:
    """A value that is written when Ctrl-C is pressed."""

    n_read = 0

    def __reduce__(self) -> Any:
        self.n_read += 1
        if self.n_read > 1:  # the first is the check of whether it could be loaded
            raise KeyboardInterrupt
        return Fraction, (1, 2)


def test_ctrl_c_in_a_save_is_no_failed_save(tmp_path: Path):
    ckpt = Checkpointer(str(tmp_path), extra={"meter": Held([Interrupted()])}, tell=print)
    ckpt.resume()
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(1)
    ckpt.close()


def interrupt_a_read(frame: FrameType, _event: str, _argument: Any) -> None:
    if frame.f_code.co_name == "read_data":
        sys.settrace(None)
        raise KeyboardInterrupt


def test_ctrl_c_in_a_load_is_no_reason_to_take_an_older_step(tmp_path: Path):
    with Checkpointer(str(tmp_path), model=torch.nn.Linear(4, 4), tell=print) as ckpt:
        ckpt.resume()
        ckpt.save(1)
        ckpt.save(2)
    before = sys.gettrace()
    sys.settrace(interrupt_a_read)
    try:
        with pytest.raises(KeyboardInterrupt):
            Checkpointer(str(tmp_path), model=torch.nn.Linear(4, 4), tell=print).resume()
    finally:
        sys.settrace(before)
    assert ckptctl.pick(str(tmp_path)).step == 2
