"""How does a file of `torch.save` become a step of sharded DCP?

It is planned, written, proven, sealed and published as a reshard is; what is in the
file is the question of `flat_files`. Nothing in the file runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptctl.checks.byte_pass import OnProgress
from ckptctl.checks.state import NO_STATE
from ckptctl.checks.words import counted
from ckptctl.errors import PathNotFound, UsageError
from ckptctl.findings import Finding, Report, Verdict
from ckptctl.judge.verifying import OpenTarget
from ckptctl.model import FileInfo, Level
from ckptctl.resharding.cutting import Mesh
from ckptctl.resharding.executing import Place, write
from ckptctl.resharding.flat_files import read_flat
from ckptctl.resharding.planning import Plan, Wanted, plan
from ckptctl.resharding.reading import Damage
from ckptctl.resharding.results import Converted
from ckptctl.resharding.sources import Source
from ckptctl.resharding.steps import Opening, with_finding
from ckptctl.resharding.writing import budget
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


@contextmanager
def one_file(source: str, opening: Opening) -> Iterator[OneFile | None]:
    """The file at an address; None where there is none, but perhaps a folder."""
    name = base_name(source)
    if not name or source.endswith("/"):
        yield None
        return
    with open_store(parent_url(source), **opening) as store:  # type: ignore[arg-type]
        yield OneFile(store, found) if (found := _found(store, name)) else None


def _found(store: Store, name: str) -> FileInfo | None:
    try:
        listed = store.list_dir()
    except PathNotFound:
        return None
    return next((file for file in listed if file.path == name and file.kind == "file"), None)


def import_flat(
    source: OneFile,
    place: Place,
    *,
    world_size: int,
    accept_unverifiable: bool,
    memory: int,
    jobs: int | None,
    on_progress: OnProgress | None,
) -> Converted:
    """Write the step at `place` from a file; see `exporting.convert`."""
    report = _report(source)
    try:
        flat = read_flat(source.store, source.file, source.url)
    except Damage as damage:
        return _refused(source, place, with_finding(report, damage.finding))
    if not flat.has_crcs and not accept_unverifiable:
        finding = _no_checksums(source)
        return _refused(source, place, with_finding(report, finding))
    read = Source(source.url, report, (flat.part,), ())
    planned = plan(read, Wanted(Mesh((("dp", world_size),))))
    if not planned.parts[0].entries:
        raise UsageError(f"{source.url} holds an empty dict: there is nothing to make a step of")
    found = OpenTarget(source.store, source.file.path, ())
    room = budget(memory, jobs, source.store, place.store)
    try:
        written = write(
            planned,
            found,
            place,
            room,
            accept_unverifiable=accept_unverifiable,
            on_progress=on_progress,
            files={"": flat.files},
        )
    except Damage as damage:
        return _refused(source, place, with_finding(report, damage.finding))
    if isinstance(written, Report):
        return _refused(source, place, written)
    return _answer(source, place, planned, written.report)


def _report(source: OneFile) -> Report:
    """What is known of a file before anything in it was compared."""
    return Report(
        url=source.url,
        number=None,
        layout="flat",
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


def _no_checksums(source: OneFile) -> Finding:
    return Finding(
        "record.unverifiable",
        source.file.path,
        f"{source.file.path} was saved without checksums: nothing proves its bytes",
        expected="a checksum for each member of the file",
        found="none",
        next_command="ckptctl explain record.unverifiable",
    )


def _refused(source: OneFile, place: Place, report: Report) -> Converted:
    return Converted(
        source=source.url,
        target=place.url,
        written=False,
        n_tensors=0,
        n_left_out=0,
        n_files=0,
        n_bytes=0,
        report=report,
        message=f"not converted: {report.url} is {report.verdict.value}; nothing was published",
        exit_code=report.exit_code,
        next_command=next(
            (finding.next_command for finding in report.findings if finding.next_command), None
        ),
    )


def _answer(source: OneFile, place: Place, planned: Plan, report: Report) -> Converted:
    (part,) = planned.parts
    n_tensors = part.n_cut + part.n_whole
    n_others = len(part.entries) - n_tensors
    ranks = counted(planned.wanted.mesh.world_size, "rank")
    return Converted(
        source=source.url,
        target=place.url,
        written=True,
        n_tensors=n_tensors,
        n_left_out=0,
        n_files=len(part.files) + 1,
        n_bytes=planned.n_bytes,
        report=report,
        message=(
            f"{counted(n_tensors, 'tensor')} and {counted(n_others, 'value')} as sharded DCP for "
            f"{ranks}: proven at level content, sealed"
        ),
        exit_code=0,
        next_command=f"ckptctl verify {shlex.quote(place.url)} --level content --require-seal",
    )
