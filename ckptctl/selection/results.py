"""The results of `scan`, `pick` and `show`.

Frozen answers that the command line only prints. `verify` answers with a
`Report`, one floor below.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ckptctl.errors import NothingToResume
from ckptctl.findings import Finding, Report
from ckptctl.model import Level, TrainState, WorldSize

if TYPE_CHECKING:
    from ckptctl.formats.own.marks import Mark


@dataclass(frozen=True, slots=True)
class Scan:
    """The steps under a root, or under several, newest first.

    `root` is the first of the `roots` that is not optional. `chosen` is the address of the
    step that `pick` would take, None where it would take none; `message` is its answer in
    one line, and `refused` are the addresses of the steps that it passed over, each with the
    reason. `findings` speak of the root, not of a step. `n_steps` counts the steps under the
    root, also those that `last`, `before` and `skip` left out of `reports`, and `n_older`
    the older ones that `last` left out: `before=more_before` shows the next of them.
    `exists` is false where there is no such folder.
    """

    root: str
    roots: tuple[str, ...]
    exists: bool
    reports: tuple[Report, ...]
    chosen: str | None
    findings: tuple[Finding, ...]
    n_steps: int
    exit_code: int
    next_command: str | None
    message: str
    refused: tuple[tuple[str, str], ...] = ()
    n_older: int = 0
    more_before: int | None = None


class Answer(str, Enum):
    """The possible answers of `pick`."""

    FOUND = "found"
    FELL_BACK = "fell-back"
    FRESH = "fresh"
    NONE_USABLE = "none-usable"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer step that was not taken: what looking found, and the reason in one line."""

    report: Report
    reason: str


@dataclass(frozen=True, slots=True)
class Pick:
    """Which step to resume from, or why none.

    `level` is how deep the chosen step was looked at, `level_reason` why not
    deeper and what that would cost, None where the level was asked for.
    `exit_code` is 0, 10, 11, 75 or 77; `--detailed-exitcode` turns 0 into 3 for
    `fell-back`. `message` is the answer in one line. `required` are the kinds of train
    state that were demanded of the chosen step: by the caller, and because the steps
    before it hold them. `absent` are the kinds that it does not restore; unless
    `allow_missing_state` was given, the step before it does not hold them either. `newest_sound` is
    the address of the newest step that is sound behind more damaged ones than may be passed
    over: a person decides whether to resume from it.
    """

    answer: Answer
    roots: tuple[str, ...]
    chosen: Report | None
    passed_over: tuple[PassedOver, ...]
    findings: tuple[Finding, ...]
    level: Level | None
    level_reason: str | None
    message: str
    exit_code: int
    next_command: str | None
    required: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    newest_sound: str | None = None

    @property
    def path(self) -> str:
        """The address of the chosen step; raises `NothingToResume` where there is none."""
        if self.chosen is None:
            raise NothingToResume(
                self.message, exit_code=self.exit_code, next_command=self.next_command
            )
        return self.chosen.url

    @property
    def step(self) -> int:
        """The number of the chosen step; raises `NothingToResume` where there is none."""
        if self.chosen is None or self.chosen.number is None:
            raise NothingToResume(
                self.message, exit_code=self.exit_code, next_command=self.next_command
            )
        return self.chosen.number

    @property
    def about_state(self) -> str:
        """Which train state was demanded, what is not restored, and what changes that."""
        words = f"requires {', '.join(self.required) or 'nothing'}"
        if self.absent:
            words += f"; does not restore {', '.join(self.absent)}"
        return f"{words} (--require KIND,... demands more, --allow-missing-state less)"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor as `show` lists it; `n_bytes` counts its elements, not its records."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    n_chunks: int
    n_bytes: int
    kind: str


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One shard file: which rank wrote it, its size, how many records lie in it."""

    path: str
    rank: int | None
    n_bytes: int
    n_records: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a step: the answer of `show`.

    `n_params` counts the elements of the model's tensors. `bytes_by_kind` are the
    tensor bytes by kind of train state. `torch_version` is the range of torch
    versions whose metadata looks like this one.
    """

    url: str
    number: int | None
    layout: str
    exit_code: int
    tensors: tuple[TensorRow, ...]
    bytes_entries: tuple[str, ...]
    shards: tuple[ShardRow, ...]
    state: TrainState
    world_size: WorldSize | None
    n_params: int
    n_bytes: int
    bytes_by_kind: tuple[tuple[str, int], ...]
    checkpoint_id: str | None
    save_id: str | None
    torch_version: str
    findings: tuple[Finding, ...]
    next_command: str | None


@dataclass(frozen=True, slots=True)
class Sealed:
    """What `seal` did: a seal was written, or the step is not one to be sealed.

    `path` is the seal's address, None where none was written. `report` is what
    looking at the step found first; where the step is refused, the exit code is the
    report's. `kind` is the algorithm, and that there is a key; `n_files` and `n_bytes`
    count what was digested, `n_stored` the files of which the seal has the store's own
    checksum, too.
    """

    url: str
    number: int | None
    path: str | None
    replaced: bool
    kind: str
    n_files: int
    n_bytes: int
    report: Report
    message: str
    exit_code: int
    next_command: str | None
    n_stored: int = 0


@dataclass(frozen=True, slots=True)
class Marked:
    """What `mark` did: `mark` is the one that was written, None where there was nothing to say.

    `path` is the file that it lies in. `lifted` are the marks that it takes back, and
    `standing` those on this save of the step from now on.
    """

    url: str
    number: int | None
    mark: Mark | None
    path: str | None
    lifted: tuple[Mark, ...]
    standing: tuple[Mark, ...]
    message: str
    exit_code: int
    next_command: str | None
