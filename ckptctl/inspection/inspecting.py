"""Inspect one step at a level, report the findings, and state what is proven.

Everything that `scan`, `verify`, `pick` and `show` know of a step comes from here: the stages
run over the open step in order, and their findings are added up to a report under the caller's
requirements. A finding says what is wrong; a claim says what is known. Every claim is unknown until
something proves it: no claim is proven because no finding contradicts it. `choosing` chooses
between steps.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptctl.errors import (
    AccessDenied,
    LinkNotFollowed,
    ObjectArchived,
    OutOfMemory,
    PathEscape,
    PathNotFound,
    StorageError,
)
from ckptctl.findings import (
    CODES,
    NEVER_FINISHED,
    NOTHING_PROVEN,
    Claim,
    ClaimName,
    ClaimState,
    Finding,
    Report,
    Verdict,
    exit_code_of,
    explained,
    in_order,
    verdict_of,
)
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.file_names import may_hold_state
from ckptctl.formats.frameworks.state_keys import file_holds_no_state
from ckptctl.formatting import command_line, counted, inside, some_of
from ckptctl.inspection.open_step import (
    NO_NEIGHBOURS,
    Neighbours,
    OpenPart,
    OpenStep,
    safetensors_in,
)
from ckptctl.inspection.rank_files import (
    check_bound,
    check_saved_world_size,
    check_world_size,
    ranks_in,
    saved_world_size,
)
from ckptctl.inspection.seals import NOTHING_NOTED, Notes
from ckptctl.inspection.stages import HELPER_STAGES, STAGES, SealBytes, StageContext, contradicted
from ckptctl.inspection.structure import MAX_QUICK_READS
from ckptctl.inspection.train_state import check_required
from ckptctl.model import SHARDED, Level, Part, PartFormat, Step, WorldSize
from ckptctl.options import Requirements
from ckptctl.storage.contract import ShortRead, StoreKind

if TYPE_CHECKING:
    from ckptctl.formats.own.seals import Seal
    from ckptctl.inspection.content import Asked


@dataclass(frozen=True, slots=True)
class Inspection:
    """A report, with what it was made from for those who want to show more.

    `parts` are empty where the step could not be inspected.
    """

    report: Report
    step: Step
    opened: OpenStep
    parts: tuple[OpenPart, ...] = ()
    notes: Notes = NOTHING_NOTED


def inspect_step(
    opened: OpenStep,
    requirements: Requirements,
    *,
    level: Level | None = None,
    content: Asked | None = None,
    neighbours: Neighbours | None = None,
    confirm: bool = True,
    seal_bytes: SealBytes | None = None,
) -> Inspection:
    """Inspect one step.

    `level` None is as deep as is cheap on this storage, see `stages.cheap_level`. `content` states
    which bytes are read at that level, and within which limits. From `structure` on its
    records are compared with those of the first of the older `neighbours`, where the caller
    gives these. A storage that fails, or a lack of memory, gives a report with the verdict
    `unknown`, never an exception. With `confirm`, files that the listing lacks are asked
    for by name, see `stages.contradictions`. `seal_bytes` states what a required seal means
    for the level; None raises the level that nobody asked for.

    Cost: at `listing` one listing, a second one of a damaged step, and one read for each
    metadata file, and on file systems for each small file of train state, and for the seal
    and each mark where there are any; at `structure` the reads of `read_structure`, a second
    listing, and what `check_step_before` takes of the older step; at `content` every byte besides.
    Where the requirements ask for the store's own checksums, one HEAD for each sealed
    file. What `opened` holds already is not read again.
    """
    opened.neighbours = neighbours or NO_NEIGHBOURS
    is_helper = content is not None and content.is_helper
    asked = level or Level.LISTING
    context = StageContext(
        requirements,
        asked,
        content,
        confirm,
        chooses_level=level is None,
        seal_bytes=seal_bytes or (SealBytes.COMPARED if level is None else SealBytes.AT_LEVEL),
    )
    try:
        with content.group.sharing() if content is not None else nullcontext():
            for stage in HELPER_STAGES if is_helper else STAGES:
                context.findings += [*stage(opened, context)]
        report = report_on(opened, context)
    except (StorageError, MemoryError) as error:
        failed, step = inspection_failed(opened, error), opened.listed
        report = _report(step, (), StageContext(requirements, asked), [failed])
        return Inspection(replace(report, claims=nothing_proven(failed)), step, opened)
    return Inspection(report, opened.step, opened, opened.parts, context.notes)


def train_step(report: Report) -> int | None:
    """The training step of a step's train state; see `train_step_of`."""
    return layouts.train_step_of(report.layout, report.number, report.state.step.value)


