"""Inspect one step at a level, and report the findings.

Everything that `scan`, `verify`, `pick` and `show` know of a step comes from
here: list it, read its metadata, run the checks that the level asks for, add it
up to a `Report`. Choosing between steps is `choosing`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptctl.checks.identity import claims_further, earlier_step
from ckptctl.checks.presence import check_holds_anything
from ckptctl.checks.shape import check_shape, check_unchanged, sidecars_of
from ckptctl.checks.state import NO_STATE, Sources, train_state
from ckptctl.errors import AccessDenied, OutOfMemory, PathEscape, PathNotFound, StorageError
from ckptctl.findings import NOTHING_PROVEN, Finding, Report, Severity
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.layouts import StepName
from ckptctl.formats.frameworks.state_keys import kind_of_file
from ckptctl.inspection.parts import PartInspection, inspect_part, inspect_structure, n_reads
from ckptctl.inspection.relisting import left_out, really_changed
from ckptctl.inspection.reports import report_on
from ckptctl.inspection.sidecars import check_documents, read_sidecars
from ckptctl.inspection.step_listing import list_step
from ckptctl.model import FileInfo, Level, Step, TrainState
from ckptctl.options import Requirements
from ckptctl.storage.contract import Kind, ShortRead, Store
from ckptctl.storage.opening import join_url

if TYPE_CHECKING:
    from ckptctl.formats.own.seals import Seal
    from ckptctl.inspection.content import Asked, Comparison
    from ckptctl.inspection.predecessor import Older
    from ckptctl.inspection.seal_and_marks import Notes

MAX_QUICK_READS = 10_000
"""Up to so many reads on a file system, `structure` is the default level."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A report, with what it was made from for those who want to show more.

    `notes` are there where ckptctl has noted anything.
    """

    report: Report
    step: Step
    parts: tuple[PartInspection, ...] = ()
    notes: Notes | None = None


def inspect_step(
    store: Store,
    named: StepName | str,
    requirements: Requirements,
    *,
    level: Level | None = None,
    files: Sequence[FileInfo] | None = None,
    content: Asked | None = None,
    older: Older | None = None,
    confirm: bool = True,
) -> Inspection:
    """Inspect one step under a root.

    `level` None is as deep as is cheap on this storage, see `cheap_level`.
    `files` is the listing of the step where the caller has it, `content` what of it is
    to be read at that level, and within which limits. From `structure` on its records are
    compared with those of the first of the `older` steps, where the caller gives these. A
    storage that fails, or a lack of memory, gives a report with the verdict `unknown`,
    never an exception. With `confirm`, files that the listing lacks are asked for by
    name, see `contradictions`.

    Cost: at `listing` one listing and one read for each metadata file, and on file
    systems for each small file of train state, and for the seal and each mark where
    there are any; at `structure` the reads that `n_reads` counts, a second listing, and
    what `check_step_before` takes of the older step; at `content` every byte besides.
    Where the requirements ask for the store's own checksums, one HEAD for each sealed file.
    """
    name = named if isinstance(named, str) else named.name
    number = None if isinstance(named, str) else named.number
    step = Step(join_url(store.url, name), name, number, "dcp", (), ())
    try:
        step = _step(step, named, list_step(store, name) if files is None else files)
        return _inspect(store, step, named, requirements, level, content, older, confirm=confirm)
    except (StorageError, MemoryError) as error:
        finding = inspection_failed(store, error, step)
        report = report_on(step, [finding], (), NO_STATE, requirements, level or Level.LISTING)
        return Inspection(report, step)


def _step(step: Step, named: StepName | str, files: Sequence[FileInfo]) -> Step:
    layout = "dcp" if isinstance(named, str) else layouts.layout_of(named, files)
    return replace(step, layout=layout, parts=layouts.parts_of(files), files=tuple(files))


def _inspect(
    store: Store,
    step: Step,
    named: StepName | str,
    requirements: Requirements,
    level: Level | None,
    content: Asked | None,
    older: Older | None,
    *,
    confirm: bool,
) -> Inspection:
    parts = [inspect_part(store, step, part) for part in step.parts]
    reached = cheap_level(store.kind, parts) if level is None else level
    if content is not None and content.is_helper:
        return _help(store, step, parts, requirements, content)
    deep = reached.depth >= Level.STRUCTURE.depth
    if deep:
        parts = [inspect_structure(store, step, part) for part in parts]
    before = _step_before(store, step, parts, older) if deep and older is not None else ()
    findings = [
        *check_shape(step, unfinished=_unfinished(named)),
        *(f for part in parts for f in part.findings),
        *check_holds_anything([part.metadata for part in parts]),
        *before,
    ]
    contents: dict[str, object] = {}
    further = any(claims_further(step, part.own_number) for part in parts)
    if deep or further or store.kind is not Kind.OBJECT:
        for sidecar in read_sidecars(store, step.name, step.layout, sidecars_of(step), step.url):
            findings += [sidecar.finding] if sidecar.finding else []
            contents |= {sidecar.path: sidecar.content} if sidecar.content is not None else {}
        findings += _documents(store, step)
    state = train_state(_sources(step, parts, contents))
    notes = _notes(store, step, parts, requirements, findings)
    findings += notes.findings if notes else ()
    if further and older is not None:
        findings = [*_wrong_step(store, step, parts, state, notes, findings, older)]
    seal = notes.seal if notes else None
    n_read, proven = 0, NOTHING_PROVEN
    if reached is Level.CONTENT:
        from ckptctl.inspection.content import inspect_content

        sealed = None if seal is None else _comparison(step, seal, findings, content)
        read = inspect_content(store, step, parts, findings, sealed, content)
        findings, proven, n_read = list(read.findings), read.proven, read.n_read
        if not read.whole:
            reached = Level.STRUCTURE
        elif not sealed:
            findings += _no_seal(step)
    by_store = None
    if requirements.remote_checksums:
        from ckptctl.inspection.store_checksums import ask_store

        by_store, said = ask_store(store, step, seal, findings)
        findings += said
    if deep:
        findings += check_unchanged(step, list_step(store, step.name))
    findings = really_changed(store, step, findings)
    if confirm:
        findings += left_out(store, step, findings)
    report = report_on(
        step,
        findings,
        parts,
        state,
        requirements,
        reached,
        seal=seal,
        n_read=n_read,
        proven=proven,
        by_store=by_store,
    )
    return Inspection(report, step, tuple(parts), notes)


def _wrong_step(
    store: Store,
    step: Step,
    parts: Sequence[PartInspection],
    state: TrainState,
    notes: Notes | None,
    findings: Sequence[Finding],
    older: Older,
) -> Iterator[Finding]:
    """The findings, with `step.wrong-step` for `metadata.foreign` where the count agrees with it.

    One who has accepted the step knows it, and a seal that names another step says it.
    """
    known = (notes is not None and notes.accepted) or any(
        finding.code == "step.foreign" for finding in findings
    )
    own = {number for part in parts if (number := part.own_number) is not None}
    number = None if known else earlier_step(step, own, state.step.value)
    found = None
    if number is not None:
        from ckptctl.inspection.predecessor import check_wrong_step

        found = check_wrong_step(store, step, parts, number, older)
    if found is not None:
        yield found
    yield from (one for one in findings if found is None or one.code != "metadata.foreign")


def _step_before(
    store: Store, step: Step, parts: Sequence[PartInspection], older: Older
) -> Iterator[Finding]:
    from ckptctl.inspection.predecessor import check_step_before

    for part in parts:
        yield from check_step_before(store, step, part, older)


def _help(
    store: Store,
    step: Step,
    parts: Sequence[PartInspection],
    requirements: Requirements,
    content: Asked,
) -> Inspection:
    """Read this process's share of the bytes, for another one that makes the report."""
    from ckptctl.inspection.content import inspect_content

    read = inspect_content(store, step, parts, (), None, content)
    report = report_on(
        step,
        read.findings,
        parts,
        NO_STATE,
        requirements,
        Level.CONTENT,
        n_read=read.n_read,
        proven=read.proven,
    )
    return Inspection(report, step, tuple(parts))


