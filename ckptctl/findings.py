"""Findings, their codes and severities, and the claims and the verdict that they add up to.

A claim is proven, contradicted or unknown, and nothing else: what was not recognized, not
checked or not seen is unknown, with what would prove it.

`CODES` is the table of all finding codes, each with its severity and the
verdict that it forces. Higher layers decide how findings are printed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Self

import msgspec

from ckptctl.formatting import command_line, some_of
from ckptctl.model import (
    ExitCode,
    FindingCode,
    Hex,
    Level,
    NextCommand,
    Ordered,
    StepNumber,
    StepUrl,
    TrainState,
    WorldSize,
)


class ClaimState(StrEnum):
    """Whether a claim holds."""

    PROVEN = "proven"
    CONTRADICTED = "contradicted"
    UNKNOWN = "unknown"


class ClaimName(StrEnum):
    """What is claimed of a step."""

    WHOLE = "whole"
    """What the save consists of is known, and all of it is there."""
    BYTES = "bytes"
    """The bytes are those that were written."""
    ONE_SAVE = "one save"
    """All parts and files were written by the same save."""
    IDENTITY = "identity"
    """It is the step that its name states."""
    STATE = "state"
    """The train state that it holds is recognized."""
    BRANCH = "branch"
    """It is on the branch that the run is on now."""


class Claim(msgspec.Struct, frozen=True):
    """One claim about a step, with its evidence."""

    name: ClaimName
    """What is claimed."""
    state: ClaimState
    """Whether it holds."""
    by: str
    """What proves or contradicts it; of an unknown one, why it is unknown."""
    would_prove: str | None = None
    """What would prove an unknown claim; null for any other."""
    finding: str | None = None
    """The code of the finding that contradicts it, or that leaves it unknown; else null."""

    @classmethod
    def proven(cls, name: ClaimName, by: str) -> Claim:
        """A claim that holds."""
        return cls(name, ClaimState.PROVEN, by)

    @classmethod
    def unknown(cls, name: ClaimName, why: str, would_prove: str | None = None) -> Claim:
        """A claim of which nothing is known yet."""
        return cls(name, ClaimState.UNKNOWN, why, would_prove)

    @property
    def is_proven(self) -> bool:
        """Whether the claim holds."""
        return self.state is ClaimState.PROVEN


class Severity(Ordered):
    """How bad one finding is.

    A `fault` makes the step unusable, a `warning` needs a person's attention, a
    `note` is for information.
    """

    FAULT = "fault"
    WARNING = "warning"
    NOTE = "note"


class Verdict(Ordered):
    """What the findings of a step add up to, worst first."""

    exit_code: int  # of `verify`

    UNSAFE = "unsafe", 25
    UNKNOWN = "unknown", 75
    CHANGED = "changed", 26
    CORRUPT = "corrupt", 21
    INCOMPLETE = "incomplete", 20
    IN_PROGRESS = "in-progress", 26
    UNVERIFIABLE = "unverifiable", 22
    REJECTED = "rejected", 27
    SUPERSEDED = "superseded", 27
    COMPLETE = "complete", 0

    def __new__(cls, word: str, exit_code: int) -> Self:
        """A verdict by its word; the exit code is beside it."""
        verdict = str.__new__(cls, word)
        verdict._value_ = word
        verdict.exit_code = exit_code
        return verdict


EXIT_FRESH = 10
EXIT_NONE_USABLE = 11
EXIT_STATE_MISSING = 23
EXIT_WORLD_SIZE = 24
EXIT_DIFFERS = 28
EXIT_DENIED = 77
EXIT_LINKED = 2


@dataclass(frozen=True, slots=True)
class Code:
    """What a finding code always means: its severity, and the verdict it forces (or none).

    `claim` is the claim about a step that it contradicts, or leaves unknown whatever else would
    prove it; None for a code that makes no claim.
    """

    severity: Severity
    verdict: Verdict | None
    title: str
    claim: ClaimName | None = None

    @property
    def contradicts(self) -> bool:
        """Whether the claim is contradicted; a warning, or what cannot be verified, is a doubt."""
        return self.severity is Severity.FAULT and self.verdict is not Verdict.UNVERIFIABLE


_note = partial(Code, Severity.NOTE, None)
_warning = partial(Code, Severity.WARNING, None)
_fault = partial(Code, Severity.FAULT)
_corrupt = partial(_fault, Verdict.CORRUPT)
_incomplete = partial(_fault, Verdict.INCOMPLETE)
_unknown = partial(_fault, Verdict.UNKNOWN)
_unproven = partial(_fault, Verdict.UNVERIFIABLE)
_unsafe = partial(_fault, Verdict.UNSAFE)

_WHOLE, _BYTES, _ONE_SAVE = ClaimName.WHOLE, ClaimName.BYTES, ClaimName.ONE_SAVE
_IDENTITY, _STATE, _BRANCH = ClaimName.IDENTITY, ClaimName.STATE, ClaimName.BRANCH


NEVER_FINISHED = frozenset(
    {"metadata.missing", "file.missing", "part.missing", "step.unfinished", "step.in-progress"}
)
"""Codes of an interrupted save: nothing that had been saved is lost."""

NO_METADATA = frozenset({"metadata.missing", "metadata.unreadable", "metadata.unsafe"})
"""Codes of a part whose shards only a seal can say how to read."""

# Something missing makes a step `incomplete`; something wrong makes it `corrupt`.
CODES: Mapping[str, Code] = {
    "metadata.missing": _incomplete("the metadata file is missing", _WHOLE),
    "metadata.empty": _incomplete("the metadata lists no entries", _WHOLE),
    "metadata.unreadable": _corrupt("the metadata cannot be decoded", _BYTES),
    "metadata.unsafe": _unsafe("loading the metadata could run code", _BYTES),
    "metadata.ambiguous": _incomplete("the step has two sets of metadata", _ONE_SAVE),
    "metadata.path": _corrupt("a key path contradicts the name of its entry", _BYTES),
    "metadata.foreign": _warning("the metadata names another step", _IDENTITY),
    "shard.missing": _incomplete("a shard file is missing", _WHOLE),
    "shard.truncated": _incomplete("a shard file is shorter than the metadata requires", _WHOLE),
    "shard.empty": _note("an empty shard file that nothing refers to"),
    "shard.stale": _warning(
        "a shard file is unchanged since the step before, and others changed", _ONE_SAVE
    ),
    "shard.orphan": _note("a shard file that no metadata names"),
    "shard.trailing": _warning("a shard file contains bytes that no record uses"),
    "range.missing": _incomplete("an entry has no byte range", _WHOLE),
    "range.overlap": _corrupt("two byte ranges in one file overlap", _BYTES),
    "range.outside": _corrupt("a byte range that no file can contain", _BYTES),
    "range.stray": _corrupt("a byte range belongs to no entry", _BYTES),
    "path.escape": _unsafe("a path leads outside the step", _BYTES),
    "coverage.gap": _incomplete("part of a tensor is in no chunk", _WHOLE),
    "coverage.overlap": _corrupt("part of a tensor is in more than one chunk", _WHOLE),
    "coverage.outside": _corrupt("a chunk extends beyond its tensor", _WHOLE),
    "record.framing": _corrupt("a record is not a well-formed archive", _BYTES),
    "record.mismatch": _corrupt("a record does not match the metadata", _BYTES),
    "record.unsafe": _unsafe("loading a record could run code", _BYTES),
    "record.crc": _corrupt("the bytes of a record do not match its checksum", _BYTES),
    "record.no-crc": _note("the records have no checksums"),
    "record.transformed": _note("the records are compressed, and their framing was not checked"),
    "record.unverifiable": _unproven("records have neither checksums nor a seal", _BYTES),
    "content.partial": _note("only part of the bytes was compared"),
    "content.unfinished": _unproven("the comparison of the bytes was not finished", _BYTES),
    "values.not-finite": _warning("a tensor contains NaN or infinity"),
    "optimizer.zero": _warning("all that the optimizer keeps is zero"),
    "optimizer.idle": _note("some of what the optimizer keeps is zero"),
    "optimizer.negative": _warning("means of squares are below zero"),
    "optimizer.shape": _warning("moments have another shape than their parameter"),
    "optimizer.unchanged": _warning("the weights have moved, and the moments have not"),
    "optimizer.discontinuous": _warning("moments fell faster than the optimizer lets them"),
    "optimizer.unseen": _note("no tensor that an optimizer keeps was read"),
    "format.unsupported": _unproven("ckptctl does not inspect this format", _WHOLE),
    "format.unlisted": _unproven("nothing states which files belong to the step", _WHOLE),
    "format.no-checksums": _note("the format has no checksums"),
    "index.size": _warning("an index states another size than its files have", _ONE_SAVE),
    "part.missing": _incomplete("a part of the step is missing", _WHOLE),
    "file.missing": _incomplete("a file that the layout requires is missing", _WHOLE),
    "file.fewer": _unproven("fewer files of like kinds than in the steps before", _WHOLE),
    "file.dropped": _warning("a file with state is missing that the steps before hold", _WHOLE),
    "file.gone": _warning("a file is missing that the steps before hold", _WHOLE),
    "file.truncated": _warning("a JSON file beside the shards is truncated"),
    "file.unreadable": _corrupt("a sidecar is damaged", _BYTES),
    "file.unsafe": _unsafe("loading a file could run code"),
    "pickle.unknown": _warning("a pickle names a class that is in no list of known ones"),
    "state.missing": _note("some train state is missing"),
    "state.adapter": _note("the weights are those of an adapter, without the base model"),
    "state.unrecognized": _note("some entries may be train state and are not recognized"),
    "state.renamed": _note("entries have other names than in the step before"),
    "state.lost": _note("some train state cannot be restored at this world size"),
    "state.left-out": _note("the target format cannot hold part of the step"),
    "state.not-finite": _fault(
        Verdict.REJECTED, "the weights hold NaN, and training had diverged before the save", _STATE
    ),
    "state.mixed": _corrupt("shard files disagree about the optimizer's step count", _ONE_SAVE),
    "world-size.differs": _note("the step was written by a different number of ranks"),
    "world-size.bound": _note("nothing says how another number of ranks could load the step"),
    "world-size.fixed": _note("the step loads only at the world size that wrote it"),
    "step.unfinished": _incomplete("the save was interrupted", _WHOLE),
    "step.in-progress": _fault(Verdict.IN_PROGRESS, "a save is in progress", _WHOLE),
    "step.changed": _fault(Verdict.CHANGED, "the step changed during the inspection", _ONE_SAVE),
    "step.unknown": _unknown("the storage did not answer"),
    "step.denied": _unknown("the storage denied access"),
    "step.linked": _unknown("a step, or a file of it, is a link, and not followed"),
    "step.archived": _unknown("files of the step are in an archive tier"),
    "step.no-memory": _unknown("there was not enough memory for the inspection"),
    "step.two-saves": _incomplete("files of two saves lie in one step", _ONE_SAVE),
    "step.times": _warning("files of the step were written far apart", _ONE_SAVE),
    "step.foreign": _corrupt("the step was sealed as another step", _IDENTITY),
    "step.nested": _corrupt("the folder is named as a step and holds several", _IDENTITY),
    "step.wrong-step": _corrupt("the folder holds an earlier step than its name states", _IDENTITY),
    "step.rejected": _fault(Verdict.REJECTED, "the step was rejected"),
    "step.superseded": _fault(
        Verdict.SUPERSEDED, "the step belongs to an abandoned branch", _BRANCH
    ),
    "step.finished-late": _note("the metadata arrived after the step was superseded"),
    "step.accepted": _note("the step was rejected and later accepted"),
    "step.pinned": _note("the step is pinned, and is not removed"),
    "step.confirmed": _note("training has shown that the step is good"),
    "seal.digest": _corrupt("a file does not match the seal", _BYTES),
    "seal.gone": _incomplete("a sealed file is missing or truncated", _WHOLE),
    "seal.bad-signature": _unproven("the seal was not made with the given key, or by its signer"),
    "seal.required": _unproven("a seal is required, and none proves the step"),
    "seal.not-compared": _unproven("a seal is required, and it was not compared with every byte"),
    "seal.invalid": _warning("the seal is damaged"),
    "seal.unsupported": _warning("the seal requires a newer ckptctl"),
    "seal.foreign": _warning("the seal belongs to another step"),
    "seal.outdated": _warning("the step was saved again after it was sealed", _ONE_SAVE),
    "seal.partial": _warning("the seal does not cover the whole step"),
    "seal.unkeyed": _warning("the seal was made without a key, and one was given"),
    "seal.unsigned": _warning("a signature is required, and the seal has none"),
    "seal.other-signer": _warning("the seal is signed with another key than those required"),
    "seal.no-key": _note("the seal was made with a key, and none was given"),
    "seal.other-run": _warning("the step was sealed for another run"),
    "seal.renamed": _warning("the step was sealed under another name"),
    "seal.rolled-back": _warning("a newer seal of the step was in the root"),
    "seal.set-back": _warning("the root has no seal as new as the one that was asked for"),
    "seal.extra": _warning("a file was added after the step was sealed"),
    "seal.missing": _note("the step has no seal"),
    "store.contradicts": _corrupt(
        "the bytes of an object do not match the checksum that the store reports", _BYTES
    ),
    "store.rewritten": _unproven(
        "a sealed object was written again, and its bytes were not compared"
    ),
    "store.unverifiable": _unproven("the store has no checksum that can be compared with a seal"),
    "mark.damaged": _warning("a mark cannot be read"),
    "mark.outdated": _note("a mark refers to an earlier save of the step"),
    "step.duplicate": _warning("two folders have the same step number", _IDENTITY),
    "step.number": _warning("a name has a step number that is too large"),
    "pointer.differs": _note("a pointer file names another step"),
    "root.unavailable": _warning("an optional root is missing or does not answer"),
    "root.not-shared": _warning("all steps lack the files of the same ranks"),
    "root.unconfirmed": _warning("no step is confirmed, and the newest sound one was chosen"),
    "root.suspect": _warning("several recent steps are damaged"),
    "root.two-branches": _warning("steps with lower numbers were written after the newest one"),
    "root.further": _warning("a checkpoint that is no step is further than the chosen one"),
    "root.unnumbered": _note("a checkpoint under the root has no step number"),
    "loss.restarted": _fault(None, "the job started from the beginning instead of resuming"),
    "loss.not-finite": _fault(None, "the loss is NaN or infinite"),
    "loss.step": _fault(None, "the first step is not the one after the checkpoint"),
    "loss.tokens": _fault(None, "the count of tokens or samples does not continue"),
    "loss.batch": _fault(None, "a step takes more or fewer tokens than before"),
    "loss.lr": _fault(None, "the learning rate does not continue"),
    "loss.data": _fault(None, "the data was repeated or skipped"),
    "loss.higher": _fault(None, "the same batches have a higher loss"),
    "loss.jump": _fault(None, "the loss jumped up"),
    "loss.spike": _fault(None, "rows are far above all rows before the resume"),
    "loss.gap": _warning("the log leaves a gap after the checkpoint"),
    "loss.lr-lower": _warning("the learning rate is lower than the rows before lead to"),
    "loss.other-samples": _warning("a step consumed samples that none consumed before"),
    "loss.drift": _warning("steps logged twice begin equal and drift apart"),
    "loss.differs": _warning("steps logged twice differ over the same batches"),
    "loss.lower": _warning("the same batches have a lower loss"),
    "loss.level-shift": _warning("the loss is slightly higher than before"),
    "loss.collapse": _warning("the loss falls as it never did, or is the same in all rows"),
    "loss.rank-not-finite": _warning("the loss of another rank is NaN or infinite"),
    "loss.grad-norm": _warning("the gradient norm is far above the one before"),
    "loss.later": _warning("the loss or the gradient norm rises behind steps that agree"),
    "loss.ema": _warning("the loss of the averaged weights differs"),
    "loss.no-value": _warning("rows have no loss, where earlier ones had one"),
    "loss.rank-differs": _warning("steps that another rank logged twice differ"),
    "loss.copied": _warning("rows that appear to be trained again are copies"),
    "loss.constant": _warning("the loss does not vary, so equal rows prove nothing"),
    "loss.other-data": _warning("steps logged twice saw other batches"),
    "loss.other-ranks": _warning("steps logged twice differ, and so does the number of ranks"),
    "loss.too-little": _warning("too few rows to compare"),
    "loss.noisy": _warning("the loss is too noisy for a jump to show"),
    "loss.no-resume": _warning("there is no resume in the logs"),
    "loss.none": _warning("there is no loss in the logs"),
    "loss.interleaved": _warning("several runs write into one log"),
    "loss.unused-key": _warning("no log has the name that --key states"),
    "loss.unread": _warning("the end of the logs is damaged and cannot be read"),
    "loss.low-precision": _note("the loss is printed too coarsely to prove anything"),
    "loss.unmarked": _note("equal rows, and nothing shows that another attempt trained them"),
    "loss.duplicates": _note("rows were written to the log twice"),
    "loss.row-missing": _note("the first row after the resume is missing in the log"),
    "loss.not-logged": _note("the logs lack the steps before the first one after the resume"),
    "loss.one-rank": _note("the losses of one rank were compared, and others logged other losses"),
    "loss.several": _note("the logs hold several resumes"),
    "loss.throughput": _note("the throughput has changed"),
    "loss.damaged": _note("a log is damaged in the middle, and later ones continue"),
}
"""Every code that a finding can have. `ckptctl explain CODE` has a page for each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One observed fault, warning or note."""

    code: FindingCode
    """The code, such as `shard.missing`; `ckptctl explain CODE` prints its page."""
    where: str
    """File, entry or part, relative to the step; empty for the step or the root itself."""
    message: str
    """What was observed, in one line."""
    expected: str | None = None
    """What should be there, with its unit, where the message does not state it."""
    found: str | None = None
    """What is there, with its unit, where the message does not state it."""
    next_command: NextCommand = None
    unmet: bool = False
    """It is a requirement of the caller that the step does not meet."""

    @property
    def severity(self) -> Severity:
        """Fault, warning or note, by the code."""
        return CODES[self.code].severity

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that the code forces; None for one that forces none."""
        return CODES[self.code].verdict


