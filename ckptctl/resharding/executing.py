"""Write a planned step: copy, verify, seal, publish.

Files are written aside: on a file system into a work folder of ckptctl below the root, which a
rename publishes; on an object store to their final place, with the metadata last. Before
publication every source record is verified, every byte of the new step is read again, and the
step is sealed.

Each thread produces one file at a time, in order and a block at a time, so memory is what one
thread needs times the number of threads and does not grow with tensor size. Several processes
share the files. Where elements are copied as they lie, one checksum serves both records: the new
one, and the old one of which they are a part. Combined in order over all files, these must give
the checksum that was saved with the record. Records whose parts were not copied in runs are read
whole instead, once.

The runs of each written file are recorded in a journal: the same call continues an interrupted
write from there, and another plan uses another work folder. Nothing else reads these files.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import tee
from operator import attrgetter
from typing import NamedTuple, TypeVar, cast

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import (
    OptionError,
    PathNotFound,
    RecordUnreadable,
    StorageError,
    StorageUnavailable,
    UsageError,
)
from ckptctl.findings import Report
from ckptctl.formats.archive.directory import read_directory
from ckptctl.formats.bounded_json import decode_json
from ckptctl.formats.dcp.writing import metadata_bytes
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.families import families_of
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, is_own, is_stage
from ckptctl.formats.own.contract import CONTRACT_FILE, contract_bytes
from ckptctl.formats.own.data_ledger import DATA_FILE, data_bytes
from ckptctl.formatting import command_line
from ckptctl.inspection.open_step import list_step
from ckptctl.model import FileInfo, Kept
from ckptctl.options import Requirements
from ckptctl.records.byte_pass import PIECE_BYTES, CrcRun, Limits, OnProgress, read_runs
from ckptctl.records.loading import TensorRecord, WrongElements
from ckptctl.records.slices import record_of
from ckptctl.records.verification import CrcPart, RecordPass, check_parts, combined_crc
from ckptctl.resharding.planning import LightestRank, PartPlan, Plan, TargetFile
from ckptctl.resharding.sources import (
    SMALLEST_BLOCK,
    CopiedBytes,
    SliceReader,
    SourceBytes,
    SourceDamaged,
    SourceFiles,
    SourcePart,
    ThreadLimits,
    refusal,
)
from ckptctl.selection.sealing import seal_found
from ckptctl.selection.verifying import OpenTarget
from ckptctl.storage.contract import (
    Data,
    OpenFile,
    Span,
    Store,
    StoreKind,
    Wrapped,
    list_if_there,
    read_if_there,
    spread,
)
from ckptctl.storage.in_flight import act_in_flight
from ckptctl.storage.local import LocalStore
from ckptctl.storage.objects import PART_BYTES
from ckptctl.storage.opening import absolute_url, join_url
from ckptctl.storage.waiting import Retries

DEFAULT_MEMORY = 256 << 20
"""The default memory limit of a reshard, in bytes."""

MIN_MEMORY = 96 << 20
"""The smallest memory limit, in bytes: the interpreter and the plan take up half of it."""

_OWN_BYTES = 48 << 20
_MAX_JOBS = 8
_LARGEST_BLOCK = 2 << 20
_PARTS_IN_FLIGHT = 5


def share_of(files: Sequence[TargetFile], rank: int, size: int) -> tuple[TargetFile, ...]:
    """The files that process `rank` of `size` writes: about as many bytes as the others."""
    if size == 1:
        return tuple(files)
    lightest = LightestRank([0] * size)
    in_order = sorted(files, key=lambda file: -file.n_bytes)
    return tuple(file for file in in_order if lightest.give(file.n_bytes) == rank)


T = TypeVar("T")


class Cancelled(Exception):
    """Another thread failed, or the command was stopped; incomplete files are removed."""


class WriteProgress:
    """Counts the bytes that several threads have written, and stops these threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.n_bytes = 0

    def add(self, n_bytes: int) -> None:
        """Count more bytes; raises `Cancelled` once the threads are to stop."""
        if self._ended.is_set():
            raise Cancelled
        with self._lock:
            self.n_bytes += n_bytes

    def end(self) -> None:
        """Stop all threads."""
        self._ended.set()


def in_threads(
    tasks: Sequence[Callable[[], T]],
    n_threads: int,
    progress: WriteProgress,
    total: int,
    on_progress: OnProgress | None,
) -> list[T]:
    """The results of all tasks; the first error stops the others at their next block.

    `on_progress` is called in the caller's thread.
    """

    def show() -> None:
        if on_progress is not None:
            on_progress(progress.n_bytes, total)

    return act_in_flight(
        lambda task: task(), tasks, width=n_threads, stop=progress.end, while_waiting=show
    )


