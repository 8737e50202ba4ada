"""Sound steps, and what a load would lose with each of their bytes.

The campaign breaks copies of these steps. The truth about them is kept here, outside of
the tree that is broken, and read without ckptctl: metadata by torch's own classes,
records by Python's `zipfile`.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import stat
import zipfile
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

import ckptctl

OLD_S = 1.7e9
"""When everything was written, in seconds since 1970: no save is in flight."""

NEEDS_VALUES = ("/data.pkl", "/byteorder")


class Harm(StrEnum):
    """The state of a step by what a load would give, not by what ckptctl reports."""

    NONE = "none"
    BYTES = "bytes"
    VALUES = "values"


@dataclass(frozen=True)
class Record:
    """Where a record lies in its file, and which bytes of its archive carry values."""

    start: int
    data: bytes
    spans: tuple[tuple[int, int], ...]

    @property
    def stored_spans(self) -> tuple[tuple[int, int], ...]:
        """The same as they lie in the file: all of a record that is compressed."""
        return self.spans if self.data[:2] == b"PK" else ((0, len(self.data)),)

    def harm(self, held: bytes) -> Harm:
        """The effect of these bytes in its place."""
        if held == self.data:
            return Harm.NONE
        held, data = unpacked(held), unpacked(self.data)
        same = len(held) == len(data) and all(held[a:b] == data[a:b] for a, b in self.spans)
        return Harm.BYTES if same else Harm.VALUES


@dataclass(frozen=True)
class Sound:
    """A sound step. `older` is one before it in the same run; `files` are all its bytes."""

    name: str
    path: Path
    older: Path | None
    files: Mapping[str, bytes]
    records: Mapping[str, tuple[Record, ...]]
    seal: bytes = field(repr=False, default=b"")

    @property
    def shards(self) -> tuple[str, ...]:
        """The files that hold records."""
        return tuple(sorted(self.records))

    def older_bytes(self, name: str) -> bytes | None:
        """The file of the same name in the older step."""
        path = None if self.older is None else self.older / name
        return path.read_bytes() if path is not None and path.is_file() else None

    def harm(self, step: Path) -> Harm:
        """The state of the copy at `step`, whose metadata is still that of this step."""
        worst = Harm.NONE
        for name, records in self.records.items():
            held = read_plain(step / name)
            for record in records:
                end = record.start + len(record.data)
                harm = record.harm(held[record.start : end]) if held is not None else Harm.VALUES
                if harm is Harm.VALUES:
                    return harm
                worst = max(worst, harm, key=list(Harm).index)
        return worst

    def bytes_with_values(self, name: str) -> list[tuple[int, int]]:
        """Where in a file lie the bytes that a load makes values of."""
        return [
            (record.start + a, record.start + b)
            for record in self.records[name]
            for a, b in record.stored_spans
        ]


def read_plain(path: Path) -> bytes | None:
    """The bytes of a file; None for anything else."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        return path.read_bytes()
    except OSError:
        return None


def unpacked(data: bytes) -> bytes:
    """The archive in a compressed record; nothing where it does not come out."""
    import zstandard

    if data[:4] != zstandard.FRAME_HEADER:
        return data
    try:
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    except zstandard.ZstdError:
        return b""


def _spans(data: bytes) -> tuple[tuple[int, int], ...]:
    """The bytes of a record that carry values; all of one that is no plain archive."""
    try:
        data = unpacked(data)
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile:
        return ((0, len(data)),)
    spans = []
    for info in archive.infolist():
        if not (info.filename.endswith(NEEDS_VALUES) or "/data/" in info.filename):
            continue
        at = info.header_offset
        n_name = int.from_bytes(data[at + 26 : at + 28], "little")
        n_extra = int.from_bytes(data[at + 28 : at + 30], "little")
        start = at + 30 + n_name + n_extra
        spans.append((start, start + info.file_size))
    return tuple(spans)


