"""Scale by construction: the metadata of very many ranks, inspected by listing.

16,384 ranks × 600 tensors are 10 million chunks and 1.7 GB of metadata: `--scale 10`. The
default is a tenth, and 300 tensors on 8,192 ranks, whose runs are short and whose integers are
large. The files are as long as the metadata requires and hold no bytes.

A tenth of the chunks does not take a tenth of the memory: the process takes 20 MiB, and each
rank, with its file and its places in the tensors, 3 KiB, however few tensors it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from measuring import Row, Size, ckptctl, folder, least, processes
from metadata_files import write_metadata, write_shards

PROCESS_MIB, RANK_MIB = 20.0, 3 / 1024
SHAPES = (
    # tensors, ranks, and the goals: a tenth of the chunks of a step that is inspected in 30 s and
    # 3 GB (2,861 MiB); decoding in 6 s and 10 % more, 0.7 GB
    (60, 16_384, 3.0, 347.0),
    (300, 8_192, 6.6, 668.0),
)


def rows(size: Size) -> Iterator[Row]:
    """Time and memory of `verify --level listing`."""
    for n_tensors, n_ranks, seconds, mebibytes in SHAPES[: 1 if size.scale > 1 else None]:
        yield from _rows_of(size, n_tensors, n_ranks, (seconds, mebibytes))


def _rows_of(
    size: Size, all_tensors: int, all_ranks: int, goals: tuple[float, float]
) -> Iterator[Row]:
    n_tensors = size.of(all_tensors, least=2)
    n_ranks = size.of(all_ranks) if size.scale < 1 else all_ranks
    with folder() as name:
        step = Path(name, "step_1")
        write_metadata(step, n_tensors, n_ranks)
        write_shards(step, n_tensors, n_ranks)
        verify = ckptctl("verify", "--quiet", "--level", "listing", step)
        taken = processes({"ours": verify}, 1 if size.scale > 1 else size.rounds)
    fixed, all_fixed = (PROCESS_MIB + RANK_MIB * ranks for ranks in (n_ranks, all_ranks))
    share = n_tensors * n_ranks / (all_ranks * all_tensors)
    seconds, mebibytes = share * goals[0], share * (goals[1] - all_fixed) + fixed
    what = f"`verify --level listing`, {n_tensors} tensors on {n_ranks:,} ranks"
    yield Row(what, least(taken, "ours"), "s", goal=seconds)
    yield Row(f"memory, {what}", least(taken, "ours", "peak_mib"), "MiB", goal=mebibytes)
