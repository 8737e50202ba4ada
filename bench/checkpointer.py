"""`Checkpointer.save` and `resume`, beside torch's save and load of the same state.

`save` with its seal beside `dcp.save`, which flushes its files. The whole of `resume` (making
and closing the `Checkpointer`, choosing, proving, loading, restoring) beside stock `dcp.load` of
the same step, in one process and in two gloo processes with `fully_shard`. Both load into a
model that was initialized, with an optimizer that was not. The limit of a save is a bare loop
that writes the same bytes from tensor memory in pieces of 1 MiB, with CRC-32, xxh3-128 and one
flush; that of a resume builds the state, without a step of the optimizer, and calls `dcp.load`
with `measuring.bare_reader`.

What `save` compares over the ranks, before it writes a model that each of them holds, is measured
beside the rest of the same save. Its limit is one sum over the same memory, on all ranks at once.

The stages of a resume are measured by the profiler, on rank 0 and in processor time.
"""

from __future__ import annotations

import cProfile
import ctypes
import gc
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from reader import in_processes

WIDTH, STATE_MIB, KEPT_MIB, REPLICATED_MIB = 2048, 768, 96, 192
MEASURES: tuple[tuple[Measure, str], ...] = (("clock_s", "by the clock"), ("cpu_s", "processor"))


RANKS = (1, 2)
REPLICAS = (2, 4)


class Script:
    """A model with AdamW: three times its weights are saved; sharded if there is a group."""

    def __init__(self, n_layers: int) -> None:
        import torch
        import torch.distributed as dist

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(n_layers)))
        if dist.is_initialized() and dist.get_world_size() > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
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

    def allocate(self) -> None:
        """Give the optimizer the tensors of its state, of any content."""
        import torch

        for one in self.model.parameters():
            moments = {name: torch.empty_like(one) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[one] = {"step": torch.tensor(0.0), **moments}

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
        saves = _saved(Path(name), n_layers, size.rounds)
    shown = f"{n_layers * layer_bytes / MIB:.0f} MiB"
    for measure, how in MEASURES:
        spent = {what: least(saves, what, measure) for what in saves}
        yield Row(
            f"`Checkpointer.save` of {shown}, sealed and durable, {how}",
            spent["save"],
            "s",
            spent["dcp.save"],
            "`dcp.save`",
            spent["bare"],
            0.6,
        )
    for n_ranks in RANKS:
        with folder() as name:
            answers = Path(name, "answers")
            in_processes(n_ranks, _resumed, name, n_layers, size.rounds, str(answers))
            found = json.loads(answers.read_text())
        yield from _resume_rows(f"{shown}, {n_ranks} process{'es' * (n_ranks > 1)}", found)
    yield _retention(size)


def comparisons(size: Size) -> Iterator[Row]:
    """What a save of a model that every rank holds takes to compare the ranks."""
    warnings.simplefilter("ignore")
    n_layers = max(1, size.of(REPLICATED_MIB) * MIB // (4 * WIDTH * WIDTH))
    for n_ranks in REPLICAS:
        with folder() as name:
            answers = Path(name, "answers")
            in_processes(n_ranks, _compared, name, n_layers, size.rounds, str(answers))
            found = json.loads(answers.read_text())
        for measure, how in MEASURES:
            yield Row(
                f"comparing {n_ranks} ranks with a replicated model of "
                f"{n_layers * 4 * WIDTH * WIDTH / MIB:.0f} MiB, {how}",
                1000 * found[measure]["comparison"],
                "ms",
                1000 * found[measure]["save"],
                "the save",
                1000 * found[measure]["bare sum"],
                0.05,
            )


def _resume_rows(shown: str, found: Mapping[str, Any]) -> Iterator[Row]:
    for measure, how in MEASURES:
        spent = found[measure]
        yield Row(
            f"`Checkpointer.resume` of {shown}, {how}",
            spent["resume"],
            "s",
            spent["dcp.load"],
            "`dcp.load`",
            spent["bare load"],
            0.8,
        )
    whole = found["stages"].pop("resume")
    for stage, took_s in found["stages"].items():
        yield Row(f"of which {stage}", 1000 * took_s, "ms", 1000 * whole, "the resume")


def _saved(parent: Path, n_layers: int, rounds: int) -> Taken:
    taken: dict[str, list[Spent]] = {}
    for turn in range(rounds):
        if turn and time_is_up():
            break
        root = parent / f"run-{turn}"
        acts = _saves(root, n_layers)
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


# In the processes of a job


def _compared(name: str, n_layers: int, rounds: int, answers: str) -> None:
    """Save a model that all ranks hold, several times; rank 0 writes the least figures."""
    import torch
    import torch.distributed as dist

    from ckptctl.train import held_once

    torch.set_num_threads(1)
    compare = held_once.HeldOnce.agree
    taken: dict[str, list[Spent]] = {}

    def measured(what: str, act: Callable[[], object]) -> None:
        dist.barrier()
        spent = called(act)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (spent.cpu_s, spent.clock_s))
        cpu_s, clock_s = zip(*everyone, strict=True)
        taken.setdefault(what, []).append(Spent(sum(cpu_s), max(clock_s)))

    def agree(*arguments: Any) -> None:
        measured("comparison", lambda: compare(*arguments))

    held_once.HeldOnce.agree = agree  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(n_layers)))

    from ckptctl.train import Checkpointer

    def bare_sum() -> None:
        for parameter in model.parameters():
            parameter.detach().view(torch.int32).view(-1)[: parameter.numel() // 2 * 2].view(
                torch.int64
            ).sum()

    with Checkpointer(str(Path(name, "run")), model=model, tell=lambda _: None) as ckpt:
        ckpt.resume()
        for turn in range(2 * rounds):
            os.sync()
            measured("save", lambda turn=turn: ckpt.save(turn + 1))
            measured("bare sum", bare_sum)
            if dist.get_rank() == 0:
                shutil.rmtree(Path(name, "run", f"step_{turn + 1}"))
    if dist.get_rank() == 0:
        least_of = {
            measure: {what: least(taken, what, measure) for what in taken}
            for measure, _ in MEASURES
        }
        Path(answers).write_text(json.dumps(least_of))


