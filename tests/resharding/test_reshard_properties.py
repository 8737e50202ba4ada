"""Resharding in any way preserves every byte of every tensor."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_steps import grid, octets, read_step, write_step

import ckptctl
from ckptctl.formats.archive.safetensors import NAMES
from ckptctl.formats.archive.writing import WRITABLE
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.model import DTYPE_SIZES, Level
from ckptctl.options import Requirements, StorageOptions
from ckptctl.resharding.executing import Place, WriteOptions, WrittenStep, write
from ckptctl.resharding.planning import Plan, TargetLayout, plan, sharded
from ckptctl.resharding.sources import ThreadLimits, source_of
from ckptctl.selection.verifying import open_target
from ckptctl.storage.local import LocalStore

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def tensors(draw):
    import torch

    dtype = draw(st.sampled_from(sorted(WRITABLE)))
    shape = draw(SHAPES)
    seed = draw(st.integers(0, 1 << 30))
    n_bytes = prod(shape) * DTYPE_SIZES[dtype]
    made = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256 if dtype != "bool" else 2, (n_bytes,), generator=made)
    tensor = raw.to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)
    cuts = [draw(st.lists(st.integers(1, 8), max_size=3)) for _ in shape]
    return tensor, grid(shape, cuts)


STEPS = st.dictionaries(st.sampled_from(["model.a", "model.b", "optim.c", "rng.d"]), tensors())


def cut_anew(source: Path, target: Path, wanted: TargetLayout, block: int) -> Plan:
    """Write a step with blocks so small that every tensor takes several."""
    with open_target(str(source), Requirements(), StorageOptions()) as found:
        checked = Requirements()
        inspected = inspect_step(found, checked, level=Level.STRUCTURE)
        assert inspected.report.exit_code == 0, inspected.report.findings
        planned = plan(source_of(inspected), wanted)
        place = Place(LocalStore(str(target.parent)), target.name)
        budget = ThreadLimits(2, block, 1 << 20)
        written = write(planned, place, budget, WriteOptions())
        assert isinstance(written, WrittenStep), written.findings
    return planned


def check_same(before: Path, after: Path) -> None:
    import torch

    left, right = read_step(before), read_step(after)
    assert left.keys() == right.keys()
    for fqn in left:
        assert torch.equal(octets(left[fqn]), octets(right[fqn])), fqn


THERE_AND_BACK = {
    "step": STEPS,
    "n_ranks": st.integers(1, 16),
    "block": st.sampled_from([16, 64, 1024]),
    "transposed": st.booleans(),
    "n_files": st.integers(1, 3),
}


def there_and_back(step, n_ranks, block, transposed, n_files) -> None:
    """Cut a step anew, and back as it was: the same bytes in the same slices."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        source = folder / "a" / "step_1"
        write_step(source, step, {"step": 1}, n_files=n_files, transposed=transposed)
        there, back = folder / "b" / "step_1", folder / "c" / "step_1"
        for target in (there, back):
            target.parent.mkdir()
        cut_anew(source, there, TargetLayout(n_ranks), block)
        check_same(source, there)
        done = ckptctl.reshard(str(there), str(back), world_size=3)
        assert done.written, done.report.findings
        check_same(source, back)


OUT_AND_IN = {
    "step": STEPS.filter(bool),
    "n_ranks": st.integers(1, 16),
    "transposed": st.booleans(),
    "n_files": st.integers(1, 3),
}


def out_and_in(step, n_ranks, transposed, n_files) -> None:
    """Make one file of a step, and a step of that, by way of either format: the same bytes."""
    import torch

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        source = folder / "a" / "step_1"
        write_step(source, step, {"step": 1}, n_files=n_files, transposed=transposed)
        formats = ["flat.pt"]
        if all(str(one.dtype).removeprefix("torch.") in NAMES for one, _ in step.values()):
            formats.append("model.safetensors")
        for name in formats:
            there, back = folder / name, folder / name[:4] / "step_1"
            assert ckptctl.convert(str(source), str(there)).written
            done = ckptctl.convert(
                str(there), str(back), world_size=n_ranks, accept_unverifiable=True
            )
            assert done.written, done.report.findings
            check_same(source, back)
        state = torch.load(folder / "flat.pt", weights_only=True)
        for fqn, (tensor, _) in step.items():
            head, leaf = fqn.split(".")
            assert torch.equal(octets(state[head][leaf]), octets(tensor))


def drawn(max_examples: int) -> settings:
    """How many examples, none of which is hurried."""
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@drawn(50)
@given(**THERE_AND_BACK)
def test_there_and_back_gives_the_same_bytes(**example):
    there_and_back(**example)


@drawn(12)
@given(**OUT_AND_IN)
def test_out_and_in_again_gives_the_same_bytes(**example):
    out_and_in(**example)


@given(n=st.integers(1, 1000), n_parts=st.integers(1, 64))
def test_rows_are_cut_as_torch_cuts_them(n, n_parts):
    import torch

    lengths = [len(part) for part in torch.arange(n).chunk(n_parts)]
    assert [part.sizes for part in sharded((n, 3), n_parts)] == [(length, 3) for length in lengths]


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    n_ranks=st.integers(1, 16),
)
def test_the_slices_of_a_tensor_fill_it_once_and_every_rank_holds_at_most_one(shape, n_ranks):
    slices = sharded(shape, n_ranks)
    assert sum(part.n_elements for part in slices) == prod(shape)
    assert len(slices) <= n_ranks
