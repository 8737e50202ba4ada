"""The results of `scan`, `pick` and `show`.

Frozen results that the command line only prints. `verify` returns a `Report`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from ckptctl.errors import NothingToResume, StorageError, UsageError
from ckptctl.findings import EXIT_FRESH, EXIT_NONE_USABLE, Finding, Report, Verdict
from ckptctl.formats.frameworks.layouts import train_step_of
from ckptctl.formatting import safe, some_of
from ckptctl.model import (
    ExitCode,
    Level,
    Message,
    NextCommand,
    StepNumber,
    StepUrl,
    TrainState,
    WorldSize,
)

if TYPE_CHECKING:
    from ckptctl.formats.own.marks import Mark


@dataclass(frozen=True, slots=True)
class Scan:
    """The steps under a root, or under several, newest first."""

    root: str
    """The root as given; of several, the first that is not optional."""
    roots: tuple[str, ...]
    """All roots, in order of preference."""
    exists: bool
    """The root exists."""
    reports: tuple[Report, ...]
    """A report for each inspected step, newest first."""
    chosen: str | None
    """The address of the step that `pick` would choose; null where it would choose none."""
    findings: tuple[Finding, ...]
    """Findings about the root, not about a step."""
    n_steps: int
    """Steps under the root, including those that were not inspected."""
    exit_code: ExitCode
    next_command: NextCommand
    message: str
    """The answer of `pick` in one line."""
    refused: tuple[tuple[str, str], ...] = ()
    """The address of each step that `pick` passed over, with the reason."""
    n_older: int = 0
    """Older steps that `last` left out."""
    more_before: int | None = None
    """The `--before` that shows the next older steps."""
    reason: NoStepReason | None = None
    """Why `pick` would choose no step, in one word; null where it would choose one."""


class Answer(StrEnum):
    """The possible answers of `pick`."""

    FOUND = "found"
    FELL_BACK = "fell-back"
    FRESH = "fresh"
    NONE_USABLE = "none-usable"
    UNKNOWN = "unknown"
    UNDECIDED = "undecided"


class NoStepReason(StrEnum):
    """Why no step was chosen, in one word that scripts and runbooks branch on."""

    DAMAGED = "damaged"
    """Of one step: it is damaged or unfinished."""
    ALL_DAMAGED = "all-damaged"
    """Every step is damaged or unfinished, or was rejected beside such steps."""
    TOO_MANY_DAMAGED = "too-many-damaged"
    """More steps are damaged than `--max-fallback` allows; an older one may be sound."""
    STATE_MISSING = "state-missing"
    """A step is sound, and lacks train state that is required."""
    UNVERIFIABLE = "unverifiable"
    """A step is not damaged, and nothing proves it at the requested level."""
    REQUIREMENT = "requirement"
    """A step is sound, and does not meet another requirement, such as a seal or world size."""
    REJECTED = "rejected"
    """Every step that is not damaged was rejected or superseded."""
    EXCLUDED = "excluded"
    """`--before` and `--skip` exclude every step."""
    TWO_BRANCHES = "two-branches"
    """The run may have gone back to an earlier step, and nothing says which branch it is on (2)."""
    NOT_SHARED = "not-shared"
    """Every step lacks the files of the same ranks: the storage is not shared by the nodes."""
    NOT_INSPECTED = "not-inspected"
    """A step could not be inspected, so no older one is chosen (75)."""
    LOST_STEPS = "lost-steps"
    """A record or pointer names a step that was usable, and none is there."""
    RECORD_DOUBT = "record-doubt"
    """No record proves that no step was ever usable."""
    UNKNOWN_FILES = "unknown-files"
    """Interrupted saves, and files that may be saves."""
    SAVE_RUNNING = "save-running"
    """The first save of the run may still be running (75)."""
    NEW_RUN = "new-run"
    """The root is that of a new run (10)."""
    NO_ROOT = "no-root"
    """The root does not exist (10)."""


_ANSWERS = {
    NoStepReason.NEW_RUN: Answer.FRESH,
    NoStepReason.NO_ROOT: Answer.FRESH,
    NoStepReason.NOT_INSPECTED: Answer.UNKNOWN,
    NoStepReason.SAVE_RUNNING: Answer.UNKNOWN,
    NoStepReason.TWO_BRANCHES: Answer.UNDECIDED,
}

_EXIT_CODES = {
    Answer.FRESH: EXIT_FRESH,
    Answer.UNKNOWN: StorageError.exit_code,
    Answer.UNDECIDED: UsageError.exit_code,
}


class NoStep(msgspec.Struct, frozen=True):
    """Why no step is chosen, and what to run next."""

    reason: NoStepReason
    message: str
    next_command: str | None = None
    code: int | None = None
    """The exit code of an error that is more precise than that of the answer."""
    missing: tuple[str, ...] = ()
    """The roots that do not exist."""
    similar: tuple[str, ...] = ()
    """Addresses beside them with similar names."""
    created: str = ""
    """The message where they are created."""

    @property
    def answer(self) -> Answer:
        """The answer of `pick`, which follows from the reason."""
        return _ANSWERS.get(self.reason, Answer.NONE_USABLE)

    @property
    def exit_code(self) -> int:
        """The exit code of the answer: 2, 10, 11, 75 or 77."""
        return self.code or _EXIT_CODES.get(self.answer, EXIT_NONE_USABLE)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer step that was not chosen: its report, and the reason in one line."""

    report: Report
    """The report of the step."""
    reason: str
    """Why it was not chosen, in one line."""
    word: NoStepReason = NoStepReason.DAMAGED
    """The same as a word."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Which step to resume from, or why none."""

    answer: Answer
    """The kind of answer."""
    roots: tuple[str, ...]
    """The roots, in order of preference."""
    chosen: Report | None
    """The report of the chosen step; null where none was chosen."""
    passed_over: tuple[PassedOver, ...]
    """Newer steps that were not chosen, in the order in which they were inspected."""
    findings: tuple[Finding, ...]
    """Findings about the roots, not about a step."""
    level: Level | None
    """The level at which the chosen step was inspected."""
    level_reason: str | None
    """Why a deeper level was not inspected, and what it would cost; null where the level was
    given."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand
    required: tuple[str, ...] = ()
    """The kinds of train state that the chosen step had to hold: demanded by the caller, or held
    by the steps before it."""
    absent: tuple[str, ...] = ()
    """The kinds of train state that the chosen step does not restore."""
    reason: NoStepReason | None = None
    """Why no step was chosen, in one word; null where one was."""
    newest_sound: str | None = None
    """The newest sound step behind more damaged ones than may be passed over: a person decides
    whether to resume from it."""

    @property
    def path(self) -> str:
        """The address of the chosen step; raises `NothingToResume` where there is none."""
        if self.chosen is None:
            raise self._nothing()
        return self.chosen.url

    @property
    def step(self) -> int:
        """The number of the chosen step; raises `NothingToResume` where there is none."""
        if self.chosen is None or self.chosen.number is None:
            raise self._nothing()
        return self.chosen.number

    def _nothing(self) -> NothingToResume:
        reason = self.reason.value if self.reason is not None else ""
        return NothingToResume(
            self.message, exit_code=self.exit_code, next_command=self.next_command, reason=reason
        )

    @property
    def about_state(self) -> str:
        """The required train state, what is not restored, and the options that change this."""
        words = f"requires {', '.join(self.required) or 'nothing'}"
        if self.absent:
            words += f"; does not restore {', '.join(self.absent)}"
        not_recognized = self.chosen.state.unrecognized if self.chosen else ()
        if not_recognized:
            keys = some_of([safe(entry.where) for entry in not_recognized])
            words += f"; not recognized: {keys} (--state KIND=KEY maps it)"
        return f"{words} (--require KIND,... demands more, --allow-missing-state less)"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor as `show` lists it; `n_bytes` counts its elements, not its records."""

    fqn: str
    """Its FQN."""
    dtype: str
    """The dtype by torch's name, without `torch.`."""
    shape: tuple[int, ...]
    """Elements along each dimension; empty for a scalar."""
    n_chunks: int
    """Chunks in which it is saved."""
    n_bytes: int
    """Bytes of its elements."""
    kind: str
    """The kind of train state that it belongs to."""
    file: str | None = None
    """The file that holds it, relative to the step; null where chunks of it lie in shard files."""
    whole_shape: tuple[int, ...] | None = None
    """Of a DTensor in a rank file, the shape of the whole; `shape` is then that of the part."""


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One shard file: the rank that wrote it, its size, how many records it contains."""

    path: str
    """Path relative to the step."""
    rank: int | None
    """The rank that wrote it, where its name states it."""
    n_bytes: int
    """Size in bytes."""
    n_records: int
    """Records in it."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a step: the result of `show`."""

    url: StepUrl
    number: StepNumber
    layout: str
    """The framework whose layout the step has."""
    exit_code: ExitCode
    tensors: tuple[TensorRow, ...]
    """Every tensor; in rank files and safetensors those of each file."""
    bytes_entries: tuple[str, ...]
    """The FQNs of entries that are not tensors."""
    shards: tuple[ShardRow, ...]
    """Every shard file."""
    state: TrainState
    """What a resume would restore."""
    world_size: WorldSize | None
    """How many ranks wrote the step; null where that is unknown."""
    n_params: int | None
    """Elements of the model's tensors; null where the files do not state which are copies."""
    n_bytes: int
    """Size of all files in bytes."""
    bytes_by_kind: tuple[tuple[str, int], ...]
    """Bytes of tensor elements by kind of train state."""
    checkpoint_id: str | None
    """The writer's name for the folder."""
    save_id: str | None
    """The writer's id of the save."""
    torch_version: str
    """The range of torch versions that write such metadata."""
    findings: tuple[Finding, ...]
    """The findings, worst first."""
    next_command: NextCommand
    unlisted: tuple[str, ...] = ()
    """Files whose tensors are not listed: damaged ones, and those after 200,000 tensors."""

    @property
    def train_step(self) -> int | None:
        """The training step of the train state; see `train_step_of`."""
        return train_step_of(self.layout, self.number, self.state.step.value)


