"""Load a checkpoint with `dcp.load`, fast and without running code from it.

`Reader` replaces torch's `FileSystemReader`: torch plans what each rank needs and reshards;
this module decodes the metadata and reads the bytes. `resume` chooses the step.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn, Unpack

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptctl.errors import (
    CkptctlError,
    LinkNotFollowed,
    MetadataUnreadable,
    MetadataUnsafe,
    PathEscape,
    PathNotFound,
    RecordUnreadable,
    StepDamaged,
    UsageError,
)
from ckptctl.findings import Finding, Severity
from ckptctl.formats.frameworks.layouts import METADATA, rank_local_rank
from ckptctl.formats.pickles.reading import collector_paused
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.formatting import command_line
from ckptctl.inspection.coverage import check_coverage
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.presence import (
    check_presence,
    check_sizes,
    escape_reason,
    holds_safetensors,
)
from ckptctl.inspection.structure import SAYS
from ckptctl.model import (
    NO_FILE,
    BytesEntry,
    Chunk,
    Chunks,
    Metadata,
    Part,
    PartFormat,
    RangeColumns,
    TensorEntry,
)
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.records.loading import QUANTIZED, Caller, LoadCounts, SliceLoads, TensorRecord
from ckptctl.records.opening import Unfit
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource
from ckptctl.records.slices import TensorSlice
from ckptctl.storage.contract import ShortRead, TooLarge
from ckptctl.storage.opening import open_store, parent_url
from ckptctl.train.safe_values import safe_copy
from ckptctl.train.tensor_copy import TensorSink, copy_from_record, is_plain, memory_of, signed

_WAITING_BYTES = 64 << 20
"""The most bytes of tensors that a planner allocates for the load and takes back."""


class _PackedPlan(LoadPlan):
    """A plan that crosses to the coordinator and back as bytes.

    `dcp.load` gathers the plans of all ranks on one, which hands each its own: torch's planner
    reads no item of them. `packed` are items that arrived and were not read, `sent` those
    that left.
    """

    def __init__(
        self, items: list[ReadItem], storage_data: Any = None, planner_data: Any = None
    ) -> None:
        self.packed: bytes | None = None
        self.sent: bytes | None = None
        super().__init__(items, storage_data, planner_data)

    @property
    def items(self) -> list[ReadItem]:
        """The items, unpacked when they are first read."""
        if self.packed is not None:
            self.items = pickle.loads(self.packed)  # noqa: S301 - from a rank of this job
        return self._items

    @items.setter
    def items(self, items: list[ReadItem]) -> None:
        self._items, self.packed = items, None

    def __reduce__(self) -> Any:
        self.sent = pickle.dumps(self._items) if self.packed is None else self.packed
        return _arrived, (self.sent, self.storage_data, self.planner_data)


def _arrived(packed: bytes, storage_data: Any, planner_data: Any) -> _PackedPlan:
    plan = _PackedPlan([], storage_data, planner_data)
    plan.packed = packed
    return plan


class Reader(StorageReader):
    """Reads a DCP checkpoint: `dcp.load(state, storage_reader=Reader(path))`.

    `path` is a folder or any URL that ckptctl opens (`s3://bucket/run/step_100`). No code
    from the checkpoint runs: metadata is decoded, tensors are not unpickled, other entries
    are loaded with `weights_only=True`, with the types of `SAFE_TYPES` and of `safe_types`.
    Every record that is read whole is compared with its checksum; with `verify="always"`,
    records of which only a slice is needed are read whole for that.

    Raises `StepDamaged` for a bad step, `RecordUnsafe` for a type that is not allowed, and
    storage errors if it cannot be read. `dcp.load` wraps them in torch's
    `CheckpointException`, whose `failures` hold them by rank. After an error the content of
    the tensors is undefined.

    `jobs` threads read; the fields of `storage` are also keywords. One reader serves any
    number of loads, one after the other. `loaded` reports what the last one read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Literal["whole", "always"] = "whole",
        safe_types: Sequence[object] = (),
        jobs: int | None = None,
        storage: StorageOptions = StorageOptions(),
        **keywords: Unpack[StorageKeywords],
    ) -> None:
        super().__init__()
        if verify not in ("whole", "always"):
            raise UsageError(f"verify is {verify!r}; expected 'whole' or 'always'")
        self._path = os.fspath(path)
        self._verify = verify
        self._safe_types = tuple(safe_types)
        self._jobs = jobs
        (self._storage,) = options_from(keywords, storage)
        self.loaded = LoadCounts()
        self._given: OpenStep | None = None
        self._stated: Metadata | None = None
        self._step: OpenStep | None = None
        self._forget()

    def _forget(self) -> None:
        self._metadata: Metadata | None = None
        self._rank_local: RankLocal | None = None
        self._refused: CkptctlError | None = None
        self._table: Ranges | None = None
        self._plan: _PackedPlan | None = None
        self._items: tuple[ReadItem, ...] = ()
        self._numbered: dict[int, list[ReadItem]] = {}
        self._load_id = str(uuid.uuid4())

    @classmethod
    def of(cls, opened: OpenStep, metadata: Metadata | None = None) -> Reader:
        """A reader of an open step; what was already read is not read again.

        `metadata` replaces that of the step, such as one of several parts.

        Closing the reader leaves the store of the step open.
        """
        reader = cls(opened.url)
        reader._given, reader._stated = opened, metadata
        return reader

    @property
    def checkpoint_id(self) -> str:
        """The address of the step, which torch shows in its logs."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is an address that can be opened; makes no request."""
        try:
            open_store(os.fspath(checkpoint_id)).close()
        except CkptctlError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of another step if `checkpoint_id` is given."""
        if checkpoint_id:
            self._path = os.fspath(checkpoint_id)
            self._given = self._stated = None
        self.close()

    def close(self) -> None:
        """Close connections and release what was read; a later load opens them again."""
        if self._step is not None and self._step is not self._given:
            self._step.store.close()
        self._step = None
        self._forget()

    def read_metadata(self, *args: Any, **kwargs: Any) -> torch_metadata.Metadata:  # noqa: ARG002
        """The decoded metadata; `rank` selects the one of a process in a rank-local step.

        `dcp.load` first calls it without a rank. For a step that was saved without
        collectives this raises, and DCP calls it again on each rank. The chunks are those
        of all ranks, so the step loads at any world size, and each rank gets back what it
        saved for itself.
        """
        rank = kwargs.get("rank")
        if rank is not None and self._refused is not None:
            return RefusedMetadata(self._refused)
        self._table = self._plan = None
        try:
            found = self._rank_local or self._stated or read_step_metadata(self._opened())
            if isinstance(found, RankLocal):
                self._rank_local = found
                self._metadata = found.seen_by(rank)
            else:
                self._metadata = found
        except CkptctlError as error:
            if self._rank_local is None:
                self._refused = error
            raise
        return to_torch(self._metadata, self._load_id)

    def set_up_storage_reader(
        self,
        metadata: torch_metadata.Metadata,
        is_coordinator: bool,  # noqa: ARG002
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Prepare the load; raises if the metadata could not be read."""
        if isinstance(metadata, RefusedMetadata):
            metadata.refuse()
        if self._metadata is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check, before any tensor is written to, that the metadata has everything in the plan."""
        metadata = self._decoded()
        for fqn in {item.storage_index.fqn for item in plan.items}:
            tensor = metadata.tensors.get(fqn)
            for finding in check_coverage(tensor) if tensor is not None else ():
                raise self._damaged(finding)
        self._items = tuple(plan.items)
        self._numbered = self._by_number(plan.items)
        self._plan = _PackedPlan(plan.items, plan.storage_data, plan.planner_data)
        return self._plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load all items of the plan; the returned future is already done."""
        # torch's own planner returns views of the state; one that takes tensors back
        # may have allocated them for this.
        makes_none = type(planner).commit_tensor is DefaultLoadPlanner.commit_tensor
        wanted = self._numbered if self._is_own(plan) else self._by_number(plan.items)
        opened, ranges = self._opened(), self._ranges()
        load = _Load(opened, ranges, planner, wanted, self._safe_types)
        loads = SliceLoads(
            RecordSource(opened.store, opened.name, ranges),
            load,
            prove_slices=self._verify == "always",
            jobs=self._jobs,
            most_waiting=None if makes_none else _WAITING_BYTES,
        )
        self.loaded = loads.counts
        load.check_paths()
        try:
            with collector_paused():  # one collection takes as long as reading a gigabyte
                loads.load(
                    {n: [_ReadTarget(item, load) for item in items] for n, items in wanted.items()}
                )
        except LinkNotFollowed:
            raise  # nothing is known about the file, and no older step replaces this one
        except (PathNotFound, PathEscape, ShortRead) as error:
            raise load.missing(error) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _opened(self) -> OpenStep:
        if self._step is None:
            self._step = self._given or OpenStep(open_store(self._path, self._storage), "")
        return self._step

    def _decoded(self) -> Metadata:
        if self._metadata is None:
            self.read_metadata()
        assert self._metadata is not None  # noqa: S101 - `read_metadata` raises otherwise
        return self._metadata

    def _ranges(self) -> Ranges:
        if self._table is None:
            self._table = Ranges([self._decoded()])
        return self._table

    def _is_own(self, plan: LoadPlan) -> bool:
        """Whether the items are those of `prepare_local_plan`; a planner may change them."""
        if self._plan is not None and isinstance(plan, _PackedPlan) and plan.packed is not None:
            return plan.packed == self._plan.sent
        return self._plan is not None and tuple(plan.items) == self._items

    def _by_number(self, items: Sequence[ReadItem]) -> dict[int, list[ReadItem]]:
        ranges, tensors = self._ranges(), self._decoded().tensors
        first = {
            entry.fqn: number
            for entry, number in zip(ranges.entries, ranges.first_range, strict=True)
        }
        by_offsets: dict[str, dict[tuple[int, ...], int]] = {}

        def chunk_of(index: torch_metadata.MetadataIndex) -> int:
            chunks = tensors[index.fqn].chunks
            offsets, hint = tuple(index.offset or ()), index.index
            if hint is not None and 0 <= hint < len(chunks) and chunks.offsets_of(hint) == offsets:
                return hint
            if index.fqn not in by_offsets:
                by_offsets[index.fqn] = {
                    chunks.offsets_of(number): number for number in reversed(range(len(chunks)))
                }
            return by_offsets[index.fqn][offsets]

        numbered: dict[int, list[ReadItem]] = {}
        for item in items:
            index = item.storage_index
            is_bytes = item.type == LoadItemType.BYTE_IO
            try:
                number: int | None = first[index.fqn] + (0 if is_bytes else chunk_of(index))
            except KeyError:
                number = None
            if number is None or ranges.files[number] == NO_FILE:
                at = "" if index.offset is None else f" at {tuple(index.offset)}"
                message = f"the metadata has no byte range for it{at}"
                raise self._damaged(Finding("range.missing", index.fqn, message))
            numbered.setdefault(number, []).append(item)
        return numbered

    def _damaged(self, finding: Finding) -> StepDamaged:
        command = command_line("verify", self._path)
        return StepDamaged(self._path, replace(finding, next_command=command))


