"""Write the `.metadata` of a save of many ranks, as a stream, in the memory of a few rows.

The opcodes are those of `pickle.dump` for torch's objects after a real save: rank after
rank, where the names that a rank sent to the coordinator are equal strings and not the same
objects. Frames end between rows, and not within. `tests/tools/test_bench.py` compares with
what torch pickles.

    python bench/metadata_files.py FOLDER --tensors 600 --ranks 16384
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from struct import pack
from typing import BinaryIO

_DCP = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_BATCH = 1_000
_FRAME_BYTES = 64 << 10
_RECORD_EXTRA_BYTES = 1_577
"""What the archive around the elements of a record takes."""


def tensor_name(number: int) -> str:
    """Names of a transformer with the state of its optimizer."""
    kinds = ("model.layers", "optim.state.layers")
    parts = ("attention.wq", "attention.wo", "feed_forward.w1", "attention_norm")
    leaf = ("weight", "weight.exp_avg", "weight.exp_avg_sq")[number % 3]
    return f"{kinds[number % 3 > 0]}.{number // 12}.{parts[number // 3 % 4]}.{leaf}"


def chunk_shape(number: int) -> tuple[int, ...]:
    """The elements of one rank, which are a slice along dimension 0."""
    return ((16, 4096), (16, 4096), (56, 4096), (16,))[number // 3 % 4]


def write_metadata(folder: Path, n_tensors: int, n_ranks: int) -> None:
    """Write the metadata of `n_tensors` tensors (two or more), each split over `n_ranks`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".metadata").open("wb") as file:
        file.write(b"\x80\4")
        frame: list[bytes] = []
        n_bytes = 0
        for piece in _Metadata(folder, n_tensors, n_ranks).pieces():
            frame.append(piece)
            n_bytes += len(piece)
            if n_bytes >= _FRAME_BYTES:
                _write_frame(file, frame)
                n_bytes = 0
        _write_frame(file, frame)


def write_shards(folder: Path, n_tensors: int, n_ranks: int) -> None:
    """Files as long as the metadata requires, which hold no bytes on the disk."""
    length = sum(record_bytes(number) for number in range(n_tensors))
    for rank in range(n_ranks):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            os.truncate(file.fileno(), length)


def record_bytes(number: int) -> int:
    """The length of a rank's record of a tensor."""
    return 4 * prod(chunk_shape(number)) + _RECORD_EXTRA_BYTES


def _write_frame(file: BinaryIO, frame: list[bytes]) -> None:
    content = b"".join(frame)
    file.write(b"\x95" + pack("<Q", len(content)) + content)
    frame.clear()


