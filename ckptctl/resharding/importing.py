"""Make a step of sharded DCP from a `torch.save` file or a safetensors model.

The step is planned, written, verified, sealed and published like a reshard. `flat_files`
and `safetensors_files` read the files without running code from them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ckptctl.checks.requirements import NO_STATE
from ckptctl.data_classes import dataclass, replace
from ckptctl.errors import PathNotFound, RecordUnreadable, UsageError
from ckptctl.findings import Finding, Report, Verdict
from ckptctl.formats.archive.safetensors import INDEX_SUFFIX, SUFFIX
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formatting import counted
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.stages import inspect_safetensors
from ckptctl.model import FileInfo, Level, Part, PartFormat
from ckptctl.options import StorageOptions
from ckptctl.resharding.executing import Place, WriteOptions, write
from ckptctl.resharding.flat_files import read_flat
from ckptctl.resharding.mesh import Mesh
from ckptctl.resharding.planning import Plan, Wanted, plan
from ckptctl.resharding.reading import Damage, SourceFiles
from ckptctl.resharding.results import Converted, left_out, not_converted
from ckptctl.resharding.safetensors_files import files_of_index, read_safetensors
from ckptctl.resharding.sources import Source, refusal
from ckptctl.resharding.steps import with_finding
from ckptctl.selection.verifying import OpenTarget
from ckptctl.storage.contract import Store
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


@dataclass(frozen=True, slots=True)
class Into:
    """The step to create: its place, the number of ranks, its content, and how to write it.

    `anyway` is the same command with `--accept-unverifiable`, for use in refusals.
    """

    place: Place
    world_size: int
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
    try:
        listed = store.list_dir()
    except PathNotFound:
        return None
    return next((file for file in listed if file.path == name and file.kind == "file"), None)


def import_flat(source: OneFile, into: Into) -> Converted:
    """Write a step from a file of `torch.save`; see `converting.convert`."""
    report = _report(source, "flat")
    try:
        flat = read_flat(source.store, source.file, source.url, only_model=into.only_model)
    except Damage as damage:
        return not_converted(source.url, into.place.url, with_finding(report, damage.finding))
    if not flat.has_crcs:
        why = "was saved without checksums: its bytes cannot be verified"
        report = with_finding(report, _unproven(source.file.path, why, into))
    read = Source(source.url, report, (flat.part,), ())
    return _import(read, source, {"": flat.files}, (), into)


def import_file(source: OneFile, into: Into) -> Converted:
    """Write a step from one file of safetensors, or from those that an index names."""
    report = _report(source, "safetensors")
    files: Sequence[FileInfo] = (source.file,)
    try:
        if source.file.path.endswith(INDEX_SUFFIX):
            files = files_of_index(source.store, source.file, source.url)
    except RecordUnreadable as error:
        finding = Finding(error.code, source.file.path, error.message)
        return not_converted(source.url, into.place.url, with_finding(report, finding))
    part = Part("", PartFormat.SAFETENSORS, tuple(files))
    for finding in inspect_safetensors(source.store, "", part):
        report = with_finding(report, finding)
    why = "is a safetensors file, which carries no checksums: its bytes cannot be verified"
    report = with_finding(report, _unproven(source.file.path, why, into))
    if refusal(report, accept_unverifiable=into.options.accept_unverifiable):
        return not_converted(source.url, into.place.url, report)
    read = read_safetensors(source.store, "", source.url, part, under=into.under)
    return _import(Source(source.url, report, (read.part,), ()), source, {"": read.files}, (), into)


def import_folder(found: OpenTarget, looked: Inspection, into: Into) -> Converted:
    """Write a step from the folders of safetensors in a folder that was inspected."""
    report = looked.report
    if refusal(report, accept_unverifiable=into.options.accept_unverifiable):
        return not_converted(found.url, into.place.url, _with_next(report, into))
    held = [held for part in looked.parts for held in part.safetensors]
    # If the folder holds a model, folders below hold its shards again, or another model.
    parts = [part for part in held if not part.path] or held
    below = [part.path for part in held if part not in parts]
    read = [
        read_safetensors(found.store, part.folder, found.url, part.part, under=into.under)
        for part in parts
    ]
    unnamed = [name for one in read for name in one.unnamed]
    others = [
        file.path
        for file in looked.step.files
        if kind_of_file(looked.step.layout, file.path) and not file.path.endswith(SUFFIX)
    ]
    notes = [
        *_left_out(unnamed, "of safetensors that the index does not name"),
        *_left_out(below, "of safetensors below", "folder"),
        *_left_out(others, "of train state beside the safetensors"),
    ]
    step = Source(found.url, report, tuple(one.part for one in read), ())
    return _import(step, found, {one.part.path: one.files for one in read}, notes, into)


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
    mesh = Mesh((("dp", into.world_size),))
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
    except Damage as damage:
        report = with_finding(read.report, damage.finding)
        return not_converted(source.url, into.place.url, report)
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
    helps = {"record.unverifiable": into.anyway, "path.escape": shlex.join(copied)}
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
        message=f"{what} as sharded DCP for {counted(into.world_size, 'rank')}: {taken}",
        next_command=f"ckptctl verify {shlex.quote(into.place.url)} --level content --require-seal",
    )
