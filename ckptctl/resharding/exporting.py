"""How does a step become files of safetensors that others read, or a file a step?

Whole tensors in files of at most so many bytes, with an index, streamed as a reshard is:
elements are read by ranges, every record of the source is proven once, and every file
is read again before the folder is published. The format carries no checksums: nobody can
prove the result later. The way from a file of `torch.save` is the question of `importing`.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

from ckptctl.checks.byte_pass import Limits, OnProgress, Piece, read_runs
from ckptctl.errors import PathNotFound, StorageError, StorageUnavailable, UsageError
from ckptctl.findings import Report
from ckptctl.formats.safetensors import NAMES, header_bytes, index_bytes
from ckptctl.judge.looking import list_step
from ckptctl.judge.verifying import OpenTarget
from ckptctl.model import DTYPE_SIZES
from ckptctl.resharding.copying import Crc, FileCopy
from ckptctl.resharding.cutting import whole
from ckptctl.resharding.executing import Place, check_space
from ckptctl.resharding.importing import import_flat, one_file
from ckptctl.resharding.journal import work_folder
from ckptctl.resharding.planning import TargetFile
from ckptctl.resharding.proving import prove
from ckptctl.resharding.reading import Damage, Reader, SourceFiles
from ckptctl.resharding.results import Converted
from ckptctl.resharding.sources import (
    Source,
    SourcePart,
    SourceTensor,
    check_format,
    refusal,
    source_of,
)
from ckptctl.resharding.steps import (
    DEFAULT_MEMORY,
    Opening,
    look_whole,
    opened_step,
    target_place,
    with_finding,
)
from ckptctl.resharding.writing import Budget, Told, budget, in_threads
from ckptctl.storage.contract import Store
from ckptctl.storage.local import LocalStore

FILE_BYTES = 5_000_000_000
"""How large a file may get, unless the caller says otherwise; one tensor may be larger."""


def convert(
    source: str,
    target: str,
    *,
    world_size: int | None = None,
    only_model: bool = False,
    strip: str = "",
    file_bytes: int | None = None,
    accept_unverifiable: bool = False,
    memory: int = DEFAULT_MEMORY,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
    pattern: str | None = None,
    grace_s: float = 600.0,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
) -> Converted:
    """Write a step as safetensors, or a file of `torch.save` as a step of sharded DCP.

    Where `source` is the path of a file, `target` is the path of the new step, and
    `world_size` how many ranks it is cut for, 1 if nobody says. Dicts come apart as
    torch's own checkpoints have it, tensors and plain values become entries; anything
    else is refused by its key. Nothing in the file runs. The step is proven, sealed and
    published as by `reshard`.

    Else `source` is a step, named as for `verify`, and its tensors are written as
    safetensors into the folder `target`. `only_model` leaves out all but the model; `strip`
    is taken away from the beginning of names that have it. Entries that are no tensors
    have no place in the format, and are counted. Files are begun anew before they have
    more than `file_bytes`, `FILE_BYTES` if nobody says.

    A source that is not whole is refused, and damage ends it: the answer bears the report,
    and nothing is published. Raises `UsageError` where `target` is there, or a tensor has
    a dtype that the format lacks, or a value is not plain; `StorageError`.

    Cost: every byte of the source read once; of the result, written once and read once.
    """
    opening: Opening = {
        "storage_options": storage_options,
        "endpoint_url": endpoint_url,
        "timeout_s": timeout_s,
    }
    with one_file(source, opening) as file:
        if file is not None:
            if only_model or strip or file_bytes is not None:
                raise UsageError(
                    f"{source} is a file, which becomes a step as a whole: only_model, strip and "
                    "file_bytes are for a step that becomes safetensors",
                    next_command=shlex.join(
                        ["ckptctl", "convert", source, target]
                        + ([] if world_size is None else ["--world-size", str(world_size)])
                    ),
                )
            with target_place(target, opening) as place:
                return import_flat(
                    file,
                    place,
                    world_size=_ranks(world_size),
                    accept_unverifiable=accept_unverifiable,
                    memory=memory,
                    jobs=jobs,
                    on_progress=on_progress,
                )
    if world_size is not None:
        raise UsageError(
            f"{source} is no file: a step becomes safetensors, which are cut for no world size",
            next_command=shlex.join(
                ["ckptctl", "reshard", source, target, "--world-size", str(world_size)]
            ),
        )
    with (
        opened_step(source, pattern, grace_s, opening) as (found, checked),
        target_place(target, opening) as place,
    ):
        looked = look_whole(found, checked, accept_unverifiable=accept_unverifiable)
        check_format(looked)
        if refusal(looked.report, accept_unverifiable=accept_unverifiable):
            return _refused(found.url, place.url, looked.report)
        read = source_of(looked)
        room = budget(memory, jobs, found.store, place.store)
        planned = _planned(
            read, only_model=only_model, strip=strip, file_bytes=file_bytes or FILE_BYTES
        )
        export = _Export(read, planned, found, place, room)
        try:
            export.write(on_progress)
        except Damage as damage:
            return _refused(found.url, place.url, with_finding(looked.report, damage.finding))
        n_others = sum(len(part.bytes_entries) for part in read.parts)
        return _answer(found.url, place.url, planned, n_others, looked.report)


def _ranks(world_size: int | None) -> int:
    if world_size is not None and world_size < 1:
        raise UsageError(f"--world-size is {world_size}; a job has at least 1 rank")
    return world_size or 1


_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the result: its name there, and where it comes from."""

    name: str
    part: SourcePart
    tensor: SourceTensor

    @property
    def n_bytes(self) -> int:
        return prod(self.tensor.entry.shape) * DTYPE_SIZES[self.tensor.entry.dtype]


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the result, and what it begins with."""

    name: str
    tensors: tuple[_Tensor, ...]
    header: bytes

    @property
    def n_bytes(self) -> int:
        return len(self.header) + sum(tensor.n_bytes for tensor in self.tensors)


def _planned(source: Source, *, only_model: bool, strip: str, file_bytes: int) -> tuple[_File, ...]:
    """The files, each with its tensors by name."""
    tensors: dict[str, _Tensor] = {}
    for part in source.parts:
        for tensor in part.tensors:
            entry = tensor.entry
            if only_model and tensor.kind != "model":
                continue
            if entry.dtype not in NAMES:
                raise UsageError(f"{entry.fqn} is of dtype {entry.dtype}, which safetensors lack")
            name = entry.fqn.removeprefix(strip)
            if not name or name in tensors:
                raise UsageError(f"two tensors would be called {name!r}, or one nothing at all")
            tensors[name] = _Tensor(name, part, tensor)
    if not tensors:
        raise UsageError(f"{source.url} holds no tensor that is asked for")
    groups: list[list[_Tensor]] = [[]]
    n_bytes = 0
    for _, one in sorted(tensors.items()):
        if groups[-1] and n_bytes + one.n_bytes > file_bytes:
            groups.append([])
            n_bytes = 0
        groups[-1].append(one)
        n_bytes += one.n_bytes
    return tuple(_file(number, len(groups), group) for number, group in enumerate(groups, 1))


def _file(number: int, total: int, group: Sequence[_Tensor]) -> _File:
    name = "model.safetensors" if total == 1 else f"model-{number:05}-of-{total:05}.safetensors"
    # The format wants larger elements first, so that all are aligned.
    in_order = sorted(group, key=lambda t: (-DTYPE_SIZES[t.tensor.entry.dtype], t.name))
    entries = [(t.name, t.tensor.entry.dtype, t.tensor.entry.shape, t.n_bytes) for t in in_order]
    return _File(name, tuple(in_order), header_bytes(entries))


class _Export:
    """The writing of a result, with what its steps share."""

    def __init__(
        self,
        source: Source,
        planned: Sequence[_File],
        found: OpenTarget,
        place: Place,
        room: Budget,
    ) -> None:
        self._source = source
        self._planned = planned
        self._place = place
        self._room = room
        self._files = {
            part.path: SourceFiles(
                found.store,
                f"{found.name}/{part.path}" if part.path else found.name,
                found.url,
                part.path,
            )
            for part in source.parts
        }
        said = repr([(file.name, file.header) for file in planned]) + source.url
        digests = repr([part.digests for part in source.parts])
        self._identity = hashlib.sha256((said + digests).encode()).hexdigest()[:32]
        aside = f"{work_folder(self._identity)}/{place.name}"
        self._folder = aside if place.is_moved else place.name
        self._crcs: dict[str, Crc] = {}

    def write(self, on_progress: OnProgress | None) -> None:
        """Write, prove, read again, publish."""
        store, name = self._place.store, self._place.name
        with suppress(PathNotFound):
            list_step(store, name)
            raise UsageError(f"{self._place.url} is there already, and nothing is replaced")
        if isinstance(store, LocalStore):
            check_space(store, name, sum(file.n_bytes for file in self._planned))
        told = Told()
        copies = [_Copy(file, self._files, self._room, told) for file in self._planned]
        in_threads(
            [self._task(copy) for copy in copies],
            self._room.jobs,
            told,
            sum(file.n_bytes for file in self._planned),
            on_progress,
        )
        for part in self._source.parts:
            prove(
                part,
                self._files[part.path],
                [piece for copy in copies for piece in copy.proof.get(part.path, ())],
                self._room.buffers.held,
                Limits(self._room.jobs),
                only=[t.tensor.entry.fqn for f in self._planned for t in f.tensors
                      if t.part is part],
            )  # fmt: skip
        self._read_again(store, copies)
        if len(self._planned) > 1:
            of = {tensor.name: file.name for file in self._planned for tensor in file.tensors}
            total = sum(tensor.n_bytes for file in self._planned for tensor in file.tensors)
            store.put(f"{self._folder}/{_INDEX}", index_bytes(of, total), replace=True)
        self._publish(store, name)

    def _task(self, copy: _Copy) -> Callable[[], None]:
        path = f"{self._folder}/{copy.file.name}"
        return lambda: self._place.store.put_pieces(path, copy.pieces, copy.file.n_bytes)

    def _read_again(self, store: Store, copies: Sequence[_Copy]) -> None:
        runs = [_Again(f"{self._folder}/{copy.file.name}", copy) for copy in copies]
        read_runs(store, runs, Limits(self._room.jobs))
        for run in runs:
            if run.crc != run.copy.crc:
                raise StorageUnavailable(
                    f"{self._place.url}: {run.copy.file.name} reads other bytes than were "
                    "written; nothing was published"
                )

    def _publish(self, store: Store, name: str) -> None:
        if not isinstance(store, LocalStore):
            return
        expected = {file.name for file in self._planned} | {_INDEX}
        for file in list_step(store, self._folder):
            # What a call that was killed left half written.
            if file.path not in expected:
                store.remove(f"{self._folder}/{file.path}")
        store.move(self._folder, name)
        with suppress(StorageError):
            folder = work_folder(self._identity)
            for _ in range(3):
                store.remove(folder)
                folder = folder.rpartition("/")[0]


class _Copy:
    """Makes one file; `proof` are the runs that went over, by part, `crc` that of the file."""

    def __init__(
        self, file: _File, files: Mapping[str, SourceFiles], room: Budget, told: Told
    ) -> None:
        self.file = file
        self.proof: dict[str, list] = {}  # type: ignore[type-arg]
        self.crc = 0
        self._files = files
        self._room = room
        self._told = told

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file in order; each piece is overwritten by the next."""
        from zlib_ng.zlib_ng import crc32, crc32_combine

        self.proof.clear()
        self.crc = crc32(self.file.header)
        block = memoryview(bytearray(self._room.buffers.block))
        yield memoryview(self.file.header)
        for one in self.file.tensors:
            files = self._files[one.part.path]
            copy = FileCopy(
                TargetFile(self.file.name, 0), files, self._room.buffers, self._told.add
            )
            (box,) = whole(one.tensor.entry.shape, 1)
            crc = Crc()
            with Reader(files, self._room.buffers) as reader:
                yield from copy.elements(one.tensor, box, reader, block, crc)
            self.crc = crc32_combine(self.crc, crc.value, one.n_bytes)
            self.proof.setdefault(one.part.path, []).extend(copy.proof)