class _ReadTarget:
    def __init__(self, item: ReadItem, load: _Load) -> None:
        self.elements = TensorSlice(tuple(item.storage_offsets), tuple(item.lengths))
        self._item = item
        self._load = load
        self._resolved: torch.Tensor | None = None
        self._buffered: tuple[torch.Tensor, tuple[str, ...]] | None = None

    @property
    def _target(self) -> torch.Tensor:
        """The tensor of the planner, which it is asked for once."""
        if self._resolved is None:
            target = self._load.resolve(self._item)
            if target.shape != self._item.lengths:
                # Same message as torch's reader: the record is not damaged.
                raise AssertionError(
                    f"req {self._item.storage_index} mismatch sizes {target.size()} vs "
                    f"{self._item.lengths}"
                )
            self._resolved = target
        return self._resolved

    def memory_for(self, stub: TensorStub) -> memoryview | None:
        self._resolved = target = self._target.detach()
        return memory_of(target) if target.dtype == torch_dtype(stub.dtype) else None

    def copy(self, record: TensorRecord) -> None:
        # A copy into a quantized tensor sets its scales too; an alias would keep its own.
        if QUANTIZED not in record.stub.signs:
            self._resolved = self._target.detach()
        copy_from_record(record, self.elements, self._target)

    def sink(self, record: TensorRecord) -> TensorSink:
        # What cannot be read in place is copied from a buffer at the end.
        stub, dtype, order = record.stub, torch_dtype(record.stub.dtype), record.order
        assert dtype is not None and order is not None  # noqa: S101, PT018 - it was opened with both
        self._resolved = target = self._target.detach()
        self._load.devices.add(target.device)
        if not is_plain(target) or stub.signs:
            target = torch.empty(self.elements.sizes, dtype=dtype)
            self._buffered = target, stub.signs
        return TensorSink(stub.shape, self.elements, order, dtype, target)

    def finish(self) -> None:
        if self._buffered is not None:
            self._target.copy_(signed(*self._buffered))
            self._buffered = None
        self._load.planner.commit_tensor(self._item, self._target)


