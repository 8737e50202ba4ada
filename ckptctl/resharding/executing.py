"""Write a planned step: copy, verify, seal, publish.

Files are written aside: on a file system into a work folder of ckptctl below the root,
which a rename publishes; on an object store to their final place, with the metadata
last. Before publication every source record is verified, every byte of the new step is
read again, and the step is sealed. The same call continues an interrupted write.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar, cast

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import PathNotFound, StorageError, StorageUnavailable, UsageError
from ckptctl.findings import Report
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.families import families_of
from ckptctl.formats.frameworks.layouts import is_own, is_stage
from ckptctl.formats.own.contract import CONTRACT_FILE, contract_bytes
from ckptctl.formats.own.data_ledger import DATA_FILE, data_bytes
from ckptctl.formatting import command_line
from ckptctl.inspection.open_step import list_step
from ckptctl.model import FileInfo, Kept
from ckptctl.options import Requirements
from ckptctl.records.byte_pass import PIECE_BYTES, Limits, OnProgress
from ckptctl.resharding.planning import PartPlan, Plan, TargetFile, new_metadata
from ckptctl.resharding.sources import CopiedBytes, SourceDamaged, ThreadLimits
from ckptctl.resharding.writing import (
    DEFAULT_MEMORY,
    FileCopy,
    WriteProgress,
    budget,
    entry_path,
    in_threads,
    note,
    noted,
    prove,
    share_of,
    work_folder,
)
from ckptctl.selection.sealing import seal_found
from ckptctl.selection.verifying import OpenTarget
from ckptctl.storage.contract import (
    Data,
    OpenFile,
    Span,
    Store,
    Wrapped,
    list_if_there,
    spread,
)
from ckptctl.storage.local import LocalStore
from ckptctl.storage.opening import absolute_url, join_url
from ckptctl.storage.waiting import Retries

_SPARE_BYTES = 16 << 20
"""Additional space for seals, notes and folders."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the new step: `name` below the root that `store` is open on."""

    store: Store
    name: str

    @property
    def url(self) -> str:
        """The address of the new step, as it was given."""
        return self.name if self.store.url == "." else join_url(self.store.url, self.name)

    @property
    def is_moved(self) -> bool:
        """Whether the step is written aside and moved, rather than written in place."""
        return self.store.folders is not None

    def written_at(self, identity: str) -> str:
        """Where the files of the work called `identity` are written."""
        return f"{work_folder(identity)}/{self.name}" if self.is_moved else self.name

    def there(self) -> FileInfo | None:
        """What has the name of the new step already; None where it is free.

        Cost: one listing of the folder above. What is there may be large: it is not listed.
        """
        entries = list_if_there(self.store, "")
        return next((entry for entry in entries if entry.path == self.name), None)

    def make_room(self, n_bytes: int) -> None:
        """Create the folder of the new step on a file system, with `n_bytes` of space in it.

        The user named it for this output, so it may be new; nothing else creates one. Raises
        `StorageUnavailable`.
        """
        folders = self.store.folders
        if folders is not None:
            check_space(folders, self.store.url, self.name, n_bytes)
            folders.create_root()

    def clear(self, folder: str, expected: Collection[str]) -> None:
        """Remove what a call that was killed has left in `folder`: all but `expected`."""
        for file in list_step(self.store, folder):
            if file.path not in expected:
                self.store.remove(f"{folder}/{file.path}")

    def move(self, identity: str) -> None:
        """Publish what was written aside, and remove the work folder."""
        folders = self.store.folders
        assert folders is not None  # noqa: S101 - `is_moved`
        folders.move(self.written_at(identity), self.name)
        # Leftovers of the work folder are harmless, so errors are ignored.
        with suppress(StorageError):
            aside = work_folder(identity)
            folders.remove_folder(aside)
            above = aside.rpartition("/")[0]
            for path in (above, above.rpartition("/")[0]):
                self.store.remove(path)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a new step is written, verified and sealed; see `steps.reshard`."""

    accept_unverifiable: bool = False
    memory: int = DEFAULT_MEMORY
    jobs: int | None = None
    key: bytes | None = None
    group: ProcessGroup = field(default_factory=ProcessGroup)
    on_progress: OnProgress | None = None

    def budget(self, source: Store, target: Store) -> ThreadLimits:
        """How many threads write, and what each may hold; raises `UsageError`."""
        return budget(self.memory, self.jobs, source, target)


@dataclass(frozen=True, slots=True)
class WrittenStep:
    """A step that was written; `continued` of its files were written by an earlier call."""

    report: Report
    continued: int


def write(
    plan: Plan, place: Place, room: ThreadLimits, options: WriteOptions
) -> WrittenStep | Report:
    """Write, verify, seal and publish a step; a `Report` if the new step is not complete.

    Every process of the group calls this, and rank 0 publishes; the others get the result of a
    step that is not published yet. Raises `SourceDamaged` if the source does not match what was
    saved, `UsageError` if the target exists, `StorageError`.
    """
    group = options.group
    # Before anything is written, and where an error of one process ends the others.
    if any(identity != plan.identity for identity in group.share(lambda: plan.identity)):
        raise StorageUnavailable(
            f"{plan.source.url}: the processes do not have the same plan: the step is being "
            "written, they were called differently, or do not see the same storage"
        )
    on_progress = group.watch(options.on_progress)
    work = _Work(plan, place, room, on_progress)
    group.from_first(work.check_place)
    own = share_of(plan.shards, group.rank, group.size)
    continued = group.share(lambda: work.write_shards(own))[group.rank]

    def complete() -> Report | None:
        if not group.is_first:
            return None  # waits in `share` for rank 0, and fails where it fails
        work.prove(on_progress)
        work.write_others()
        plan.source.check_unchanged()
        return work.seal(options, on_progress)

    report = group.share(complete)[0]
    if report is None or not group.is_first:
        return WrittenStep(plan.source.report, continued)
    if report.exit_code and not (options.accept_unverifiable and report.exit_code == _UNVERIFIABLE):
        return report
    work.publish()
    return WrittenStep(replace(report, url=place.url), continued)


_UNVERIFIABLE = 22


class _Work:
    """The stages of `write`, and the state that they share."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        room: ThreadLimits,
        on_progress: OnProgress | None,
    ) -> None:
        self.plan = plan
        self.place = place
        self.identity = plan.identity
        self._room = room
        self._on_progress = on_progress
        self._folder = place.written_at(self.identity)

    def check_place(self) -> None:
        """Raise if the target exists, or if there is too little space."""
        if self.place.is_moved:
            if self.place.there() is not None:
                raise self._taken("it already exists")
            self._check_space()
            return
        there = self._there(self.place.name)
        expected = {file.path for file in self.plan.shards}
        expected |= {one.file.path for one in self.plan.files}
        strange = [path for path in there or () if path not in expected and not is_own(path)]
        if strange:
            raise self._taken(f"{strange[0]} already exists")

    def _there(self, name: str) -> dict[str, int] | None:
        """The files of a step by path, with their sizes; None if there is no such step."""
        try:
            return {file.path: file.size for file in list_step(self.place.store, name)}
        except PathNotFound:
            return None

    def _taken(self, why: str) -> UsageError:
        return UsageError(
            f"{self.place.url}: {why}; nothing is replaced",
            next_command=command_line("verify", self.place.url),
        )

    def _check_space(self) -> None:
        written = sum((self._there(self._folder) or {}).values())
        self.place.make_room(max(0, self.plan.n_bytes - written))

    def write_shards(self, own: Sequence[TargetFile]) -> int:
        """Write the files that are missing; returns how many were written already."""
        written = self._there(self._folder) or {}
        left = [
            file
            for file in own
            if written.get(file.path) != file.n_bytes or self._noted(file) is None
        ]
        progress = WriteProgress()
        total = sum(file.n_bytes for file in left)
        part_of = {file.path: part for part in self.plan.parts for file in part.files}
        in_threads(
            [self._task(file, part_of[file.path], progress) for file in left],
            self._room.jobs,
            progress,
            total,
            self._on_progress,
        )
        return len(own) - len(left)

    def _task(
        self, file: TargetFile, part: PartPlan, progress: WriteProgress
    ) -> Callable[[], None]:
        def task() -> None:
            copy = FileCopy(file, part.source.files, self._room, progress.add)
            store = self.place.store
            store.put_pieces(f"{self._folder}/{file.path}", copy.pieces, file.n_bytes)
            name = self.place.name
            note(store, self.identity, name, file.path, file.n_bytes, copy.proof)

        return task

    def _noted(self, file: TargetFile) -> list[CopiedBytes] | None:
        return noted(self.place.store, self.identity, self.place.name, file.path, file.n_bytes)

    def prove(self, on_progress: OnProgress | None) -> None:
        """Compare every source record that was copied with its checksum."""
        for part in self.plan.parts:
            try:
                prove(
                    part.source,
                    self._pieces(part),
                    self._room,
                    on_progress,
                    only=[entry.fqn for entry in part.entries],
                )
            except SourceDamaged:
                self._forget(part)
                raise

    def _forget(self, part: PartPlan) -> None:
        """Remove the journal of a part whose files were made of damaged bytes."""
        for file in part.files:
            path = entry_path(self.identity, self.place.name, file.path)
            self.place.store.put(path, b"", replace=True)

    def _pieces(self, part: PartPlan) -> Iterator[CopiedBytes]:
        for file in part.files:
            pieces = self._noted(file)
            if pieces is None:
                raise StorageUnavailable(
                    f"{self.place.url}: the journal of {file.path} has disappeared; another "
                    "process writes there, or the machines do not see the same storage"
                )
            yield from pieces

    def write_others(self) -> None:
        """Copy the sidecars, and on a file system write the metadata."""
        store, opened = self.place.store, self.plan.source.opened
        expected = {file.path for file in self.plan.shards}
        for sidecar in self.plan.files:
            assert opened is not None  # noqa: S101 - only a step has sidecars
            path, size = sidecar.file.path, sidecar.file.size
            pieces = partial(_whole, opened.store, opened.in_store(path), size)
            store.put_pieces(f"{self._folder}/{path}", pieces, size)
            expected.add(path)
        if self.place.is_moved:
            for path, data in (self._metadata() | self._records()).items():
                store.put(f"{self._folder}/{path}", data, replace=True)
                expected.add(path)
            self.place.clear(self._folder, expected)

    def _records(self) -> dict[str, bytes]:
        """Data ledger and contract of the source, for the new step: of one metadata file."""
        opened = self.plan.source.opened
        metadata = [sha256_of(data) for data in self._metadata().values()]
        if opened is None or len(metadata) != 1:
            return {}
        found: dict[str, bytes] = {}
        if (fields := opened.read_data_ledger()[0]) is not None:
            found[DATA_FILE] = data_bytes({**fields, "metadata": metadata[0]})
        if (terms := opened.read_contract()) is not None:
            found[CONTRACT_FILE] = contract_bytes(terms, metadata[0])
        return found

    def _metadata(self) -> dict[str, bytes]:
        url = absolute_url(self.place.url)
        return {
            part.metadata_path: new_metadata(part, url, self.identity) for part in self.plan.parts
        }

    def seal(self, options: WriteOptions, on_progress: OnProgress | None) -> Report:
        """Verify every byte of the new step, and seal it."""
        name, store = self.place.name, self.place.store
        n_ranks = self.plan.wanted.world_size
        in_stages = any(is_stage(part.source.path) for part in self.plan.parts)
        # Files of the source's ranks are copied as they are, and are as many as before.
        copied = families_of(one.file.path for one in self.plan.files)
        saved = None if in_stages or copied else n_ranks
        shown = self._shown(store)
        sealed = seal_found(
            OpenTarget(shown, name, tuple(list_step(shown, name))),
            Requirements(saved_world_size=saved, key=options.key),
            Limits(self._room.jobs, on_progress=on_progress),
            replace=True,
            accept_unverifiable=options.accept_unverifiable,
            root=store,
        )
        return sealed.report

    def _shown(self, store: Store) -> Store:
        """A store that shows the new step under its own name, as if it were published."""
        if self.place.is_moved:
            return LocalStore(join_url(_local(store), work_folder(self.identity)))
        metadata = self._metadata()
        return with_files(store, {f"{self.place.name}/{p}": d for p, d in metadata.items()})

    def publish(self) -> None:
        """Publish the step, atomically for each part."""
        store, name = self.place.store, self.place.name
        if not self.place.is_moved:
            for path, data in (self._records() | self._metadata()).items():
                store.put(f"{name}/{path}", data, replace=path in (DATA_FILE, CONTRACT_FILE))
            return
        self.place.move(self.identity)