@dataclass(frozen=True, slots=True)
class Sealed:
    """The result of `seal`: a seal was written, or the step cannot be sealed."""

    url: StepUrl
    number: StepNumber
    path: str | None
    """The address of the seal; null where the step was refused."""
    replaced: bool
    """The seal replaced another one."""
    kind: str
    """`xxh3-128`, or `sha256 with a key`; empty where the step was refused."""
    n_files: int
    """Files that were digested."""
    n_bytes: int
    """Bytes that were digested."""
    report: Report
    """The report of the step before it was sealed."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand
    n_stored: int = 0
    """Files for which the seal also has the store's own checksum."""
    run: str = ""
    """The id of the run that the seal is of; empty where the step was refused."""
    sequence: int = 0
    """The place of the seal in the order of the root's seals; 0 where the step was refused."""


@dataclass(frozen=True, slots=True)
class Marked:
    """The result of `mark`: the mark that was written, None if nothing changed."""

    url: StepUrl
    number: StepNumber
    mark: Mark | None
    """The mark that was written; null where there was nothing to lift."""
    path: str | None
    """The file that holds the mark."""
    lifted: tuple[Mark, ...]
    """The marks that it lifts."""
    standing: tuple[Mark, ...]
    """The marks in force on this save of the step from now on, oldest first."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """The decision on one step: whether it is removed, and why."""

    number: int
    """The training step."""
    url: StepUrl
    verdict: Verdict
    """The verdict of the step."""
    n_bytes: int
    """Its size in bytes."""
    removed: bool
    """It is removed."""
    reason: str
    """Why it is removed or kept, in one line."""
    counts: bool = False
    """It is one of the good steps that are kept."""