def _resumed(name: str, n_layers: int, rounds: int, answers: str) -> None:
    """Save a step and load it in turns; rank 0 writes the least figures, and the stages."""
    import torch.distributed as dist

    root = Path(name, "run")
    script = Script(n_layers)
    script.train()
    with script.checkpointer(root) as ckpt:
        ckpt.resume()
        ckpt.save(1)
    taken: dict[str, list[Spent]] = {}
    for turn in range(rounds):
        for what, act in reversed(LOADS) if turn % 2 else LOADS:
            del script
            script = _fresh(n_layers)
            dist.barrier()
            spent = called(lambda act=act, script=script: act(script, root))
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (spent.cpu_s, spent.clock_s))
            cpu_s, clock_s = zip(*everyone, strict=True)
            taken.setdefault(what, []).append(Spent(sum(cpu_s), max(clock_s)))
    del script
    stages = _stages(_fresh(n_layers), root)
    if dist.get_rank() == 0:
        least_of = {
            measure: {what: least(taken, what, measure) for what in taken}
            for measure, _ in MEASURES
        }
        Path(answers).write_text(json.dumps({**least_of, "stages": stages}))


def _fresh(n_layers: int) -> Script:
    """A script in a process that has no freed memory left to reuse, as one that has just begun."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return Script(n_layers)


def _stock_load(script: Script, root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(script.state(), checkpoint_id=root / "step_1")


def _resume(script: Script, root: Path) -> None:
    with script.checkpointer(root) as ckpt:
        ckpt.resume("auto")


def _bare_load(script: Script, root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    script.allocate()
    dcp.load(script.state(), storage_reader=bare_reader(root / "step_1"))


LOADS: list[tuple[str, Callable[[Script, Path], None]]] = [
    ("dcp.load", _stock_load),
    ("resume", _resume),
    ("bare load", _bare_load),
]


def _stages(script: Script, root: Path) -> dict[str, float]:
    """Seconds of the processor in each stage of a resume on this rank, by the profiler."""
    from ckptctl.selection.history import take_token
    from ckptctl.train import optimizers, reader, resolving, restoring, resuming, state

    run = resuming.Resume
    stages = {
        "resume": run.run,
        "choosing the step: metadata, structure, predecessor": run._decide,
        "proving that every rank sees it": resolving.open_on_all,
        "building the state: allocation": optimizers.allocate_state,
        "building the state: state dicts": state.template,
        "loading": restoring.LoadTarget.fill,
        "reading and comparing bytes, a part of loading": reader.Reader.read_data,
        "restoring": run._restore,
        "taking the root over": take_token,
        "ledger, report, marks": run._complete,
    }
    ckpt = script.checkpointer(root)
    profiler = cProfile.Profile(time.process_time)
    profiler.enable()
    ckpt.resume("auto")
    profiler.disable()
    ckpt.close()
    spent = {entry.code: entry.totaltime for entry in profiler.getstats()}
    return {stage: spent.get(act.__code__, 0.0) for stage, act in stages.items()}


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
