"""A script with epochs over a `StatefulDataLoader`, its launcher, and a killer.

    python epoch_job.py FOLDER '{"loader": "distributed", "script": "steps", ...}'

Two ranks train three epochs twice: undisturbed, and killed with SIGKILL after every save and
started again. Prints a line of JSON: the rows of each run by rank and step (the ids of the samples
and the loss), and how its attempts ended.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer needs it; once, before the ranks are forked
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ckptctl.errors import CkptctlError
from ckptctl.train import Checkpointer

N_RANKS = 2
N_EPOCHS = 3
DEFAULTS = {
    "loader": "distributed",
    "script": "steps",
    "workers": 0,
    "accumulate": 1,
    "drop_last": False,
    "samples": 20,
    "save_at": [2, 5, 6, 10, 12, 15],
    "between": [],
    "before": [],
    "ranks": N_RANKS,
    "persistent": False,
    "sets_epoch": True,
    "options": {},
}


def line(index: int) -> Any:
    draw = random.Random(index)
    return torch.tensor([draw.random() for _ in range(4)]), index


class Lines:
    def __init__(self, n_samples: int) -> None:
        self.n_samples = n_samples

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> Any:
        return line(index)


class Stream(IterableDataset):
    """The lines of this rank and worker, in order; without a state."""

    def __init__(self, n_samples: int, rank: int, n_ranks: int) -> None:
        self.own = range(rank, n_samples, n_ranks)

    def share(self) -> range:
        worker = get_worker_info()
        return self.own if worker is None else self.own[worker.id :: worker.num_workers]

    def __iter__(self) -> Iterator[Any]:
        return map(line, self.share())


class CountedStream(Stream):
    """The same with a state: how many of its lines were taken."""

    taken = 0

    def __iter__(self) -> Iterator[Any]:
        for index in self.share()[self.taken :]:
            self.taken += 1
            yield line(index)
        self.taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Progress:
    """The epoch that a script is in, as it is often kept in a checkpoint."""

    epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def loader_of(options: dict[str, Any], rank: int) -> tuple[Any, Any]:
    """The loader, and what takes the number of the epoch."""
    kind, n_samples, n_ranks = options["loader"], options["samples"], options["ranks"]
    data: Any = Lines(n_samples)
    given: dict[str, Any] = {"batch_size": 2, "drop_last": options["drop_last"]}
    given["num_workers"] = options["workers"]
    given["persistent_workers"] = options["persistent"]
    sampler = None
    if kind in ("distributed", "stateful sampler"):
        cls = DistributedSampler if kind == "distributed" else StatefulDistributedSampler
        sampler = given["sampler"] = cls(data, n_ranks, rank, seed=5)
    elif kind in ("shuffled", "own generator"):
        data = torch.utils.data.Subset(data, range(rank, n_samples, n_ranks))
        given["shuffle"] = True
        if kind == "own generator":
            given["generator"] = torch.Generator().manual_seed(3 + rank)
    elif kind in ("stream", "counted stream"):
        data = (Stream if kind == "stream" else CountedStream)(n_samples, rank, n_ranks)
    return StatefulDataLoader(data, **given), sampler


def steps_of_an_epoch(options: dict[str, Any]) -> int:
    own, workers = options["samples"] // options["ranks"], max(1, options["workers"])
    shares = [own]
    if "stream" in options["loader"]:
        shares = [len(range(worker, own, workers)) for worker in range(workers)]
    n_batches = sum(n // 2 if options["drop_last"] else -(-n // 2) for n in shares)
    return n_batches // options["accumulate"]


def rank_main(options: dict[str, Any], rank: int, meet: str, root: str, out: Path) -> int:
    warnings.simplefilter("ignore")
    logging.getLogger("torchdata").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    n_ranks = options["ranks"]
    if n_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=n_ranks)
    torch.manual_seed(1 + rank)
    loader, sampler = loader_of(options, rank)
    torch.manual_seed(1)
    layers = torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    model: Any = torch.nn.Sequential(*layers)
    if n_ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(50 + rank)
    progress, script = Progress(), options["script"]
    ckpt = Checkpointer(
        root,
        model=model,
        optimizer=optimizer,
        dataloader=loader,
        extra={"progress": progress} if script == "counter" else None,
        tell=lambda text: print(text, file=sys.stderr),
        **options["options"],
    )
    try:
        start = step = ckpt.resume().step
        n_steps = steps_of_an_epoch(options)

        def save(where: str) -> None:
            if step in options[where] and step > start:
                ckpt.save(step)
                if options["kill"]:
                    if n_ranks > 1:
                        dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)

        first = progress.epoch if script == "counter" else step // n_steps
        with out.open("a") as rows:
            for epoch in range(first, 100 if script == "endless" else N_EPOCHS):
                progress.epoch = epoch
                if script == "endless" and step == N_EPOCHS * n_steps:
                    break
                if sampler is not None and options["sets_epoch"]:
                    sampler.set_epoch(epoch)
                batches = iter(loader)
                save("before")
                row: dict[str, Any] = {"ids": [], "losses": []}
                for batch, ids in batches:
                    loss = model(batch).square().mean()
                    loss.backward()
                    row["ids"] += ids.tolist()
                    row["losses"].append(loss.item())
                    if len(row["losses"]) < options["accumulate"]:
                        continue
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    rows.write(json.dumps({"rank": rank, "step": step, **row}) + "\n")
                    rows.flush()
                    row = {"ids": [], "losses": []}
                    save("save_at")
                    if step == N_EPOCHS * n_steps and script == "endless":
                        break
                progress.epoch = epoch + 1
                save("between")
        ckpt.close()
    except CkptctlError as error:
        os.write(2, f"rank {rank}: {type(error).__name__}: {error.message}\n".encode())
        return error.exit_code
    if n_ranks > 1:
        dist.destroy_process_group()
    return 0


Main = Callable[[dict[str, Any], int, str, str, Path], int]
"""What a rank does, with the options, its number, the file to meet at, the root, and its rows."""


def attempt(options: dict[str, Any], folder: Path, name: str, main: Main) -> int:
    """One attempt of the script; returns the worst exit code of its ranks."""
    meet = tempfile.mktemp(prefix="ckptctl-meet-")
    pids = []
    for rank in range(options["ranks"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                out = folder / f"{name}.{rank}.jsonl"
                code = main(options, rank, meet, str(folder / name), out)
            except BaseException:  # noqa: BLE001 - a forked rank must not go on as the launcher
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return next((code for code in codes if code), 0)


def rows_of(folder: Path, name: str) -> dict[str, Any]:
    """By rank and step, the line of the attempt that trained it last."""
    found = {}
    for file in sorted(folder.glob(f"{name}.*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            found[f"rank {row['rank']} step {row['step']:02}"] = (row["ids"], row["losses"])
    return found


def compared(folder: Path, main: Main, **given: Any) -> dict[str, Any]:
    """The rows of a run that nobody killed, and of one that was killed after every save."""
    options = DEFAULTS | given
    codes = [attempt(options | {"kill": False}, folder, "whole", main)]
    while len(codes) < 20 and codes[-1] in (0, -signal.SIGKILL) and (len(codes) == 1 or codes[-1]):
        codes.append(attempt(options | {"kill": True}, folder, "killed", main))
    return {
        "codes": codes,
        "whole": rows_of(folder, "whole"),
        "killed": rows_of(folder, "killed"),
    }


if __name__ == "__main__":
    print(json.dumps(compared(Path(sys.argv[1]), rank_main, **json.loads(sys.argv[2]))))
