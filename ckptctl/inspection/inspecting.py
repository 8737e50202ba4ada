"""Inspect one step at a level, and report the findings.

Everything that `scan`, `verify`, `pick` and `show` know of a step comes from here: the
stages run over the open step in order, and `reports` adds their findings up. `choosing`
chooses between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.errors import AccessDenied, OutOfMemory, PathEscape, PathNotFound, StorageError
from ckptctl.findings import Finding, Report
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.relisting import contradicted
from ckptctl.inspection.reports import report_failed, report_on
from ckptctl.inspection.stages import HELPER_STAGES, STAGES, Found
from ckptctl.model import Level, Step
from ckptctl.options import Requirements
from ckptctl.storage.contract import Kind, ShortRead

if TYPE_CHECKING:
    from ckptctl.inspection.content import Asked
    from ckptctl.inspection.predecessor import Older
    from ckptctl.inspection.seal_and_marks import Notes

MAX_QUICK_READS = 10_000
"""Up to so many reads on a file system, `structure` is the default level."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A report, with what it was made from for those who want to show more.

    `notes` are there where ckptctl has noted anything; `parts` are empty where the step
    could not be inspected.
    """

    report: Report
    step: Step
    opened: OpenStep
    parts: tuple[OpenPart, ...] = ()
    notes: Notes | None = None


def inspect_step(
    opened: OpenStep,
    requirements: Requirements,
    *,
    level: Level | None = None,
    content: Asked | None = None,
    older: Older | None = None,
    confirm: bool = True,
) -> Inspection:
    """Inspect one step.

    `level` None is as deep as is cheap on this storage, see `cheap_level`. `content` says
    which bytes are read at that level, and within which limits. From `structure` on its
    records are compared with those of the first of the `older` steps, where the caller
    gives these. A storage that fails, or a lack of memory, gives a report with the verdict
    `unknown`, never an exception. With `confirm`, files that the listing lacks are asked
    for by name, see `stages.contradictions`.

    Cost: at `listing` one listing and one read for each metadata file, and on file
    systems for each small file of train state, and for the seal and each mark where
    there are any; at `structure` the reads of `read_structure`, a second listing, and
    what `check_step_before` takes of the older step; at `content` every byte besides.
    Where the requirements ask for the store's own checksums, one HEAD for each sealed
    file. What `opened` holds already is not read again.
    """
    is_helper = content is not None and content.is_helper
    found = Found(requirements, level or Level.LISTING, content, older, confirm)
    try:
        if level is None:
            found.level = cheap_level(opened.store.kind, opened.parts)
        for stage in HELPER_STAGES if is_helper else STAGES:
            found.findings += [*stage(opened, found)]
        report = report_on(opened, found)
    except (StorageError, MemoryError) as error:
        failed = inspection_failed(opened, error)
        found.level = level or Level.LISTING
        return Inspection(report_failed(opened.listed, found, failed), opened.listed, opened)
    return Inspection(report, opened.step, opened, opened.parts, found.notes)


def cheap_level(kind: Kind, parts: Sequence[OpenPart]) -> Level:
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


def _n_reads(parts: Sequence[OpenPart]) -> int:
    return sum(part.n_structure_reads for part in parts)


def inspection_failed(opened: OpenStep, error: StorageError | MemoryError) -> Finding:
    """What a storage that failed, or a lack of memory, means for the step it was asked for."""
    step = opened.listed
    if isinstance(error, MemoryError):
        said = error.message if isinstance(error, OutOfMemory) else "there is not enough memory"
        return Finding(
            "step.no-memory",
            step.name,
            f"{said}: nothing is known about the step",
            expected="enough memory and threads",
            found="less than the inspection takes",
            next_command="ckptctl explain step.no-memory",
        )
    if isinstance(error, PathEscape):
        code, expected = "path.escape", "files and folders inside the root"
    elif isinstance(error, (PathNotFound, ShortRead)):
        code, expected = "step.changed", "the step as it was listed"
    elif isinstance(error, AccessDenied):
        code, expected = "step.denied", "permission to list and read"
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
        return contradicted(opened, [finding]) or finding
    except StorageError:
        return finding


def _named_in(message: str, step: Step) -> str:
    """The file of the step that a storage error names; the step where it names none."""
    named = [file.path for file in step.files if f"{step.name}/{file.path}" in message]
    return max(named, key=len, default=step.name)


_NOT_KNOWN = {
    "step.changed": "it existed a moment ago, so another process writes or deletes files here",
    "step.denied": "nothing is known about the step",
    "step.unknown": "nothing is known about the step",
}
