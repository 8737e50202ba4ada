"""`Writer`: save a checkpoint with `dcp.save`, durably, straight from tensor memory.

It takes the place of torch's `FileSystemWriter`: torch plans what each rank writes; here
the records are framed as torch frames them and written, and their checksums and the
digests of the files are computed in the same pass. Its counterpart is `Reader`.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shlex
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import prod
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptctl.errors import AlreadyExists, PathNotFound, SaveFailed, UsageError
from ckptctl.formats.archive.writing import WRITABLE, tensor_frame
from ckptctl.formats.digests import Algorithm, Digester, Digests, checksumming
from ckptctl.formats.frameworks.layouts import METADATA
from ckptctl.formatting import command_line
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.records.slices import block_of, joined, record_of
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name, check_address, open_store, parent_url
from ckptctl.train.tensor_copy import elements_of, is_plain, saved_strides


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Size in bytes and digests of a file; `checksum` is the store's kind of one, in hex."""

    size: int
    digests: Digests
    checksum: str | None = None


class Writer(StorageWriter):
    """Writes a checkpoint of DCP: `dcp.save(state, storage_writer=Writer(path))`.

    `path` is a folder or any URL that ckptctl opens (`s3://bucket/run/step_100`). The files
    are those of torch's `FileSystemWriter`, byte for byte where that is possible, and stock
    `dcp.load` reads them. The metadata is published last, when all that it names is on the
    disk or in the bucket. A checkpoint is never written over.

    Tensors in the memory of this machine are written from where they lie; others pass
    through one buffer of a few MiB. `thread_count` and `single_file_per_rank` are those of
    `FileSystemWriter`.

    Raises `AlreadyExists` where the step has metadata, errors of storage where it cannot be
    written. Under `dcp.save` they arrive within torch's `CheckpointException`, whose
    `failures` hold them by rank. Shards of a save that failed stay where they are, without
    metadata.

    The fields of `storage` are keywords, too. One writer serves any number of saves, one
    after the other. `written` are the files that this rank wrote in the last of them, by
    name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int = 1,
        single_file_per_rank: bool = True,
        storage: StorageOptions = StorageOptions(),
        **keywords: Unpack[StorageKeywords],
    ) -> None:
        super().__init__()
        if thread_count < 1:
            raise UsageError(f"thread_count is {thread_count}; at least 1 thread must write")
        self._path = os.fspath(path)
        self._n_threads = thread_count
        self._single_file = single_file_per_rank
        (self._storage,) = options_from(keywords, storage)
        self._within: Store | None = None
        self._algorithm = Algorithm.XXH3
        self._before_metadata: Callable[[bytes], None] | None = None
        self._rank: int | None = None
        self.written: Mapping[str, WrittenFile] = {}
        self.reset()

    @classmethod
    def of(
        cls,
        store: Store,
        name: str,
        *,
        algorithm: Algorithm = Algorithm.XXH3,
        before_metadata: Callable[[bytes], None] | None = None,
    ) -> Writer:
        """A writer of the step `name` in a store that is open, and stays open.

        The step's folder must exist, where the store has folders.
        `before_metadata` is called with the metadata, on rank 0, right before it is published.
        """
        folders = store.folders
        writer = cls(folders.path_of(name) if folders is not None else f"{store.url}/{name}")
        writer._within = store
        writer._algorithm = algorithm
        writer._before_metadata = before_metadata
        return writer

    # What `dcp.save` calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, of another step where `checkpoint_id` is given."""
        if checkpoint_id:
            self._path, self._within = os.fspath(checkpoint_id), None
        self._save_id = str(uuid.uuid4())
        self.written = {}

    def storage_meta(self) -> StorageMeta:
        """What the metadata records of this save."""
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Take note of the rank where each one saves metadata of its own."""
        self._rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder of the step; a writer of an open store is given one that is there."""
        if self._within is not None:
            return plan
        with self._opened() as (store, name):
            if store.folders is not None:
                try:
                    with suppress(AlreadyExists):
                        store.folders.make_folder(name)
                except PathNotFound as error:
                    # It may be on a file system that is not mounted any more.
                    raise PathNotFound(
                        f"{error.message}; a save does not create the folder of the run",
                        next_command=f"mkdir {shlex.quote(store.url)}",
                    ) from error
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of each rank; raises `AlreadyExists` where there is metadata."""
        with self._opened() as (store, name), suppress(PathNotFound):
            if any(file.path == f"{name}/{self._metadata}" for file in store.list_dir(name)):
                raise AlreadyExists(
                    f"{self._path} holds a checkpoint already; it is not written over",
                    next_command=command_line("verify", self._path),
                )
        first = self._rank or 0
        return [
            dataclasses.replace(plan, storage_data=first + rank) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of this rank, durably; the future is done."""
        files = self._files(plan, planner)
        with self._opened() as (store, name):
            # No daemon threads: torch runs in these, and would abort where the process ends.
            pool = ThreadPoolExecutor(self._n_threads, "ckptctl-write")
            try:
                written = [*pool.map(partial(_write_file, store, name, self._algorithm), files)]
            finally:
                pool.shutdown(cancel_futures=True)
            if store.folders is not None:
                store.folders.sync_folder(name)
        self.written = {file.name: one for file, one in zip(files, written, strict=True)}
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for file in files for result in file.results()])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the metadata of all that was written; on rank 0 only, with collectives."""
        metadata.storage_data = {
            result.index: result.storage_data for written in results for result in written
        }
        metadata.storage_meta = self.storage_meta()
        if any(field.name == "version" for field in dataclasses.fields(metadata)):
            metadata.version = filesystem.CURRENT_DCP_VERSION  # torch 2.9 and later
        data = pickle.dumps(metadata)
        if self._before_metadata is not None:
            self._before_metadata(data)
        with self._opened() as (store, name):
            store.put(f"{name}/{self._metadata}", data)
            if store.folders is not None:
                store.folders.sync_folder("")
        digester = Digester(self._algorithm)
        digester.update(data)
        self.written = {**self.written, self._metadata: WrittenFile(len(data), digester.digests())}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is an address that can be opened; nothing is asked of the storage."""
        try:
            check_address(os.fspath(checkpoint_id))
        except UsageError:
            return False
        return True

    # What they have in common

    @property
    def checkpoint_id(self) -> str:
        """The address of the step; torch names it in its logs."""
        return self._path

    @property
    def _metadata(self) -> str:
        """The name of the metadata file that this rank publishes, if it publishes one."""
        return METADATA if self._rank is None else f"__{self._rank}{METADATA}"

    @contextmanager
    def _opened(self) -> Iterator[tuple[Store, str]]:
        """The store of the folder that holds the step, and the name of the step in it."""
        if self._within is not None:
            yield self._within, base_name(self._path)
            return
        name = base_name(self._path)
        if name in ("", ".", ".."):
            raise UsageError(f"{self._path!r} names no folder that a checkpoint can be saved in")
        with open_store(parent_url(self._path), self._storage) as store:
            yield store, name

    def _files(self, plan: SavePlan, planner: SavePlanner) -> list[_ShardFile]:
        """The files of this rank, with their records in the order in which torch writes them."""
        items = plan.items
        shares = _shared(items, self._n_threads) if self._single_file else [[one] for one in items]
        name = f"__{plan.storage_data}_{{}}.distcp"
        records = ([_record_of(item, planner) for item in share] for share in shares)
        return [_ShardFile(name.format(number), held) for number, held in enumerate(records)]