def explained(
    code: str, where: str, message: str, expected: str | None = None, found: str | None = None
) -> Finding:
    """A finding of which the page says what to do next."""
    return Finding(code, where, message, expected, found, command_line("explain", code))


_MAX_ALIKE = 20
"""So many findings of one code are listed one by one."""


def at_most_few(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings, but of each code only the first few and one for all others together."""
    others: dict[str, list[str]] = {}
    n_seen: dict[str, int] = {}
    for finding in findings:
        n_seen[finding.code] = n_seen.get(finding.code, 0) + 1
        if n_seen[finding.code] <= _MAX_ALIKE:
            yield finding
        else:
            others.setdefault(finding.code, []).append(finding.where)
    for code, places in others.items():
        yield Finding(
            code, some_of(places), f"{CODES[code].title}: the same in {len(places):,} more places"
        )


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict that any finding forces; `complete` when none does."""
    forced = [f.verdict for f in findings if f.verdict is not None]
    return min(forced, key=lambda verdict: verdict.place, default=Verdict.COMPLETE)


UNMET_EXIT_CODES: Mapping[str, int] = {
    "state.missing": EXIT_STATE_MISSING,
    "state.unrecognized": EXIT_STATE_MISSING,
    "state.lost": EXIT_WORLD_SIZE,
    "world-size.fixed": EXIT_WORLD_SIZE,
}
"""The exit code of a step that does not meet a requirement, by the code of the finding."""


def unmet_in(findings: Iterable[Finding]) -> Finding | None:
    """The requirement that decides the exit code of a step without faults; None if all are met."""
    unmet = (finding for finding in findings if finding.unmet)
    return max(unmet, key=lambda finding: UNMET_EXIT_CODES[finding.code], default=None)


def exit_code_of(findings: Collection[Finding]) -> int:
    """The exit code of `verify` for a step with these findings."""
    verdict, codes = verdict_of(findings), {finding.code for finding in findings}
    if verdict is Verdict.UNKNOWN and "step.linked" in codes:
        return EXIT_LINKED
    if verdict is Verdict.UNKNOWN and "step.denied" in codes:
        return EXIT_DENIED
    unmet = unmet_in(findings)
    code = 0 if unmet is None else UNMET_EXIT_CODES[unmet.code]
    # An option accepts what is unverifiable, and none what cannot be loaded.
    is_fixed = verdict is Verdict.UNVERIFIABLE and code == EXIT_WORLD_SIZE
    return code if verdict is Verdict.COMPLETE or is_fixed else verdict.exit_code


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings worst first, then by code and place: the order of every output."""
    return tuple(sorted(findings, key=lambda f: (f.severity.place, f.code, f.where, f.message)))


@dataclass(frozen=True, slots=True)
class Proven:
    """How many bytes of one part, or of several, match their checksums.

    `n_asked` counts the bytes of all records; `n_bytes` of them, in `n_records` records,
    match. `n_values` floating-point values were scanned for NaN and infinity, if requested.
    """

    n_asked: int = 0
    n_bytes: int = 0
    n_records: int = 0
    n_values: int = 0

    def __add__(self, other: Proven) -> Proven:
        return Proven(
            self.n_asked + other.n_asked,
            self.n_bytes + other.n_bytes,
            self.n_records + other.n_records,
            self.n_values + other.n_values,
        )


NOTHING_PROVEN = Proven()


@dataclass(frozen=True, slots=True)
class ByStore:
    """The comparison of a sealed step with the store's checksums; no bytes are read for it."""

    n_files: int
    """Sealed files beside the metadata."""
    n_same: int
    """Files that the store keeps with the checksum that was sealed."""
    n_bytes: int
    """Size of those files in bytes."""
    n_reported: int
    """Of those, files whose sealed checksum the store had reported and nobody had computed."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of the inspection of one step."""

    url: StepUrl
    number: StepNumber
    layout: str
    """The framework whose layout the step has: `dcp`, `torchtitan`, `megatron`, …"""
    verdict: Verdict
    """What the findings of the step add up to."""
    exit_code: ExitCode
    """The exit code of `verify` for this step."""
    level: Level
    """The level that was inspected."""
    findings: tuple[Finding, ...]
    """The findings, worst first."""
    state: TrainState
    """What a resume would restore."""
    world_size: WorldSize | None
    """How many ranks wrote the step; null where that is unknown."""
    n_bytes: int
    """Size of all files in bytes."""
    n_files: int
    """Number of files."""
    n_tensors: int
    """Number of tensors in the metadata."""
    n_records: int
    """Number of byte ranges in the metadata."""
    bytes_read: int
    """Bytes that the inspection read."""
    written_s: float | None
    """When the newest file was written, in seconds since 1970; null where the storage keeps no
    times."""
    parts: tuple[str, ...]
    """The folders of tensors in the step, as paths relative to it; the step itself is empty."""
    digests: tuple[tuple[str, Hex], ...]
    """SHA-256 of the metadata files, by path; of rank files, from level structure on, that of the
    directory of each."""
    ranks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The ranks that left a file, by part; of rank files, those that lack none."""
    seal: str | None = None
    """The kind of seal (`xxh3-128`, `sha256 with a key`); null where no seal is of this save."""
    seal_run: str | None = None
    """The id of the run that the seal is of; null where no seal is of this save."""
    seal_sequence: int | None = None
    """The place of the seal in the order of the root's seals; null where none is of this save."""
    seal_signer: str | None = None
    """The fingerprint of the key that signed the seal, as the seal names it; null without one."""
    seal_signer_verified: bool = False
    """A signature was required, and the one of this signer matches the seal."""
    bytes_in_records: int = 0
    """At level content: bytes of all records."""
    bytes_proven: int = 0
    """At level content: bytes of the records that match their checksums."""
    records_proven: int = 0
    """At level content: records that match their checksums."""
    values_scanned: int = 0
    """With a NaN scan: floating-point values that were checked."""
    pickles_read: int = 0
    """Pickles of the step that were read whole and would run no code that ckptctl knows of."""
    pickles_unread: int = 0
    """Pickles of the step that this level does not read: whether loading them runs code is
    unknown."""
    allowed_globals: tuple[str, ...] = ()
    """Classes in pickles that are in no list and that `--allow-globals` names."""
    by_store: ByStore | None = None
    """What the store's own checksums prove; null where the store was not asked, or no seal is of
    this save."""
    claims: tuple[Claim, ...] = ()
    """What is proven of the step, what is contradicted, and what is unknown."""

    def claim(self, name: ClaimName) -> Claim:
        """The claim of a name; unknown in a report without claims."""
        of_name = (claim for claim in self.claims if claim.name is name)
        return next(of_name, Claim.unknown(name, "not inspected"))

    def with_claim(self, claim: Claim) -> Report:
        """The report with another claim of that name, unless its own is contradicted."""
        if self.claim(claim.name).state is ClaimState.CONTRADICTED:
            return self
        claims = (claim if one.name is claim.name else one for one in self.claims)
        return replace(self, claims=tuple(claims))

    @property
    def usable(self) -> bool:
        """The step is complete and meets every requirement."""
        return self.exit_code == 0

    @property
    def interrupted(self) -> bool:
        """The save was interrupted: every fault is something that was not written.

        A mark on the step does not change this.
        """
        faults = {f.code for f in self.with_severity(Severity.FAULT)} - {"step.superseded"}
        return bool(faults) and faults <= NEVER_FINISHED

    @property
    def left_unfinished(self) -> bool:
        """The save was interrupted, or superseded before its metadata arrived."""
        return self.interrupted or self.has_finding("step.finished-late")

    @property
    def damaged(self) -> bool:
        """Something that had been saved is missing or wrong."""
        bad = self.verdict in (Verdict.UNSAFE, Verdict.CORRUPT, Verdict.INCOMPLETE)
        return bad and not self.interrupted

    def is_same_save(self, other: Report) -> bool:
        """Whether both are of the same save, by the digests of its metadata."""
        return bool(self.digests) and self.digests == other.digests

    @property
    def is_excluded(self) -> bool:
        """A mark, or a resume from an older step, excludes the step."""
        return self.verdict in (Verdict.REJECTED, Verdict.SUPERSEDED)

    @property
    def only_archived(self) -> bool:
        """The listing and the metadata are sound, and files are in an archive tier."""
        faults = [one.code for one in self.with_severity(Severity.FAULT)]
        return bool(self.state.held) and faults == ["step.archived"]

    def has_finding(self, code: str) -> bool:
        """Whether there is a finding of this code."""
        return any(finding.code == code for finding in self.findings)

    def with_severity(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one severity, in order."""
        return tuple(f for f in self.findings if f.severity is severity)

    def with_findings(self, *more: Finding) -> Report:
        """The report with more findings, and the verdict that follows from them."""
        findings = in_order((*self.findings, *more))
        verdict, exit_code = verdict_of(findings), exit_code_of(findings)
        return replace(self, findings=findings, verdict=verdict, exit_code=exit_code)
