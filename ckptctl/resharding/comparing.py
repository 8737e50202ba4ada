"""Compare two steps: entries, shapes, dtypes, and optionally values.

Entries, shapes and dtypes come from the metadata. Values are compared by the checksums of
records that hold the same slices, and by their bytes if the slices differ. Of a rank-file
step each file is compared with that of the same name; `verify` checks whether a step is
complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Unpack

from ckptctl.errors import StepDamaged, UsageError
from ckptctl.findings import EXIT_DIFFERS, Severity, Verdict
from ckptctl.formats.archive.directory import read_directory
from ckptctl.formats.archive.state_file import FlatEntry, NotPlain, PickledValue, pickled_value
from ckptctl.formats.archive.writing import WRITABLE
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.layouts import is_scattered, step_name
from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.values import ShardStub, TensorStub, decode_shards
from ckptctl.formatting import command_line, counted, verb
from ckptctl.inspection.inspecting import Inspection, inspect_step
from ckptctl.inspection.open_step import OpenPart
from ckptctl.model import SHARDED, FileInfo, Level, Step
from ckptctl.options import Requirements, StorageKeywords, StorageOptions, options_from
from ckptctl.records.byte_pass import OnProgress
from ckptctl.records.loading import is_row_major
from ckptctl.records.slices import TensorSlice, blocks
from ckptctl.resharding.executing import WriteProgress, in_threads
from ckptctl.resharding.reading import FlatFile, open_flat, read_safetensors, storage_of
from ckptctl.resharding.results import Diff, Difference
from ckptctl.resharding.sources import (
    SliceReader,
    SourceBytes,
    SourceDamaged,
    SourceFiles,
    SourcePart,
    SourceTensor,
    ThreadLimits,
    check_format,
    read_values,
    source_of,
)
from ckptctl.selection.verifying import OpenTarget, open_target
from ckptctl.storage.contract import read_range

_ROOM = ThreadLimits(2, 1 << 20, 64 << 20)

Entry = SourceTensor | SourceBytes


def diff(
    a: str,
    b: str,
    *,
    values: bool = False,
    pattern: str | None = None,
    on_progress: OnProgress | None = None,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> Diff:
    """Compare the steps `a` and `b`, named as for `verify`.

    Without `values` only the metadata is read and compared. How tensors are sharded is
    reported, and does not count as a difference. Of a rank-file step the entries of each file
    are compared. Raises `UsageError` where one of them holds neither DCP, rank files nor
    safetensors, `SourceDamaged` where its records contradict its metadata, and `StepDamaged` where
    it could not be inspected, is unsafe, or changed meanwhile.

    Cost: four listings and the metadata, for a rank file three short reads and two for each
    storage; with `values` two short reads for each record, and all bytes of tensors that are
    sharded differently. Memory: the entries of all files, and a fixed buffer.
    """
    (storage,) = options_from(keywords, storage)
    checked = Requirements(pattern=pattern)
    with (
        open_target(a, checked, storage) as found_a,
        open_target(b, checked, storage) as found_b,
        _unchanged(found_a, found_b),
    ):
        sides = []
        for found in (found_a, found_b):
            inspected = inspect_step(found, checked, level=Level.LISTING)
            _check_inspected(inspected)
            sides.append(_Side(found, inspected))
        compared = _StepComparison(*sides)
        found_different = [*compared.by_metadata()]
        is_one = _place(found_a) == _place(found_b)
        if values and not is_one:
            found_different += compared.by_values(on_progress)
        return _answer(compared, found_different, values=values, is_one=is_one)


@contextmanager
def _unchanged(*steps: OpenTarget) -> Iterator[None]:
    """Raise `StepDamaged` (`step.changed`) if one of the steps was written to meanwhile.

    What was read of two saves proves neither a difference nor damage.
    """
    damage = None
    try:
        yield
    except SourceDamaged as error:
        damage = error
    for step in steps:
        for finding in step.changes():
            raise StepDamaged(step.url, finding)
    if damage is not None:
        raise damage


def _check_inspected(inspected: Inspection) -> None:
    """Raise `StepDamaged` if nothing is known of a step, or nothing of it may be shown."""
    report = inspected.report
    if report.verdict in (Verdict.UNKNOWN, Verdict.CHANGED, Verdict.UNSAFE):
        faults = report.with_severity(Severity.FAULT)
        error = StepDamaged(report.url, next(f for f in faults if f.verdict is report.verdict))
        error.exit_code = report.exit_code
        raise error


def _place(found: OpenTarget) -> str:
    """Where a step is, the same for every name and link that leads to it."""
    folders = found.store.folders
    return found.url if folders is None else os.path.realpath(folders.path_of(found.name))


class _Side:
    """One step: its entries, each with the files that hold it, by part and FQN."""

    def __init__(self, found: OpenTarget, inspected: Inspection) -> None:
        self.url = found.url
        parts = _parts(found, inspected)
        self.entries: dict[str, Entry] = {}
        self.files: dict[str, SourceFiles] = {}
        for at, part in parts:
            for entry in part.entries:
                # Steps of one part each are compared even if the parts have different paths.
                name = entry.fqn if len(parts) == 1 or not at else f"{at}: {entry.fqn}"
                self.entries[name] = entry
                self.files[name] = part.files


def _parts(found: OpenTarget, inspected: Inspection) -> Sequence[tuple[str, SourcePart]]:
    """The parts of sharded DCP in a step, else its rank files and safetensors, by name.

    The name of a file is that of the same file in another step.
    """
    if not any(part.part.format in SHARDED for part in inspected.parts):
        files = [
            named for part in inspected.parts for named in _read_archives(inspected.step, part)
        ]
        if files:
            return files
    check_format(inspected)
    if not any(part.metadata for part in inspected.parts):
        raise UsageError(
            f"{found.url} holds no DCP metadata to compare",
            next_command=command_line("verify", found.url),
        )
    return [(part.path, part) for part in source_of(inspected).parts]


class _StepComparison:
    """The comparison of two steps."""

    def __init__(self, a: _Side, b: _Side) -> None:
        self.a = a
        self.b = b
        self.names = sorted({*a.entries, *b.entries})
        self.n_by_checksum = 0
        self.n_by_bytes = 0

    def by_metadata(self) -> Iterator[Difference]:
        """The differences in the metadata."""
        for name in self.names:
            left, right = self.a.entries.get(name), self.b.entries.get(name)
            if left is None or right is None:
                what = "only-in-b" if left is None else "only-in-a"
                yield Difference(name, what, _summary(left), _summary(right))
            elif isinstance(left, SourceBytes) or isinstance(right, SourceBytes):
                if type(left) is not type(right):
                    yield Difference(name, "kind", _summary(left), _summary(right))
            else:
                a, b = left.entry, right.entry
                if a.dtype != b.dtype:
                    yield Difference(name, "dtype", a.dtype, b.dtype)
                if a.shape != b.shape:
                    yield Difference(name, "shape", str(a.shape), str(b.shape))
                elif _slices(left) != _slices(right):
                    shown = [counted(len(tensor.chunks), "chunk") for tensor in (left, right)]
                    yield Difference(name, "layout", shown[0], shown[1])

    def by_values(self, on_progress: OnProgress | None) -> list[Difference]:
        """The differences in values, of entries whose metadata is equal."""
        shown: dict[str, tuple[str, str] | None] = {}
        progress, total = WriteProgress(), 0
        tasks: dict[str, Callable[[], tuple[bool, tuple[str, str] | None]]] = {}
        for name in self.names:
            left, right = self.a.entries.get(name), self.b.entries.get(name)
            if isinstance(left, SourceTensor) and isinstance(right, SourceTensor):
                a, b = left.entry, right.entry
                if (a.dtype, a.shape) == (b.dtype, b.shape) and a.dtype in WRITABLE:
                    total += left.n_bytes
                    tasks[name] = partial(self._of_values, name, left, right, progress)
            elif isinstance(left, SourceBytes) and isinstance(right, SourceBytes):
                shown[name] = self._of_bytes(name, left, right)
        compared = in_threads([*tasks.values()], _ROOM.jobs, progress, total, on_progress)
        self.n_by_checksum = sum(by_checksum for by_checksum, _ in compared)
        self.n_by_bytes = len(compared) - self.n_by_checksum
        shown |= {name: one for name, (_, one) in zip(tasks, compared, strict=True)}
        return [Difference(name, "values", *one) for name, one in sorted(shown.items()) if one]

    def _of_values(
        self, name: str, left: SourceTensor, right: SourceTensor, progress: WriteProgress
    ) -> tuple[bool, tuple[str, str] | None]:
        """Whether the checksums of a tensor were enough, and how its values differ, if they do."""
        with (
            SliceReader(self.a.files[name], _ROOM) as of_a,
            SliceReader(self.b.files[name], _ROOM) as of_b,
        ):
            is_same = _same_checksums((left, of_a), (right, of_b))
            if is_same is None:
                return False, _different_bytes((left, of_a), (right, of_b), progress)
        progress.add(left.n_bytes)
        return True, None if is_same else ("checksums", "other checksums")

    def _of_bytes(self, name: str, left: SourceBytes, right: SourceBytes) -> tuple[str, str] | None:
        """How two non-tensor entries differ; None if they are equal."""
        sides = ((self.a.files[name], left), (self.b.files[name], right))
        a, b = (_members(files, entry) for files, entry in sides)
        if a == b:
            return None
        with suppress(SourceDamaged):
            values = [value for files, one in sides for _, value in read_values(files, [one])]
            if isinstance(values[0], PickledValue) and values[0] == values[1]:
                return None  # the values are plain and equal, although their pickles differ
        return a, b


_Read = tuple[SourceTensor, SliceReader]


def _same_checksums(a: _Read, b: _Read) -> bool | None:
    """Whether all checksums of two tensors are equal; None if they cannot be compared."""
    (left, of_a), (right, of_b) = a, b
    if _slices(left) != _slices(right):
        return None
    same = True
    ones = of_a.open(chunk.number for chunk in left.chunks)
    others = of_b.open(chunk.number for chunk in right.chunks)
    for chunk, one, other in zip(left.chunks, ones.values(), others.values(), strict=True):
        strides = one.stub.strides == other.stub.strides
        alike = strides or (is_row_major(one.stub) and is_row_major(other.stub))
        first, other_first = one.stub.storage_offset, other.stub.storage_offset
        alike = alike and (one.n_bytes, first) == (other.n_bytes, other_first)
        if one.crc is None or other.crc is None or not (one.n_bytes and alike):
            return None
        n_bytes = chunk.elements.n_elements * left.item_bytes
        if one.crc != other.crc and one.n_bytes != n_bytes:
            return None  # the storage holds more than this tensor
        same = same and one.crc == other.crc
    return same


def _different_bytes(a: _Read, b: _Read, progress: WriteProgress) -> tuple[str, str] | None:
    """The first elements that differ, with their index; None if all are equal."""
    (left, of_a), (right, of_b) = a, b
    item_bytes = left.item_bytes
    buffers = [memoryview(bytearray(_ROOM.block)) for _ in range(2)]
    for part in blocks(left.entry.shape, item_bytes, _ROOM.block):
        if not part.n_elements:
            return None
        (one,), (other,) = (
            of_a.fill([(left, part)], buffers[0]),
            of_b.fill([(right, part)], buffers[1]),
        )
        progress.add(len(one.data))
        if one.data != other.data:
            number = _first(one.data, other.data) // item_bytes
            at, end = number * item_bytes, (number + 1) * item_bytes
            where = _index(part, number)
            return (
                f"{bytes(one.data[at:end]).hex()} at {where}",
                f"{bytes(other.data[at:end]).hex()} at {where}",
            )
    return None


def _slices(tensor: SourceTensor) -> list[TensorSlice]:
    return [chunk.elements for chunk in tensor.chunks]


def _summary(entry: Entry | None) -> str | None:
    if entry is None:
        return None
    if isinstance(entry, SourceBytes):
        return "no tensor"
    return f"{entry.entry.dtype} {entry.entry.shape}"


def _first(left: memoryview, right: memoryview) -> int:
    """The position of the first byte that differs; the two runs are not equal."""
    low, high = 0, len(left)
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] != right[low:middle]:
            high = middle
        else:
            low = middle
    return low


def _index(part: TensorSlice, number: int) -> tuple[int, ...]:
    """The index of an element of a slice, by its number in row-major order."""
    index = []
    for offset, size in zip(reversed(part.offsets), reversed(part.sizes), strict=True):
        number, at = divmod(number, size)
        index.append(offset + at)
    return tuple(reversed(index))


def _members(files: SourceFiles, entry: SourceBytes) -> str:
    """A description that differs for entries of different values: its members' checksums."""
    record, held = entry.record, entry.held

    def read(start: int, n_bytes: int) -> bytes:
        if held is not None:
            return held[start : start + n_bytes]
        return read_range(files.store, files.in_store(record.file), record.offset + start, n_bytes)

    if record.transforms:
        data = read(0, record.length)
        return f"{record.length:,} bytes compressed, {sha256_of(data)[:16]}"
    members, _ = read_directory(lambda n: read(record.length - n, n), record.length)
    values = [m for m in members.members if m.name == "data.pkl" or m.name.startswith("data/")]
    if not members.has_crcs:
        data = read(0, record.length)
        data_of = b"".join(data[m.start : m.end] for m in values)
        return f"{len(data_of):,} bytes, {sha256_of(data_of)[:16]}"
    return ", ".join(f"{m.name} of {m.size:,} bytes with the CRC-32 {m.crc:08x}" for m in values)


