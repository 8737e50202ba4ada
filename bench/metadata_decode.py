"""How long does it take to know what 512,000 chunks are, and in how much memory?

`decode_metadata` against torch's own `FileSystemReader.read_metadata`, each in a
fresh process that also pays for its imports. The file is made by torch's real
classes as a save of 256 ranks makes it: what the other ranks sent to the
coordinator has been through pickle once, so their names are equal strings but
not the same objects.

    python bench/metadata_decode.py [--tensors 2000] [--ranks 256] [--rounds 3]

`--alternatives` measures two other ways to do it as well: C's unpickler with
stand-ins for torch's classes, and our interpreter without its hot shapes.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ORDERS = ("rank-major", "tensor-major")
"""In which order the byte ranges lie in the metadata. torch writes them rank after rank."""

PEERS = {
    "torch": "from torch.distributed.checkpoint import FileSystemReader\n"
    "metadata = FileSystemReader(path).read_metadata()\n"
    "n = sum(len(getattr(t, 'chunks', ())) for t in metadata.state_dict_metadata.values())",
    "ckptctl": "from ckptctl.formats.dcp.metadata import decode_metadata\n"
    "metadata = decode_metadata(open(path + '/.metadata', 'rb').read())\n"
    "n = sum(len(t.chunks) for t in metadata.tensors.values())",
}

ALTERNATIVES = {
    "stand-ins": """
import gc, pickle
gc.disable()
class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if name in ("Size", "PosixPath", "_get_layout", "_MEM_FORMAT_ENCODING"):
            return lambda *args: args[0]
        if module == "torch":
            return name
        methods = {"__setstate__": lambda self, state: None} if name == "TensorProperties" else {}
        return type(name, (), methods)
metadata = Unpickler(open(path + "/.metadata", "rb")).load()
n = sum(len(getattr(t, 'chunks', ())) for t in metadata.state_dict_metadata.values())
""",
    "opcodes": PEERS["ckptctl"].replace(".read())", ".read(), shapes=None)"),
}
"""C's unpickler allocates what a damaged length tells it to: `stand-ins` is no candidate
without a limit on memory around it."""

MEASURE = """
import json, resource, sys, time
began = time.perf_counter()
path = sys.argv[1]
{work}
seconds = time.perf_counter() - began
mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([n, seconds, mebibytes]))
"""


def make(folder: Path, n_tensors: int, n_ranks: int, order: str) -> None:
    """Write a `.metadata` of `n_tensors` tensors, each split over `n_ranks` along dimension 0."""
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

    shapes = [_shape(number, n_ranks) for number in range(n_tensors)]
    names = [_name(number) for number in range(n_tensors)]
    tensors = {
        name: TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), [])
        for name, shape in zip(names, shapes, strict=True)
    }
    results = []
    for rank in range(n_ranks):
        file, position, sent = f"__{rank}_0.distcp", 0, []
        for name, shape in zip(names, shapes, strict=True):
            sizes = torch.Size((shape[0] // n_ranks, *shape[1:]))
            offsets = torch.Size((rank * sizes[0], *(0 for _ in shape[1:])))
            chunk = ChunkStorageMetadata(offsets, sizes)
            length = 4 * sizes.numel() + 1_577
            index = MetadataIndex(name, offsets, rank)
            sent.append((index, _StorageInfo(file, position, length), chunk))
            position += length
        for number, (index, info, chunk) in enumerate(pickle.loads(pickle.dumps(sent))):
            tensors[names[number]].chunks.append(chunk)
            results.append((number, rank, index, info))
    if order == "tensor-major":
        results.sort(key=lambda result: result[:2])
    metadata = Metadata(
        tensors,
        {name: tuple(name.split(".")) for name in names},
        {index: info for _, _, index, info in results},
        StorageMeta(folder, "3b0e0ac5-30fb-4bb0-9d31-b1ad1b5ec0f3", None, []),
        "1.0.0",
    )
    folder.mkdir(parents=True)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def _name(number: int) -> str:
    kinds = ("model.layers", "optim.state.layers")
    parts = ("attention.wq", "attention.wo", "feed_forward.w1", "attention_norm")
    leaf = ("weight", "weight.exp_avg", "weight.exp_avg_sq")[number % 3]
    return f"{kinds[number % 3 > 0]}.{number // 12}.{parts[number // 3 % 4]}.{leaf}"


def _shape(number: int, n_ranks: int) -> tuple[int, ...]:
    shapes = ((16 * n_ranks, 4096), (16 * n_ranks, 4096), (56 * n_ranks, 4096), (16 * n_ranks,))
    return shapes[number // 3 % 4]


def measure(folder: Path, work: str) -> tuple[int, float, float]:
    """Chunks, seconds and peak MiB of one fresh process."""
    script = MEASURE.format(work=work)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], check=True, capture_output=True, text=True
    )
    n_chunks, seconds, mebibytes = json.loads(done.stdout)
    return n_chunks, seconds, mebibytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--keep", type=Path, help="make the files here, and use those that are there"
    )
    parser.add_argument("--alternatives", action="store_true")
    args = parser.parse_args()
    peers = {**PEERS, **ALTERNATIVES} if args.alternatives else PEERS
    with tempfile.TemporaryDirectory() as temporary:
        for order in ORDERS:
            folder = (args.keep or Path(temporary)) / f"{order}-{args.tensors}x{args.ranks}"
            if not folder.exists():
                make_apart(folder, args.tensors, args.ranks, order)
            compare(folder, order, args.rounds, peers)


def make_apart(folder: Path, n_tensors: int, n_ranks: int, order: str) -> None:
    """`make` in a process of its own, which gives its memory back."""
    call = f"make(Path({str(folder)!r}), {n_tensors}, {n_ranks}, {order!r})"
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    script += f"from pathlib import Path\nfrom metadata_decode import make\n{call}"
    subprocess.run([sys.executable, "-c", script], check=True)


def compare(folder: Path, order: str, rounds: int, peers: Mapping[str, str]) -> None:
    """Print one table: medians of `rounds` runs, the peers taking turns."""
    runs = [(peer, measure(folder, work)) for _ in range(rounds) for peer, work in peers.items()]
    medians = {
        peer: [statistics.median(run[i] for name, run in runs if name == peer) for i in range(3)]
        for peer in peers
    }
    size = (folder / ".metadata").stat().st_size / 1e6
    n_chunks, seconds_of_torch, mebibytes_of_torch = medians["torch"]
    print(f"\n{order}: {n_chunks:,.0f} chunks, {size:.0f} MB of pickle, median of {rounds}")
    print(f"{'':10}{'wall':>10}{'torch / it':>12}{'peak RSS':>12}{'it / torch':>12}")
    for peer, (n, seconds, mebibytes) in medians.items():
        assert n == n_chunks, f"{peer} found {n:,.0f} chunks"
        faster, smaller = seconds_of_torch / seconds, mebibytes / mebibytes_of_torch
        print(f"{peer:10}{seconds:>8.2f} s{faster:>12.1f}{mebibytes:>8.0f} MiB{smaller:>12.2f}")


if __name__ == "__main__":
    main()
