"""Loads steps with the Reader in several processes, and prints what came of it as JSON.

    python reader_ranks.py STEP N [STEP N …]

Each of the N processes of a load has the FSDP2 model of `fixtures/writers/training.py`
and its optimizer. torch is imported once, and the processes are forked from there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "fixtures"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes
from writers.rank import describe
from writers.training import _sharded, _tied

from ckptctl.train import Reader


def load(number: int, size: int, step: str, folder: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=size
    )
    model = _sharded(_tied(), init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "train_state": {"step": 0}}
    answer: dict[str, Any] = {}
    reader = Reader(step)
    try:
        dcp.load(state, storage_reader=reader)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        weights, moments = get_state_dict(model, optimizer)
        answer["entries"] = describe({**state, "model": weights, "optimizer": moments})
        answer["read"] = reader.loaded.n_read
    except CheckpointException as error:
        answer["failures"] = {
            rank: [type(failure).__name__, failure.code, str(failure)]
            for rank, (failure, _) in error.failures.items()
        }
    answers: list[Any] = [None] * size
    dist.all_gather_object(answers, answer)
    if number == 0:
        Path(folder, "answers").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    loads = list(zip(sys.argv[1::2], map(int, sys.argv[2::2]), strict=True))
    answers = []
    for step, size in loads:
        with tempfile.TemporaryDirectory() as folder:
            start_processes(load, args=(size, step, folder), nprocs=size, start_method="fork")
            answers.append(json.loads(Path(folder, "answers").read_text()))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
