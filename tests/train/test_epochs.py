"""The end of a pass over the data, and data that changed: the same samples, or refused."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
loaders = pytest.importorskip("torchdata.stateful_dataloader")

from command_line import REPOSITORY, clean_environment, torch_server  # noqa: E402
from torch.utils.data import DistributedSampler, IterableDataset  # noqa: E402

from ckptctl.errors import StateRefused, UsageError  # noqa: E402
from ckptctl.train import Checkpointer, GlobalLoader  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's
]

ONE = {"ranks": 1, "samples": 10}  # five batches an epoch


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"script": "counter"},
        {**ONE, "workers": 2},
        {**ONE, "samples": 12, "accumulate": 3, "save_at": [1, 2, 3, 4]},
        {**ONE, "loader": "stateful sampler", "samples": 11, "drop_last": True},
        {**ONE, "save_at": [3], "before": [5], "between": [10]},
        {**ONE, "loader": "shuffled"},
        {**ONE, "loader": "own generator", "save_at": [3], "before": [5], "between": [10]},
        {**ONE, "loader": "own generator", "script": "endless"},
        {**ONE, "loader": "stream"},
        {**ONE, "loader": "stream", "workers": 2, "save_at": [2, 6, 7]},
        {**ONE, "loader": "counted stream"},
    ],
    ids=lambda given: " ".join(map(str, given.values())),
)
def test_a_run_that_is_killed_after_every_save_equals_an_undisturbed_one(options, tmp_path):
    assert_equal_if_killed("epoch_job", options, tmp_path)


SHAPES = [
    {"script": "fsdp", "workers": 1, "samples": 16, "save_at": [1, 2, 4, 5]},
    {"script": "gan"},
    {"script": "lora"},
    {"script": "parallel"},
    {"script": "curriculum"},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", SHAPES, ids=lambda given: given["script"])
def test_a_killed_run_of_the_shape_of_a_real_script_equals_an_undisturbed_one(options, tmp_path):
    """The saves fall on the ends of epochs, too."""
    ends = {"samples": 12, "save_at": [2, 3, 5, 6, 8]}
    assert_equal_if_killed("shapes_job", {**ends, **options}, tmp_path)


def assert_equal_if_killed(module: str, options: dict[str, Any], tmp_path: Path) -> None:
    paths = f"{Path(__file__).parent}:{REPOSITORY}"
    done = torch_server().run(
        ["-m", module, str(tmp_path), json.dumps(options)],
        env=clean_environment(PYTHONPATH=paths, OMP_NUM_THREADS="1"),
    )
    found = json.loads(done.stdout.splitlines()[-1])
    whole, *codes = found["codes"]
    assert (whole, codes[-1]) == (0, 0), done.stderr
    assert set(codes[:-1]) == {-signal.SIGKILL}
    assert found["killed"] == found["whole"]


class Lines:
    """Samples of random numbers, by a seed."""

    def __init__(self, n_samples: int = 8, seed: int = 0) -> None:
        self.values = torch.randn(n_samples, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


class Transformed(Lines):
    """Samples with a random transform of a generator of its own."""

    def __getitem__(self, index: int) -> Any:
        return self.values[index] * random.SystemRandom().random()


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.n_read = 0

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a stream is not indexed")

    def __iter__(self) -> Iterator[Any]:
        for number in range(8):
            self.n_read += 1
            yield torch.tensor([float(number)])


def stateful(dataset: Any = None, batch_size: int = 2, **options: Any) -> Any:
    return loaders.StatefulDataLoader(dataset or Lines(), batch_size=batch_size, **options)


class Counter:
    """The epoch that a script keeps in its checkpoint."""

    epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def begin(root: Path, loader: Any, lines: list[str] | None = None, **options: Any) -> Checkpointer:
    tell = (lines if lines is not None else []).append
    ckpt = Checkpointer(str(root), dataloader=loader, tell=tell, **options)
    ckpt.resume()
    return ckpt


def take(ckpt: Checkpointer, loader: Any, n_batches: int, **options: Any) -> None:
    """Take some batches of a pass, and save behind the last."""
    batches = iter(loader)
    for _ in range(n_batches):
        next(batches)
    ckpt.save(1, **options)
    ckpt.close()


def sampled(**options: Any) -> tuple[Any, Any]:
    sampler = DistributedSampler(Lines(), 1, 0, **options)
    return stateful(sampler=sampler), sampler


@pytest.mark.parametrize(("n_batches", "epoch"), [(2, 1), (2, 0), (4, 1), (4, 9)])
def test_an_epoch_that_is_not_that_of_the_step_is_refused_with_the_lines_that_mend_it(
    n_batches, epoch, tmp_path
):
    loader, sampler = sampled()
    with begin(tmp_path / "run", loader) as ckpt:
        for first in (1, 2):
            sampler.set_epoch(first)
            if first == 1:
                list(loader)
        take(ckpt, loader, n_batches)
    loader, sampler = sampled()
    with begin(tmp_path / "run", loader):
        assert sampler.epoch == 2
        sampler.set_epoch(epoch)
        with pytest.raises(StateRefused, match=f"epoch 2 .* has set epoch {epoch}") as refused:
            next(iter(loader))
        assert "for epoch in range(sampler.epoch, n_epochs):" in refused.value.message
    loader, sampler = sampled()
    lines: list[str] = []
    with begin(tmp_path / "run", loader, lines, accept_repetition=True):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == (4 if n_batches == 4 else 2)
        assert any("has set epoch" in line for line in lines)


@pytest.mark.parametrize(("epoch", "n_left"), [(2, 0), (3, 4), (None, 4)])
def test_the_epoch_that_a_script_sets_decides_what_follows_a_last_batch(epoch, n_left, tmp_path):
    loader, sampler = sampled()
    with begin(tmp_path / "run", loader) as ckpt:
        sampler.set_epoch(2)
        take(ckpt, loader, 4)
    loader, sampler = sampled()
    with begin(tmp_path / "run", loader):
        if epoch is not None:
            sampler.set_epoch(epoch)
        assert len(list(loader)) == n_left
        assert len(list(loader)) == 4


def test_a_script_that_sets_no_epoch_continues_in_the_order_of_the_step(tmp_path):
    loader, sampler = sampled()
    with begin(tmp_path / "run", loader) as ckpt:
        sampler.set_epoch(2)
        whole = [batch.tolist() for batch in loader]
        take(ckpt, loader, 1)
    loader, _ = sampled()
    with begin(tmp_path / "run", loader):
        assert [batch.tolist() for batch in loader] == whole[1:]


@pytest.mark.parametrize(("epoch_end", "n_left"), [("rest", 0), ("next", 4), (None, None)])
def test_a_script_that_may_count_passes_itself_states_what_follows(epoch_end, n_left, tmp_path):
    loader, counter = stateful(shuffle=True), Counter()
    with begin(tmp_path / "run", loader, extra={"progress": counter}) as ckpt:
        take(ckpt, loader, 4)
    loader = stateful(shuffle=True)
    extra = {"progress": Counter()}
    with begin(tmp_path / "run", loader, extra=extra, epoch_end=epoch_end):
        if n_left is not None:
            assert len(list(loader)) == n_left
            return
        with pytest.raises(
            StateRefused, match=r"progress\.epoch of extra, 0, may count the passes"
        ):
            list(loader)
    with pytest.raises(UsageError, match="'so' is no value of epoch_end"):
        begin(tmp_path / "run", loader, epoch_end="so")


@pytest.mark.parametrize("own", [True, False])
def test_a_number_that_rose_with_the_passes_shows_what_a_script_expects(own, tmp_path):
    loader, counter = stateful(shuffle=True), Counter()
    with begin(tmp_path / "run", loader, extra={"progress": counter}) as ckpt:
        list(loader)
        counter.epoch = 1
        take(ckpt, loader, 4)
    loader, counter = stateful(shuffle=True), Counter()
    with begin(tmp_path / "run", loader, extra={"progress": counter}):
        if not own:
            counter.epoch = 2  # computed from the step
        assert len(list(loader)) == (0 if own else 4)


def distributed(**options: Any) -> Callable[[], Any]:
    return lambda: sampled(**options)[0]


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "length": (stateful, lambda: stateful(Lines(6)), "length was 8 and is 6 now"),
    "samples": (stateful, lambda: stateful(Lines(seed=1)), "the first and last sample was"),
    "samples, by a worker": (
        lambda: stateful(num_workers=1),
        lambda: stateful(Lines(seed=1), num_workers=1),
        "the first and last sample was",
    ),
    "batch size": (stateful, lambda: stateful(batch_size=4), "batch_size was 2 and is 4 now"),
    "drop_last": (stateful, lambda: stateful(drop_last=True), "drop_last was False and is True"),
    "seed": (distributed(seed=1), distributed(seed=2), "seed of DistributedSampler was 1 and is 2"),
    "shuffle": (
        distributed(),
        distributed(shuffle=False),
        "shuffle of DistributedSampler was True and is False",
    ),
    "sampler": (stateful, distributed(), "sampler was .*SequentialSampler and is .*Distributed"),
    "GlobalLoader": (
        lambda: GlobalLoader(Lines(), 2, seed=1),
        lambda: GlobalLoader(Lines(seed=1), 2, seed=1),
        "the first and last sample was",
    ),
}


@pytest.mark.parametrize("what", CHANGED)
def test_data_that_changed_is_refused_unless_it_is_accepted(what, tmp_path):
    before, now, why = CHANGED[what]
    loader = before()
    with begin(tmp_path / "run", loader) as ckpt:
        take(ckpt, loader, 1)
    with pytest.raises(StateRefused, match=f"differs from that of the step: .*{why}") as refused:
        begin(tmp_path / "run", now())
    assert "accept_repetition=True" in refused.value.message
    lines: list[str] = []
    begin(tmp_path / "run", now(), lines, accept_repetition=True).close()
    assert any("the same positions are other samples" in line for line in lines)
    lines.clear()
    begin(tmp_path / "run", before(), lines).close()
    assert not [line for line in lines if line.startswith("note: ")]


@pytest.mark.parametrize("make", [stateful, lambda data: GlobalLoader(data, 2, seed=1)])
def test_samples_that_are_never_alike_prove_nothing(make, tmp_path):
    loader = make(Transformed())
    with begin(tmp_path / "run", loader) as ckpt:
        take(ckpt, loader, 1)
    begin(tmp_path / "run", make(Transformed())).close()


def test_a_stream_is_not_read_to_describe_it(tmp_path):
    loader = stateful(Stream())
    with begin(tmp_path / "run", loader) as ckpt:
        assert loader.dataset.n_read == 0
        take(ckpt, loader, 1)
    begin(tmp_path / "run", stateful(Stream())).close()


def test_describing_data_leaves_the_random_numbers_alone(tmp_path):
    class Drawing(Lines):
        def __getitem__(self, index: int) -> Any:
            return self.values[index] + torch.rand(2)

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with begin(tmp_path / "run", stateful(Drawing())):
        assert torch.equal(torch.rand(3), expected)


def test_a_step_that_does_not_describe_its_data_resumes_with_a_note(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("ckptctl.train.checkpointer.follow_all", lambda *_: None)
        loader = stateful()
        with begin(tmp_path / "run", loader) as ckpt:
            take(ckpt, loader, 1)
    lines: list[str] = []
    loader = stateful()
    with begin(tmp_path / "run", loader, lines):
        assert len(list(loader)) == 3
    assert any("the step does not describe its data" in line for line in lines)


@pytest.mark.parametrize("make", [stateful, lambda data: GlobalLoader(data, 2, seed=1)])
def test_the_data_of_a_second_loader_is_compared_as_well(make, tmp_path):
    second = make(Lines())
    with begin(tmp_path / "run", stateful(), extra={"second": second}) as ckpt:
        take(ckpt, second, 1)
    with pytest.raises(StateRefused, match="the first and last sample was"):
        begin(tmp_path / "run", stateful(), extra={"second": make(Lines(seed=1))})
    begin(tmp_path / "run", stateful(), extra={"second": make(Lines())}).close()


def shuffled() -> Any:
    return stateful(shuffle=True, generator=torch.Generator().manual_seed(5))


def test_the_next_pass_of_a_second_loader_has_the_order_of_an_undisturbed_run(tmp_path):
    undisturbed = shuffled()
    with begin(tmp_path / "undisturbed", stateful(), extra={"second": undisturbed}):
        expected = [*undisturbed, *undisturbed][1:]
    second = shuffled()
    with begin(tmp_path / "run", stateful(), extra={"second": second}) as ckpt:
        take(ckpt, second, 1)
    resumed = shuffled()
    begin(tmp_path / "run", stateful(), extra={"second": resumed}).close()
    assert torch.equal(torch.stack([*resumed, *resumed]), torch.stack(expected))
