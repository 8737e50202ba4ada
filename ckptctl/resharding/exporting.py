"""Write a step as files of another format, verified, or none at all, and list what is left out.

A step becomes safetensors, in files of bounded size with an index, or one `torch.save` file
with the nested state that was saved. Safetensors have no checksums and cannot hold non-tensor
entries.

Each file is streamed once, in order: elements are read by ranges, and every source record is
verified before the file ends. The file is then read again, and on a file system a rename
publishes the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from zlib_ng.zlib_ng import crc32, crc32_combine

from ckptctl.errors import StorageUnavailable, UsageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.safetensors import NAMES, SUFFIX, header_bytes, index_bytes, is_name
from ckptctl.formats.archive.state_file import FlatEntry, NotPlain, nested, pickled_state
from ckptctl.formats.archive.writing import Archive
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.formatting import command_line
from ckptctl.model import DTYPE_SIZES
from ckptctl.records.byte_pass import CrcRun, Limits, OnProgress, read_runs
from ckptctl.records.slices import TensorSlice
from ckptctl.resharding.executing import Place, WriteProgress, in_threads, prove
from ckptctl.resharding.results import left_out
from ckptctl.resharding.sources import (
    CopiedBytes,
    SliceReader,
    Source,
    SourceBytes,
    SourcePart,
    SourceTensor,
    ThreadLimits,
    read_values,
)
from ckptctl.storage.opening import join_url

FILE_BYTES = 5_000_000_000
"""The default limit on the size of a safetensors file."""

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of the result: its name there, and where it comes from."""

    name: str
    part: SourcePart
    tensor: SourceTensor


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file of the result. `name` is below the target; empty if that is the file itself.

    `between` returns the bytes between the tensors of which it gets the checksums, and the next
    one.
    """

    name: str
    tensors: tuple[WholeTensor, ...]
    n_bytes: int
    between: Callable[[Sequence[int]], bytes]


@dataclass(frozen=True, slots=True)
class Export:
    """What an export writes, and what of the step it leaves out."""

    files: tuple[WholeFile, ...]
    beside: tuple[tuple[str, bytes], ...]
    n_values: int
    n_left_out: int
    findings: tuple[Finding, ...]

    @property
    def n_tensors(self) -> int:
        """The tensors of all files."""
        return sum(len(file.tensors) for file in self.files)

    @property
    def n_bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.n_bytes for file in self.files)


def to_safetensors(
    source: Source, *, only_model: bool, strip: str, file_bytes: int | None, alone: bool
) -> Export:
    """A step as safetensors: one file, which is the target itself if `alone`.

    Raises `UsageError` for a dtype that the format lacks, and if two tensors get the same
    name.
    """
    tensors = _tensors(source, only_model=only_model, strip=strip)
    for name, one in tensors.items():
        if not is_name(name):
            raise UsageError(
                f"{name!r} cannot be the name of a tensor in safetensors; a torch.save file (a "
                "target that ends in .pt) can hold it",
                next_command="ckptctl convert --help",
            )
        if one.tensor.entry.dtype not in NAMES:
            dtype = one.tensor.entry.dtype
            raise UsageError(
                f"{name} is of dtype {dtype}, which safetensors do not support; a torch.save file "
                "(a target that ends in .pt) does",
                next_command="ckptctl convert --help",
            )
    limit = None if alone else (file_bytes or FILE_BYTES)
    groups: list[list[WholeTensor]] = [[]]
    n_bytes = 0
    for _, one in sorted(tensors.items()):
        if groups[-1] and limit is not None and n_bytes + one.tensor.n_bytes > limit:
            groups.append([])
            n_bytes = 0
        groups[-1].append(one)
        n_bytes += one.tensor.n_bytes
    files = [_safetensors_file(n, len(groups), group) for n, group in enumerate(groups, 1)]
    if alone:
        files = [replace(file, name="") for file in files]
    beside: tuple[tuple[str, bytes], ...] = ()
    if len(files) > 1:
        names = {tensor.name: file.name for file in files for tensor in file.tensors}
        n_elements = sum(one.tensor.n_bytes for one in tensors.values())
        beside = ((_INDEX, index_bytes(names, n_elements)),)
    others = [entry.fqn for part in source.parts for entry in _others(part, only_model)]
    findings = _left_out(source, others, "that safetensors cannot hold")
    return Export(tuple(files), beside, 0, len(others), findings)


def to_flat(source: Source, *, only_model: bool) -> Export:
    """A step as one `torch.save` file: the nested state, with all plain values.

    Raises `UsageError` if key paths contradict each other, and `SourceDamaged`. Cost: one read per
    non-tensor entry.
    """
    tensors = _tensors(source, only_model=only_model, strip="")
    leaves: list[FlatEntry] = []
    others: list[str] = []
    for part in source.parts:
        for entry, value in read_values(part.files, [*_others(part, only_model)]):
            if isinstance(value, NotPlain):
                others.append(str(value))
            else:
                leaves.append(FlatEntry(part.paths.get(entry.fqn) or (entry.fqn,), value))
    for number, one in enumerate(tensors.values()):
        tensor = one.tensor.entry
        path = one.part.paths.get(tensor.fqn) or (tensor.fqn,)
        stub = TensorStub.row_major(tensor.dtype, tensor.shape, str(number))
        leaves.append(FlatEntry(path, stub))
    order = {path: n for part in source.parts for n, path in enumerate(part.paths.values())}
    try:
        state = nested(sorted(leaves, key=lambda leaf: order.get(leaf.path, len(order))))
    except NotPlain as error:
        raise UsageError(f"{source.url}: {error}") from error
    sizes = [one.tensor.n_bytes for one in tensors.values()]
    archive = Archive(pickled_state(state), sizes)
    file = WholeFile("", tuple(tensors.values()), archive.n_bytes, archive.between)
    findings = _left_out(source, others, "whose values are not plain")
    return Export((file,), (), len(leaves) - len(tensors), len(others), findings)


def _tensors(source: Source, *, only_model: bool, strip: str) -> dict[str, WholeTensor]:
    """The selected tensors, by their names in the result."""
    tensors: dict[str, WholeTensor] = {}
    for part in source.parts:
        for tensor in part.tensors:
            if only_model and tensor.kind != "model":
                continue
            name = tensor.entry.fqn.removeprefix(strip)
            if not name or name in tensors:
                raise UsageError(
                    f"two tensors would get the name {name!r}, or one an empty name",
                    without=("--strip",) if strip else (),
                )
            tensors[name] = WholeTensor(name, part, tensor)
    if not tensors:
        raise UsageError(
            f"{source.url} holds none of the requested tensors",
            without=("--only",) if only_model else (),
        )
    return tensors


def _safetensors_file(number: int, total: int, group: Sequence[WholeTensor]) -> WholeFile:
    name = f"model-{number:05}-of-{total:05}{SUFFIX}" if total > 1 else f"model{SUFFIX}"
    # The format requires larger elements first, for alignment.
    in_order = sorted(group, key=lambda t: (-DTYPE_SIZES[t.tensor.entry.dtype], t.name))
    held = [(one.name, one.tensor) for one in in_order]
    entries = [(name, t.entry.dtype, t.entry.shape, t.n_bytes) for name, t in held]
    header = header_bytes(entries)
    n_bytes = len(header) + sum(one.tensor.n_bytes for one in in_order)
    # The elements follow each other without a gap.
    return WholeFile(name, tuple(in_order), n_bytes, lambda crcs: b"" if crcs else header)


def _others(part: SourcePart, only_model: bool) -> Iterator[SourceBytes]:
    """The selected non-tensor entries."""
    return (e for e in part.bytes_entries if not only_model or e.kind == "model")


def _left_out(source: Source, others: Sequence[str], why: str) -> tuple[Finding, ...]:
    """Remarks on entries, and on sidecars, which the other formats cannot hold."""
    held = [one.file.path for one in source.files if one.kind is not None]
    of_entries = left_out(others, why, "entry", "entries")
    return (*of_entries, *left_out(held, "of train state beside the shards"))


def write_export(
    source: Source, export: Export, place: Place, room: ThreadLimits, on_progress: OnProgress | None
) -> None:
    """Write, verify, read again, publish.

    Raises `SourceDamaged` if the source does not match what was saved, `UsageError` if the target
    exists, `StorageError`.
    """
    store = place.store
    there = place.there()
    if there is not None:
        if there.kind == "dir":
            raise UsageError(
                f"{place.url} already exists; name a file or a folder that does not exist",
                instead_of=place.url,
                instead=join_url(place.url, "model"),
            )
        raise UsageError(
            f"{place.url} already exists; nothing is replaced: choose another name",
            next_command=command_line("show", place.url),
        )
    place.make_room(export.n_bytes)
    content = repr([(file.name, file.between(())) for file in export.files]) + source.url
    digests = repr([part.digests for part in source.parts])
    identity = sha256_of((content + digests).encode("utf-8", "surrogateescape"))[:32]
    target = place.written_at(identity)

    def path_of(name: str) -> str:
        return f"{target}/{name}" if name else target

    progress, proving = WriteProgress(), threading.Lock()
    copies = [_Copy(file, room, progress, proving) for file in export.files]
    tasks = [
        partial(store.put_pieces, path_of(copy.file.name), copy.pieces, copy.file.n_bytes)
        for copy in copies
    ]
    in_threads(tasks, room.jobs, progress, export.n_bytes, on_progress)
    source.check_unchanged()
    runs = [CrcRun(path_of(copy.file.name), 0, copy.file.n_bytes) for copy in copies]
    read_runs(store, runs, Limits(room.jobs))
    for copy, run in zip(copies, runs, strict=True):
        if run.crc != copy.crc:
            end = "nothing was published" if place.is_moved else "remove its leftovers"
            named = copy.file.name or place.name
            raise StorageUnavailable(f"{place.url}: {named} does not read back as written; {end}")
    for name, data in export.beside:
        store.put(path_of(name), data, replace=True)
    if place.is_moved:
        names = {file.name for file in export.files} | {name for name, _ in export.beside}
        if "" not in names:
            place.clear(target, names)
        place.move(identity)


class _Copy:
    """Produces one file; `crc` is the checksum of all that was written."""

    def __init__(
        self, file: WholeFile, room: ThreadLimits, progress: WriteProgress, proving: threading.Lock
    ) -> None:
        self.file = file
        self.crc = 0
        self._proving = proving
        self._room = room
        self._written = progress

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file in order; each piece is overwritten by the next.

        Raises `SourceDamaged` before the last piece if the source does not match what was saved.
        """
        crcs: list[int] = []
        block = memoryview(bytearray(self._room.block))
        before = self.file.between(crcs)
        self.crc = crc32(before)
        yield memoryview(before)
        with ExitStack() as stack:
            readers: dict[str, SliceReader] = {}
            for path, group in groupby(self.file.tensors, lambda whole: whole.part.path):
                tensors = [*group]
                if path not in readers:
                    files = tensors[0].part.files
                    reader = SliceReader(files, self._room, self._written.add)
                    readers[path] = stack.enter_context(reader)
                slices = [
                    (one.tensor, TensorSlice.whole(one.tensor.entry.shape)) for one in tensors
                ]
                read = readers[path].each(slices, block)
                for whole, blocks in zip(tensors, read, strict=True):
                    crc = 0
                    for part in blocks:
                        crc = crc32_combine(crc, part.crc, len(part.data))
                        yield part.data
                    crcs.append(crc)
                    if len(crcs) == len(self.file.tensors):
                        self._prove({at: reader.proof for at, reader in readers.items()})
                    self.crc = crc32_combine(self.crc, crc, whole.tensor.n_bytes)
                    if behind := self.file.between(crcs):
                        self.crc = crc32(behind, self.crc)
                        yield memoryview(behind)

    def _prove(self, proof: Mapping[str, Sequence[CopiedBytes]]) -> None:
        """Compare every record that went into the file with its checksum."""
        for part in {whole.part.path: whole.part for whole in self.file.tensors}.values():
            # One file at a time: reading records again takes memory too.
            with self._proving:
                prove(
                    part,
                    proof[part.path],
                    self._room,
                    only=[whole.tensor.fqn for whole in self.file.tensors if whole.part is part],
                )
