"""Load a checkpoint with `dcp.load`, fast and without running code from it.

`Reader` replaces torch's `FileSystemReader`: torch plans what each rank needs and reshards;
this module decodes the metadata and reads the bytes. `resume` chooses the step.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptctl.errors import (
    CkptctlError,
    LinkNotFollowed,
    PathEscape,
    PathNotFound,
    StepDamaged,
    UsageError,
)
from ckptctl.findings import Finding, Severity
from ckptctl.formats.pickles.reading import collector_paused
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.formatting import command_line
from ckptctl.inspection.coverage import check_coverage
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.presence import (
    check_presence,
    check_sizes,
    escape_reason,
    holds_safetensors,
)
from ckptctl.inspection.structure import SAYS
from ckptctl.model import NO_FILE, Metadata
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.records.loading import QUANTIZED, LoadCounts, SliceLoads, TensorRecord
from ckptctl.records.opening import Unfit
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource
from ckptctl.records.slices import TensorSlice
from ckptctl.storage.contract import ShortRead
from ckptctl.storage.opening import open_store
from ckptctl.train.safe_values import safe_copy
from ckptctl.train.tensor_copy import TensorSink, copy_from_record, is_plain, memory_of, signed
from ckptctl.train.torch_metadata import (
    RankLocal,
    RefusedMetadata,
    StorageData,
    read_step_metadata,
    to_torch,
    torch_dtype,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
        self._storage = options_from(keywords, storage)
        self.loaded = LoadCounts()
        self._load_id = ""
        self._given: OpenStep | None = None
        self._stated: Metadata | None = None
        self._step: OpenStep | None = None
        self._metadata: Metadata | None = None
        self._rank_local: RankLocal | None = None
        self._refused: CkptctlError | None = None
        self._table: Ranges | None = None
        self._plan: _PackedPlan | None = None
        self._items: tuple[ReadItem, ...] = ()
        self._numbered: dict[int, list[ReadItem]] = {}
        self._forget()

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

    def read_metadata(self, *args: Any, **kwargs: Any) -> TorchMetadata:  # noqa: ARG002
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
        metadata: TorchMetadata,
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
        """The plans, unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load all items of the plan; the returned future is already done."""
        # torch's own planner returns views of the state; one that takes tensors back
        # may have allocated them for this.
        makes_none = type(planner).commit_tensor is DefaultLoadPlanner.commit_tensor
        wanted = self._numbered if self._is_own(plan) else self._by_number(plan.items)
        load = _Load(Damage(self._opened(), self._ranges()), planner, wanted, self._safe_types)
        loads = SliceLoads(
            RecordSource(self._opened().store, self._opened().name, self._ranges()),
            load,
            prove_slices=self._verify == "always",
            jobs=self._jobs,
            most_waiting=None if makes_none else _WAITING_BYTES,
        )
        self.loaded = loads.counts
        load.run(loads)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _forget(self) -> None:
        self._metadata = self._rank_local = self._refused = self._table = self._plan = None
        self._items, self._numbered = (), {}
        self._load_id = str(uuid.uuid4())

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
        """The items of a plan by the numbers of their ranges."""
        ranges, data = self._ranges(), StorageData(self._decoded())
        first = {
            entry.fqn: number
            for entry, number in zip(ranges.entries, ranges.first_range, strict=True)
        }
        numbered: dict[int, list[ReadItem]] = {}
        for item in items:
            index = item.storage_index
            is_bytes = item.type == LoadItemType.BYTE_IO
            try:
                number = first[index.fqn] + (0 if is_bytes else data.chunk(index))
            except KeyError:
                raise self._no_range(index) from None
            if ranges.files[number] == NO_FILE:
                raise self._no_range(index)
            numbered.setdefault(number, []).append(item)
        return numbered

    def _no_range(self, index: MetadataIndex) -> StepDamaged:
        at = "" if index.offset is None else f" at {tuple(index.offset)}"
        return self._damaged(
            Finding("range.missing", index.fqn, f"the metadata has no byte range for it{at}")
        )

    def _damaged(self, finding: Finding) -> StepDamaged:
        command = command_line("verify", self._path)
        return StepDamaged(self._path, replace(finding, next_command=command))


class _Item:
    """An item of torch's plan, as a target of the record engine: a slice of one tensor."""

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
        """See `Target.memory_for`."""
        self._resolved = target = self._target.detach()
        return memory_of(target) if target.dtype == torch_dtype(stub.dtype) else None

    def copy(self, record: TensorRecord) -> None:
        """See `Target.copy`."""
        # A copy into a quantized tensor sets its scales too; an alias would keep its own.
        if QUANTIZED not in record.stub.signs:
            self._resolved = self._target.detach()
        copy_from_record(record, self.elements, self._target)

    def sink(self, record: TensorRecord) -> TensorSink:
        """See `Target.sink`; what cannot be read in place is copied from a buffer at the end."""
        stub, dtype, order = record.stub, torch_dtype(record.stub.dtype), record.order
        assert dtype is not None and order is not None  # noqa: S101, PT018 - it was opened with both
        self._resolved = target = self._target.detach()
        self._load.devices.add(target.device)
        if not is_plain(target) or stub.signs:
            target = torch.empty(self.elements.sizes, dtype=dtype)
            self._buffered = target, stub.signs
        return TensorSink(stub.shape, self.elements, order, dtype, target)

    def finish(self) -> None:
        """See `Target.finish`."""
        if self._buffered is not None:
            self._target.copy_(signed(*self._buffered))
            self._buffered = None
        self._load.planner.commit_tensor(self._item, self._target)


