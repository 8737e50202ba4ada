"""Write the files of a new step with several threads, and verify the source records on the way.

Each thread produces one file at a time, in order and a block at a time, so memory is what one
thread needs times the number of threads and does not grow with tensor size. Several processes
share the files.

Where elements are copied as they lie, one checksum serves both records: the new one, and the
old one of which they are a part. Combined in order over all files, these must give the
checksum that was saved with the record. Records whose parts were not copied in runs are read
whole instead, once.

The runs of each written file are recorded in a journal: a later call with the same plan
continues from there, and another plan uses another work folder. Nothing else reads these files.
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ckptctl.errors import OptionError, PathNotFound, RecordUnreadable
from ckptctl.formats.archive.directory import read_directory
from ckptctl.formats.bounded_json import decode_json
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.records.byte_pass import CrcRun, Limits, OnProgress, read_runs
from ckptctl.records.loading import TensorRecord, WrongElements
from ckptctl.records.slices import record_of
from ckptctl.records.verification import CrcPart, RecordPass, check_parts, combined_crc
from ckptctl.resharding.planning import TargetFile
from ckptctl.resharding.sources import (
    SMALLEST_BLOCK,
    CopiedBytes,
    SliceReader,
    SourceBytes,
    SourceDamaged,
    SourceFiles,
    SourcePart,
    ThreadLimits,
)
from ckptctl.storage.contract import Store, StoreKind, read_if_there
from ckptctl.storage.in_flight import act_in_flight
from ckptctl.storage.objects import PART_BYTES

DEFAULT_MEMORY = 256 << 20
"""The default memory limit of a reshard, in bytes."""

MIN_MEMORY = 96 << 20
"""The smallest memory limit, in bytes: the interpreter and the plan take up half of it."""

_OWN_BYTES = 48 << 20
_MAX_JOBS = 8
_LARGEST_BLOCK = 2 << 20
_PARTS_IN_FLIGHT = 5


def budget(memory: int, jobs: int | None, source: Store, target: Store) -> ThreadLimits:
    """The threads and buffers that fit in `memory` bytes; raises `UsageError` if too little.

    An upload holds a few more parts.
    """
    if memory < MIN_MEMORY:
        raise OptionError(
            "--memory",
            f"is {memory:,} bytes; at least {MIN_MEMORY >> 20} MiB are needed",
            instead="--memory 256M",
        )
    waits = StoreKind.LOCAL not in (source.kind, target.kind) or source.kind is StoreKind.OBJECT
    # A thread that flushes its file leaves its processor to one more.
    usual = _MAX_JOBS if waits else min(_MAX_JOBS, (os.cpu_count() or 1) + 1)
    upload = _PARTS_IN_FLIGHT * PART_BYTES if target.kind is StoreKind.OBJECT else 0
    free = memory - _OWN_BYTES
    n = max(1, min(jobs or usual, free // (upload + 8 * SMALLEST_BLOCK)))
    each = free // n - upload
    block = SMALLEST_BLOCK
    while block < _LARGEST_BLOCK and 8 * block <= each:
        block *= 2
    return ThreadLimits(n, block, max(0, each - 2 * block) // 2)


def share_of(files: Sequence[TargetFile], rank: int, size: int) -> tuple[TargetFile, ...]:
    """The files that process `rank` of `size` writes: about as many bytes as the others."""
    if size == 1:
        return tuple(files)
    loads = [0] * size
    own = []
    for file in sorted(files, key=lambda each: -each.n_bytes):
        lightest = loads.index(min(loads))
        loads[lightest] += file.n_bytes
        if lightest == rank:
            own.append(file)
    return tuple(own)


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
        self,
        file: TargetFile,
        files: SourceFiles,
        room: ThreadLimits,
        count: Callable[[int], None],
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


# What an interrupted call has written: one JSON file for each complete shard file


def work_folder(identity: str) -> str:
    """The work folder of a plan, below the root that holds the new step."""
    return f"{OWN_FOLDER}/resharding/{identity}"


def note(
    store: Store, identity: str, name: str, path: str, size: int, proof: Sequence[CopiedBytes]
) -> None:
    """Record that a file of the new step `name` is written, and the runs that went into it."""
    document = {"schema": SCHEMA, "path": path, "size": size, "proof": [list(p) for p in proof]}
    data = json.dumps(document, separators=(",", ":")).encode()
    store.put(entry_path(identity, name, path), data, replace=True)


def noted(store: Store, identity: str, name: str, path: str, size: int) -> list[CopiedBytes] | None:
    """The runs in a written file; None if it is not recorded."""
    try:
        data = read_if_there(store, entry_path(identity, name, path), limit=MAX_BYTES)
        document = decode_json(data or b"", max_bytes=MAX_BYTES)
        if not isinstance(document, dict):
            return None
        if (document["schema"], document["path"], document["size"]) != (SCHEMA, path, size):
            return None
        return [
            CopiedBytes(str(f), int(s), int(a), int(n), int(c))
            for f, s, a, n, c in document["proof"]
        ]
    except (PathNotFound, ValueError, TypeError, KeyError):
        return None


def entry_path(identity: str, name: str, path: str) -> str:
    """The path of the journal entry for a file of the new step `name`."""
    return f"{work_folder(identity)}/{name}.written/{path.replace('/', '+')}.json"
