"""`Checkpointer.save` and `resume`, beside torch's save and load: one process, one state.

`save` with its seal beside `dcp.save`, which flushes its files; the whole of `resume`
(choosing, proving, loading, restoring) beside stock `dcp.load` of the same step. Both load
into a model that was initialized, with an optimizer that was not. The limit of a save is a
bare loop that writes the same bytes from tensor memory in pieces of 1 MiB, with CRC-32,
xxh3-128 and one flush; that of a resume is `dcp.load` with `measuring.bare_reader`, into the
state that torch builds.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import (
    MIB,
    Measure,
    Row,
    Size,
    Spent,
    Taken,
    bare_reader,
    called,
    folder,
    least,
    time_is_up,
)

WIDTH, STATE_MIB, KEPT_MIB = 2048, 768, 96
MEASURES: tuple[tuple[Measure, str], ...] = (("clock_s", "by the clock"), ("cpu_s", "processor"))


class Script:
    """A model with AdamW: three times its weights are saved."""

    def __init__(self, n_layers: int) -> None:
        import torch

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(n_layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self) -> None:
        """One step, after which the optimizer has its moments."""
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, object]:
        """What `dcp.save` is given."""
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def checkpointer(self, root: Path, keep: int | None = None) -> Any:
        """The same, as ckptctl is given it."""
        from ckptctl.train import Checkpointer

        return Checkpointer(
            str(root), model=self.model, optimizer=self.optimizer, keep=keep, tell=lambda _: None
        )


def rows(size: Size) -> Iterator[Row]:
    """Save, resume, and what retention adds to a save."""
    warnings.simplefilter("ignore")
    layer_bytes = 3 * 4 * (WIDTH * WIDTH + WIDTH)
    n_layers = max(1, size.of(STATE_MIB) * MIB // layer_bytes)
    with folder() as name:
        taken = _measured(Path(name), n_layers, size.rounds)
    shown = f"{n_layers * layer_bytes / MIB:.0f} MiB"
    for measure, how in MEASURES:
        spent = {what: least(taken, what, measure) for what in taken}
        yield Row(
            f"`Checkpointer.save` of {shown}, sealed and durable, {how}",
            spent["save"],
            "s",
            spent["dcp.save"],
            "`dcp.save`",
            spent["bare"],
            0.6,
        )
        yield Row(
            f"`Checkpointer.resume` of {shown}, {how}",
            spent["resume"],
            "s",
            spent["dcp.load"],
            "`dcp.load`",
            spent["bare load"],
            0.8,
        )
    yield _retention(size)


def _measured(parent: Path, n_layers: int, rounds: int) -> Taken:
    taken: dict[str, list[Spent]] = {}
    for turn in range(rounds):
        if turn and time_is_up():
            break
        root = parent / f"run-{turn}"
        for acts in (_saves(root, n_layers), _loads(root, n_layers)):
            for what, act in reversed(acts) if turn % 2 else acts:
                os.sync()  # each waits for its own bytes only
                taken.setdefault(what, []).append(called(act))
        shutil.rmtree(root)
    return taken


Acts = list[tuple[str, Callable[[], object]]]


def _saves(root: Path, n_layers: int) -> Acts:
    import torch.distributed.checkpoint as dcp

    script = Script(n_layers)
    script.train()
    ckpt = script.checkpointer(root)
    ckpt.resume()

    def save() -> None:
        ckpt.save(1)
        ckpt.close()

    return [
        ("dcp.save", lambda: dcp.save(script.state(), checkpoint_id=root / "bare")),
        ("save", save),
        ("bare", lambda: bare_loop(script.state(), root / "bare.bin")),
    ]


def bare_loop(state: dict[str, object], path: Path) -> None:
    """Write the elements of all tensors of a state, with checksum, digest and one flush."""
    import xxhash
    from zlib_ng.zlib_ng import crc32

    digest, crc = xxhash.xxh3_128(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for memory in memories(state):
        for at in range(0, len(memory), MIB):
            piece = memory[at : at + MIB]
            crc = crc32(piece, crc)
            digest.update(piece)
            os.write(fd, piece)
    os.fsync(fd)
    os.close(fd)


def memories(state: object) -> Iterator[memoryview]:
    """The memory of each tensor in a nested state."""
    import torch

    if isinstance(state, torch.Tensor):
        yield memoryview(state.detach().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(state, dict):
        for value in state.values():
            yield from memories(value)


def _loads(root: Path, n_layers: int) -> Acts:
    import torch.distributed.checkpoint as dcp

    stock, built, script = (Script(n_layers) for _ in range(3))
    ckpt = script.checkpointer(root)

    def resume() -> None:
        ckpt.resume("auto")

    return [
        ("dcp.load", lambda: dcp.load(stock.state(), checkpoint_id=root / "step_1")),
        ("resume", resume),
        ("bare load", lambda: dcp.load(built.state(), storage_reader=bare_reader(root / "step_1"))),
    ]


def _retention(size: Size) -> Row:
    """The same save with `keep=3` and without; each root first holds the steps that it keeps."""
    n_layers = max(1, size.of(KEPT_MIB) * MIB // (3 * 4 * WIDTH * WIDTH))
    with folder() as name:
        script = Script(n_layers)
        jobs = {
            keep: script.checkpointer(Path(name, f"keep-{keep}"), keep=keep) for keep in (None, 3)
        }
        for job in jobs.values():
            job.resume("none")
        taken: dict[str, list[Spent]] = {}
        for step in range(1, 4 + 5 * size.rounds):
            order = list(jobs.items())
            for keep, job in order if step % 2 else reversed(order):
                spent = called(lambda job=job, step=step: job.save(step))
                job.flush()
                if step > 3:
                    taken.setdefault(str(keep), []).append(spent)
        for job in jobs.values():
            job.close()
    kept, all_kept = (least(taken, keep, "clock_s") for keep in ("3", "None"))
    return Row("save with `keep=3`, by the clock", kept, "s", all_kept, "without")