def _notes(
    store: Store,
    step: Step,
    parts: Sequence[PartInspection],
    requirements: Requirements,
    findings: Sequence[Finding],
) -> Notes | None:
    """What ckptctl has noted about the step; None where there is nothing to be read."""
    asked = requirements.require_seal or requirements.marks is not None
    if not asked and not any(layouts.is_own(file.path) for file in step.files):
        return None
    from ckptctl.inspection.seal_and_marks import read_notes

    at_fault = {finding.where for finding in findings if finding.severity is Severity.FAULT}
    return read_notes(store, step, parts, requirements, at_fault)


def _comparison(
    step: Step, seal: Seal, findings: Sequence[Finding], content: Asked | None
) -> Comparison | None:
    """What holds every byte against the seal; None where not all is to be read."""
    if content is not None and content.choose is not None:
        return None
    from ckptctl.inspection.content import Comparison

    told = {finding.where for finding in findings if finding.code == "seal.digest"}
    return Comparison(step.name, seal, step.files, told)


def _no_seal(step: Step) -> Iterator[Finding]:
    """Yield `seal.missing` where there is none at all: of a wrong one, others speak."""
    from ckptctl.formats.own.seals import SEAL

    if any(file.path == SEAL for file in step.files):
        return
    yield Finding(
        "seal.missing",
        SEAL,
        "there is no seal: a shard that is valid and belongs to another step would not be seen",
        expected=SEAL,
        found="no seal",
        next_command=f"ckptctl seal {step.url}",
    )