def why_not_deeper(inspection: Inspection) -> str:
    """What the next level would have cost, or what it would have compared."""
    if inspection.report.level is Level.STRUCTURE:
        n_bytes = sum(file.size for part in inspection.parts for file in part.part.files)
        return f"the checksums of its {n_bytes:,} bytes were not compared"
    n_reads = inspection.opened.n_structure_reads
    is_object = inspection.opened.store.kind is StoreKind.OBJECT
    noun, verb = ("further request", "send") if is_object else ("read", "take")
    few = counted(min(n_reads, MAX_QUICK_READS), noun)
    return f"--level structure would {verb} {'more than ' * (n_reads > MAX_QUICK_READS)}{few}"


def inspection_failed(opened: OpenStep, error: StorageError | MemoryError) -> Finding:
    """What a storage that failed, or a lack of memory, means for the step it was asked for."""
    step = opened.listed
    if isinstance(error, MemoryError):
        why = error.message if isinstance(error, OutOfMemory) else "there is not enough memory"
        return explained("step.no-memory", step.name, f"{why}: nothing is known about the step")
    code, expected, means = next(row for kind, *row in _FAILED if isinstance(error, kind))
    finding = Finding(
        code,
        _named_in(error.message, step),
        error.message + means,
        expected=expected,
        found=error.message,
        next_command=error.next_command or command_line("verify", step.url),
    )
    try:
        return contradicted(opened, [finding]) or finding
    except StorageError:
        return finding


def _named_in(message: str, step: Step) -> str:
    """The file of the step that a storage error names; the step where it names none."""
    named = [file.path for file in step.files if f"{step.name}/{file.path}" in message]
    return max(named, key=len, default=step.name)


_NOT_KNOWN = ": nothing is known about the step"
_GONE = ": it existed a moment ago, so another process writes or deletes files here"
_FAILED: tuple[tuple[type[StorageError], str, str, str], ...] = (
    (LinkNotFollowed, "step.linked", "files and folders, or --follow-links", _NOT_KNOWN),
    (PathEscape, "path.escape", "files and folders inside the root", ""),
    (PathNotFound, "step.changed", "the step as it was listed", _GONE),
    (ShortRead, "step.changed", "the step as it was listed", _GONE),
    (ObjectArchived, "step.archived", "files that can be read", _NOT_KNOWN),
    (AccessDenied, "step.denied", "permission to list and read", _NOT_KNOWN),
    (StorageError, "step.unknown", "an answer", _NOT_KNOWN),
)
"""What the failure of a storage means: the code, what was expected, and the end of the message."""


_REPLACES = {
    # Metadata of another step is a suspicion, until the train state agrees with it.
    "step.wrong-step": frozenset({"metadata.foreign"}),
    # Contradictory answers of a storage prove no change.
    "step.unknown": frozenset({"step.changed"}),
}
"""Findings that explain others, which are left out then."""

_REPEATED = frozenset({"record.crc", "record.framing"})
"""Findings that structure and content have of the same file; the later one counts."""

_SETTLED_BY_CONTENT = frozenset({"record.no-crc", "record.transformed", "format.no-checksums"})
"""Notes of shallower levels that reading every byte settles, one way or the other."""


