"""The lines of a ledger: what one attempt of a job records about itself.

A ledger is the file `.ckptctl/attempts/ATTEMPT.jsonl` of a root, to which lines are only added;
`ckptctl.train` writes it. Each line is one JSON object, whose kind is the word in `event`.

Lines come from jobs that were killed and from other versions, so they are read leniently: a
value that is missing or of another type counts as not recorded, a field or a kind that is not
known is no error. What is read has the types that stand here. Beside the ledger is the report of
the resume.
"""

# Annotations stay objects, so that reading a line evaluates no string as code.
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from ckptctl.distributed.launcher import Cluster
from ckptctl.errors import OwnFileUnreadable
from ckptctl.formats.own.files import (
    ATTEMPTS_FOLDER,
    REPORT_SUFFIX,
    classes_by_event,
    made_of,
    parsed,
)
from ckptctl.model import Count, Time

if TYPE_CHECKING:
    from ckptctl.storage.contract import Store

MAX_LINE_BYTES = 1 << 20
"""Of a line, and of the report of a resume."""

Seconds = Annotated[float, Meta(ge=0, le=1e10)]


@dataclass(slots=True, kw_only=True)
class LedgerLine:
    """What every line has; all that is known of one of another version."""

    at: Time | None = None
    """When it was written."""
    event: str = ""
    """The kind of line."""
    attempt: str | None = None
    """The name of the attempt."""
    process_s: Seconds | None = None
    """The age of the process, by a clock that nobody sets."""
    rank: Count = 0
    """The rank that wrote it."""
    stalled_s: Seconds | None = None
    """How long saves had kept this rank from training so far; null before the resume."""


@dataclass(slots=True, kw_only=True)
class StartedLine(LedgerLine):
    """The attempt holds the root."""

    event: Literal["started"] = "started"
    token: Count | None
    """The number of its fencing token."""
    resume_from: str | None
    """What the job was asked to resume from."""
    world_size: Count | None
    """Its ranks."""
    cluster: Cluster | None
    """The job, the machine and the rank."""
    supervised: str | None
    """The attempt of `ckptctl run` that it belongs to, `RUN/NUMBER`; null without one."""


@dataclass(slots=True, kw_only=True)
class ResumedLine(LedgerLine):
    """The job has resumed; the report of the resume states how."""

    event: Literal["resumed"] = "resumed"
    step: Count | None
    """The step that was loaded; null for a fresh run."""
    metadata: Mapping[str, str] | None
    """The SHA-256 of its metadata files, by path."""
    load_s: Seconds | None
    """How long choosing, loading and restoring took."""


@dataclass(slots=True, kw_only=True)
class ProgressLine(LedgerLine):
    """How far training has come; written every 30 seconds at most."""

    event: Literal["progress"] = "progress"
    step: Count | None
    """The training step."""
    loss: float | None
    """Its loss."""


@dataclass(slots=True, kw_only=True)
class SavingLine(LedgerLine):
    """A save begins."""

    event: Literal["saving"] = "saving"
    step: Count | None
    """The training step."""


@dataclass(slots=True, kw_only=True)
class SavedLine(LedgerLine):
    """A save is complete."""

    event: Literal["saved"] = "saved"
    step: Count | None
    """The training step."""
    path: str | None
    """Its address."""
    tokens: Count | None
    """Tokens that the run had consumed there."""
    loss: float | None
    """The loss there."""
    took_s: Seconds | None
    """How long the save took."""
    moved_aside: str | None
    """Where an earlier save of the same step is now; null without one."""


@dataclass(slots=True, kw_only=True)
class RemovingLine(LedgerLine):
    """An older step is about to be removed."""

    event: Literal["removing"] = "removing"
    step: Count | None
    """The training step."""
    path: str | None
    """Its address."""


@dataclass(slots=True, kw_only=True)
class FailedLine(LedgerLine):
    """A failure that may be evidence against a step."""

    event: Literal["failed"] = "failed"
    step: Count | None
    """The step that could not be loaded, or at which training failed."""
    evidence: str | None = None
    """The error of training, in words that are equal for equal failures."""
    reason: str | None = None
    """Why the step could not be loaded."""
    phase: Literal["loading"] | None = None
    """`loading` where the step could not be loaded."""


@dataclass(slots=True, kw_only=True)
class EndedLine(LedgerLine):
    """The attempt ends."""

    event: Literal["ended"] = "ended"
    step: Count | None
    """The training step."""
    how: str | None
    """How it ended; `exception` where an error ended it."""
    error: str | None = None
    """The code of that error, or its class."""


LedgerEvent = (
    StartedLine
    | ResumedLine
    | ProgressLine
    | SavingLine
    | SavedLine
    | RemovingLine
    | FailedLine
    | EndedLine
)
"""A line of any kind."""

_KINDS = classes_by_event(LedgerEvent)


def read_line(data: bytes) -> LedgerLine:
    """One line; a `LedgerLine` alone if its kind is not known.

    Raises `OwnFileUnreadable` for what is no JSON object.
    """
    fields = parsed(data, MAX_LINE_BYTES, numbers="finite", unique_keys=False)
    kind = _KINDS.get(str(fields.get("event")), LedgerLine)
    line: LedgerLine = made_of(kind, fields, lenient=True)
    return line


REPORT_SCHEMA = "ckptctl.resume/1"


@dataclass(slots=True, kw_only=True)
class ResumeFields:
    """What is read of the report of a resume; `documents.ResumeDocument` is all of it."""

    schema: str | None
    at: str | None
    root: str | None
    path: str | None
    step: Count | None
    tokens: Count | None
    samples: Count | None
    world_size: Count | None
    saved_world_size: Count | None
    cluster: Mapping[str, object] | None


def report_paths(store: "Store", folder: str = ATTEMPTS_FOLDER) -> list[str]:
    """The resume reports in a folder, newest first; none without the folder. Cost: one listing."""
    from ckptctl.storage.contract import list_if_there

    paths = (entry.path for entry in list_if_there(store, folder))
    return sorted((path for path in paths if path.endswith(REPORT_SUFFIX)), reverse=True)


def read_report(store: "Store", path: str) -> ResumeFields:
    """The report of a resume. Raises `OwnFileUnreadable` for anything else; cost: one read."""
    from ckptctl.storage.contract import TooLarge  # whoever only reads lines needs no storage

    try:
        data = store.read(path, limit=MAX_LINE_BYTES)
    except TooLarge as error:
        raise OwnFileUnreadable(error.message) from error
    return made_of(ResumeFields, parsed(data, MAX_LINE_BYTES, numbers="finite"))
