"""Scale by construction: the metadata of very many ranks, inspected by listing.

16,384 ranks × 600 tensors are 10 million chunks and 1.7 GB of metadata: `--scale 10`. The
default is a tenth. The files are as long as the metadata requires and hold no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from measuring import Row, Size, ckptctl, folder, least, processes
from metadata_files import write_metadata, write_shards

N_RANKS, N_TENSORS = 16_384, 60
SECONDS, MIBIBYTES = 3.0, 307.0
"""What a million chunks may take: a tenth of 30 s and of 3 GiB."""


def rows(size: Size) -> Iterator[Row]:
    """Time and memory of `verify --level listing`."""
    n_tensors = size.of(N_TENSORS, least=2)
    n_ranks = size.of(N_RANKS) if size.scale < 1 else N_RANKS
    with folder() as name:
        step = Path(name, "step_1")
        write_metadata(step, n_tensors, n_ranks)
        write_shards(step, n_tensors, n_ranks)
        verify = ckptctl("verify", "--quiet", "--level", "listing", step)
        taken = processes({"ours": verify}, 1 if size.scale > 1 else size.rounds)
    share = n_tensors * n_ranks / (N_RANKS * N_TENSORS)
    what = f"`verify --level listing`, {n_tensors} tensors on {n_ranks:,} ranks"
    yield Row(what, least(taken, "ours"), "s", goal=SECONDS * share)
    yield Row(f"memory, {what}", least(taken, "ours", "peak_mib"), "MiB", goal=MIBIBYTES * share)
