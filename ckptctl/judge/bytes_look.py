"""What do the bytes of a whole step say?

Brings the parts of a step together for one pass over their bytes, and what that
says together with what `structure` said before. Where there is a seal, its digests
are compared in the same pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ckptctl.checks.byte_pass import Limits, read_runs
from ckptctl.checks.content import Choose, ContentCheck, unverifiable
from ckptctl.checks.sealed_bytes import Comparison
from ckptctl.checks.words import counted, inside
from ckptctl.findings import NOTHING_PROVEN, Finding, Proven
from ckptctl.formats.safetensors import SUFFIX
from ckptctl.judge.part_checks import PartLook, folder_of
from ckptctl.model import Part, PartFormat, Step
from ckptctl.storage.contract import Store

_SAID_BETTER = frozenset({"record.no-crc", "record.transformed", "format.no-checksums"})
"""Remarks of the shallower levels that a look at the bytes makes good, or into a fault."""

_SAID_AGAIN = frozenset({"record.crc", "record.framing"})


@dataclass(frozen=True, slots=True)
class Asked:
    """How the bytes of a step are to be read, and which of its records."""

    limits: Limits = field(default_factory=Limits)
    choose: Choose | None = None


@dataclass(frozen=True, slots=True)
class BytesLook:
    """What the bytes said: `findings` are all of the step, `whole` that every byte was read."""

    findings: tuple[Finding, ...]
    proven: Proven
    n_read: int
    whole: bool


def look_at_bytes(
    store: Store,
    step: Step,
    parts: Sequence[PartLook],
    findings: Sequence[Finding],
    sealed: Comparison | None,
    asked: Asked | None = None,
) -> BytesLook:
    """Compare every byte of a step's records, after `structure` has found `findings`.

    `sealed` compares all files with the seal of the step, where there is one. Storage
    errors pass through. Cost: every byte once, of the records, and of all files where
    there is a seal.
    """
    asked = asked or Asked()
    checks = [
        ContentCheck(
            store,
            folder_of(step, look.part),
            look.ranges,
            look.part.files,
            look.part.path,
            choose=asked.choose,
        )
        for look in parts
        if look.metadata
    ]
    of_records = [run for check in checks for run in check.runs]
    n_read = read_runs(store, sealed.runs(of_records) if sealed else of_records, asked.limits)
    as_sealed = sealed.proven if sealed else frozenset()
    found = [*sealed.findings()] if sealed else []
    found += [finding for check in checks for finding in check.findings(as_sealed)]
    for look in parts:
        found += _of_safetensors(look.part, as_sealed)
    proven = sum((check.proven for check in checks), NOTHING_PROVEN)
    whole = all(check.whole for check in checks) and asked.choose is None
    whole = whole and (sealed is None or sealed.whole)
    if not whole:
        found.append(_partial(proven, step))
    return BytesLook((*_merged(findings, found, whole=whole), *found), proven, n_read, whole)


def _of_safetensors(part: Part, sealed: Collection[str]) -> Iterator[Finding]:
    if part.format is not PartFormat.SAFETENSORS:
        return
    files = [file.path for file in part.files if file.path.endswith(SUFFIX)]
    unproven = [path for path in files if inside(part.path, path) not in sealed]
    if unproven:
        n_files = counted(len(unproven), "safetensors file")
        yield unverifiable(part.path, f"{n_files} without checksums")


def _partial(proven: Proven, step: Step) -> Finding:
    return Finding(
        "content.partial",
        "",
        f"{proven.n_bytes:,} of {proven.n_asked:,} bytes in records match their checksums; the "
        "others were not compared",
        expected=f"{proven.n_asked:,} bytes",
        found=f"{proven.n_bytes:,} bytes",
        next_command=f"ckptctl verify {step.url} --level content",
    )


def _merged(
    before: Sequence[Finding], found: Sequence[Finding], *, whole: bool
) -> Iterator[Finding]:
    """The earlier findings, without those that the look at the bytes says again, or better."""
    again = {(finding.code, finding.where) for finding in found if finding.code in _SAID_AGAIN}
    for finding in before:
        better = whole and finding.code in _SAID_BETTER
        if not better and (finding.code, finding.where) not in again:
            yield finding