def settled(context: StageContext) -> list[Finding]:
    """The findings of all stages, without those that a later one repeats or explains."""
    replaced = {code for one in context.findings for code in _REPLACES.get(one.code, ())}
    if context.content is not None and context.content.whole:
        replaced |= _SETTLED_BY_CONTENT
    by_content = context.content.findings if context.content is not None else ()
    again = {(one.code, one.where) for one in by_content if one.code in _REPEATED}
    latest = {id(one) for one in by_content}
    return [
        one
        for one in context.findings
        if id(one) in latest or not (one.code in replaced or (one.code, one.where) in again)
    ]


def report_on(opened: OpenStep, context: StageContext) -> Report:
    """Add up what was found of a step, and hold it against the requirements."""
    findings = [*_in_flight(opened, settled(context), context.requirements.grace_s)]
    report = _report(opened.step, opened.parts, context, findings)
    return replace(report, claims=claims_of(opened, context, report.findings))


def _report(
    step: Step, parts: Sequence[OpenPart], context: StageContext, findings: Sequence[Finding]
) -> Report:
    requirements, state = context.requirements, context.state
    allowed = set(requirements.allow_globals)
    seal = context.notes.seal
    signature = seal.signature if seal else None
    is_known = not any(finding.verdict is Verdict.UNKNOWN for finding in findings)
    named = {part.path: frozenset(part.ranges.file_names) for part in parts if part.metadata}
    saved = _recorded_world_size(seal, context, saved_world_size(step.parts, named, state))
    findings = [*findings]
    if is_known and step.parts:
        # Without metadata there is nothing to say what a resume would restore.
        if all(part.metadata or part.part.format not in SHARDED for part in parts):
            findings += check_required(state, requirements.require, step.url)
        if requirements.saved_world_size is not None:
            findings += check_saved_world_size(
                step.parts, named, requirements.saved_world_size, step.url
            )
        if requirements.world_size is None:
            findings += check_bound(step.parts, step.url)
        else:
            wanted, require = requirements.world_size, requirements.require
            findings += check_world_size(step.parts, state, saved, wanted, step.url, require)
    verdict = verdict_of(findings)
    metadata = [(part, one) for part in parts for one in part.metadata]
    files = [file for file in step.files if not layouts.is_own(file.path)]
    proven = context.content.proven if context.content else NOTHING_PROVEN
    return Report(
        url=step.url,
        number=step.number,
        layout=step.layout,
        verdict=verdict,
        exit_code=exit_code_of(findings),
        level=context.level,
        findings=in_order(findings),
        state=state,
        world_size=saved,
        n_bytes=sum(file.size for file in files),
        n_files=len(files),
        n_tensors=sum(len(one.tensors) for _, one in metadata),
        n_records=sum(len(part.ranges) for part in parts),
        bytes_read=sum(part.bytes_read for part in parts)
        + (context.content.n_read if context.content else 0),
        written_s=layouts.last_written_s(step.files),
        parts=tuple(name for part in step.parts for name in _names(step, part)),
        digests=tuple(
            pair
            for part in parts
            if context.is_deep or part.part.format in SHARDED
            for pair in part.digests.items()
        ),
        ranks=tuple((part.path, tuple(sorted(ranks_in(part)))) for part in step.parts),
        seal=seal.kind if seal else None,
        seal_run=seal.run if seal else None,
        seal_sequence=seal.sequence if seal else None,
        seal_signer=signature.signer if signature else None,
        seal_signer_verified=bool(
            signature
            and requirements.require_signature
            and not any(finding.code == "seal.other-signer" for finding in findings)
        ),
        bytes_in_records=proven.n_asked,
        bytes_proven=proven.n_bytes,
        records_proven=proven.n_records,
        values_scanned=proven.n_values,
        pickles_read=context.pickles.n_read if context.pickles else 0,
        pickles_unread=context.pickles.n_unread if context.pickles else 0,
        allowed_globals=tuple(sorted(allowed.intersection(context.pickles.unknown)))
        if context.pickles
        else (),
        by_store=context.by_store,
    )


