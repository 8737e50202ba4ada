"""What depends on the device: random numbers, copies to and from its memory, HSDP.

Each test runs on the CPU, and with the marker `gpu` on CUDA where there is a device.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import clean_environment

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

from ckptctl.train import Reader, Writer, check_gpu  # noqa: E402
from ckptctl.train.saving import Stager  # noqa: E402
from ckptctl.train.state import restore_rng, rng_state  # noqa: E402

pytestmark = pytest.mark.torch

RANKS = Path(__file__).with_name("device_ranks.py")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no CUDA device")
    name: str = request.param
    return name


def state_on(device: str, *, filled: bool) -> dict[str, Any]:
    """Tensors of every form that is copied differently, the last longer than one piece."""
    torch.manual_seed(0)
    full = {
        "weight": torch.randn(64, 48),
        "half": torch.randn(33, 7).to(torch.bfloat16),
        "columns": torch.randn(48, 64).T,
        "every second": torch.randn(64, 64)[:, ::2],
        "whole": torch.arange(7),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "long": torch.randn(5 << 20).reshape(5, 1 << 20).T,
    }
    return {
        name: (one if filled else torch.zeros_like(one)).to(device) for name, one in full.items()
    }


@pytest.mark.parametrize("writer", [Writer, dcp.FileSystemWriter])
@pytest.mark.parametrize("reader", [Reader, dcp.FileSystemReader])
def test_what_is_saved_from_a_device_is_loaded_onto_it(device, tmp_path, writer, reader):
    saved, loaded = state_on(device, filled=True), state_on(device, filled=False)
    dcp.save(saved, storage_writer=writer(tmp_path / "step_1"), no_dist=True)
    dcp.load(loaded, storage_reader=reader(tmp_path / "step_1"), no_dist=True)
    for name, value in saved.items():
        assert loaded[name].device == value.device
        assert torch.equal(loaded[name], value), name


def test_the_numbers_of_every_generator_go_on_where_they_were_saved(device):
    n_gpus = torch.cuda.device_count() if device == "cuda" else 0
    devices = ["cpu", *(f"cuda:{number}" for number in range(n_gpus))]
    state = rng_state()
    drawn = [torch.rand(8, device=each) for each in devices]
    assert restore_rng(state) == ()
    assert all(
        torch.equal(torch.rand(8, device=each), before)
        for each, before in zip(devices, drawn, strict=True)
    )


def test_a_staged_state_keeps_its_values_when_the_training_goes_on(device):
    state = {"model": state_on(device, filled=True), "step": 3}
    expected = {name: value.cpu().clone() for name, value in state["model"].items()}
    stager = Stager()
    for _ in range(2):  # the second copy uses the buffers of the first
        staged = stager.staged(state)
        for value in state["model"].values():
            value.zero_()
        for name, value in expected.items():
            assert staged["model"][name].device.type == "cpu"
            assert torch.equal(staged["model"][name], value), name
            state["model"][name].copy_(value)
    stager.close()


def test_a_device_that_computes_correctly_has_no_fault(device):
    report = check_gpu(device)
    assert report is not None
    assert report.fault is None


@pytest.mark.slow
def test_ranks_of_hsdp_resume_with_the_bits_and_numbers_of_a_save_in_the_background(
    device, tmp_path
):
    n_most = 4 if device == "cpu" else torch.cuda.device_count()
    n_ranks = max(n for n in (1, 2, 4) if n <= n_most)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={n_ranks}", RANKS, tmp_path / "run", device],
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
