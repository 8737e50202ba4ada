"""State what is proven of a step, what is contradicted, and what is unknown.

A finding says what is wrong; a claim says what is known. Every claim is unknown until something
proves it: no claim is proven because no finding contradicts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptctl.claims import Claim, ClaimName, ClaimState
from ckptctl.findings import Finding, Severity
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.file_names import may_hold_state
from ckptctl.formats.frameworks.state_keys import file_holds_no_state
from ckptctl.formatting import command_line, some_of
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.stages import StageContext

CONTRADICTS: Mapping[str, ClaimName] = {
    "metadata.missing": ClaimName.WHOLE,
    "metadata.empty": ClaimName.WHOLE,
    "metadata.ambiguous": ClaimName.ONE_SAVE,
    "metadata.unreadable": ClaimName.BYTES,
    "metadata.unsafe": ClaimName.BYTES,
    "metadata.path": ClaimName.BYTES,
    "path.escape": ClaimName.BYTES,
    "shard.missing": ClaimName.WHOLE,
    "shard.truncated": ClaimName.WHOLE,
    "range.missing": ClaimName.WHOLE,
    "range.overlap": ClaimName.BYTES,
    "range.outside": ClaimName.BYTES,
    "range.stray": ClaimName.BYTES,
    "coverage.gap": ClaimName.WHOLE,
    "coverage.overlap": ClaimName.WHOLE,
    "coverage.outside": ClaimName.WHOLE,
    "record.framing": ClaimName.BYTES,
    "record.mismatch": ClaimName.BYTES,
    "record.unsafe": ClaimName.BYTES,
    "record.crc": ClaimName.BYTES,
    "store.contradicts": ClaimName.BYTES,
    "seal.digest": ClaimName.BYTES,
    "seal.gone": ClaimName.WHOLE,
    "part.missing": ClaimName.WHOLE,
    "file.missing": ClaimName.WHOLE,
    "file.unreadable": ClaimName.BYTES,
    "state.mixed": ClaimName.ONE_SAVE,
    "state.not-finite": ClaimName.STATE,
    "step.two-saves": ClaimName.ONE_SAVE,
    "step.unfinished": ClaimName.WHOLE,
    "step.in-progress": ClaimName.WHOLE,
    "step.changed": ClaimName.ONE_SAVE,
    "step.foreign": ClaimName.IDENTITY,
    "step.nested": ClaimName.IDENTITY,
    "step.wrong-step": ClaimName.IDENTITY,
    "step.superseded": ClaimName.BRANCH,
}
"""The claim that a fault contradicts. A fault that is in neither table makes no claim."""

DOUBTS: Mapping[str, ClaimName] = {
    "format.unlisted": ClaimName.WHOLE,
    "format.unsupported": ClaimName.WHOLE,
    "file.fewer": ClaimName.WHOLE,
    "file.dropped": ClaimName.WHOLE,
    "file.gone": ClaimName.WHOLE,
    "step.times": ClaimName.ONE_SAVE,
    "shard.stale": ClaimName.ONE_SAVE,
    "index.size": ClaimName.ONE_SAVE,
    "seal.outdated": ClaimName.ONE_SAVE,
    "metadata.foreign": ClaimName.IDENTITY,
    "step.duplicate": ClaimName.IDENTITY,
    "record.unverifiable": ClaimName.BYTES,
    "content.unfinished": ClaimName.BYTES,
}
"""The claim that a finding leaves unknown, whatever would prove it otherwise."""

_SEAL = "seal"
"""Proof by a seal of this save: it names every file, the step and the run, so no doubt remains."""

_NOT_INSPECTED = frozenset(
    {"step.unknown", "step.linked", "step.denied", "step.archived", "step.no-memory"}
)


def claims_of(
    opened: OpenStep, context: StageContext, findings: Sequence[Finding]
) -> tuple[Claim, ...]:
    """The claims of a step, in the order of `ClaimName`. Cost: none; nothing is read."""
    failed = next((finding for finding in findings if finding.code in _NOT_INSPECTED), None)
    if failed is not None:
        return nothing_proven(failed)
    contradicted = {CONTRADICTS[finding.code]: finding for finding in _first(findings, CONTRADICTS)}
    doubts = {DOUBTS[finding.code]: finding for finding in _first(findings, DOUBTS)}
    proofs = {claim.name: claim for claim in _proofs(opened, context)}
    claims = []
    for name in ClaimName:
        if name in contradicted:
            fault = contradicted[name]
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


def _first(findings: Sequence[Finding], table: Mapping[str, ClaimName]) -> Iterable[Finding]:
    """The findings in a table; of those about one claim the worst comes last, and decides."""
    listed = [finding for finding in findings if finding.code in table]
    faults = [finding for finding in listed if finding.severity is Severity.FAULT]
    return reversed(faults or listed)


def _proofs(opened: OpenStep, context: StageContext) -> Iterator[Claim]:
    """What proves each claim, as if no finding spoke against it."""
    yield _whole(opened, context)
    yield _bytes(opened, context)
    yield context.one_save or Claim.unknown(
        ClaimName.ONE_SAVE, "the parts were not compared", command_line("seal", opened.url)
    )
    yield _identity(opened, context)
    yield _state(context)
    yield context.branch or Claim.unknown(
        ClaimName.BRANCH, "the other steps of the root were not compared", None
    )


def _whole(opened: OpenStep, context: StageContext) -> Claim:
    if context.notes.seal is not None:
        return Claim.proven(ClaimName.WHOLE, _SEAL)
    if context.wholeness is None:
        return Claim.unknown(ClaimName.WHOLE, "the files of the step were not compared", None)
    return context.wholeness.claim(opened, ranks_counted=context.ranks_counted)


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


def _identity(opened: OpenStep, context: StageContext) -> Claim:
    if opened.step.number is None:
        return Claim.unknown(ClaimName.IDENTITY, "its name states no step")
    if context.notes.seal is not None:
        return Claim.proven(ClaimName.IDENTITY, _SEAL)
    return context.identity or Claim.unknown(ClaimName.IDENTITY, "no count was compared", None)


def _state(context: StageContext) -> Claim:
    held = context.state.held
    if not held:
        return Claim.unknown(ClaimName.STATE, "no train state is recognized", "--state KIND=KEY")
    return Claim.proven(ClaimName.STATE, ", ".join(held))