def _answer(
    compared: _StepComparison, found: Sequence[Difference], *, values: bool, is_one: bool
) -> Diff:
    layouts = sum(one.what == "layout" for one in found)
    real = len(found) - layouts
    n_entries = len(compared.names)
    a, b = compared.a.url, compared.b.url
    if real:
        message = f"{real:,} of {n_entries:,} entries {verb(real, 'differs', 'differ')}"
    elif is_one:
        message = f"a and b are one step, with {counted(n_entries, 'entry', 'entries')}"
    else:
        same = "the same values" if values else "the same names, shapes and dtypes"
        message = f"{n_entries:,} entries with {same}"
    return Diff(
        a=a,
        b=b,
        same=not real,
        n_entries=n_entries,
        n_layouts=layouts,
        one_step=is_one,
        values_compared=values and not is_one,
        n_by_checksum=compared.n_by_checksum,
        n_by_bytes=compared.n_by_bytes,
        differences=tuple(found),
        message=message,
        exit_code=EXIT_DIFFERS if real else 0,
        next_command=None if real or values or is_one else command_line("diff", a, b, "--values"),
    )


# The files of a rank-file step as entries


OTHER_VALUES = "(values that are not plain)"


def _read_archives(step: Step, part: OpenPart) -> Iterator[tuple[str, SourcePart]]:
    """The entries of each file of `torch.save` in a rank-file part, and of its safetensors.

    Raises `SourceDamaged` for a damaged file, and `UsageError` for one that cannot be read. Cost:
    three short reads for each file, and two for each storage.
    """
    for file in part.part.files:
        if part.metadata and file.path in part.metadata[0].bytes_entries:
            there = file.at(part.in_store(file.path))
            yield _name(step, file), _entries(part, there)
    for held in part.safetensors:
        read = read_safetensors(part.store, held.folder, step.url, held.part, under="")
        yield held.part.path or "safetensors", read.part


