"""Findings, their codes and severities, and the verdict that they add up to.

`CODES` is the one table of finding codes: each with its severity and the
verdict that it forces. Which commands say them, and how they look, is the
business of the floors above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ckptctl.model import Level, TrainState, WorldSize


class Severity(str, Enum):
    """How bad one finding is.

    A `fault` makes the step unusable, a `warning` is a suspicion that a person
    should look at, a `remark` is worth knowing and nothing more.
    """

    FAULT = "fault"
    WARNING = "warning"
    REMARK = "remark"


class Verdict(str, Enum):
    """What the findings of a step add up to, worst first."""

    UNSAFE = "unsafe"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    CORRUPT = "corrupt"
    INCOMPLETE = "incomplete"
    IN_PROGRESS = "in-progress"
    UNVERIFIABLE = "unverifiable"
    REJECTED = "rejected"
    SUPERSEDED = "superseded"
    COMPLETE = "complete"

    @property
    def rank(self) -> int:
        """0 for the worst: verdicts compare by this."""
        return list(Verdict).index(self)

    @property
    def exit_code(self) -> int:
        """The exit code of `verify` for this verdict."""
        return _EXIT_CODES[self]


_EXIT_CODES: Mapping[Verdict, int] = {
    Verdict.UNSAFE: 25,
    Verdict.UNKNOWN: 75,
    Verdict.CHANGED: 26,
    Verdict.CORRUPT: 21,
    Verdict.INCOMPLETE: 20,
    Verdict.IN_PROGRESS: 26,
    Verdict.UNVERIFIABLE: 22,
    Verdict.REJECTED: 27,
    Verdict.SUPERSEDED: 27,
    Verdict.COMPLETE: 0,
}

EXIT_FRESH = 10
EXIT_NONE_USABLE = 11
EXIT_STATE_MISSING = 23
EXIT_WORLD_SIZE = 24
EXIT_DIFFERS = 28
EXIT_DENIED = 77


@dataclass(frozen=True, slots=True)
class Code:
    """What a finding code always means: its severity, and the verdict it forces (or none)."""

    severity: Severity
    verdict: Verdict | None
    title: str


def _fault(verdict: Verdict | None, title: str) -> Code:
    return Code(Severity.FAULT, verdict, title)


def _remark(title: str) -> Code:
    return Code(Severity.REMARK, None, title)


def _warning(title: str) -> Code:
    return Code(Severity.WARNING, None, title)


NEVER_FINISHED = frozenset(
    {"metadata.missing", "file.missing", "part.missing", "step.unfinished", "step.in-progress"}
)
"""What a save leaves that never came to its end: nothing that was there is lost."""

# What should be there and is not makes a step `incomplete`; what is there and
# is wrong makes it `corrupt`.
CODES: Mapping[str, Code] = {
    "metadata.missing": _fault(Verdict.INCOMPLETE, "there is no metadata"),
    "metadata.empty": _fault(Verdict.INCOMPLETE, "the metadata names no entry at all"),
    "metadata.unreadable": _fault(Verdict.CORRUPT, "the metadata does not decode"),
    "metadata.unsafe": _fault(Verdict.UNSAFE, "the metadata asks for code to run"),
    "metadata.ambiguous": _fault(Verdict.INCOMPLETE, "two metadata compete"),
    "metadata.foreign": _warning("the metadata calls itself another step"),
    "shard.missing": _fault(Verdict.INCOMPLETE, "a shard file is missing"),
    "shard.truncated": _fault(
        Verdict.INCOMPLETE, "a shard file is shorter than its metadata needs"
    ),
    "shard.empty": _remark("a shard file of zero bytes that nothing refers to"),
    "shard.newer": _warning("a shard file is much younger than the metadata that names it"),
    "shard.stale": _warning("a shard file is as it was in the step before, and others are not"),
    "shard.orphan": _remark("a shard file that no metadata names"),
    "shard.trailing": _warning("a shard file goes on after its last record"),
    "range.missing": _fault(Verdict.INCOMPLETE, "an entry has no byte range"),
    "range.overlap": _fault(Verdict.CORRUPT, "two byte ranges of one file overlap"),
    "range.outside": _fault(Verdict.CORRUPT, "a byte range that no file can hold"),
    "range.stray": _fault(Verdict.CORRUPT, "a byte range that belongs to no entry"),
    "path.escape": _fault(Verdict.UNSAFE, "a path leads out of the step"),
    "coverage.gap": _fault(Verdict.INCOMPLETE, "part of a tensor is in no chunk"),
    "coverage.overlap": _fault(Verdict.CORRUPT, "part of a tensor is in two chunks"),
    "coverage.outside": _fault(Verdict.CORRUPT, "a chunk sticks out of its tensor"),
    "record.framing": _fault(Verdict.CORRUPT, "a record is not a well-formed archive"),
    "record.mismatch": _fault(Verdict.CORRUPT, "a record contradicts the metadata"),
    "record.unsafe": _fault(Verdict.UNSAFE, "a record asks for code to run"),
    "record.crc": _fault(Verdict.CORRUPT, "bytes do not match the checksum saved with them"),
    "record.no-crc": _remark("records were saved without checksums"),
    "record.transformed": _remark("records are compressed; their framing was not read"),
    "record.unverifiable": _fault(
        Verdict.UNVERIFIABLE, "no checksum and no seal proves the bytes of records"
    ),
    "content.partial": _remark("not every byte was compared"),
    "content.unfinished": _fault(
        Verdict.UNVERIFIABLE, "the time was up before every byte was compared"
    ),
    "values.not-finite": _warning("a tensor holds NaN or infinity"),
    "format.unsupported": _fault(Verdict.UNVERIFIABLE, "a format that is not sharded DCP"),
    "format.no-checksums": _remark("a format that carries no checksums"),
    "part.missing": _fault(Verdict.INCOMPLETE, "a part of the step is missing"),
    "file.missing": _fault(Verdict.INCOMPLETE, "a file that the framework writes last is missing"),
    "file.truncated": _warning("a document beside the shards ends too early"),
    "file.unreadable": _fault(Verdict.CORRUPT, "a file beside the shards is damaged"),
    "state.missing": _remark("some train state is not in the step"),
    "state.lost": _remark("some train state is for another world size"),
    "state.left-out": _remark("something does not go along into another format"),
    "state.mixed": _fault(Verdict.CORRUPT, "shards disagree about the optimizer's step"),
    "world-size.differs": _remark("the step was written by another number of ranks"),
    "world-size.fixed": _remark("the step loads at the world size that wrote it only"),
    "step.unfinished": _fault(Verdict.INCOMPLETE, "a save that was never brought to its end"),
    "step.in-progress": _fault(Verdict.IN_PROGRESS, "a save is in flight"),
    "step.changed": _fault(Verdict.CHANGED, "the step changed while it was looked at"),
    "step.unknown": _fault(Verdict.UNKNOWN, "the storage did not answer"),
    "step.denied": _fault(Verdict.UNKNOWN, "the storage denies access"),
    "step.no-memory": _fault(Verdict.UNKNOWN, "there was not enough memory to look"),
    "step.foreign": _fault(Verdict.CORRUPT, "the step was sealed as another step"),
    "step.wrong-step": _fault(
        Verdict.CORRUPT, "what lies in the folder is an earlier step than its name says"
    ),
    "step.rejected": _fault(Verdict.REJECTED, "the step was rejected"),
    "step.superseded": _fault(Verdict.SUPERSEDED, "the step is of a branch that was abandoned"),
    "step.accepted": _remark("the step was rejected, and accepted again"),
    "step.pinned": _remark("the step is pinned: it is not to be removed"),
    "seal.digest": _fault(Verdict.CORRUPT, "a file is not what was sealed"),
    "seal.gone": _fault(Verdict.INCOMPLETE, "a sealed file, or the end of one, is gone"),
    "seal.bad-signature": _fault(Verdict.UNVERIFIABLE, "the seal was not made with the key given"),
    "seal.required": _fault(Verdict.UNVERIFIABLE, "no seal proves the step, and one is required"),
    "seal.invalid": _warning("the seal is damaged, or is no seal"),
    "seal.unsupported": _warning("the seal was made by a newer ckptctl"),
    "seal.foreign": _warning("the seal is that of another step"),
    "seal.outdated": _warning("the step was saved anew after it was sealed"),
    "seal.partial": _warning("the seal does not cover the whole step"),
    "seal.unkeyed": _warning("the seal was made without a key, and one was given"),
    "seal.no-key": _remark("the seal has a key, and none was given"),
    "seal.extra": _remark("a file came into the step after it was sealed"),
    "seal.missing": _remark("the step has no seal"),
    "store.contradicts": _fault(
        Verdict.CORRUPT, "the store gives other bytes than its own checksum is of"
    ),
    "store.rewritten": _fault(
        Verdict.UNVERIFIABLE, "a sealed file was written again, with bytes that nobody compared"
    ),
    "store.unverifiable": _fault(
        Verdict.UNVERIFIABLE, "no checksum that the store keeps could be compared with a seal"
    ),
    "mark.damaged": _warning("a mark cannot be read"),
    "mark.outdated": _remark("a mark speaks of an earlier save of the step"),
    "step.duplicate": _warning("two folders stand for one step"),
    "step.number": _warning("a name has a number that no counter of steps reaches"),
    "pointer.differs": _remark("a pointer file names another step"),
    "root.unavailable": _warning("an optional root is absent or does not answer"),
    "root.suspect": _warning("several recent steps are damaged"),
    "root.unnumbered": _remark("a checkpoint under the root bears no step number"),
    "loss.restarted": _fault(None, "the job began from the beginning instead of resuming"),
    "loss.not-finite": _fault(None, "the loss is no number any more"),
    "loss.step": _fault(None, "the step counter goes back behind the checkpoint"),
    "loss.tokens": _fault(None, "the count of tokens or samples does not go on"),
    "loss.batch": _fault(None, "a step takes more or fewer tokens than before"),
    "loss.lr": _fault(None, "the learning rate is not where it was"),
    "loss.data": _fault(None, "the data was repeated or skipped"),
    "loss.higher": _fault(None, "the same batches have a higher loss"),
    "loss.jump": _fault(None, "the loss jumped up"),
    "loss.spike": _fault(None, "rows far above all before"),
    "loss.gap": _warning("the log leaves a gap after the checkpoint"),
    "loss.lr-lower": _warning("the learning rate is lower than it would have been"),
    "loss.other-samples": _warning("a step consumed samples that none consumed before"),
    "loss.drift": _warning("steps logged twice begin equal and drift apart"),
    "loss.differs": _warning("steps logged twice differ over the same batches"),
    "loss.lower": _warning("the same batches have a lower loss"),
    "loss.level-shift": _warning("the loss stands a little higher than before"),
    "loss.grad-norm": _warning("the gradient norm stands far above that of before"),
    "loss.other-data": _warning("steps logged twice saw other batches"),
    "loss.too-little": _warning("too few rows to compare"),
    "loss.noisy": _warning("the loss is too noisy to see a jump"),
    "loss.no-resume": _warning("there is no resume in the logs"),
    "loss.none": _warning("there is no loss in the logs"),
    "loss.interleaved": _warning("several runs write into one log"),
    "loss.unread": _warning("the end of the logs is damaged and cannot be read"),
    "loss.low-precision": _remark("the loss is printed too coarsely to prove anything"),
    "loss.later": _remark("the loss rises later, after steps that agree"),
    "loss.averaged": _remark("a row is a mean with the step before"),
    "loss.several": _remark("the logs hold several resumes"),
    "loss.throughput": _remark("the throughput is not what it was"),
    "loss.clock": _remark("the clock of the log goes back"),
    "loss.damaged": _remark("a log is damaged in the middle, and later ones go on"),
    "loss.cadence": _remark("many steps were trained again after failures"),
}
"""Every code that a finding can have. `ckptctl explain CODE` has a page for each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One observed fault or remark.

    `where` names the thing: a file, an FQN, a part; relative to the step.
    `expected` and `found` carry their units. `next_command` is what a reader
    can run next, None where there is nothing to do.
    """

    code: str
    where: str
    message: str
    expected: str | None = None
    found: str | None = None
    next_command: str | None = None

    @property
    def severity(self) -> Severity:
        """Fault, warning or remark, by the code."""
        return CODES[self.code].severity

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that the code forces; None for one that forces none."""
        return CODES[self.code].verdict


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict that any finding forces; `complete` when none does."""
    forced = [f.verdict for f in findings if f.verdict is not None]
    return min(forced, key=lambda verdict: verdict.rank, default=Verdict.COMPLETE)


_SEVERITIES = list(Severity)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings worst first, then by code and place: the order of every output."""
    return tuple(
        sorted(findings, key=lambda f: (_SEVERITIES.index(f.severity), f.code, f.where, f.message))
    )