class FileCopy:
    """Produces one shard file; `pieces` may be taken again from the beginning.

    `proof` holds the runs of source elements that were copied unchanged.
    """

    def __init__(
        self, file: TargetFile, files: SourceFiles, room: ThreadLimits, count: Callable[[int], None]
    ) -> None:
        self.proof: list[CopiedBytes] = []
        self._file = file
        self._files = files
        self._room = room
        self._count = count

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file in order; each piece is overwritten by the next.

        Raises `SourceDamaged` if the source does not match what was saved.
        """
        block = memoryview(bytearray(self._room.block))
        with SliceReader(self._files, self._room, self._count) as reader:
            self.proof = reader.proof
            slices = []
            for item in self._file.items:  # values come first
                if isinstance(item.entry, SourceBytes):
                    yield from self._as_it_is(item.entry, reader, block)
                elif item.elements is not None:
                    slices.append((item.entry, item.elements))
            read = reader.each(slices, block)
            for (tensor, elements), found in zip(slices, read, strict=True):
                yield from record_of(tensor.entry.dtype, elements.sizes, found)

    def _as_it_is(
        self, entry: SourceBytes, reader: SliceReader, block: memoryview
    ) -> Iterator[memoryview]:
        """A non-tensor record: copied whole, and verified on the way."""
        record = entry.record
        if entry.held is not None:
            self._count(len(entry.held))
            yield memoryview(entry.held)
            return

        def damaged(code: str, message: str) -> SourceDamaged:
            return SourceDamaged(self._files.finding(code, record, message))

        def read_tail(n_bytes: int) -> bytes:
            end = bytearray(n_bytes)
            start = record.offset + record.length - n_bytes
            reader.read(record.file, start, memoryview(end))
            return bytes(end)

        passing = None
        tail = b""
        if not record.transforms:
            try:
                directory, tail = read_directory(read_tail, record.length)
                passing = RecordPass(directory, 0)
            except RecordUnreadable as error:
                raise damaged("record.framing", error.message) from error
        for at in range(0, record.length, len(block)):
            piece = block[: min(len(block), record.length - at)]
            reader.read(record.file, record.offset + at, piece)
            if passing is not None:
                passing.take(piece)
            self._count(len(piece))
            yield piece
        if passing is None:
            return
        checked = check_parts(passing.directory, [passing.part], tail)
        if checked.unreadable is not None:
            raise damaged("record.framing", checked.unreadable)
        if checked.wrong is not None:
            names = ", ".join(checked.wrong.names)
            raise damaged("record.crc", f"{names} does not match the checksum saved with it")


SCHEMA = "ckptctl.reshard-journal/1"
MAX_BYTES = 64 << 20


def prove(
    part: SourcePart,
    pieces: Iterable[CopiedBytes],
    room: ThreadLimits,
    on_progress: OnProgress | None = None,
    *,
    only: Iterable[str] | None = None,
) -> int:
    """Verify the records of a part's tensors; returns how many bytes this read.

    `pieces` are those of all target files; `only` are the FQNs that were copied. Raises
    `SourceDamaged`. Records without a checksum are skipped; the caller has allowed that.
    """
    files = part.files
    by_record: dict[tuple[str, int], list[CopiedBytes]] = defaultdict(list)
    for piece in pieces:
        by_record[piece.file, piece.start].append(piece)
    wanted = None if only is None else set(only)
    copied = [tensor for tensor in part.tensors if wanted is None or tensor.fqn in wanted]
    unproven: list[tuple[TensorRecord, CrcRun]] = []
    with SliceReader(files, room) as reader:
        records = reader.open(chunk.number for tensor in copied for chunk in tensor.chunks)
        for number, record in records.items():
            if record.crc is None or not record.n_bytes or record.is_whole:
                continue
            place = files.place(number)
            runs = by_record.get((place.file, place.offset), ())
            crc = combined_crc((CrcPart(r.at, r.length, r.crc) for r in runs), record.n_bytes)
            if crc is None:
                path = files.in_store(place.file)
                run = CrcRun(path, place.offset + record.start, record.n_bytes)
                unproven.append((record, run))
            elif crc != record.crc:
                raise files.damage(number, WrongElements(record, crc))
    n_read = read_runs(
        files.store, [run for _, run in unproven], Limits(room.jobs, on_progress=on_progress)
    )
    for record, run in unproven:
        if run.crc != record.crc:
            raise files.damage(record.number, WrongElements(record, run.crc))
    return n_read


def work_folder(identity: str) -> str:
    """The work folder of a plan, below the root that holds the new step."""
    return f"{OWN_FOLDER}/resharding/{identity}"


class Journal(NamedTuple):
    """What calls have written of the new step `name`: a JSON file for each complete shard file."""

    store: Store
    identity: str
    name: str

    def path_of(self, path: str) -> str:
        """The path of the entry for a file of the new step."""
        file = path.replace("/", "+")
        return f"{work_folder(self.identity)}/{self.name}.written/{file}.json"

    def add(self, file: TargetFile, proof: Sequence[CopiedBytes]) -> None:
        """Record that a file is written, and the runs that went into it."""
        document = {"schema": SCHEMA, "path": file.path, "size": file.n_bytes, "proof": [*proof]}
        data = json.dumps(document, separators=(",", ":")).encode()
        self.store.put(self.path_of(file.path), data, replace=True)

    def runs(self, file: TargetFile) -> list[CopiedBytes] | None:
        """The runs in a written file; None if it is not recorded."""
        try:
            data = read_if_there(self.store, self.path_of(file.path), limit=MAX_BYTES)
            document = decode_json(data or b"", max_bytes=MAX_BYTES)
            if not isinstance(document, dict):
                return None
            stated = document["schema"], document["path"], document["size"]
            if stated != (SCHEMA, file.path, file.n_bytes):
                return None
            return [
                CopiedBytes(str(f), int(s), int(a), int(n), int(c))
                for f, s, a, n, c in document["proof"]
            ]
        except (PathNotFound, ValueError, TypeError, KeyError):
            return None

    def forget(self, file: TargetFile) -> None:
        """Record that a file is not written: it was made of damaged bytes."""
        self.store.put(self.path_of(file.path), b"", replace=True)


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
        """The threads and buffers that fit in `memory` bytes; raises `UsageError` if too little.

        An upload holds a few more parts.
        """
        if self.memory < MIN_MEMORY:
            raise OptionError(
                "--memory",
                f"is {self.memory:,} bytes; at least {MIN_MEMORY >> 20} MiB are needed",
                instead="--memory 256M",
            )
        waits = StoreKind.LOCAL not in (source.kind, target.kind) or source.kind is StoreKind.OBJECT
        # A thread that flushes its file leaves its processor to one more.
        usual = _MAX_JOBS if waits else min(_MAX_JOBS, (os.cpu_count() or 1) + 1)
        upload = _PARTS_IN_FLIGHT * PART_BYTES if target.kind is StoreKind.OBJECT else 0
        free = self.memory - _OWN_BYTES
        n = max(1, min(self.jobs or usual, free // (upload + 8 * SMALLEST_BLOCK)))
        each = free // n - upload
        block = SMALLEST_BLOCK
        while block < _LARGEST_BLOCK and 8 * block <= each:
            block *= 2
        return ThreadLimits(n, block, max(0, each - 2 * block) // 2)


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
    if refusal(report, accept_unverifiable=options.accept_unverifiable):
        return report
    work.publish()
    return WrittenStep(replace(report, url=place.url), continued)


class _Work:
    """The stages of `write`, and the state that they share."""

    def __init__(
        self, plan: Plan, place: Place, room: ThreadLimits, on_progress: OnProgress | None
    ) -> None:
        self.plan = plan
        self.place = place
        self.identity = plan.identity
        self._room = room
        self._on_progress = on_progress
        self._folder = place.written_at(self.identity)
        self._journal = Journal(place.store, self.identity, place.name)

    def check_place(self) -> None:
        """Raise if the target exists, or if there is too little space."""
        if self.place.is_moved:
            if self.place.there() is not None:
                raise self._taken("it already exists")
            written = sum((self._there(self._folder) or {}).values())
            self.place.make_room(max(0, self.plan.n_bytes - written))
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

    def write_shards(self, own: Sequence[TargetFile]) -> int:
        """Write the files that are missing; returns how many were written already."""
        written = self._there(self._folder) or {}
        left = [
            file
            for file in own
            if written.get(file.path) != file.n_bytes or self._journal.runs(file) is None
        ]
        progress = WriteProgress()
        part_of = {file.path: part for part in self.plan.parts for file in part.files}

        def copy_file(file: TargetFile) -> None:
            copy = FileCopy(file, part_of[file.path].source.files, self._room, progress.add)
            path = f"{self._folder}/{file.path}"
            self.place.store.put_pieces(path, copy.pieces, file.n_bytes)
            self._journal.add(file, copy.proof)

        in_threads(
            [partial(copy_file, file) for file in left],
            self._room.jobs,
            progress,
            sum(file.n_bytes for file in left),
            self._on_progress,
        )
        return len(own) - len(left)

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
                for file in part.files:
                    self._journal.forget(file)
                raise

    def _pieces(self, part: PartPlan) -> Iterator[CopiedBytes]:
        for file in part.files:
            pieces = self._journal.runs(file)
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
        url, save_id = absolute_url(self.place.url), str(uuid.UUID(self.identity))
        return {
            part.metadata_path: metadata_bytes(
                part.entries, part.paths, checkpoint_id=url, save_id=save_id
            )
            for part in self.plan.parts
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
            root = store.url.removeprefix("file://")
            return LocalStore(join_url(root, work_folder(self.identity)))
        metadata = self._metadata()
        named = {f"{self.place.name}/{path}": data for path, data in metadata.items()}
        return cast("Store", _StoreWithFiles(store, named))

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


class _StoreWithFiles(Wrapped):
    """A store with a few small files in memory, by path, that are not written yet.

    Object stores have no rename: the metadata completes a step and is written last. To inspect
    the step before that, its store is shown with the metadata in memory.
    """

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
        due, asked = tee(spans)
        others = read(span for span in asked if span.path not in self._files)
        for span in due:
            held = self._files.get(span.path)
            if held is None:
                yield next(others)
            else:
                yield span, held[span.offset : span.offset + span.length]

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
        return cast("Store", _StoreWithFiles(self._store.retrying(retries), self._files))

    def close(self) -> None:
        self._store.close()

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
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        spread(self._data[offset : offset + sum(map(len, buffers))], buffers)