class _Metadata:
    def __init__(self, folder: Path, n_tensors: int, n_ranks: int) -> None:
        self.folder, self.n_ranks = folder, n_ranks
        self.names = [tensor_name(number) for number in range(n_tensors)]
        self.n_kept = 0
        self.known: dict[object, bytes] = {}

    def pieces(self) -> Iterator[bytes]:
        yield self.new(_DCP, "Metadata") + self.text("state_dict_metadata")
        yield from self.a_dict(map(b"".join, map(self.tensor, range(len(self.names)))))
        yield self.text("planner_data")
        yield from self.a_dict(self.path(name) for name in self.names)
        yield self.text("storage_data")
        yield from self.a_dict(self.storage())
        yield self.text("storage_meta") + self.storage_meta()
        yield self.text("version") + self.text("1.0.0") + b"ub."

    def tensor(self, number: int) -> Iterator[bytes]:
        yield self.text(self.names[number]) + self.new(_DCP, "TensorStorageMetadata")
        yield self.text("properties") + self.properties()
        rows, *rest = chunk_shape(number)
        yield self.text("size") + self.size((rows * self.n_ranks, *rest))
        yield self.text("chunks") + b"]" + self.kept()
        for rank in range(self.n_ranks):
            if rank % _BATCH == 0:
                yield b"(" if rank == 0 else b"e("
            head = self.new(_DCP, "ChunkStorageMetadata") + self.text("offsets")
            offsets = self.offsets(number, rank)
            yield head + offsets + self.text("sizes") + self.size((rows, *rest)) + b"ub"
        yield b"eub"

    def storage(self) -> Iterator[bytes]:
        """One entry for each record, rank after rank."""
        for rank in range(self.n_ranks):
            start = 0
            # What came from another process is a string of its own.
            file = b""
            for number, name in enumerate(self.names):
                key = self.new(_DCP, "MetadataIndex")
                key += self.text("fqn") + self.text(name, again=True)
                key += self.text("index") + _integer(rank)
                key += self.text("offset") + self.offsets(number, rank) + b"ub"
                info = self.new(_FILES, "_StorageInfo") + self.text("relative_path")
                if number == 0:
                    info += self.text(f"__{rank}_0.distcp", again=True)
                    file = self.known[f"__{rank}_0.distcp"]
                else:
                    info += file
                length = record_bytes(number)
                info += self.text("offset") + _integer(start)
                info += self.text("length") + _integer(length) + b"ub"
                yield key + info
                start += length

    def offsets(self, number: int, rank: int) -> bytes:
        rows, *rest = chunk_shape(number)
        return self.size((rank * rows, *(0 for _ in rest)))

    def storage_meta(self) -> bytes:
        values = (str(self.folder), "3b0e0ac5-30fb-4bb0-9d31-b1ad1b5ec0f3")
        made = self.new(_DCP, "StorageMeta")
        for attribute, value in zip(("checkpoint_id", "save_id"), values, strict=True):
            made += self.text(attribute) + self.text(value)
        return (
            made + self.text("load_id") + b"N" + self.text("modules") + b"]" + self.kept() + b"ub"
        )

    def path(self, name: str) -> bytes:
        words = name.split(".")  # the interpreter keeps one object of each short string
        key = self.text(name)
        made = b"(" + b"".join(self.text(word, again=len(word) > 1) for word in words) + b"t"
        return key + made + self.kept()

    def properties(self) -> bytes:
        head = self.name(_DCP, "TensorProperties") + b")\x81" + self.kept() + b"("
        made = self.name("torch", "float32")
        made += self.made_by("torch.serialization", "_get_layout", "torch.strided") + b"\x89"
        made += self.made_by(_DCP, "_MEM_FORMAT_ENCODING", 0) + b"\x89"
        return head + made + b"t" + self.kept() + b"b"

    def made_by(self, module: str, name: str, value: str | int) -> bytes:
        """What a function returns for a value, written once."""
        if (known := self.known.get((module, name, value))) is not None:
            return known
        made = self.name(module, name)
        made += self.text(value) if isinstance(value, str) else _integer(value)
        made += self.called()
        self.known[module, name, value] = self.slot(self.n_kept - 1)
        return made

    def called(self) -> bytes:
        return b"\x85" + self.kept() + b"R" + self.kept()

    def size(self, dims: tuple[int, ...]) -> bytes:
        named = self.name("torch", "Size")
        made = b"".join(map(_integer, dims)) + bytes((0x84 + len(dims),)) + self.kept()
        return named + made + self.called()

    def new(self, module: str, name: str) -> bytes:
        return self.name(module, name) + b")\x81" + self.kept() + b"}" + self.kept() + b"("

    def name(self, module: str, name: str) -> bytes:
        if (known := self.known.get((module, name))) is not None:
            return known
        # torch's data types and `torch.Size` do not share the string of their module.
        made = self.text(module, again=name == "Size") + self.text(name) + b"\x93"
        self.known[module, name] = self.slot(self.n_kept)
        return made + self.kept()

    def text(self, value: str, *, again: bool = False) -> bytes:
        """A string; `again` one that is equal to an earlier and not the same object."""
        if not again and (known := self.known.get(value)) is not None:
            return known
        self.known[value] = self.slot(self.n_kept)
        data = value.encode()
        return b"\x8c" + bytes((len(data),)) + data + self.kept()

    def kept(self) -> bytes:
        self.n_kept += 1
        return b"\x94"

    def slot(self, number: int) -> bytes:
        return b"h" + bytes((number,)) if number < 256 else b"j" + pack("<I", number)

    def a_dict(self, pairs: Iterable[bytes]) -> Iterator[bytes]:
        yield b"}" + self.kept()
        for number, pair in enumerate(pairs):
            if number % _BATCH == 0:
                yield b"u(" if number else b"("
            yield pair
        yield b"u"


def _integer(value: int) -> bytes:
    if value < 1 << 8:
        return b"K" + bytes((value,))
    if value < 1 << 16:
        return b"M" + pack("<H", value)
    if value < 1 << 31:
        return b"J" + pack("<i", value)
    n_bytes = value.bit_length() // 8 + 1
    return b"\x8a" + bytes((n_bytes,)) + value.to_bytes(n_bytes, "little")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensors", type=int, default=600)
    parser.add_argument("--ranks", type=int, default=16_384)
    chosen = parser.parse_args()
    write_metadata(chosen.folder, chosen.tensors, chosen.ranks)
    write_shards(chosen.folder, chosen.tensors, chosen.ranks)


if __name__ == "__main__":
    main()
