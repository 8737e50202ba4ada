"""Write files that hold whole tensors, verified, or none at all.

Each file is streamed once, in order: elements are read by ranges, and every source record
is verified before the file ends. The file is then read again, and on a file system a rename
publishes the result. `exporting` produces the bytes around the elements.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from ckptctl.data_classes import dataclass
from ckptctl.errors import PathNotFound, StorageError, StorageUnavailable, UsageError
from ckptctl.inspection.open_step import list_step
from ckptctl.records.byte_pass import CrcRun, Limits, OnProgress, read_runs
from ckptctl.records.slices import TensorSlice
from ckptctl.resharding.copying import FileCopy, prove, work_folder
from ckptctl.resharding.executing import Place, check_space
from ckptctl.resharding.planning import TargetFile
from ckptctl.resharding.reading import Piece as Run
from ckptctl.resharding.reading import SliceReader, SourceFiles
from ckptctl.resharding.sources import SourcePart, SourceTensor
from ckptctl.resharding.writing import Budget, WriteProgress, in_threads
from ckptctl.storage.contract import Store


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of the result: its name there, and where it comes from."""

    name: str
    part: SourcePart
    tensor: SourceTensor

    @property
    def n_bytes(self) -> int:
        """The bytes of its elements."""
        return self.tensor.n_bytes


class WholeFile(Protocol):
    """A file of the result. `name` is below the target; empty if that is the file itself."""

    @property
    def name(self) -> str:
        """Its path below the target."""
        ...

    @property
    def tensors(self) -> Sequence[WholeTensor]:
        """The tensors in it, in order."""
        ...

    @property
    def n_bytes(self) -> int:
        """Its size."""
        ...

    def between(self, crcs: Sequence[int]) -> bytes:
        """The bytes between the first tensors, whose checksums are `crcs`, and the next one."""
        ...


def write_whole(
    planned: Sequence[WholeFile],
    beside: Mapping[str, bytes],
    files: Mapping[str, SourceFiles],
    place: Place,
    room: Budget,
    *,
    identity: str,
    on_progress: OnProgress | None,
) -> None:
    """Write, verify, read again, publish.

    `beside` are small files that are written last, `files` the records of each part by its
    path. Raises `Damage` if the source does not match what was saved, `UsageError` if the
    target exists, `StorageError`.
    """
    store = place.store
    with suppress(PathNotFound):
        list_step(store, place.name)
        raise UsageError(
            f"{place.url} already exists; remove it or choose another name",
            next_command=f"ckptctl show {shlex.quote(place.url)}",
        )
    n_bytes = sum(file.n_bytes for file in planned)
    if store.folders is not None:
        check_space(store.folders, store.url, place.name, n_bytes)
    work = _Work(planned, beside, place, identity)
    progress, proving = WriteProgress(), threading.Lock()
    copies = [_Copy(file, files, room, progress, proving) for file in planned]
    in_threads([work.task(copy) for copy in copies], room.jobs, progress, n_bytes, on_progress)
    work.read_again(copies, Limits(room.jobs))
    for name, data in beside.items():
        store.put(work.path(name), data, replace=True)
    work.publish()


class _Work:
    """The paths of the files while they are written, and after publication."""

    def __init__(
        self,
        planned: Sequence[WholeFile],
        beside: Mapping[str, bytes],
        place: Place,
        identity: str,
    ) -> None:
        self._names = {file.name for file in planned} | {*beside}
        self._place = place
        self._aside = work_folder(identity)
        self._target = f"{self._aside}/{place.name}" if place.is_moved else place.name

    def path(self, name: str) -> str:
        """The path to which a file is written."""
        return f"{self._target}/{name}" if name else self._target

    def task(self, copy: _Copy) -> Callable[[], None]:
        """The task that writes a file."""
        path = self.path(copy.file.name)
        return lambda: self._place.store.put_pieces(path, copy.pieces, copy.file.n_bytes)

    def read_again(self, copies: Sequence[_Copy], limits: Limits) -> None:
        """Raise `StorageUnavailable` if a file does not read back as it was written."""
        runs = [CrcRun(self.path(copy.file.name), 0, copy.file.n_bytes) for copy in copies]
        read_runs(self._place.store, runs, limits)
        for copy, run in zip(copies, runs, strict=True):
            if run.crc != copy.crc:
                end = "nothing was published" if self._place.is_moved else "remove its leftovers"
                named = copy.file.name or self._place.name
                raise StorageUnavailable(
                    f"{self._place.url}: {named} does not read back as written; {end}"
                )

    def publish(self) -> None:
        """Publish the result, atomically where the storage can."""
        store = self._place.store
        if store.folders is None:
            return
        if "" not in self._names:
            self._clear(store)
        store.folders.move(self._target, self._place.name)
        with suppress(StorageError):
            folder = self._aside
            for _ in range(3):
                store.remove(folder)
                folder = folder.rpartition("/")[0]

    def _clear(self, store: Store) -> None:
        """Remove the incomplete files of a call that was killed."""
        for file in list_step(store, self._target):
            if file.path not in self._names:
                store.remove(f"{self._target}/{file.path}")


class _Copy:
    """Produces one file; `crc` is the checksum of all that was written."""

    def __init__(
        self,
        file: WholeFile,
        files: Mapping[str, SourceFiles],
        room: Budget,
        progress: WriteProgress,
        proving: threading.Lock,
    ) -> None:
        self.file = file
        self.crc = 0
        self._proving = proving
        self._files = files
        self._room = room
        self._written = progress

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file in order; each piece is overwritten by the next.

        Raises `Damage` before the last piece if the source does not match what was saved.
        """
        from zlib_ng.zlib_ng import crc32, crc32_combine

        crcs: list[int] = []
        proof: dict[str, list[Run]] = {}
        block = memoryview(bytearray(self._room.buffers.block))
        before = self.file.between(crcs)
        self.crc = crc32(before)
        yield memoryview(before)
        for one in self.file.tensors:
            files = self._files[one.part.path]
            copy = FileCopy(
                TargetFile(self.file.name, 0), files, self._room.buffers, self._written.add
            )
            every = TensorSlice.whole(one.tensor.entry.shape)
            crc = 0
            with SliceReader(files, self._room.buffers) as reader:
                for part in copy.elements(one.tensor, every, reader, block):
                    crc = crc32_combine(crc, part.crc, len(part.data))
                    yield part.data
            proof.setdefault(one.part.path, []).extend(copy.proof)
            crcs.append(crc)
            if len(crcs) == len(self.file.tensors):
                self._prove(proof)
            self.crc = crc32_combine(self.crc, crc, one.n_bytes)
            if behind := self.file.between(crcs):
                self.crc = crc32(behind, self.crc)
                yield memoryview(behind)

    def _prove(self, proof: Mapping[str, Sequence[Run]]) -> None:
        """Compare every record that went into the file with its checksum."""
        for part in {one.part.path: one.part for one in self.file.tensors}.values():
            # One file at a time: reading records again takes memory too.
            with self._proving:
                prove(
                    part,
                    self._files[part.path],
                    proof[part.path],
                    self._room.buffers.held,
                    Limits(self._room.jobs),
                    only=[t.tensor.entry.fqn for t in self.file.tensors if t.part is part],
                )
