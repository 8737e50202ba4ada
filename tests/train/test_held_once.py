"""What a step holds once is equal on all ranks, or refused; buffers are those of rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from train_ranks import ends, ranks  # noqa: E402

from ckptctl.errors import UsageError  # noqa: E402
from ckptctl.train.held_once import check_equal, digests_of_values  # noqa: E402

pytestmark = pytest.mark.torch

JOB = """
import torch
from torch import nn
from ckptctl.errors import UsageError
from ckptctl.train import Checkpointer

torch.manual_seed(rank)

class Meter:
    def __init__(self, n): self.n = n
    def state_dict(self): return {"n": self.n}
    def load_state_dict(self, state): self.n = state["n"]

def refused(name, **parts):
    with Checkpointer(f"{root}/{name}", tell=lambda _: None, **parts) as ckpt:
        ckpt.resume()
        try:
            ckpt.save(1)
        except UsageError as error:
            say(name, error.message)

root = sys.argv[4]
stage = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
refused("stages", model=stage, optimizer=torch.optim.AdamW(stage.parameters()))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + rank)
refused("rates", model=model, optimizer=optimizer)
refused("meter", model=model, extra={"meter": Meter(rank)})

for n_steps in (3, 0):
    meter = Meter(n_steps and rank + 5)
    extra = {f"meter_{rank}": meter, "shared": Meter(1)}
    with Checkpointer(f"{root}/sound", model=model, extra=extra, tell=lambda _: None) as ckpt:
        ckpt.resume()
        for _ in range(n_steps):
            model(torch.randn(4, 2)).sum().backward()
        if n_steps:
            ckpt.save(1)
    say("meter", meter.n, "buffers", [one.tolist() for one in model.module[1].buffers()])
"""


def test_values_that_differ_between_ranks_are_refused_and_buffers_are_those_of_rank_0(
    tmp_path: Path,
):
    code = JOB.replace("sys.argv[4]", repr(str(tmp_path)))
    with ranks(code, 2, tmp_path, OMP_NUM_THREADS="1") as started:
        ended = ends(started)
    assert [code for code, _, _ in ended] == [0, 0], ended
    outs = [out for _, out, _ in ended]
    assert outs[0][:3] == outs[1][:3]
    stages, rates, meter = outs[0][:3]
    options = "the options of the optimizer differ between ranks 0 and 1, as those of pipeline "
    assert stages.startswith(f"stages {options}")
    assert rates.startswith(f"rates {options}")
    assert meter == (
        "meter the state of extra meter differs between ranks 0 and 1, and a step holds it once: "
        "make it equal, or name it by rank, such as 'meter_1'"
    )
    saved, resumed = zip(*(out[3:] for out in outs), strict=True)
    buffers = [line.partition(" buffers ")[2] for line in (*saved, *resumed)]
    assert buffers[0] != buffers[1]
    assert buffers[2:] == [buffers[0]] * 2
    assert [line.split()[1] for line in resumed] == ["5", "6"]


VALUES = [{"a": 1.5, 2: [None, (True,)]}, {"lr": torch.tensor(0.1)}, {}, {"s": float("nan")}]


@pytest.mark.parametrize("value", VALUES)
def test_equal_values_have_one_digest(value: dict[Any, Any]):
    again = {key: value[key] for key in reversed(value)}
    check_equal([digests_of_values({"scheduler": (one,)}) for one in (value, again)])
    with pytest.raises(UsageError, match="the state of scheduler differs between ranks 0 and 2"):
        check_equal(
            [digests_of_values({"scheduler": (one,)}) for one in (value, again, {"other": 1})]
        )


def test_a_value_that_only_some_ranks_have_is_no_difference():
    check_equal([{}, {"extra meter_1": "a"}, {"extra meter_2": "b"}])