class _Again:
    """Reads a file that was written; see `byte_pass.Run`."""

    def __init__(self, path: str, copy: _Copy) -> None:
        self.path = path
        self.copy = copy
        self.n_bytes = copy.file.n_bytes
        self.crc = 0

    def pieces(self, limit: int) -> Iterator[Piece]:
        """See `byte_pass.Run`."""
        for at in range(0, self.n_bytes, limit):
            yield Piece(at, min(limit, self.n_bytes - at))

    def take(self, piece: Piece, data: memoryview) -> None:  # noqa: ARG002 - in order
        """See `byte_pass.Run`."""
        from zlib_ng.zlib_ng import crc32

        self.crc = crc32(data, self.crc)


def _answer(
    source: str, target: str, planned: Sequence[_File], n_others: int, report: Report
) -> Converted:
    n_tensors = sum(len(file.tensors) for file in planned)
    return Converted(
        source=source,
        target=target,
        written=True,
        n_tensors=n_tensors,
        n_left_out=n_others,
        n_files=len(planned),
        n_bytes=sum(file.n_bytes for file in planned),
        report=report,
        message=f"{n_tensors:,} tensors written as safetensors, every byte read again",
        exit_code=0,
        next_command=None,
    )


def _refused(source: str, target: str, report: Report) -> Converted:
    return Converted(
        source=source,
        target=target,
        written=False,
        n_tensors=0,
        n_left_out=0,
        n_files=0,
        n_bytes=0,
        report=report,
        message=f"not converted: {source} is {report.verdict.value}; nothing was published",
        exit_code=report.exit_code,
        next_command=f"ckptctl verify {shlex.quote(source)} --level content",
    )