def check_space(folders: LocalStore, url: str, name: str, n_bytes: int) -> None:
    """Raise `StorageUnavailable` if there is no space for `n_bytes` more."""
    needed = n_bytes + _SPARE_BYTES
    free = folders.file_system().free_bytes
    if free < needed:
        raise StorageUnavailable(
            f"{url}: {needed:,} bytes are needed for {name}, and {free:,} are free; nothing "
            "was written",
            next_command=f"df -h {shlex.quote(url)}",
        )


def _local(store: Store) -> str:
    return store.url.removeprefix("file://")


def _whole(store: Store, path: str, size: int) -> Iterator[memoryview]:
    """A file of the source, in pieces."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, max(1, size))))
    with store.open_file(path) as file:
        for at in range(0, size, len(buffer)):
            piece = buffer[: min(len(buffer), size - at)]
            file.read_into(at, piece)
            yield piece


# A step whose metadata is not written yet


D = TypeVar("D", bytes, Data)
_Read = Callable[[Iterable[Span]], Iterator[tuple[Span, D]]]


def with_files(store: Store, files: Mapping[str, bytes]) -> Store:
    """The store with a few small files in memory, by path, that are not written yet.

    Object stores have no rename: the metadata completes a step and is written last. To inspect
    the step before that, its store is shown with the metadata in memory.
    """
    return cast("Store", _WithFiles(store, files))


class _WithFiles(Wrapped):
    """See `Store`."""

    def __init__(self, store: Store, files: Mapping[str, bytes]) -> None:
        super().__init__(store)
        self._files = files

    @property
    def folders(self) -> None:
        """See `Store.folders`: none, since the files in memory are in no folder."""
        return

    def list_dir(self, path: str = "") -> Sequence[FileInfo]:
        return self._with(self._store.list_dir(path), f"{path}/" if path else "", deep=False)

    def list_tree(self, path: str = "") -> Sequence[FileInfo]:
        return self._with(self._store.list_tree(path), f"{path}/" if path else "", deep=True)

    def read(self, path: str, *, limit: int) -> bytes:
        data = self._files.get(path)
        return self._store.read(path, limit=limit) if data is None else data

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        return self._with_own(self._store.read_spans, spans)

    def view_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, Data]]:
        return self._with_own(self._store.view_spans, spans)

    def _with_own(self, read: _Read[D], spans: Iterable[Span]) -> Iterator[tuple[Span, bytes | D]]:
        """Each span with its bytes: those of the store by `read`."""
        asked: deque[Span] = deque()

        def others() -> Iterator[Span]:
            for span in spans:
                asked.append(span)
                if span.path not in self._files:
                    yield span

        for _, data in read(others()):
            while asked[0].path in self._files:
                yield self._from_memory(asked.popleft())
            yield asked.popleft(), data
        while asked:
            yield self._from_memory(asked.popleft())

    def open_file(self, path: str) -> OpenFile:
        data = self._files.get(path)
        return self._store.open_file(path) if data is None else _BytesFile(data)

    def kept(self, paths: Iterable[str]) -> Iterator[Kept]:
        asked = [*paths]
        there = self._store.kept(path for path in asked if path not in self._files)
        known = {kept.path: kept for kept in there}
        for path in asked:
            yield known.get(path) or Kept(path, why_none="it is not written yet")

    def retrying(self, retries: Retries) -> Store:
        return with_files(self._store.retrying(retries), self._files)

    def close(self) -> None:
        self._store.close()

    def _from_memory(self, span: Span) -> tuple[Span, bytes]:
        return span, self._files[span.path][span.offset : span.offset + span.length]

    def _with(self, found: Sequence[FileInfo], prefix: str, *, deep: bool) -> Sequence[FileInfo]:
        there = {info.path for info in found}
        more = [
            FileInfo(path, len(data))
            for path, data in self._files.items()
            if path.startswith(prefix) and path not in there
            if deep or "/" not in path[len(prefix) :]
        ]
        return sorted([*found, *more], key=attrgetter("path"))


class _BytesFile(OpenFile):
    """See `OpenFile`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        spread(self._data[offset : offset + sum(map(len, buffers))], buffers)
