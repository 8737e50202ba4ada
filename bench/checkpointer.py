"""Measure `Checkpointer.save` and `resume` against torch's save and load.

One process, one state, in turns: `save` with its seal against `dcp.save`, which flushes its
files; the whole of `resume` (choosing, proving, loading, restoring) against stock `dcp.load`
of the same step. Both load into a model that was initialized, with an optimizer that was
not. The limit of a save is a bare loop that writes the same bytes from tensor memory in
pieces of 1 MiB, with CRC-32, xxh3-128 and one flush. Targets: 0.6 for the save, 0.8 for the
resume, and no memory that grows with the model.

    python bench/checkpointer.py [--mib 768] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from zlib_ng.zlib_ng import crc32

from ckptctl.train import Checkpointer

WIDTH = 2048
PIECE_BYTES = 1 << 20

RATIOS = (
    ("save and seal", "dcp.save", "target 0.6"),
    ("bare loop", "dcp.save", "limit of the above"),
    ("resume", "stock dcp.load", "target 0.8"),
)


class Script:
    """A model with AdamW: three times its weights are saved."""

    def __init__(self, n_layers: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(n_layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self) -> None:
        """One step, after which the optimizer has its moments."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, object]:
        """What `dcp.save` is given."""
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def checkpointer(self, root: Path) -> Checkpointer:
        """The same, as ckptctl is given it."""
        return Checkpointer(
            str(root), model=self.model, optimizer=self.optimizer, tell=lambda _: None
        )


def main() -> int:
    """Measure and print."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    n_layers = max(1, options.mib * 2**20 // (3 * 4 * WIDTH * WIDTH))
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        taken = _measured(Path(name), n_layers, options.rounds)
    size = 3 * 4 * (WIDTH * WIDTH + WIDTH) * n_layers / 2**20
    print(f"{size:.0f} MiB of state, one process, median of {options.rounds}, in turns")
    print("                             by the clock, s        processor, s")
    print("                           median      fastest      median  fastest")
    for what, (wall, busy) in taken.items():
        print(
            f"  {what:24} {statistics.median(wall):6.2f}       {min(wall):6.2f}"
            f"      {statistics.median(busy):6.2f}   {min(busy):6.2f}"
        )
    print("  ratio to the peer              median      fastest      median  fastest")
    for what, peer, target in RATIOS:
        ratios = [
            measure(mine) / measure(stock)
            for mine, stock in zip(taken[what], taken[peer], strict=True)
            for measure in (statistics.median, min)
        ]
        shown = "      {:6.2f}       {:6.2f}      {:6.2f}   {:6.2f}".format(*ratios)
        print(f"  {what:24}{shown}   {target}")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB")
    return 0


Taken = dict[str, tuple[list[float], list[float]]]
"""Seconds by the clock and of the processor, a pair for each round."""


def _measured(folder: Path, n_layers: int, rounds: int) -> Taken:
    taken: Taken = {}
    for turn in range(rounds):
        root = folder / f"run-{turn}"
        for what, act in chain(_saves(root, n_layers, turn), _loads(root, n_layers)):
            began_s, busy_s = time.perf_counter(), time.process_time()
            act()
            wall, busy = taken.setdefault(what, ([], []))
            wall.append(time.perf_counter() - began_s)
            busy.append(time.process_time() - busy_s)
        shutil.rmtree(root)
    return taken


Act = tuple[str, Callable[[], object]]


def _saves(root: Path, n_layers: int, turn: int) -> Iterator[Act]:
    """In one order and in the other by turns."""
    script = Script(n_layers)
    script.train()
    ckpt = script.checkpointer(root)
    ckpt.resume()
    bare = root.with_name("bare")
    acts: list[Act] = [
        ("dcp.save", lambda: dcp.save(script.state(), checkpoint_id=bare)),
        ("save and seal", lambda: ckpt.save(1)),
        ("bare loop", lambda: bare_loop(script.state(), root.with_name("bare.bin"))),
    ]
    for what, act in acts if turn % 2 else reversed(acts):
        os.sync()  # each waits for its own bytes only
        yield what, act
    ckpt.close()
    shutil.rmtree(bare)
    root.with_name("bare.bin").unlink()


def bare_loop(state: dict[str, object], path: Path) -> None:
    """Write the elements of all tensors of a state, with checksum, digest and one flush."""
    digest, crc = xxhash.xxh3_128(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for memory in memories(state):
        for at in range(0, len(memory), PIECE_BYTES):
            piece = memory[at : at + PIECE_BYTES]
            crc = crc32(piece, crc)
            digest.update(piece)
            os.write(fd, piece)
    os.fsync(fd)
    os.close(fd)


def memories(state: object) -> Iterator[memoryview]:
    """The memory of each tensor in a nested state."""
    if isinstance(state, torch.Tensor):
        yield memoryview(state.detach().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(state, dict):
        for value in state.values():
            yield from memories(value)


def _loads(root: Path, n_layers: int) -> Iterator[Act]:
    stock = Script(n_layers)
    yield "stock dcp.load", lambda: dcp.load(stock.state(), checkpoint_id=root / "step_1")
    ckpt = Script(n_layers).checkpointer(root)
    yield "resume", lambda: ckpt.resume("auto")
    ckpt.close()


if __name__ == "__main__":
    sys.exit(main())