@dataclass
class _Load(Caller):
    """One load of a part for torch's planner, as the caller of the record engine."""

    _opened: OpenStep
    _ranges: Ranges
    planner: LoadPlanner
    _wanted: Mapping[int, Sequence[ReadItem]]
    _safe_types: Sequence[object]
    devices: set[torch.device] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.resolve = _resolver(self.planner)

    def item_bytes(self, stub: TensorStub) -> int:
        found = torch_dtype(stub.dtype)
        if found is None:
            raise Unfit("format.unsupported", f"torch {torch.__version__} has no {stub.dtype}")
        return found.itemsize

    def take_value(self, number: int, data: bytes) -> None:
        fqn = self._ranges.owner(number).entry.fqn
        for item in self._wanted[number]:
            self.planner.load_bytes(item, safe_copy(data, fqn, self._safe_types))

    def damage(self, number: int, error: RecordUnreadable | Unfit) -> StepDamaged:
        ranges = self._ranges
        if error.code == "record.framing" and holds_safetensors(ranges):
            return self._found(next(check_sizes(ranges)))
        start = ranges.starts[number]
        message = (
            f"the record of {ranges.owner(number).name}, bytes {start:,} to "
            f"{start + ranges.lengths[number]:,}, {SAYS[error.code][0]}: {error.message}"
        )
        return self._found(Finding(error.code, self._file(number), message))

    def before_reading(self) -> None:
        """Wait for the devices, so that no earlier kernel still writes to the tensors."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.devices.clear()

    def check_paths(self) -> None:
        """Raise `StepDamaged` if the file of a record lies outside the step."""
        for name in {self._file(number) for number in self._wanted}:
            reason = escape_reason(name)
            if reason is not None:
                message = f"the path {reason}, and was not followed"
                raise self._found(Finding("path.escape", name, message))

    def missing(self, error: Exception) -> StepDamaged:
        """The error for a file that is missing, truncated or a link. Cost: one listing."""
        needed = {self._file(number) for number in self._wanted}
        # List again: the state after the failed read matters.
        for finding in check_presence(self._ranges, self._opened.list_again()):
            if finding.severity is Severity.FAULT and finding.where in needed:
                return self._found(finding)
        message = (
            f"it changed while it was loaded ({error}): another process writes or deletes there"
        )
        return self._found(Finding("step.changed", "", message))

    def _found(self, finding: Finding) -> StepDamaged:
        """A finding as an error, with the command that inspects the whole step."""
        url = self._opened.url
        command = command_line("verify", url, "--level", "content")
        return StepDamaged(url, replace(finding, next_command=command))

    def _file(self, number: int) -> str:
        return self._ranges.file_names[self._ranges.files[number]]


def _resolver(planner: LoadPlanner) -> Callable[[ReadItem], torch.Tensor]:
    """As `resolve_tensor`, but torch's own finds each tensor once for all items of its slices."""
    own = DefaultLoadPlanner
    if not (
        isinstance(planner, own)
        and type(planner).resolve_tensor is own.resolve_tensor
        and type(planner).lookup_tensor is own.lookup_tensor
    ):
        return planner.resolve_tensor
    found: dict[torch_metadata.MetadataIndex, torch.Tensor] = {}

    def resolve(item: ReadItem) -> torch.Tensor:
        index = item.dest_index
        if index not in found:
            found[index] = planner.lookup_tensor(index)
        target: torch.Tensor = planner.transform_tensor(item, found[index])
        return target

    return resolve