def _names(step: Step, part: Part) -> Iterator[str]:
    """What a later step may lack: the part, or each kind of rank file in it."""
    if layouts.is_scattered(step.name):
        # Several averages of the weights differ by a decimal fraction: it is no step or rank.
        number = r"(?<![0-9.])[0-9]+(?!\.?[0-9])"
        yield from sorted({re.sub(number, "N", file.path) for file in part.files})
    # RNG states are compared as a kind of train state: a job of one rank may write one file.
    grids = [grid for grid in part.grids if grid.is_named and grid.what != "RNG states"]
    if not grids:
        yield part.path
    for grid in grids:
        # DeepSpeed in a step of transformers: `checkpoint-30/global_step30/`.
        folders = [
            folder
            for folder in grid.folder.split("/")
            if folder and layouts.step_name(folder) is None
        ]
        yield "/".join((*folders, grid.what))
    # Beside the shards of a model, safetensors are an export of it.
    is_export = any("model" in grid.holds for grid in part.grids)
    if part.format is PartFormat.RANK_FILES and not is_export:
        held = [inside(one.path, file.path) for one in safetensors_in(part) for file in one.files]
        yield from sorted({path.rpartition("/")[0] for path in held} - {""})


def _recorded_world_size(
    seal: Seal | None, context: StageContext, found: WorldSize | None
) -> WorldSize | None:
    """The world size that is known best: a seal or a manifest may state what files only bound."""
    if found is not None and not found.at_least:
        return found
    if seal is not None and seal.step.world_size is not None:
        return WorldSize(seal.step.world_size, "seal")
    stated = context.wholeness.n_ranks if context.wholeness else None
    return found if stated is None else WorldSize(stated, "manifest")


_HALF_WRITTEN = frozenset({"record.framing", "shard.truncated", "file.unreadable"})
"""The faults of a rank file while it is written; the metadata of DCP is written last."""

MAX_AHEAD_S = 12 * 3600.0
"""How far a storage's clock may be ahead: local time for UTC, at most."""


def _in_flight(opened: OpenStep, findings: Sequence[Finding], grace_s: float) -> Iterator[Finding]:
    """The findings, with those of an unfinished save as one `step.in-progress` while it is young.

    The storage's clock may be ahead of this host's, so that a time in the future is young too.
    One further ahead than `MAX_AHEAD_S` is no clock's, and proves nothing.
    """
    step = opened.step
    beside = [] if opened.beside is None else [opened.beside.file]
    newest = layouts.last_written_s([*step.files, *beside])
    age_s = None if newest is None else time.time() - newest
    ahead_s = max(grace_s, MAX_AHEAD_S) if grace_s else 0.0
    young = age_s is not None and -ahead_s <= age_s < grace_s
    codes = NEVER_FINISHED
    if beside or step.has_rank_files:
        codes |= _HALF_WRITTEN
    unfinished = [finding for finding in findings if finding.code in codes]
    others = [finding for finding in findings if finding.code not in codes]
    # What no running save explains decides about the step, and is not left to time.
    is_worse = verdict_of(others).exit_code not in (0, Verdict.UNVERIFIABLE.exit_code)
    if age_s is None or is_worse or not (young and unfinished):
        yield from findings
        return
    what = unfinished[0].message.removesuffix(": the save was interrupted")
    when = f"{age_s:.0f} s ago" if age_s >= 0 else f"{-age_s:.0f} s in the future"
    yield from others
    yield Finding(
        "step.in-progress",
        unfinished[0].where,
        f"{what}; the last write was {when}: the save may still be running",
        next_command=command_line("verify", step.url),
    )


_SEAL = "seal"
"""Proof by a seal of this save: it names every file, the step and the run, so no doubt remains."""


