"""Measure inspecting the structure of a whole root, and counting 100,000 chunks.

The root is one step of records that torch.save really wrote, for a small transformer
sharded over 64 ranks, with a `.metadata` of torch's own classes; the other steps are
hard links to it. So all reads but the first come from the page cache, for ckptctl and
for its peer alike: the peer lists the same folders with `os.scandir` and reads the same
bytes with `os.pread`, one span after the other, and inspects none of them. Times are of the
processor.

    python bench/structure_check.py [--steps 200] [--shards 64] [--rounds 1]
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import os
import pickle
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ckptctl.checks.coverage import check_coverage
from ckptctl.checks.presence import check_presence
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.inspection.part_files import Structure, read_structure
from ckptctl.model import Chunks, RangeColumns, TensorEntry
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource
from ckptctl.storage.contract import Span
from ckptctl.storage.local import LocalStore

# Name, and elements in each shard: matrices, gates and norms, each with its optimizer state.
PARAMETERS = [(f"layers.{i}.{name}.weight", n) for i in range(4) for name, n in (
    ("attention", 65_536), ("feed_forward", 131_072), ("gate", 4_096), ("norm", 16),
)]  # fmt: skip


def make_step(folder: Path, n_shards: int) -> None:
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

    folder.mkdir(parents=True)
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
        with (folder / name).open("wb") as file:
            for fqn, tensor in tensors.items():
                record = io.BytesIO()
                torch.save(torch.randn(tensor.chunks[rank].sizes), record)
                index = MetadataIndex(fqn, tensor.chunks[rank].offsets, rank)
                places[index] = _StorageInfo(name, file.tell(), len(record.getvalue()))
                file.write(record.getvalue())
    metadata = Metadata(tensors, {}, places, StorageMeta(str(folder)))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def make_root(root: Path, n_steps: int, n_shards: int) -> None:
    first = root / "step_0"
    make_step(first, n_shards)
    for number in range(1, n_steps):
        step = root / f"step_{number}"
        step.mkdir()
        for file in first.iterdir():
            os.link(file, step / file.name)


def structure_of_root(root: str, n_steps: int) -> list[Structure]:
    """Look at every step by listing, metadata and structure; each must be sound."""
    store = LocalStore(root)
    looks = []
    for number in range(n_steps):
        folder = f"step_{number}"
        files = LocalStore(f"{root}/{folder}").list_tree()
        ranges = Ranges([decode_metadata(store.read(f"{folder}/.metadata", limit=2**30))])
        assert list(check_presence(ranges, files)) == []
        looks.append(read_structure(RecordSource(store, folder, ranges), files))
        assert looks[-1].findings == ()
    return looks


def bare_reads(root: str, n_steps: int, spans: list[Span]) -> None:
    """List and read what `structure_of_root` does, and look at nothing."""
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


def spans_of_step(folder: str) -> list[Span]:
    store = Noting(LocalStore(folder))
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
    offsets = array("q", itertools.chain.from_iterable(boxes))
    chunks = Chunks(
        len(shape),
        offsets,
        array("q", sizes * n),
        RangeColumns(array("i", zeros), zeros, zeros, ["f"]),
    )
    return TensorEntry("w", "float32", shape, chunks)


def elements_in_chunks(tensor: TensorEntry) -> int:
    """The count that finds a gap and no overlap: the least that any check has to do."""
    return sum(math.prod(chunk.sizes) for chunk in tensor.chunks)


def seconds(work: Callable[[], object], n_rounds: int) -> float:
    """The median of several rounds, in seconds of processor: the machine may be busy."""
    taken = []
    for _ in range(n_rounds):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    n_steps = options.steps

    with tempfile.TemporaryDirectory() as folder:
        make_root(Path(folder), n_steps, options.shards)
        n_bytes = n_steps * sum(p.stat().st_size for p in Path(folder, "step_0").iterdir())
        look = structure_of_root(folder, 1)[0]
        spans = spans_of_step(f"{folder}/step_0")
        own_s = seconds(lambda: structure_of_root(folder, n_steps), options.rounds)
        bare_s = seconds(lambda: bare_reads(folder, n_steps, spans), options.rounds)
    n_records, n_read = n_steps * look.n_records, n_steps * look.n_bytes
    print(f"structure of {n_steps} steps of {options.shards} shards, {n_bytes / 2**30:.1f} GiB")
    print(f"  {n_records:,} records, {n_steps * look.n_reads:,} reads")
    print(f"  {n_read / 2**20:,.1f} MiB read, {100 * n_read / n_bytes:.1f} % of all bytes")
    print(f"  {own_s:.2f} s, {own_s / n_records * 1e6:.1f} us a record, decoding included")
    print(f"  {own_s / bare_s:.1f} times os.scandir and os.pread of the same, {bare_s:.2f} s")

    for shape, cuts in (
        ((800_000, 64), (100_000, 1)),
        ((2_528, 2_528), (316, 316)),
        ((368, 368, 368), (46, 46, 46)),
    ):
        tensor = chunked(shape, cuts)
        assert list(check_coverage(tensor)) == []
        own_s = seconds(lambda tensor=tensor: list(check_coverage(tensor)), options.rounds)
        bare_s = seconds(lambda tensor=tensor: elements_in_chunks(tensor), options.rounds)
        print(f"coverage of {' x '.join(f'{n:,}' for n in cuts)} chunks")
        print(
            f"  {own_s:.2f} s, {own_s / bare_s:.1f} times adding up their elements, {bare_s:.2f} s"
        )


if __name__ == "__main__":
    main()