# The metadata of a step, in the classes of torch's planners
#
# A step has one `.metadata`, or one file for each rank where it was saved without collectives. It
# is decoded once, and damage raises the finding of `ckptctl verify`. Only the planner uses torch's
# classes, of the version that is installed; byte ranges are read from the decoded metadata.


_HAS_STRIDES = "strides" in {one.name for one in fields(torch_metadata.TensorProperties)}

_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
"""By torch's encoding, which is `TensorEntry.memory_format`."""


def to_torch(metadata: Metadata, load_id: str) -> torch_metadata.Metadata:
    """The metadata in torch's classes.

    `storage_data` is left out: the reader knows where records lie. A dtype that this torch does
    not have is given as uint8: the planner ignores it, and reading refuses it.

    Cost: a microsecond or two per chunk.
    """
    with collector_paused():
        state: dict[str, Any] = {fqn: _tensor(entry) for fqn, entry in metadata.tensors.items()}
        state |= dict.fromkeys(metadata.bytes_entries, torch_metadata.BytesStorageMetadata())
    values: dict[str, Any] = {
        "planner_data": dict(metadata.planner_paths),
        "storage_meta": torch_metadata.StorageMeta(
            metadata.checkpoint_id, metadata.save_id, load_id
        ),
        "version": metadata.version,
    }
    known = {field.name for field in fields(torch_metadata.Metadata)}
    return torch_metadata.Metadata(
        state, **{name: value for name, value in values.items() if name in known}
    )


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name; None if the installed torch lacks it."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _tensor(entry: TensorEntry) -> torch_metadata.TensorStorageMetadata:
    chunk, size = torch_metadata.ChunkStorageMetadata, torch.Size
    chunks = entry.chunks
    # Most chunks of a tensor have the same size.
    sizes: dict[tuple[int, ...], torch.Size] = {}
    return torch_metadata.TensorStorageMetadata(
        torch_metadata.TensorProperties(
            dtype=torch_dtype(entry.dtype) or torch.uint8,
            layout=getattr(torch, entry.layout, torch.strided),
            requires_grad=entry.requires_grad,
            memory_format=_MEMORY_FORMATS[entry.memory_format],
            pin_memory=entry.pin_memory,
            **({"strides": entry.strides} if _HAS_STRIDES else {}),
        ),
        size(entry.shape),
        [
            chunk(
                size(chunks.offsets_of(number)),
                sizes.setdefault(dims := chunks.sizes_of(number), size(dims)),
            )
            for number in range(len(chunks))
        ],
    )


