"""Add up the findings of one step to a report, under the caller's requirements."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptctl.checks.formatting import inside
from ckptctl.checks.state import check_required
from ckptctl.checks.world_size import (
    check_saved_world_size,
    check_world_size,
    ranks_in,
    saved_world_size,
)
from ckptctl.findings import (
    EXIT_DENIED,
    EXIT_STATE_MISSING,
    EXIT_WORLD_SIZE,
    NEVER_FINISHED,
    NOTHING_PROVEN,
    ByStore,
    Finding,
    Proven,
    Report,
    Verdict,
    in_order,
    verdict_of,
)
from ckptctl.formats.frameworks.layouts import is_own
from ckptctl.inspection.parts import PartInspection
from ckptctl.model import SHARDED, FileInfo, Level, Step, TrainState, WorldSize
from ckptctl.options import Requirements

if TYPE_CHECKING:
    from ckptctl.formats.own.seals import Seal


def report_on(
    step: Step,
    findings: Sequence[Finding],
    parts: Sequence[PartInspection],
    state: TrainState,
    requirements: Requirements,
    level: Level,
    *,
    seal: Seal | None = None,
    n_read: int = 0,
    proven: Proven = NOTHING_PROVEN,
    by_store: ByStore | None = None,
) -> Report:
    """Add up what was found of a step, and hold it against the requirements.

    `seal` is the one that speaks of the step, `n_read` how many bytes level `content`
    has read, `proven` what it has proven, `by_store` what the store's checksums say.
    """
    looked = not any(finding.verdict is Verdict.UNKNOWN for finding in findings)
    named = {look.part.path: look.ranges.file_names for look in parts if look.metadata}
    saved = _sealed_world_size(seal, saved_world_size(step.parts, named, state))
    found = [*_in_flight(step, findings, requirements.grace_s)]
    if looked and step.parts:
        if _is_known(parts):
            found += check_required(state, requirements.require, step.url)
        if requirements.saved_world_size is not None:
            found += check_saved_world_size(step.parts, requirements.saved_world_size, step.url)
        if requirements.world_size is not None:
            found += check_world_size(step.parts, state, saved, requirements.world_size, step.url)
    verdict = verdict_of(found)
    metadata = [(look.part.path, one) for look in parts for one in look.metadata]
    files = _saved_files(step)
    return Report(
        url=step.url,
        number=step.number,
        layout=step.layout,
        verdict=verdict,
        exit_code=_exit_code(verdict, found, state, requirements),
        level=level,
        findings=in_order(found),
        state=state,
        world_size=saved,
        n_bytes=sum(file.size for file in files),
        n_files=len(files),
        n_tensors=sum(len(one.tensors) for _, one in metadata),
        n_records=sum(len(look.ranges) for look in parts),
        bytes_read=sum(look.bytes_read for look in parts) + n_read,
        written_s=_newest(files),
        parts=tuple(part.path for part in step.parts),
        digests=tuple((metadata_path(path, one.rank), one.digest) for path, one in metadata),
        ranks=tuple((part.path, tuple(sorted(ranks_in(part)))) for part in step.parts),
        seal=seal.kind if seal else None,
        bytes_in_records=proven.n_asked,
        bytes_proven=proven.n_bytes,
        records_proven=proven.n_records,
        values_scanned=proven.n_values,
        by_store=by_store,
    )


def _is_known(parts: Sequence[PartInspection]) -> bool:
    # Without metadata there is nothing to say what a resume would restore.
    return all(look.metadata or look.part.format not in SHARDED for look in parts)


def metadata_path(part: str, rank: int | None) -> str:
    """The path of a metadata file in its step: the global one of a part, or a rank's own."""
    name = ".metadata" if rank is None else f"__{rank}.metadata"
    return inside(part, name)


def _saved_files(step: Step) -> list[FileInfo]:
    """The files of the step without those that ckptctl wrote: they say nothing of the save."""
    return [file for file in step.files if not is_own(file.path)]


def _sealed_world_size(seal: Seal | None, found: WorldSize | None) -> WorldSize | None:
    """The world size that is known best: a seal may know what files can only bound."""
    known = seal.step.world_size if seal else None
    if known is None or (found is not None and not found.at_least):
        return found
    return WorldSize(known, "seal")


def _newest(files: Sequence[FileInfo]) -> float | None:
    return max((file.mtime_s for file in files if file.mtime_s is not None), default=None)


def _in_flight(step: Step, findings: Sequence[Finding], grace_s: float) -> Iterator[Finding]:
    """The findings, with those of an unfinished save as one `step.in-progress` while it is young.

    A time in the future by more than the grace is a clock that is wrong, and says
    nothing.
    """
    newest = _newest(_saved_files(step))
    age_s = None if newest is None else time.time() - newest
    young = age_s is not None and -grace_s <= age_s < grace_s
    unfinished = [finding for finding in findings if finding.code in NEVER_FINISHED]
    if not (young and unfinished):
        yield from findings
        return
    yield from (finding for finding in findings if finding.code not in NEVER_FINISHED)
    yield Finding(
        "step.in-progress",
        unfinished[0].where,
        f"{unfinished[0].message}, but the last write was {age_s:.0f} s ago: "
        "a save may still be running",
        expected=f"no write for {grace_s:.0f} s",
        found=f"a write {age_s:.0f} s ago",
        next_command=f"ckptctl verify {shlex.quote(step.url)}",
    )


def _exit_code(
    verdict: Verdict, findings: Sequence[Finding], state: TrainState, requirements: Requirements
) -> int:
    if verdict is Verdict.UNKNOWN:
        denied = any(finding.code == "step.denied" for finding in findings)
        return EXIT_DENIED if denied else verdict.exit_code
    codes = {finding.code for finding in findings}
    lost = next((f.where for f in findings if f.code == "state.lost"), "").split(", ")
    fixed = "world-size.fixed" in codes or not set(lost).isdisjoint(requirements.require)
    if verdict is Verdict.UNVERIFIABLE and fixed:
        return EXIT_WORLD_SIZE
    if verdict is not Verdict.COMPLETE:
        return verdict.exit_code
    if fixed:
        return EXIT_WORLD_SIZE
    if any(kind not in state.held for kind in requirements.require):
        return EXIT_STATE_MISSING
    return 0
