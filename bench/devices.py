"""A state in the memory of a device, saved and loaded beside torch: by the clock.

One process; the CPU, and the first CUDA device where torch finds one. `Writer` computes the
checksums of what it saves and flushes it, as `FileSystemWriter` does; `Reader` compares every
record with its checksum, and `FileSystemReader` compares none. The step is in the page cache.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import Row, Size, Spent, called, folder, in_turns, least

N_TENSORS, TENSOR_MIB = 24, 32


def rows(size: Size) -> Iterator[Row]:
    """A load and a save on each device."""
    import torch

    warnings.simplefilter("ignore")
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        yield from _rows_on(device, size)


def _rows_on(device: str, size: Size) -> Iterator[Row]:
    import torch
    import torch.distributed.checkpoint as dcp

    from ckptctl.train import Reader, Writer

    shape = (size.of(TENSOR_MIB << 10), 256)
    state = {f"layers.{n}": torch.rand(shape, device=device) for n in range(N_TENSORS)}
    with folder() as made:
        step, other = Path(made, "step"), Path(made, "other")

        def save(writer: Callable[[Path], Any]) -> Spent:
            def act() -> None:
                dcp.save(state, storage_writer=writer(other), no_dist=True)

            return _measured(act)

        def load(reader: Callable[[Path], Any]) -> Spent:
            return _measured(lambda: dcp.load(state, storage_reader=reader(step), no_dist=True))

        dcp.save(state, storage_writer=dcp.FileSystemWriter(step), no_dist=True)
        saves = {
            "ours": lambda: save(Writer),
            "stock": lambda: save(dcp.FileSystemWriter),
        }
        loads = {
            "ours": lambda: load(Reader),
            "stock": lambda: load(dcp.FileSystemReader),
        }
        for what, acts, peer in (
            (f"load onto {device}", loads, "`FileSystemReader`"),
            (f"save from {device}", saves, "`FileSystemWriter`"),
        ):
            taken = in_turns(acts, size.rounds, lambda: shutil.rmtree(other, ignore_errors=True))
            ours, stock = (least(taken, name, "clock_s") for name in ("ours", "stock"))
            yield Row(f"{what}, {N_TENSORS} tensors", ours, "s", stock, peer)


def _measured(act: Callable[[], object]) -> Spent:
    """What a call took until the device had done its part."""
    import torch

    def both() -> None:
        act()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return called(both)
