"""Record the file operations of real saves, in order.

    python tests/campaign/recorded_saves.py OUT

Two ranks of real torch save over gloo, through DCP's own writer. Its file system is
watched: folders made, files opened, every write with its bytes, syncs, closes, renames
and removals, with the time of each, so that those of both ranks have one order.
Written as JSON: for each kind of save the files before it, and the operations.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SAVES: dict[str, dict[str, Any]] = {
    "to a new folder": {"over": False},
    "over an older step": {"over": True},
    "over an older step, in the background": {"over": True, "background": True},
    "over an older step, nothing synced": {"over": True, "sync_files": False},
    "to a new folder, a file for each entry": {"over": False, "single_file_per_rank": False},
    "over an older step, a file for each entry": {"over": True, "single_file_per_rank": False},
}
N_RANKS = 2


class _Stream:
    """A file that records what is written to it."""

    def __init__(self, stream: Any, name: str, tell: Any) -> None:
        self._stream, self._name, self._tell = stream, name, tell

    def write(self, data: Any) -> int:
        at = self._stream.tell()
        self._tell("write", self._name, at, base64.b64encode(bytes(data)).decode())
        return int(self._stream.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _watch(operations: list[list[object]]) -> None:
    """Let DCP's writer record in `operations` what it does in the folder of a step."""
    from torch.distributed.checkpoint import filesystem

    def tell(what: str, *about: object) -> None:
        operations.append([time.monotonic_ns(), what, *about])

    names: dict[int, str] = {}
    make, rename, remove = (
        filesystem.FileSystem.create_stream,
        filesystem.FileSystem.rename,
        filesystem.FileSystem.rm_file,
    )

    @contextmanager
    def create_stream(self: Any, path: Any, mode: str) -> Iterator[Any]:
        with make(self, path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            name = Path(path).name
            names[stream.fileno()] = name
            tell("open", name)
            yield _Stream(stream, name, tell)
        tell("close", name)

    def renamed(self: Any, path: Any, new: Any) -> None:
        tell("rename", Path(path).name, Path(new).name)
        rename(self, path, new)

    def removed(self: Any, path: Any) -> None:
        tell("remove", Path(path).name)
        remove(self, path)

    sync = os.fsync

    def synced(fd: int) -> None:
        sync(fd)
        tell("sync", names.get(fd, ""))

    filesystem.FileSystem.create_stream = create_stream
    filesystem.FileSystem.rename = renamed
    filesystem.FileSystem.rm_file = removed
    filesystem.os.fsync = synced


def _state(rank: int, value: int) -> dict[str, Any]:
    """A model that every rank holds, state of its own, and the counts of an optimizer."""
    import torch

    state: dict[str, Any] = {"trained": value}
    for name in ("up", "down"):
        state[f"model.{name}.{rank}"] = torch.full((40, 60), float(value))
        for kind in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer.state.{name}.{rank}.{kind}"] = torch.full((40, 60), value / 7)
    if value % 2 == 0:  # half of the runs keep counts that reveal a mixed step
        for name in ("up", "down"):
            state[f"optimizer.state.{name}.{rank}.step"] = torch.tensor(float(value))
    return state


def _save(rank: int, step: Path, value: int, about: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    options = {k: v for k, v in about.items() if k in ("sync_files", "single_file_per_rank")}
    writer = dcp.FileSystemWriter(step, **options)
    if about.get("background"):
        dcp.async_save(_state(rank, value), storage_writer=writer).result()
    else:
        dcp.save(_state(rank, value), storage_writer=writer)


def _rank(rank: int, folder: Path, out: Path) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=N_RANKS
    )
    found = []
    kinds = [(name, about, odd) for name, about in SAVES.items() for odd in (0, 1)]
    operations: list[list[object]] = []
    _watch(operations)
    for number, (name, about, odd) in enumerate(kinds):
        step = folder / f"run-{number}" / "step_20"
        before: dict[str, str] = {}
        if about["over"]:
            _save(rank, step, 10 + odd, about)
            dist.barrier()
            before = {p.name: base64.b64encode(p.read_bytes()).decode() for p in step.iterdir()}
        dist.barrier()
        operations.clear()
        _save(rank, step, 20 + odd, about)
        dist.barrier()
        after = {p.name: base64.b64encode(p.read_bytes()).decode() for p in step.iterdir()}
        said = f"{name}{'' if odd else ', with counts of the optimizer'}"
        found.append(
            {"name": said, "before": before, "after": after, "operations": list(operations)}
        )
        dist.barrier()
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def record(out: Path) -> None:
    """Save in every way, and write the operations."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        mp.spawn(_rank, (folder, folder), nprocs=N_RANKS)
        ranks = [json.loads((folder / f"rank-{n}.json").read_text()) for n in range(N_RANKS)]
    saves = []
    for of_ranks in zip(*ranks, strict=True):
        merged = sorted(one for rank in of_ranks for one in rank["operations"])
        first = of_ranks[0]
        saves.append({**first, "operations": [operation[1:] for operation in merged]})
    out.write_text(json.dumps(saves))


if __name__ == "__main__":
    record(Path(sys.argv[1]))