def sound(path: Path, older: Path | None = None) -> Sound:
    """Read a sound step, and seal it as its owner would."""
    files = {one.name: one.read_bytes() for one in path.iterdir() if one.is_file()}
    metadata = pickle.loads(files[".metadata"])
    records: dict[str, list[Record]] = {}
    for place in metadata.storage_data.values():
        data = files[place.relative_path][place.offset : place.offset + place.length]
        records.setdefault(place.relative_path, []).append(Record(place.offset, data, _spans(data)))
    ordered = {n: tuple(sorted(all_, key=lambda r: r.start)) for n, all_ in records.items()}
    return Sound(f"{path.parent.name}/{path.name}", path, older, files, ordered)


def sound_as(step: Path) -> Sound:
    """A step without faults, whose bytes are not damaged."""
    return Sound(step.name, step, None, {}, {})


@dataclass(frozen=True)
class Library:
    """The sound steps that the campaign breaks."""

    checkpoints: Path
    versions: Path
    work: Path

    @cache  # noqa: B019 - one library a process
    def all(self) -> tuple[Sound, ...]:
        """Of several ranks and of one, of several ways to write, of old versions and new."""
        made = self.checkpoints
        pairs = [
            (made / "run_bare4" / "step_20", made / "run_bare4" / "step_10"),
            (made / "run_fsdp4" / "step_500", made / "run_fsdp4" / "step_400"),
            (made / "async_2" / "step_200", made / "async_2" / "step_100"),
            _with_long_records(self.work / "long"),
            *((made / name / "step_100", None) for name in _SINGLE),
            *((self.versions / name / "step_10", None) for name in _OLD),
        ]
        return tuple(self._sealed(sound(path, older)) for path, older in pairs)

    def _sealed(self, one: Sound) -> Sound:
        root = self.work / "sealing"
        shutil.rmtree(root, ignore_errors=True)
        step = tree(root, one)
        ckptctl.seal(str(step))
        seal = (step / ".ckptctl" / "seal.json").read_bytes()
        shutil.rmtree(root)
        return Sound(one.name, one.path, one.older, one.files, one.records, seal)


def _with_long_records(root: Path) -> tuple[Path, Path]:
    """Two steps of `Writer` whose records are too long for `structure` to read them whole."""
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    from ckptctl.train import Writer

    steps = (root / "step_20", root / "step_10")
    root.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps):
        torch.manual_seed(number)
        state = {name: torch.randn(200, 300) for name in ("up", "down", "norm")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it is alone
            writer = Writer(step, single_file_per_rank=False)
            dcp.save(state, storage_writer=writer, no_dist=True)
        for path in step.iterdir():
            os.utime(path, (OLD_S, OLD_S))
    return steps


_SINGLE = ("tp_fsdp_2x2", "uneven_4", "dtypes_1", "shapes_2", "files_2", "threads_2", "zstd_2")
_OLD = ("torch-2.2.2/plain-2", "torch-2.6.0/dtensor-4", "torch-2.9.1/fsdp2-4")


def tree(root: Path, subject: Sound, *, sealed: bool = False) -> Path:
    """A root with a private copy of a step, and the one before it; the path of the step.

    Files are linked, not copied: write to them with `put` alone.
    """
    root.mkdir(parents=True)
    if subject.older is not None:
        _linked(subject.older, root / subject.older.name)
    step = root / subject.path.name
    _linked(subject.path, step)
    if sealed:
        (step / ".ckptctl").mkdir()
        put(step / ".ckptctl" / "seal.json", subject.seal)
    return step


def _linked(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            os.link(path, target / path.name)


def put(path: Path, data: bytes, at_s: float = OLD_S) -> None:
    """Write a file anew, as old as the others."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    os.utime(path, (at_s, at_s))


def place_of(spans: list[tuple[int, int]], number: int) -> int:
    """The `number`th of the bytes that lie in `spans`."""
    ends = []
    total = 0
    for a, b in spans:
        total += b - a
        ends.append(total)
    which = bisect_right(ends, number)
    return spans[which][1] - (ends[which] - number)