@dataclass(frozen=True, slots=True)
class Proven:
    """How much of a part, or of several, was shown to be what was saved.

    `n_asked` are the bytes of all records; `n_bytes` of them, in `n_records` records,
    match their checksums. `n_values` floating-point values were looked at for NaN and
    infinity, where that was asked for.
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
    """What the store's own checksums say of a sealed step; no byte was read for it.

    Of the `n_files` sealed files beside the metadata, `n_same` with `n_bytes` bytes are kept
    with the checksum that was sealed. `n_told` of these had been sealed on the store's word,
    by an algorithm that was not computed then.
    """

    n_files: int
    n_same: int
    n_bytes: int
    n_told: int


@dataclass(frozen=True, slots=True)
class Report:
    """What looking at one step found.

    `url` is the step's address, `number` its step number (None where the folder's
    name gives none), `level` the level that was reached. `exit_code` is the
    verdict's, or 23, 24 when a condition that was asked for does not hold.
    `n_bytes`, `n_files`, `n_tensors` and `n_records` say how large the step is,
    `bytes_read` what looking cost. `digests` are the SHA-256 of the metadata
    files by their path in the step. `written_s` is when the newest file was
    written, in seconds since 1970. `ranks` are the ranks that left a file, by part.
    At level `content`, of the `bytes_in_records` those of `records_proven` records,
    `bytes_proven`, match their checksums; `values_scanned` are the values that a scan for
    NaN and infinity has looked at.
    `seal` is how the step was sealed (`xxh3-128`, `sha256 with a key`), None where no
    seal speaks of this save. `by_store` is there where the store was asked for its checksums
    and there was a seal to compare them with.
    """

    url: str
    number: int | None
    layout: str
    verdict: Verdict
    exit_code: int
    level: Level
    findings: tuple[Finding, ...]
    state: TrainState
    world_size: WorldSize | None
    n_bytes: int
    n_files: int
    n_tensors: int
    n_records: int
    bytes_read: int
    written_s: float | None
    parts: tuple[str, ...]
    digests: tuple[tuple[str, str], ...]
    ranks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    seal: str | None = None
    bytes_in_records: int = 0
    bytes_proven: int = 0
    records_proven: int = 0
    values_scanned: int = 0
    by_store: ByStore | None = None

    @property
    def usable(self) -> bool:
        """The step is complete and every condition that was asked for holds."""
        return self.exit_code == 0

    @property
    def interrupted(self) -> bool:
        """A save that never came to its end: no fault but what it did not get to write.

        A mark on it changes nothing about that.
        """
        faults = {f.code for f in self.with_severity(Severity.FAULT)} - {"step.superseded"}
        return bool(faults) and faults <= NEVER_FINISHED

    @property
    def damaged(self) -> bool:
        """We looked, and what had been saved is not there any more, or is wrong."""
        looked_bad = self.verdict in (Verdict.UNSAFE, Verdict.CORRUPT, Verdict.INCOMPLETE)
        return looked_bad and not self.interrupted

    def with_severity(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one severity, in order."""
        return tuple(f for f in self.findings if f.severity is severity)
