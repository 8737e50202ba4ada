"""Make a step of sharded DCP from a `torch.save` file or a safetensors model.

The step is planned, written, verified, sealed and published like a reshard. No code from the
files runs: `flat_files` reads those of `torch.save`.

The files of a safetensors model hold whole tensors, or the slices that DCP's Hugging Face
writer puts into each shard. Headers give the position of the elements; no checksum verifies
them, so a file that is written to in the meantime is detected by its size and time. Whether
the files are complete is checked in `inspection.rank_files` and `inspection.safetensors`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptctl.errors import RecordUnreadable, UsageError
from ckptctl.findings import Finding, Report, Verdict
from ckptctl.formats.archive.safetensors import (
    INDEX_SUFFIX,
    MAX_HEADER,
    PREFIX,
    SUFFIX,
    TORCH_NAMES,
    StoredTensor,
    parse_header,
    parse_index,
)
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.shape import check_unchanged
from ckptctl.inspection.stages import inspect_safetensors
from ckptctl.inspection.train_state import NO_STATE
from ckptctl.model import (
    ByteRange,
    FileInfo,
    Level,
    Part,
    PartFormat,
)
from ckptctl.options import StorageOptions
from ckptctl.records.reads import read_headers
from ckptctl.records.slices import TensorSlice, row_major
from ckptctl.resharding.executing import Place, WriteOptions, write
from ckptctl.resharding.flat_files import read_flat
from ckptctl.resharding.mesh import Mesh
from ckptctl.resharding.planning import Plan, Wanted, plan
from ckptctl.resharding.reading import Opened, SourceFiles
from ckptctl.resharding.results import Converted, left_out, not_converted
from ckptctl.resharding.sources import (
    Source,
    SourceChunk,
    SourceDamaged,
    SourcePart,
    SourceTensor,
    check_is_copied,
    part_of,
    refusal,
    source_in,
    tensor_entry,
)
from ckptctl.resharding.state_files import (
    MODEL_FOLDERS,
    OPTIMIZER_FOLDERS,
    STATE_BESIDE,
    FilePart,
    StateFiles,
    read_state_file,
)
from ckptctl.selection.verifying import OpenTarget
from ckptctl.storage.contract import Store, list_if_there
from ckptctl.storage.opening import base_name, join_url, open_store, parent_url


@dataclass(frozen=True, slots=True)
class OneFile:
    """A file that an argument names, and the store of the folder that holds it."""

    store: Store
    file: FileInfo

    @property
    def url(self) -> str:
        """The address of the file."""
        return join_url(self.store.url, self.file.path)

    def source(self, report: Report, part: SourcePart, files: Sequence[FileInfo]) -> Source:
        """The source that `files` of the folder make: the file, or those that it names."""
        names = {file.path for file in files}

        def changes() -> Iterator[Finding]:
            listed = list_if_there(self.store, "")
            return check_unchanged(self.url, files, [one for one in listed if one.path in names])

        return Source(self.url, report, (part,), (), changes)


@dataclass(frozen=True, slots=True)
class Into:
    """The step to create: its place, the number of ranks, its content, and how to write it.

    `world_size` None is the number of ranks that the source has files of, or 1.
    `anyway` is the same command with `--accept-unverifiable`, for use in refusals.
    """

    place: Place
    world_size: int | None
    only_model: bool
    under: str
    options: WriteOptions
    anyway: str


@contextmanager
def one_file(source: str, storage: StorageOptions) -> Iterator[OneFile | None]:
    """The file at an address; None if there is none or it is a folder."""
    name = base_name(source)
    if not name or source.endswith("/"):
        yield None
        return
    with open_store(parent_url(source), storage) as store:
        yield OneFile(store, found) if (found := _found(store, name)) else None


def _found(store: Store, name: str) -> FileInfo | None:
    listed = list_if_there(store, "")
    return next((file for file in listed if file.path == name and file.kind == "file"), None)


def import_flat(source: OneFile, into: Into) -> Converted:
    """Write a step from a file of `torch.save`; see `converting.convert`."""
    report = _report(source, "flat")
    try:
        flat = read_flat(source.store, source.file, source.url, only_model=into.only_model)
    except SourceDamaged as damage:
        return not_converted(source.url, into.place.url, report.with_findings(damage.finding))
    if not flat.has_crcs:
        why = "was saved without checksums: its bytes cannot be verified"
        report = report.with_findings(_unproven(source.file.path, why, into))
    made = source.source(report, flat.part, [source.file])
    return _import(made, source, {"": flat.files}, (), into)


def import_file(source: OneFile, into: Into) -> Converted:
    """Write a step from one file of safetensors, or from those that an index names."""
    report = _report(source, "safetensors")
    files: Sequence[FileInfo] = (source.file,)
    try:
        if source.file.path.endswith(INDEX_SUFFIX):
            files = files_of_index(source.store, source.file, source.url)
    except RecordUnreadable as error:
        finding = Finding(error.code, source.file.path, error.message)
        return not_converted(source.url, into.place.url, report.with_findings(finding))
    part = Part("", PartFormat.SAFETENSORS, tuple(files))
    for finding in inspect_safetensors(source.store, "", part):
        report = report.with_findings(finding)
    why = "is a safetensors file, which carries no checksums: its bytes cannot be verified"
    report = report.with_findings(_unproven(source.file.path, why, into))
    if refusal(report, accept_unverifiable=into.options.accept_unverifiable):
        return not_converted(source.url, into.place.url, report)
    read = read_safetensors(source.store, "", source.url, part, under=into.under)
    made = source.source(report, read.part, files)
    return _import(made, source, {"": read.files}, (), into)


def import_folder(
    found: OpenTarget, inspected: Inspection, save: StateFiles | None, into: Into
) -> Converted:
    """Write a step from the files of one `save`, or from the folders of safetensors in a folder."""
    report = inspected.report
    if refusal(report, accept_unverifiable=into.options.accept_unverifiable):
        return not_converted(found.url, into.place.url, _with_next(report, into))
    if save is not None:
        return _import_save(found, inspected, save, into)
    read, notes = _safetensors(found, inspected, into.under)
    kinds = {
        file.path: kind
        for file in inspected.step.files
        if (kind := kind_of_file(inspected.step.layout, file.path))
        and not file.path.endswith(SUFFIX)
    }
    state = [path for path, kind in kinds.items() if not STATE_BESIDE.isdisjoint(kind.names)]
    if state and not into.only_model:
        raise UsageError(
            f"{found.url}: {some_of(state)} beside the safetensors would be left out; --only "
            "model converts the model alone",
            instead="--only model",
        )
    others = [*kinds]
    notes += _left_out(others, "of train state beside the safetensors")
    step = source_in(inspected, [part.part for part in read])
    return _import(step, found, {part.part.path: part.files for part in read}, notes, into)


def _safetensors(
    found: OpenTarget, inspected: Inspection, under: str
) -> tuple[list[SafetensorsPart], list[Finding]]:
    """The folders of safetensors that make a step, and notes about what is left out."""
    folders = [folder for part in inspected.parts for folder in part.safetensors]
    # If the folder holds a model, folders below hold its shards again, or another model.
    model = [folder for folder in folders if not folder.path] or folders
    below = [folder.path for folder in folders if folder not in model]
    read = [
        read_safetensors(found.store, folder.folder, found.url, folder.part, under=under)
        for folder in model
    ]
    unnamed = [name for part in read for name in part.unnamed]
    return read, [
        *_left_out(unnamed, "of safetensors that the index does not name"),
        *_left_out(below, "of safetensors below", "folder"),
    ]


def _import_save(
    found: OpenTarget, inspected: Inspection, save: StateFiles, into: Into
) -> Converted:
    """Write a step with a part for the model and for each optimizer of one save."""
    parts: list[FilePart] = []
    for other in save.others:
        check_is_copied(found.url, other.file)
    if save.lost:
        path = save.lost[0]
        message = f"{path} is not there, and a file of a later number is"
        report = inspected.report.with_findings(
            Finding("file.missing", path, message, next_command="ckptctl explain file.missing")
        )
        return not_converted(found.url, into.place.url, report)
    folders = [folder for part in inspected.parts for folder in part.safetensors]
    below = [folder.path for folder in folders if folder.path]
    notes = [*_left_out(below, "of safetensors below", "folder")]
    try:
        for number, files in save.models.items():
            path = MODEL_FOLDERS.format(number)
            if not files[0].path.endswith((SUFFIX, INDEX_SUFFIX)):
                parts.append(read_state_file(found, files[0], path, "model"))
                continue
            top = next(folder for folder in folders if not folder.path)
            of_model = replace(top.part, files=tuple(files))
            under = into.under or "model"
            model = read_safetensors(found.store, top.folder, found.url, of_model, under=under)
            if model.unnamed:
                raise UsageError(
                    f"{found.url}: {model.unnamed[0]} is not in the index of the model: move it "
                    "away, or the index and the files that it names",
                    next_command=command_line("show", found.url),
                )
            parts.append(FilePart(replace(model.part, path=path), model.files))
        for number, file in save.optimizers.items():
            path = OPTIMIZER_FOLDERS.format(number)
            parts.append(read_state_file(found, file, path, "optimizer"))
    except SourceDamaged as damage:
        report = inspected.report.with_findings(damage.finding)
        return not_converted(found.url, into.place.url, report)
    source = source_in(inspected, [part.part for part in parts], save.others)
    ranks = {file.rank for file in save.others if file.rank is not None}
    for_ranks = replace(into, world_size=into.world_size or len(ranks) or 1)
    return _import(source, found, {part.part.path: part.files for part in parts}, notes, for_ranks)


def import_shards(
    read: Source,
    found: OpenTarget,
    files: Mapping[str, SourceFiles],
    left: Sequence[str],
    into: Into,
) -> Converted:
    """Write a step from the shards of ranks; `left` are the files of which nothing is taken."""
    return _import(read, found, files, [*_left_out(left, "of train state of each rank")], into)


def _import(
    read: Source,
    source: OneFile | OpenTarget,
    files: Mapping[str, SourceFiles],
    notes: Sequence[Finding],
    into: Into,
) -> Converted:
    if refusal(read.report, accept_unverifiable=into.options.accept_unverifiable):
        return not_converted(source.url, into.place.url, read.report)
    mesh = Mesh((("dp", into.world_size or 1),))
    planned = plan(read, Wanted(mesh, only_model=into.only_model))
    if not any(part.entries for part in planned.parts):
        asked = "no model" if into.only_model else "no entries"
        raise UsageError(
            f"{source.url} holds {asked}, so a step cannot be made",
            without=("--only",) if into.only_model else (),
        )
    name = source.file.path if isinstance(source, OneFile) else source.name
    try:
        written = write(
            planned,
            OpenTarget(source.store, name, ()),
            into.place,
            into.options.budget(source.store, into.place.store),
            into.options,
            files,
        )
    except SourceDamaged as damage:
        return not_converted(source.url, into.place.url, read.with_damage(damage))
    if isinstance(written, Report):
        return not_converted(source.url, into.place.url, written)
    return _answer(source, into, planned, read.report, written.report, notes)


def _report(source: OneFile, layout: str) -> Report:
    """The report on a file of which nothing has been compared yet."""
    return Report(
        url=source.url,
        number=None,
        layout=layout,
        verdict=Verdict.COMPLETE,
        exit_code=0,
        level=Level.STRUCTURE,
        findings=(),
        state=NO_STATE,
        world_size=None,
        n_bytes=source.file.size,
        n_files=1,
        n_tensors=0,
        n_records=0,
        bytes_read=0,
        written_s=source.file.mtime_s,
        parts=(),
        digests=(),
    )


def _unproven(path: str, why: str, into: Into) -> Finding:
    return Finding(
        "record.unverifiable",
        path,
        f"{path} {why}",
        expected="a checksum for each tensor",
        found="none",
        next_command=into.anyway,
    )


def _with_next(report: Report, into: Into) -> Report:
    """The report, with the next command for the findings that prevent the conversion."""
    copied = ["cp", "-rL", report.url, f"{report.url}-copy"]
    helps = {"record.unverifiable": into.anyway, "step.linked": shlex.join(copied)}
    return replace(
        report,
        findings=tuple(
            replace(finding, next_command=helps.get(finding.code, finding.next_command))
            for finding in report.findings
        ),
    )


def _left_out(names: Sequence[str], what: str, noun: str = "file") -> Iterator[Finding]:
    if names:
        yield left_out(f"{counted(len(names), noun)} {what}", names)


def _answer(
    source: OneFile | OpenTarget,
    into: Into,
    planned: Plan,
    before: Report,
    report: Report,
    notes: Sequence[Finding],
) -> Converted:
    n_tensors = sum(part.n_cut + part.n_whole for part in planned.parts)
    n_others = sum(len(part.entries) for part in planned.parts) - n_tensors
    what = counted(n_tensors, "tensor")
    if n_others:
        what += f" and {counted(n_others, 'value')}"
    taken = "verified at level content, sealed"
    if before.verdict is Verdict.UNVERIFIABLE:
        taken = "used without verification; the seal of the new step verifies them from now on"
    return Converted(
        source=source.url,
        target=into.place.url,
        format="dcp",
        written=True,
        n_tensors=n_tensors,
        n_files=len(planned.shards) + len(planned.parts),
        n_bytes=planned.n_bytes,
        findings=tuple(notes),
        report=report,
        message=f"{what} as sharded DCP for {counted(into.world_size or 1, 'rank')}: {taken}",
        next_command=command_line("verify", into.place.url, "--level", "content", "--require-seal"),
    )


class SafetensorsPart(NamedTuple):
    """One folder of safetensors. `unnamed` are files that its index does not name."""

    part: SourcePart
    files: SourceFiles
    unnamed: tuple[str, ...]


def read_safetensors(
    store: Store, folder: str, url: str, part: Part, *, under: str
) -> SafetensorsPart:
    """The tensors in a folder's files, or in those that its index names.

    `folder` is where the part is in the store. Tensors are put below the key `under`,
    if it is not empty. Raises `UsageError` for dtypes that torch has no tensor of, and
    where several indexes compete. Cost: as for `inspect_safetensors`.
    """
    files = [file for file in part.files if file.path.endswith(SUFFIX)]
    named = _named(store, folder, url, part)
    held = [file for file in files if named is None or file.path in named]
    unnamed = tuple(file.path for file in files if file not in held)
    by_name: dict[str, list[tuple[StoredTensor, ByteRange]]] = defaultdict(list)
    digest = hashlib.sha256(os.fsencode(url))
    for file, header in read_headers(store, folder, held):
        digest.update(repr((file.path, file.size, file.mtime_s, file.identity)).encode() + header)
        for tensor in parse_header(header[PREFIX:]):
            place = ByteRange(file.path, len(header) + tensor.start, tensor.n_bytes)
            by_name[tensor.name].append((tensor, place))
    source = _part(part.path, by_name, under, digest.hexdigest())
    return SafetensorsPart(source, _Files(store, folder, url, part.path), unnamed)


def _named(store: Store, folder: str, url: str, part: Part) -> frozenset[str] | None:
    """The files that the index of a folder names; None if there is no index."""
    indexes = [file.path for file in part.files if file.path.endswith(INDEX_SUFFIX)]
    if not indexes:
        return None
    if len(indexes) > 1:
        raise UsageError(
            f"{url} holds {len(indexes)} indexes, {' and '.join(sorted(indexes)[:2])}: each "
            "describes a separate model; give the path of one of them instead of the folder"
        )
    path = f"{folder}/{indexes[0]}" if folder else indexes[0]
    return frozenset(parse_index(store.read(path, limit=MAX_HEADER)).files.values())


class _Files(SourceFiles):
    """The elements in the files of a folder, which only a seal can verify."""

    def in_store(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name

    def opened(self, tensor: SourceTensor, number: int, held_limit: int) -> Opened:  # noqa: ARG002
        """See `SourceFiles.opened`: elements are row-major, and have no frame."""
        chunk = tensor.chunks[number]
        strides = row_major(chunk.elements.sizes, tensor.item_bytes)
        return Opened(chunk.record.offset, chunk.record.length, None, 0, strides, True)


def _part(
    path: str,
    by_name: Mapping[str, Sequence[tuple[StoredTensor, ByteRange]]],
    under: str,
    digest: str,
) -> SourcePart:
    tensors = []
    for name, held in by_name.items():
        places = [piece.offsets for piece, _ in held if 0 not in piece.shape]
        if len(places) > len({*places}):
            files = " and ".join(sorted({place.file for _, place in held})[:2])
            raise UsageError(
                f"{name} is in {files} with the same elements: these are several models; give the "
                "path of one file instead of the folder"
            )
        dtype = TORCH_NAMES.get(held[0][0].dtype)
        if dtype is None:
            stored = held[0][0].dtype
            raise UsageError(f"{name} is of dtype {stored}, which torch does not support")
        ends = [map(sum, zip(piece.offsets, piece.shape, strict=True)) for piece, _ in held]
        shape = tuple(max(dim) for dim in zip(*ends, strict=True))
        fqn, keys = (f"{under}.{name}", (under, name)) if under else (name, (name,))
        chunks = [
            SourceChunk(TensorSlice(piece.offsets, piece.shape), place) for piece, place in held
        ]
        tensors.append((tensor_entry(fqn, dtype, shape, keys), chunks))
    return part_of(path, tensors, digest, folder=path)


def files_of_index(store: Store, index: FileInfo, url: str) -> tuple[FileInfo, ...]:
    """The existing files that an index names, and the index itself.

    Raises `RecordUnreadable` for an index that is damaged.
    """
    if index.size > MAX_HEADER:
        raise RecordUnreadable(f"{url} takes {index.size:,} bytes, which is too large for an index")
    named = {*parse_index(store.read(index.path, limit=MAX_HEADER)).files.values()}
    return tuple(file for file in store.list_dir() if file.path in named or file.path == index.path)
