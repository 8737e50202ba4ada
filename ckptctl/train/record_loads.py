"""Load the records that a rank needs into its tensors.

One record of each dtype, shape and length is parsed. The others are expected to be like it, and
`records.neighbours` reads them straight into their tensors, many with one call. A record that
differs is parsed, as is one whose elements need more than that: very long ones, slices that are
not rows, tensors on a GPU or of another dtype. Of these the frame is read first, and then several
threads read the elements. torch plans what is needed; `records.elements` maps that to bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from ckptctl.errors import LinkNotFollowed, PathEscape, PathNotFound, RecordUnreadable
from ckptctl.formats.archive.directory import Member, View
from ckptctl.formats.pickles.reading import collector_paused
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.formatting import inside
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import BytesEntry, TensorEntry
from ckptctl.records.byte_pass import Limits, Run, read_runs
from ckptctl.records.elements import RUN_BYTES, element_runs
from ckptctl.records.neighbours import MAX_FRAME, Neighbour, neighbour_runs
from ckptctl.records.opening import (
    Expected,
    Need,
    OpenRecord,
    Unfit,
    is_plain_pickle,
    unpack,
    unpacked_limit,
)
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import Reading, RecordSource, open_records
from ckptctl.records.slices import Dims, TensorSlice
from ckptctl.records.templates import Template, Templates
from ckptctl.records.verification import ElementChecksum
from ckptctl.storage.contract import ShortRead, StoreKind
from ckptctl.train.load_errors import Damage
from ckptctl.train.safe_values import safe_copy
from ckptctl.train.tensor_copy import (
    QUANTIZED,
    TensorSink,
    copy_from_record,
    is_plain,
    memory_of,
    order_of,
    signed,
)
from ckptctl.train.torch_metadata import torch_dtype


@dataclass(frozen=True, slots=True)
class Reach:
    """What to read at once, in bytes.

    Records up to `short` are read whole, in reads of up to `longest`. A gap of up to `skip`
    between two rows of a slice is read rather than skipped.
    """

    short: int
    longest: int
    skip: int


_REACH = {
    StoreKind.LOCAL: Reach(short=256 << 10, longest=1 << 20, skip=32 << 10),
    StoreKind.NETWORK: Reach(short=1 << 20, longest=4 << 20, skip=128 << 10),
    # A request takes as long as the transfer of a megabyte or two.
    StoreKind.OBJECT: Reach(short=4 << 20, longest=8 << 20, skip=1 << 20),
}


@dataclass(slots=True)
class Loaded:
    """The bytes that one load read: `n_needed` are those of the requested elements.

    `n_read` counts all bytes read, including the frames of records; `n_proven` those of
    elements that were compared with the checksum of their record.
    """

    n_records: int = 0
    n_needed: int = 0
    n_read: int = 0
    n_proven: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An item whose elements are still to be read.

    They are read into `buffer` if there is one, and copied into `target` afterwards with
    the `signs` of the record.
    """

    item: ReadItem
    target: torch.Tensor
    buffer: torch.Tensor | None
    signs: tuple[str, ...]


class _Alike(NamedTuple):
    """An item whose record is still to be read, straight into `target`."""

    record: Neighbour
    item: ReadItem
    target: torch.Tensor


class _Tensor(NamedTuple):
    """The tensor in the record of range `number`; `member` holds its elements."""

    number: int
    stub: TensorStub
    member: Member
    dtype: torch.dtype
    has_crcs: bool