def cheap_level(kind: Kind, parts: Sequence[PartInspection]) -> Level:
    """The level of an inspection for which nobody asked for a level."""
    cheap = kind is not Kind.OBJECT and _n_reads(parts) <= MAX_QUICK_READS
    return Level.STRUCTURE if cheap else Level.LISTING


def why_not_deeper(kind: Kind, inspection: Inspection) -> str:
    """What the next level would have cost, or what it would have compared."""
    parts = inspection.parts
    if inspection.report.level is Level.STRUCTURE:
        n_bytes = sum(file.size for part in parts for file in part.part.files)
        return f"the checksums of its {n_bytes:,} bytes were not compared"
    n_reads = _n_reads(parts)
    if kind is Kind.OBJECT:
        return f"--level structure would send {n_reads:,} more requests"
    return f"--level structure would take {n_reads:,} reads"


def _n_reads(parts: Sequence[PartInspection]) -> int:
    return sum(n_reads(part) for part in parts)


def _documents(store: Store, step: Step) -> Iterator[Finding]:
    needed = layouts.written_last(step.layout, step.parts, step.files)
    told = [f for f in sidecars_of(step) if kind_of_file(step.layout, f.path) is None]
    return check_documents(store, step.name, needed, told)


def _unfinished(named: StepName | str) -> bool:
    return isinstance(named, StepName) and named.unfinished


def _sources(
    step: Step, parts: Sequence[PartInspection], contents: Mapping[str, object]
) -> Sources:
    return Sources(
        step.layout,
        [(look.part.path, metadata) for look in parts for metadata in look.metadata],
        sidecars_of(step),
        contents,
        {(look.part.path, fqn): value for look in parts for fqn, value in look.numbers.items()},
    )


def inspection_failed(store: Store, error: StorageError | MemoryError, step: Step) -> Finding:
    """What a storage that failed, or a lack of memory, means for the step it was asked for."""
    if isinstance(error, MemoryError):
        said = error.message if isinstance(error, OutOfMemory) else "there is not enough memory"
        return Finding(
            "step.no-memory",
            step.name,
            f"{said}: nothing is known about the step",
            expected="memory and threads to look with",
            found="less than the look takes",
            next_command="ckptctl explain step.no-memory",
        )
    if isinstance(error, PathEscape):
        code, expected = "path.escape", "files and folders inside the root"
    elif isinstance(error, (PathNotFound, ShortRead)):
        code, expected = "step.changed", "the step as it was listed"
    elif isinstance(error, AccessDenied):
        code, expected = "step.denied", "leave to list and read"
    else:
        code, expected = "step.unknown", "an answer"
    finding = Finding(
        code,
        _named_in(error.message, step),
        error.message if code == "path.escape" else f"{error.message}: {_NOT_KNOWN[code]}",
        expected=expected,
        found=error.message,
        next_command=error.next_command or f"ckptctl verify {step.url}",
    )
    try:
        return really_changed(store, step, [finding])[-1]
    except StorageError:
        return finding


def _named_in(message: str, step: Step) -> str:
    """The file of the step that a storage error names; the step where it names none."""
    named = [file.path for file in step.files if f"{step.name}/{file.path}" in message]
    return max(named, key=len, default=step.name)


_NOT_KNOWN = {
    "step.changed": "it was there a moment ago, so someone deletes or writes here",
    "step.denied": "nothing is known about the step",
    "step.unknown": "nothing is known about the step",
}