class RefusedMetadata(torch_metadata.Metadata):
    """Metadata that could not be read, and raises the error on access.

    DCP turns any error of `read_metadata` into an `AssertionError`, which loses its class;
    an error that is raised later reaches all ranks unchanged.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data"):
            self.refuse()
        return super().__getattribute__(name)

    def refuse(self) -> NoReturn:
        raise self.error


@dataclass(frozen=True, slots=True)
class RankLocal:
    """The metadata of a step that was saved without collectives, by rank."""

    url: str
    by_rank: Mapping[int, Metadata]

    def seen_by(self, rank: int | None) -> Metadata:
        """The chunks of all ranks in one metadata; of shared names, the entry of `rank`.

        Raises `StepDamaged` without a rank, because the values differ by rank.
        """
        if rank is None:
            message = "the step was saved without collectives and has one metadata file per rank"
            raise StepDamaged(self.url, Finding("metadata.missing", METADATA, message))
        own = [self.by_rank[rank]] if rank in self.by_rank else []
        others = [metadata for other, metadata in self.by_rank.items() if other != rank]
        return _joined([*own, *others])


def read_step_metadata(opened: OpenStep) -> Metadata | RankLocal:
    """The metadata of a step.

    Raises `StepDamaged` if none can be read, `PathNotFound` if the folder does not exist.
    Other storage errors are passed on. Cost: one read; without a `.metadata`, also a
    listing and all metadata files.
    """
    try:
        return opened.metadata
    except LinkNotFollowed:
        raise
    except (PathNotFound, PathEscape, TooLarge, MetadataUnreadable, MetadataUnsafe) as error:
        files = opened.files
        paths = [file.path for file in files]
        has_metadata = any(path == METADATA or rank_local_rank(path) is not None for path in paths)
        if not has_metadata and any(path.endswith(".safetensors") for path in paths):
            message = (
                "its tensors are in safetensors files, without DCP metadata; torch's "
                "HuggingFaceStorageReader loads them"
            )
            raise StepDamaged(opened.url, Finding("format.unsupported", "", message)) from error
        by_rank: dict[int, Metadata] = {}
        for found in OpenPart(opened, Part("", PartFormat.DCP, tuple(files))).decoded:
            if isinstance(found, Metadata) and found.rank is not None:
                by_rank[found.rank] = found
            elif isinstance(found, Finding) and found.severity is Severity.FAULT:
                command = found.next_command or command_line("pick", parent_url(opened.url))
                raise StepDamaged(opened.url, replace(found, next_command=command)) from error
        if not by_rank:
            why = f"it changed while it was read ({error.message}): another process writes there"
            raise StepDamaged(opened.url, Finding("step.changed", METADATA, why)) from error
        return RankLocal(opened.url, by_rank)


def _joined(metadatas: Sequence[Metadata]) -> Metadata:
    """One metadata made of several; of two chunks with equal offsets the first counts."""
    first: dict[str, TensorEntry] = {}
    chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
    bytes_entries: dict[str, BytesEntry] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for metadata in metadatas:
        for fqn, tensor in metadata.tensors.items():
            own = first.setdefault(fqn, tensor)
            # A rank may have saved its own tensor of any shape under a name that all ranks use.
            if (tensor.shape, tensor.dtype) == (own.shape, own.dtype):
                held = chunks.setdefault(fqn, {})
                for chunk in tensor.chunks:
                    held.setdefault(chunk.offsets, chunk)
        for fqn, entry in metadata.bytes_entries.items():
            bytes_entries.setdefault(fqn, entry)
        paths = {**metadata.planner_paths, **paths}
    return replace(
        metadatas[0],
        tensors={
            fqn: replace(tensor, chunks=Chunks.of(len(tensor.shape), [*chunks[fqn].values()]))
            for fqn, tensor in first.items()
        },
        bytes_entries=bytes_entries,
        file_names=sorted({name for metadata in metadatas for name in metadata.file_names}),
        planner_paths=paths,
        rank=None,
    )


def joined_parts(parts: Sequence[tuple[str, Metadata]]) -> Metadata:
    """The metadata of the parts of a step, by their paths, as one: each name begins with a path."""
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, BytesEntry] = {}
    for part, metadata in parts:
        inside = [f"{part}/{file}" for file in metadata.file_names]
        for fqn, tensor in metadata.tensors.items():
            chunks, name = tensor.chunks, f"{part}.{fqn}"
            names = inside
            if chunks.file_names != metadata.file_names:
                names = [f"{part}/{file}" for file in chunks.file_names]
            columns = (chunks.files, chunks.starts, chunks.lengths, names, chunks.transforms)
            moved = Chunks(chunks.n_dims, chunks.offsets, chunks.sizes, RangeColumns(*columns))
            path = (part, *(tensor.path or (fqn,)))
            tensors[name] = replace(tensor, fqn=name, path=path, chunks=moved)
        for fqn, entry in metadata.bytes_entries.items():
            where, name = entry.byte_range, f"{part}.{fqn}"
            where = None if where is None else replace(where, file=f"{part}/{where.file}")
            path = (part, *(entry.path or (fqn,)))
            values[name] = replace(entry, fqn=name, path=path, byte_range=where)
    files = [f"{part}/{file}" for part, metadata in parts for file in metadata.file_names]
    paths = {name: one.path for name, one in tensors.items()}
    paths |= {name: one.path for name, one in values.items()}
    return replace(
        parts[0][1],
        tensors=tensors,
        bytes_entries=values,
        file_names=files,
        planner_paths=paths,
        strays=(),
    )
