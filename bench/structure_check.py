"""Inspecting the structure of a whole root, and counting the chunks of one tensor.

The root is one step of records that torch.save wrote, for a small transformer sharded over
64 ranks; the other steps are hard links to it. The limit lists the same folders with
`os.scandir`, reads the same spans with `os.pread`, and inspects none. Times are of the
processor, in one process.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from measuring import Row, Size, called, folder, in_turns, least

from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.inspection.coverage import check_coverage
from ckptctl.inspection.presence import check_presence
from ckptctl.inspection.structure import read_structure
from ckptctl.model import Chunks, RangeColumns, TensorEntry
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource
from ckptctl.storage.contract import Span
from ckptctl.storage.local import LocalStore

N_STEPS, N_SHARDS, RECORD_GOAL_US = 20, 64, 12
# Name, and elements in each shard: matrices, gates and norms, each with its optimizer state.
PARAMETERS = [(f"layers.{i}.{name}.weight", n) for i in range(4) for name, n in (
    ("attention", 65_536), ("feed_forward", 131_072), ("gate", 4_096), ("norm", 16),
)]  # fmt: skip
GRIDS = (((800_000, 64), (100_000, 1)), ((2_528,) * 2, (316,) * 2), ((368,) * 3, (46,) * 3))


def make_step(at: Path, n_shards: int) -> None:
    """Write one step of `n_shards` shard files and the metadata that names their records."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    at.mkdir(parents=True)
    tensors, places = {}, {}
    for parameter, n in PARAMETERS:
        for fqn in (f"model.{parameter}", *(f"optim.{parameter}.exp_avg{x}" for x in ("", "_sq"))):
            chunks = [
                ChunkStorageMetadata(torch.Size([rank * n]), torch.Size([n]))
                for rank in range(n_shards)
            ]
            properties = TensorProperties(dtype=torch.float32)
            size = torch.Size([n * n_shards])
            tensors[fqn] = TensorStorageMetadata(properties, size, chunks)
    for rank in range(n_shards):
        name = f"__{rank}_0.distcp"
        with (at / name).open("wb") as file:
            for fqn, tensor in tensors.items():
                record = io.BytesIO()
                torch.save(torch.randn(tensor.chunks[rank].sizes), record)
                index = MetadataIndex(fqn, tensor.chunks[rank].offsets, rank)
                places[index] = _StorageInfo(name, file.tell(), len(record.getvalue()))
                file.write(record.getvalue())
    metadata = Metadata(tensors, {}, places, StorageMeta(str(at)))
    (at / ".metadata").write_bytes(pickle.dumps(metadata))


def make_root(root: Path, n_steps: int, n_shards: int) -> None:
    first = root / "step_0"
    make_step(first, n_shards)
    for number in range(1, n_steps):
        step = root / f"step_{number}"
        step.mkdir()
        for file in first.iterdir():
            os.link(file, step / file.name)


def structure_of_root(root: str, n_steps: int) -> int:
    """Inspect every step by listing, metadata and structure; returns how many records."""
    store, n_records = LocalStore(root), 0
    for number in range(n_steps):
        step = f"step_{number}"
        files = LocalStore(f"{root}/{step}").list_tree()
        ranges = Ranges([decode_metadata(store.read(f"{step}/.metadata", limit=2**30))])
        assert list(check_presence(ranges, files)) == []
        found = read_structure(RecordSource(store, step, ranges), files)
        assert found.findings == ()
        n_records += found.n_records
    return n_records


def decode_root(root: str, n_steps: int) -> None:
    """Decode the metadata of every step."""
    store = LocalStore(root)
    for number in range(n_steps):
        decode_metadata(store.read(f"step_{number}/.metadata", limit=2**30))


def bare_reads(root: str, n_steps: int, spans: list[Span]) -> None:
    """List and read what `structure_of_root` does, and inspect nothing."""
    for number in range(n_steps):
        with os.scandir(f"{root}/step_{number}") as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        open_files = {name: os.open(f"{root}/step_{number}/{name}", os.O_RDONLY) for name in sizes}
        os.pread(open_files[".metadata"], sizes[".metadata"], 0)
        for span in spans:
            os.pread(open_files[span.path], span.length, span.offset)
        for descriptor in open_files.values():
            os.close(descriptor)


class Noting:
    """A store that notes which spans are read."""

    def __init__(self, inner: LocalStore) -> None:
        self.inner = inner
        self.spans: list[Span] = []

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        """See `Store.read_spans`."""
        for span, data in self.inner.read_spans(spans):
            self.spans.append(span)
            yield span, data


def spans_of_step(at: str) -> list[Span]:
    store = Noting(LocalStore(at))
    files = store.inner.list_tree()
    ranges = Ranges([decode_metadata(store.inner.read(".metadata", limit=2**30))])
    read_structure(RecordSource(store, "", ranges), files)  # type: ignore[arg-type]
    return store.spans


def chunked(shape: tuple[int, ...], cuts: tuple[int, ...]) -> TensorEntry:
    """A tensor cut into equal chunks, so many along each dimension, in a shuffled order."""
    sizes = [n // cut for n, cut in zip(shape, cuts, strict=True)]
    boxes = [
        [i * size for i, size in zip(at, sizes, strict=True)]
        for at in itertools.product(*map(range, cuts))
    ]
    boxes = boxes[::2] + boxes[1::2]
    n = len(boxes)
    zeros = array("q", [0] * n)
    chunks = Chunks(
        len(shape),
        array("q", itertools.chain.from_iterable(boxes)),
        array("q", sizes * n),
        RangeColumns(array("i", zeros), zeros, zeros, ["f"]),
    )
    return TensorEntry("w", "float32", shape, chunks)


def elements_in_chunks(tensor: TensorEntry) -> int:
    """The count that finds a gap and no overlap: the least that any check has to do."""
    return sum(math.prod(chunk.sizes) for chunk in tensor.chunks)


def rows(size: Size) -> Iterator[Row]:
    """Structure per record, and coverage of three grids of chunks."""
    n_steps, n_shards = size.of(N_STEPS), size.of(N_SHARDS, least=2)
    with folder() as root:
        make_root(Path(root), n_steps, n_shards)
        spans = spans_of_step(f"{root}/step_0")
        n_records = structure_of_root(root, n_steps)
        taken = in_turns(
            {
                "ours": lambda: called(lambda: structure_of_root(root, n_steps)),
                "bare": lambda: called(lambda: bare_reads(root, n_steps, spans)),
                "decode": lambda: called(lambda: decode_root(root, n_steps)),
            },
            size.rounds,
        )
    us = {what: 1e6 * least(taken, what) / n_records for what in taken}
    what = f"structure of {n_records:,} records in {n_steps} steps"
    yield Row(what, us["ours"], "µs a record", limit=us["bare"], goal=RECORD_GOAL_US)
    yield Row(f"of which decoding metadata, {what}", us["decode"], "µs a record")
    for shape, cuts in GRIDS:
        tensor = chunked(shape, cuts)
        assert list(check_coverage(tensor)) == []
        taken = in_turns(
            {
                "ours": lambda tensor=tensor: called(lambda: list(check_coverage(tensor))),
                "bare": lambda tensor=tensor: called(lambda: elements_in_chunks(tensor)),
            },
            size.rounds,
        )
        yield Row(
            f"coverage of {' × '.join(f'{n:,}' for n in cuts)} chunks",
            1_000 * least(taken, "ours"),
            "ms",
            1_000 * least(taken, "bare"),
            "adding up elements",
            goal=1,
        )