def _shared(items: Sequence[WriteItem], n_files: int) -> list[list[WriteItem]]:
    """The items by file: values in turns, then each tensor where the fewest bytes are."""
    values = [item for item in items if item.type == WriteItemType.BYTE_IO]
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    if n_files == 1:
        return [values + tensors]
    shares = [values[first::n_files] for first in range(n_files)]
    loads = [0] * n_files
    for item in sorted(tensors, key=_n_bytes, reverse=True):
        lightest = loads.index(min(loads))
        loads[lightest] += _n_bytes(item)
        shares[lightest].append(item)
    return shares


def _n_bytes(item: WriteItem) -> int:
    """How many bytes the elements of an item take up; 0 for a value."""
    about = item.tensor_data
    return 0 if about is None else prod(about.chunk.sizes) * about.properties.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Record:
    """A record of `length` bytes, which `pieces` makes anew each time."""

    index: MetadataIndex
    length: int
    pieces: Callable[[], Iterable[memoryview]]


def _record_of(item: WriteItem, planner: SavePlanner) -> _Record:
    """The record of an item; a plain tensor is asked for again when it is written."""
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        return _held(item, data.getbuffer())
    dtype = str(data.dtype).removeprefix("torch.")
    tensor = data.detach()
    if not is_plain(tensor) or dtype not in WRITABLE:
        return _held(item, _saved_by_torch(tensor))
    shape, strides = tuple(tensor.shape), saved_strides(tensor)

    def pieces() -> Iterable[memoryview]:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)  # noqa: S101 - it was one before
        elements = elements_of(tensor.detach(), strides)
        return record_of(dtype, shape, map(block_of, elements), strides)

    return _Record(item.index, tensor_frame(dtype, shape, strides).n_bytes, pieces)


def _held(item: WriteItem, data: memoryview) -> _Record:
    """A record that is held in memory until it is written: of a value, or of a rare tensor."""
    return _Record(item.index, len(data), lambda: (data,))


def _saved_by_torch(tensor: torch.Tensor) -> memoryview:
    """The record of a tensor whose memory alone is not its values: quantized, conjugated."""
    tensor = tensor.cpu()
    if tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()  # a view is saved without the rest of what it is a view of
    saved = BytesIO()
    torch.save(tensor, saved)
    return saved.getbuffer()


@dataclass(frozen=True, slots=True)
class _ShardFile:
    """A file of records that follow one another."""

    name: str
    records: Sequence[_Record]

    @property
    def size(self) -> int:
        return sum(record.length for record in self.records)

    def pieces(self) -> Iterator[memoryview]:
        for record in self.records:
            yield from record.pieces()

    def results(self) -> Iterator[WriteResult]:
        """Where each record lies, as torch takes it."""
        at = 0
        for record in self.records:
            info = filesystem._StorageInfo(self.name, at, record.length)
            yield WriteResult(record.index, record.length, info)
            at += record.length


def _write_file(store: Store, step: str, algorithm: Algorithm, file: _ShardFile) -> WrittenFile:
    """Write one file of a step, and digest it on the way."""
    path = f"{step}/{file.name}"
    written: list[WrittenFile] = []

    def digested() -> Iterator[memoryview]:
        # The storage may ask for them again: the last time counts.
        digester, size = Digester(algorithm), 0
        kind = store.upload_checksum
        checksum = None if kind is None else checksumming(kind)
        for piece in joined(file.pieces()):
            digester.update(piece)
            if checksum is not None:
                checksum.update(piece)
            size += len(piece)
            yield piece
        of_store = None if checksum is None else checksum.hexdigest()
        written.append(WrittenFile(size, digester.digests(), of_store))

    put = store.put_pieces if store.folders is None else store.folders.write_in_place
    put(path, digested, file.size)
    size = written[-1].size if written else 0
    if size != file.size:
        raise SaveFailed(
            f"{path} was planned with {file.size:,} bytes, and {size:,} were written: a tensor was "
            "changed while it was saved"
        )
    return written[-1]