class _Load:
    """One load of a part for torch's planner, as the caller of the record engine."""

    def __init__(
        self,
        damage: Damage,
        planner: LoadPlanner,
        wanted: Mapping[int, Sequence[ReadItem]],
        safe_types: Sequence[object],
    ) -> None:
        self.planner = planner
        self.resolve = _resolver(planner)
        self.devices: set[torch.device] = set()
        self._damage = damage
        self._wanted = wanted
        self._safe_types = safe_types

    def run(self, loads: SliceLoads) -> None:
        """Load all items.

        Raises `StepDamaged` for a damaged step, `RecordUnsafe` for an entry that may not be
        unpickled. Other storage errors are passed on. After an error the content of the
        tensors is undefined.
        """
        self._damage.check_paths(self._wanted)
        try:
            with collector_paused():  # one collection takes as long as reading a gigabyte
                loads.load(
                    {n: [_Item(item, self) for item in items] for n, items in self._wanted.items()}
                )
        except LinkNotFollowed:
            raise  # nothing is known about the file, and no older step replaces this one
        except (PathNotFound, PathEscape, ShortRead) as error:
            raise self._damage.missing(error, self._wanted) from error

    def item_bytes(self, dtype: str) -> int:
        """See `Caller.item_bytes`."""
        found = torch_dtype(dtype)
        if found is None:
            raise Unfit("format.unsupported", f"torch {torch.__version__} has no {dtype}")
        return found.itemsize

    def take_value(self, number: int, data: bytes) -> None:
        """See `Caller.take_value`."""
        fqn = self._damage.ranges.owner(number).entry.fqn
        for item in self._wanted[number]:
            self.planner.load_bytes(item, safe_copy(data, fqn, self._safe_types))

    def damage(self, number: int, code: str, reason: str) -> StepDamaged:
        """See `Caller.damage`."""
        return self._damage.record(number, code, reason)

    def before_reading(self) -> None:
        """Wait for the devices, so that no earlier kernel still writes to the tensors."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.devices.clear()


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


@dataclass(frozen=True, slots=True)
class Damage:
    """Errors about the records of one part, whose `ranges` are those of its metadata."""

    opened: OpenStep
    ranges: Ranges

    def record(self, number: int, code: str, reason: str) -> StepDamaged:
        """The error for a damaged record, that of range `number`."""
        ranges = self.ranges
        if code == "record.framing" and holds_safetensors(ranges):
            return self.finding(next(check_sizes(ranges)))
        start = ranges.starts[number]
        message = (
            f"the record of {ranges.owner(number).name}, bytes {start:,} to "
            f"{start + ranges.lengths[number]:,}, {SAYS[code][0]}: {reason}"
        )
        return self.finding(Finding(code, self._file(number), message))

    def check_paths(self, numbers: Iterable[int]) -> None:
        """Raise `StepDamaged` if the file of a record lies outside the step."""
        for name in {self._file(number) for number in numbers}:
            reason = escape_reason(name)
            if reason is not None:
                message = f"the path {reason}, and was not followed"
                raise self.finding(Finding("path.escape", name, message))

    def missing(self, error: Exception, numbers: Iterable[int]) -> StepDamaged:
        """The error for a file that is missing, truncated or a link. Cost: one listing."""
        needed = {self._file(number) for number in numbers}
        # List again: the state after the failed read matters.
        for finding in check_presence(self.ranges, self.opened.list_again()):
            if finding.severity is Severity.FAULT and finding.where in needed:
                return self.finding(finding)
        message = (
            f"it changed while it was loaded ({error}): another process writes or deletes there"
        )
        return self.finding(Finding("step.changed", "", message))

    def finding(self, finding: Finding) -> StepDamaged:
        """A finding as an error, with the command that inspects the whole step."""
        url = self.opened.url
        command = command_line("verify", url, "--level", "content")
        return StepDamaged(url, replace(finding, next_command=command))

    def _file(self, number: int) -> str:
        return self.ranges.file_names[self.ranges.files[number]]