class RecordLoads:
    """Loads the records of one part, whose `ranges` are those of its metadata."""

    def __init__(
        self,
        opened: OpenStep,
        ranges: Ranges,
        planner: LoadPlanner,
        *,
        prove_slices: bool,
        safe_types: Sequence[object],
        jobs: int | None,
        most_waiting: int | None,
    ) -> None:
        self._source = RecordSource(opened.store, opened.name, ranges)
        self._ranges = ranges
        self._planner = planner
        self._resolve = _resolver(planner)
        self._prove_slices = prove_slices
        self._safe_types = safe_types
        self._jobs = jobs
        self._most_waiting = most_waiting
        self._damage = Damage(opened, ranges)
        self._templates = Templates()
        self._reach = _REACH[opened.store.kind]
        self._waiting: list[_Waiting] = []
        self._n_waiting = 0
        self._runs: list[Run] = []
        self._alike: dict[int, _Alike] = {}
        self._resolved: dict[int, torch.Tensor] = {}
        self._unlike: list[int] = []
        self.loaded = Loaded()

    def load(self, wanted: Mapping[int, Sequence[ReadItem]]) -> Loaded:
        """Load the items of each record, by the number of its range.

        Raises `StepDamaged` for a damaged step, `RecordUnsafe` for an entry that may not be
        unpickled. Other storage errors are passed on. After an error the content of the
        tensors is undefined.
        """
        self._damage.check_paths(wanted)
        files, starts = self._ranges.files, self._ranges.starts
        in_order = sorted(wanted, key=lambda number: (files[number], starts[number]))
        try:
            with collector_paused():  # one collection takes as long as reading a gigabyte
                self._load_all(in_order, wanted)
        except LinkNotFollowed:
            raise  # nothing is known about the file, and no older step replaces this one
        except (PathNotFound, PathEscape, ShortRead) as error:
            raise self._damage.missing(error, wanted) from error
        return self.loaded

    def _load_all(self, numbers: Sequence[int], wanted: Mapping[int, Sequence[ReadItem]]) -> None:
        """Parse one record of each kind, read the others like it, and parse what differs."""
        parsed, likely = self._divided(numbers, wanted)
        self._load_parsed(parsed, wanted)
        templates = {kind: self._templates.get(*kind) for kind in set(likely.values())}
        others = []
        for number, kind in likely.items():
            template = templates[kind]
            if template is None or not self._queue_alike(number, template, wanted[number][0]):
                others.append(number)
            self._read_if_full()
        self._load_parsed(others, wanted)
        self._read_waiting()
        self._load_parsed(self._unlike, wanted)
        self._read_waiting()

    # Records that are like one before

    def _divided(
        self, numbers: Sequence[int], wanted: Mapping[int, Sequence[ReadItem]]
    ) -> tuple[list[int], dict[int, _Kind]]:
        """The records to be parsed, and those that may be like one of them, with their kind."""
        lengths = self._ranges.lengths
        parsed: list[int] = []
        likely: dict[int, _Kind] = {}
        kinds: set[_Kind] = set()
        for number in numbers:
            owner = self._ranges.owner(number)
            if isinstance(owner.entry, TensorEntry) and not owner.transforms:
                kind = lengths[number], Expected.chunk(owner.entry, owner.chunk)
                if kind in kinds and self._is_one_run(number, kind[1].sizes, wanted[number]):
                    likely[number] = kind
                    continue
                kinds.add(kind)
            parsed.append(number)
        return parsed, likely

    def _is_one_run(self, number: int, sizes: Dims, items: Sequence[ReadItem]) -> bool:
        """Whether what is read of a record are consecutive elements, for one tensor."""
        if len(items) > 1 or self._ranges.lengths[number] > RUN_BYTES:
            return False
        lengths = items[0].lengths
        return lengths == sizes or (lengths[1:] == sizes[1:] and not self._prove_slices)

    def _queue_alike(self, number: int, template: Template, item: ReadItem) -> bool:
        """Queue a record to be read into its tensor as the template states, if that is possible."""
        dtype = _straight_dtype(template)
        if dtype is None:
            return False
        target = self._target(number, item).detach()
        memory = memory_of(target) if target.dtype == dtype else None
        first = template.start
        if memory and item.lengths:
            first += item.storage_offsets[0] * len(memory) // item.lengths[0]  # rows before
        if not memory or first + len(memory) > template.end:
            self._resolved[number] = target
            return False
        record = Neighbour(number, self._ranges.starts[number], template, first, memory)
        self._alike[number] = _Alike(record, item, target)
        self._n_waiting += len(memory)
        return True

    # Frames and short records

    def _load_parsed(
        self, numbers: Sequence[int], wanted: Mapping[int, Sequence[ReadItem]]
    ) -> None:
        """Parse the frame of each record, decompressed if necessary, and load or queue it."""
        by_file: list[list[int]] = [[] for _ in self._ranges.file_names]
        for number in numbers:
            by_file[self._ranges.files[number]].append(number)
        needs = {n: need for n in numbers if (need := self._need(n, wanted[n])) is not None}
        reading = Reading()
        for number, record in open_records(
            self._source, by_file, self._open, reading, needs=needs, longest=self._reach.longest
        ):
            self._at(number, record, wanted[number])
            self._read_if_full()
        self.loaded.n_read += reading.n_bytes

    def _need(self, number: int, items: Sequence[ReadItem]) -> Need | None:
        """How much of a record to read at first; None for its frame."""
        owner = self._ranges.owner(number)
        length = self._ranges.lengths[number]
        if isinstance(owner.entry, BytesEntry) or owner.transforms:
            return Need(head=length)
        sizes = owner.entry.chunks.sizes_of(owner.chunk)
        whole = self._prove_slices or any(item.lengths == sizes for item in items)
        return Need(head=length) if whole and length <= self._reach.short else None

    def _open(self, number: int, view: View) -> tuple[View, OpenRecord] | Need:
        owner = self._ranges.owner(number)
        tensor = owner.entry if isinstance(owner.entry, TensorEntry) else None
        try:
            if owner.transforms:
                data = unpack(view.head, owner.transforms, unpacked_limit(owner))
                view = View(len(data), data, data)
            if tensor is None and is_plain_pickle(view.head, view.tail):
                raise Unfit(
                    "format.unsupported",
                    "it is a planner's own pickle, which cannot be read without running it",
                )
            expected = None if tensor is None else Expected.chunk(tensor, owner.chunk)
            found = self._templates.open(view, expected)
            if isinstance(found, Need):
                return found
            if found.stub is not None:
                if found.byte_order not in (None, sys.byteorder):
                    raise Unfit("format.unsupported", f"it is {found.byte_order}-endian")
                whole = order_of(found.stub) is None or QUANTIZED in found.stub.signs
                if whole and len(view.head) < view.length:
                    return Need(head=view.length)
            return view, found
        except (RecordUnreadable, Unfit) as error:
            raise self._damage.record(number, error.code, error.message) from error

    # One record

    def _at(self, number: int, record: tuple[View, OpenRecord], items: Sequence[ReadItem]) -> None:
        view, found = record
        self.loaded.n_records += 1
        if found.stub is None:
            fqn = self._ranges.owner(number).entry.fqn
            for item in items:
                self._planner.load_bytes(item, safe_copy(view.head, fqn, self._safe_types))
            return
        tensor = self._tensor(number, found, found.stub)
        for place, item in enumerate(items):
            target = self._target(number, item)
            # A copy into a quantized tensor sets its scales too; an alias would keep its own.
            if QUANTIZED not in tensor.stub.signs:
                target = target.detach()
            wanted = TensorSlice(tuple(item.storage_offsets), tuple(item.lengths))
            self.loaded.n_needed += wanted.n_elements * tensor.dtype.itemsize
            if len(view.head) == view.length:
                copy_from_record(view, tensor.member, tensor.stub, tensor.dtype, wanted, target)
                self.loaded.n_proven += tensor.member.size if tensor.has_crcs else 0
                self._planner.commit_tensor(item, target)
            else:
                self._wait(tensor, item, wanted, target, first=place == 0)

    def _target(self, number: int, item: ReadItem) -> torch.Tensor:
        """The tensor of the planner for an item, which it is asked for once."""
        target = self._resolved.pop(number, None)
        if target is None:
            target = self._resolve(item)
            if target.shape != item.lengths:
                # Same message as torch's reader: the record is not damaged.
                raise AssertionError(
                    f"req {item.storage_index} mismatch sizes {target.size()} vs {item.lengths}"
                )
        return target

    def _tensor(self, number: int, found: OpenRecord, stub: TensorStub) -> _Tensor:
        dtype = torch_dtype(stub.dtype)
        if dtype is None:
            reason = f"torch {torch.__version__} has no {stub.dtype}"
            raise self._damage.record(number, "format.unsupported", reason)
        member = found.elements
        n_bytes = stub.n_elements_in_storage * dtype.itemsize
        # `open_record` cannot compare this for dtypes whose size only torch defines.
        if member is None or member.size != n_bytes:
            has = 0 if member is None else member.size
            reason = f"it holds {has:,} bytes of elements instead of {n_bytes:,}"
            raise self._damage.record(number, "record.mismatch", reason)
        return _Tensor(number, stub, member, dtype, found.directory.has_crcs)

    def _wait(
        self,
        tensor: _Tensor,
        item: ReadItem,
        wanted: TensorSlice,
        target: torch.Tensor,
        *,
        first: bool,
    ) -> None:
        """Queue the elements to be read with those of other records."""
        dtype, member, ranges = tensor.dtype, tensor.member, self._ranges
        shape, signs = tensor.stub.shape, tensor.stub.signs
        straight = is_plain(target) and not signs
        buffer = None if straight else torch.empty(wanted.sizes, dtype=dtype)
        self._waiting.append(_Waiting(item, target, buffer, signs))
        self._n_waiting += wanted.n_elements * dtype.itemsize
        order = order_of(tensor.stub)
        if order is None or not target.numel():  # without order it was read as a whole
            return
        checksum = None
        if tensor.has_crcs and (wanted.sizes == shape or (self._prove_slices and first)):
            wrong = self._damage.wrong_crc(tensor.number, member)
            checksum = ElementChecksum(member.size, member.crc, wrong)
            self.loaded.n_proven += member.size
        sink = TensorSink(shape, wanted, order, dtype, target if buffer is None else buffer)
        path = inside(self._source.folder, ranges.file_names[ranges.files[tensor.number]])
        at = ranges.starts[tensor.number] + member.start
        self._runs += element_runs(path, at, sink, skip=self._reach.skip, checksum=checksum)

    def _read_if_full(self) -> None:
        if self._most_waiting is not None and self._n_waiting > self._most_waiting:
            self._read_waiting()

    def _read_waiting(self) -> None:
        """Read the queued items, and pass them to the planner."""
        files, skip = self._ranges.files, self._reach.skip
        alike, self._alike = self._alike, {}
        for file, records in groupby(
            (one.record for one in alike.values()), lambda record: files[record.number]
        ):
            path = inside(self._source.folder, self._ranges.file_names[file])
            self._runs += neighbour_runs(path, records, skip, self._unlike.append)
        devices = {one.target.device for one in self._waiting if one.target.device.type == "cuda"}
        for device in devices:
            torch.cuda.synchronize(device)  # so that no earlier kernel still writes to the tensors
        # An older step may be loaded into the same tensors next: no thread may still write.
        limits = Limits(jobs=self._jobs)
        self.loaded.n_read += read_runs(self._source.store, self._runs, limits, to_the_last=True)
        for one in self._waiting:
            if one.buffer is not None:
                one.target.copy_(signed(one.buffer, one.signs))
            self._planner.commit_tensor(one.item, one.target)
        for number in set(self._unlike):
            if number in alike:
                self._resolved[number] = alike.pop(number).target
        for record, item, target in alike.values():
            self.loaded.n_records += 1
            self.loaded.n_needed += len(record.memory)
            self.loaded.n_proven += record.n_proven
            self._planner.commit_tensor(item, target)
        self._runs, self._waiting, self._n_waiting = [], [], 0


_Kind = tuple[int, Expected]
"""Length in bytes, dtype and shape: of records of one kind, most have one frame."""


def _straight_dtype(template: Template) -> torch.dtype | None:
    """The dtype of a record whose elements can be read into a contiguous tensor as they are."""
    stub = template.opened.stub
    if stub is None or stub.signs or max(template.start, template.n_rest) > MAX_FRAME:
        return None
    return torch_dtype(stub.dtype) if order_of(stub) == tuple(range(len(stub.shape))) else None


def _resolver(planner: LoadPlanner) -> Callable[[ReadItem], torch.Tensor]:
    """As `resolve_tensor`, but torch's own finds each tensor once for all items of its slices."""
    own = DefaultLoadPlanner
    if not (
        isinstance(planner, own)
        and type(planner).resolve_tensor is own.resolve_tensor
        and type(planner).lookup_tensor is own.lookup_tensor
    ):
        return planner.resolve_tensor
    found: dict[MetadataIndex, torch.Tensor] = {}

    def resolve(item: ReadItem) -> torch.Tensor:
        index = item.dest_index
        if index not in found:
            found[index] = planner.lookup_tensor(index)
        target: torch.Tensor = planner.transform_tensor(item, found[index])
        return target

    return resolve
