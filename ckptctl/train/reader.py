"""Load a checkpoint with `dcp.load`, fast and without running code from it.

`Reader` replaces torch's `FileSystemReader`: torch plans what each rank needs and reshards;
this module decodes the metadata and reads the bytes. `resume` chooses the step.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptctl.errors import CkptctlError, StepDamaged, UsageError
from ckptctl.findings import Finding
from ckptctl.formatting import command_line
from ckptctl.inspection.coverage import check_coverage
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import NO_FILE, Metadata
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.records.ranges import Ranges
from ckptctl.storage.opening import open_store
from ckptctl.train.record_loads import Loaded, RecordLoads
from ckptctl.train.torch_metadata import (
    RankLocal,
    RefusedMetadata,
    StorageData,
    read_step_metadata,
    to_torch,
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
        self.loaded = Loaded()
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
        loads = RecordLoads(
            self._opened(),
            self._ranges(),
            planner,
            prove_slices=self._verify == "always",
            safe_types=self._safe_types,
            jobs=self._jobs,
            most_waiting=None if makes_none else _WAITING_BYTES,
        )
        self.loaded = loads.loaded
        loads.load(self._numbered if self._is_own(plan) else self._by_number(plan.items))
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
