"""Decoding metadata, beside torch's `FileSystemReader.read_metadata`; fresh processes.

The limit is C's unpickler with stand-ins for torch's classes, which allocates whatever a
damaged length demands. The files are those that torch pickles (`metadata_files.py`). Where a
rank saves few tensors, its run of entries in the metadata is short.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from measuring import Row, Size, Taken, ckptctl, folder, least, processes, python
from metadata_files import write_metadata, write_shards

DECODE = """
import sys
from ckptctl.formats.dcp.metadata import decode_metadata
metadata = decode_metadata(open(sys.argv[1] + "/.metadata", "rb").read())
print(sum(len(t.chunks) for t in metadata.tensors.values()))
"""
TORCH = """
import sys
from torch.distributed.checkpoint import FileSystemReader
metadata = FileSystemReader(sys.argv[1]).read_metadata()
print(sum(len(t.chunks) for t in metadata.state_dict_metadata.values()))
"""
STAND_INS = """
import gc, pickle, sys
gc.disable()
class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if name in ("Size", "PosixPath", "_get_layout", "_MEM_FORMAT_ENCODING"):
            return lambda *args: args[0]
        if module == "torch":
            return name
        methods = {"__setstate__": lambda self, state: None} if name == "TensorProperties" else {}
        return type(name, (), methods)
metadata = Unpickler(open(sys.argv[1] + "/.metadata", "rb")).load()
print(sum(len(t.chunks) for t in metadata.state_dict_metadata.values()))
"""

SHAPES = (
    # tensors, ranks, and the goals for time and memory beside torch's
    (2_000, 256, 0.25, 0.75),
    (300, 1_024, 0.125, 0.125),
)


def rows(size: Size) -> Iterator[Row]:
    """Long and short runs, and what a whole inspection adds to decoding."""
    for n_tensors, n_ranks, time_goal, memory_goal in SHAPES:
        n_ranks = size.of(n_ranks, least=8)
        with folder() as name:
            step = Path(name, "step_1")
            write_metadata(step, n_tensors, n_ranks)
            write_shards(step, n_tensors, n_ranks)
            taken = processes(
                {
                    "ours": python(DECODE, step),
                    "torch": python(TORCH, step),
                    "stand-ins": python(STAND_INS, step),
                    "verify": ckptctl("verify", "--quiet", "--level", "listing", step),
                },
                size.rounds,
            )
        shape = f"{n_tensors:,} tensors on {n_ranks:,} ranks"
        yield from _rows_of(taken, shape, time_goal, memory_goal)


def _rows_of(taken: Taken, shape: str, time_goal: float, memory_goal: float) -> Iterator[Row]:
    n_chunks = int(taken["ours"][0].printed)
    assert n_chunks == int(taken["torch"][0].printed) == int(taken["stand-ins"][0].printed)
    us = {what: 1e6 * least(taken, what) / n_chunks for what in taken}
    mib = {what: least(taken, what, "peak_mib") for what in taken}
    yield Row(
        f"decode {shape}",
        us["ours"],
        "µs a chunk",
        us["torch"],
        "`read_metadata`",
        us["stand-ins"],
        time_goal,
    )
    yield Row(
        f"memory to decode {shape}",
        mib["ours"],
        "MiB",
        mib["torch"],
        "`read_metadata`",
        goal=memory_goal,
    )
    yield Row(
        f"`verify --level listing`, {shape}",
        us["verify"],
        "µs a chunk",
        us["ours"],
        "decoding",
        goal=1.1,
    )