def _name(step: Step, file: FileInfo) -> str:
    """The path of a file without the number of the step."""
    if is_scattered(step.name):
        return re.sub(r"iter_[0-9]+_|(?:[^/]*-)?ba[0-9]+-", "", file.path)
    *folders, name = file.path.split("/")
    return "/".join((*(one for one in folders if step_name(one) is None), name))


def _entries(part: OpenPart, file: FileInfo) -> SourcePart:
    opened = open_flat(part.store, file, part.url, decode_shards)
    leaves: dict[str, FlatEntry] = {}
    is_all = True
    for leaf in _leaves((), opened.state):
        if leaf.fqn not in leaves and _can_be_compared(leaf, opened):
            leaves[leaf.fqn] = leaf
        else:
            is_all = False
    if not is_all:
        crc = opened.members["data.pkl"].crc
        leaves[OTHER_VALUES] = FlatEntry((OTHER_VALUES,), f"in a pickle with the CRC-32 {crc:08x}")
    try:
        return opened.part_of_leaves(tuple(leaves.values()))
    except NotPlain as error:
        raise UsageError(f"{part.url}: {error}") from error


def _leaves(path: tuple[str | int, ...], value: object) -> Iterator[FlatEntry]:
    if isinstance(value, ShardStub):
        yield FlatEntry(path, value.local)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, key if isinstance(key, int) else str(key)), item)
    elif isinstance(value, Opaque) and isinstance(value.state, dict):
        yield from _leaves(path, value.state)
    elif isinstance(value, (list, tuple)) and not _is_plain(value):
        for number, item in enumerate(value):
            yield from _leaves((*path, number), item)
    else:
        yield FlatEntry(path, value)


def _is_plain(value: object) -> bool:
    with suppress(NotPlain):
        pickled_value(FlatEntry((), value))
        return True
    return False


def _can_be_compared(leaf: FlatEntry, opened: FlatFile) -> bool:
    if not isinstance(leaf.value, TensorStub):
        return _is_plain(leaf.value)
    with suppress(NotPlain):
        storage_of(leaf.fqn, leaf.value, opened.members)
        return True
    return False