def claims_of(
    opened: OpenStep, context: StageContext, findings: Sequence[Finding]
) -> tuple[Claim, ...]:
    """The claims of a step, in the order of `ClaimName`. Cost: none; nothing is read."""
    failed = next((finding for finding in findings if finding.verdict is Verdict.UNKNOWN), None)
    if failed is not None:
        return nothing_proven(failed)
    contradictions: dict[ClaimName, Finding] = {}
    doubts: dict[ClaimName, Finding] = {}
    for finding in reversed(findings):  # of those about one claim the worst comes last, and decides
        code = CODES[finding.code]
        if code.claim is not None:
            (contradictions if code.contradicts else doubts)[code.claim] = finding
    proofs = {claim.name: claim for claim in _proofs(opened, context)}
    claims = []
    for name in ClaimName:
        if name in contradictions:
            fault = contradictions[name]
            claims.append(Claim(name, ClaimState.CONTRADICTED, fault.message, finding=fault.code))
        elif name in doubts and proofs[name].by != _SEAL:
            doubt = doubts[name]
            unknown = ClaimState.UNKNOWN
            claims.append(Claim(name, unknown, doubt.message, doubt.next_command, doubt.code))
        else:
            claims.append(proofs[name])
    return tuple(claims)


def nothing_proven(failed: Finding) -> tuple[Claim, ...]:
    """The claims of a step whose inspection failed, for the reason in `failed`."""
    return tuple(Claim.unknown(name, failed.message, failed.next_command) for name in ClaimName)


def _proofs(opened: OpenStep, context: StageContext) -> Iterator[Claim]:
    """What proves each claim, as if no finding spoke against it."""
    is_sealed, held = context.notes.seal is not None, context.state.held
    if is_sealed:
        yield Claim.proven(ClaimName.WHOLE, _SEAL)
    elif context.wholeness is None:
        yield Claim.unknown(ClaimName.WHOLE, "the files of the step were not compared")
    else:
        yield context.wholeness.claim(opened, ranks_counted=context.ranks_counted)
    yield _bytes(opened, context)
    yield context.one_save or Claim.unknown(
        ClaimName.ONE_SAVE, "the parts were not compared", command_line("seal", opened.url)
    )
    if opened.step.number is None:
        yield Claim.unknown(ClaimName.IDENTITY, "its name states no step")
    elif is_sealed:
        yield Claim.proven(ClaimName.IDENTITY, _SEAL)
    else:
        yield context.identity or Claim.unknown(ClaimName.IDENTITY, "no count was compared")
    if held:
        yield Claim.proven(ClaimName.STATE, ", ".join(held))
    else:
        why = "no train state is recognized"
        yield Claim.unknown(ClaimName.STATE, why, "--state KIND=KEY")
    yield Claim.unknown(ClaimName.BRANCH, "the other steps of the root were not compared")


def _bytes(opened: OpenStep, context: StageContext) -> Claim:
    deeper = command_line("verify", opened.url, "--level", "content")
    if context.content is None or not context.content.whole:
        return Claim.unknown(ClaimName.BYTES, f"checked: {context.level.value}", deeper)
    proven, seal = context.content.proven, command_line("seal", opened.url)
    if context.notes.seal is not None:
        return Claim.proven(ClaimName.BYTES, _SEAL)
    if not proven.n_asked or proven.n_bytes != proven.n_asked:
        return Claim.unknown(ClaimName.BYTES, "no checksums", seal)
    unread = _without_checksum(opened)
    if unread:
        return Claim.unknown(
            ClaimName.BYTES, f"{some_of(unread)} has no checksum that was read", seal
        )
    return Claim.proven(ClaimName.BYTES, f"checksums of {proven.n_bytes:,} bytes")


def _without_checksum(opened: OpenStep) -> list[str]:
    """The files that may hold state and lie in no record, metadata or sidecar that was compared."""
    parts = [*opened.parts, *([opened.archives_beside] if opened.archives_beside else [])]
    read = {part.in_step(name) for part in parts for name in part.ranges.file_names}
    read |= {part.metadata_path(one.rank) for part in opened.parts for one in part.metadata}
    read |= {sidecar.path for sidecar in opened.sidecars if sidecar.content is not None}
    return [
        file.path
        for file in opened.files
        if file.size
        and layouts.is_saved(file.path)
        and may_hold_state(file.path)
        and not (file.path in read or file.path.endswith(".json"))
        and not file_holds_no_state(file.path)
    ]
