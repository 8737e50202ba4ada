"""Build the documents that `--json` prints.

A document is an envelope that is the same everywhere, then the fields of a result under
the names they have in the library. `explain` generates the JSON Schemas from the same
classes; within a major version fields are only added.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypedDict, cast

import msgspec
from msgspec import Meta

import ckptctl
from ckptctl.errors import CkptctlError
from ckptctl.findings import Report
from ckptctl.formatting import rfc3339
from ckptctl.model import ExitCode, NextCommand, Time

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Document = dict[str, object]


class Tool(TypedDict):
    """A program and its version."""

    name: Literal["ckptctl"]
    """The name of the program."""
    version: str
    """Version of ckptctl."""


class Envelope(TypedDict):
    """The fields that every document begins with."""

    schema: str
    """Name and major version of the document."""
    tool: Tool
    """The program that wrote the document."""
    generated_at: Annotated[Time, Meta(pattern="Z$")]
    """When the document was made, in UTC."""
    ok: bool
    """The exit code is 0, or 3 where that was asked for."""
    exit_code: ExitCode


class Verified(TypedDict):
    """The answer of `verify`."""

    report: Report
    """The report of the step."""
    next_command: NextCommand


class Chosen(TypedDict):
    """What `pick` prints, beside the fields of its result."""

    path: str | None
    """The address of the chosen step; null where none was chosen."""
    step: int | None
    """The number of the chosen step."""


class Failed(TypedDict):
    """A command that could not do its work."""

    command: str | None
    """The command that was called; null where the command line names none."""
    code: str
    """The kind of error, such as `usage`, `storage.unavailable` or `internal`."""
    message: str
    """What happened, in one line."""
    next_command: NextCommand


class DocumentKind(NamedTuple):
    """A kind of document: its title, and the classes whose fields it has, as `module:Class`.

    Answers have an envelope and are open. Files of a root are closed: they have these fields
    and no others, and most have a `digest` of themselves.
    """

    title: str
    holds: tuple[str, ...]
    is_answer: bool = True
    is_closed: bool = False
    has_digest: bool = False
    is_line: bool = False
    """It is one of several classes, which its field `event` names, and has no field `schema`."""


def _own_file(title: str, holds: str, module: str = "documents") -> DocumentKind:
    return DocumentKind(
        title, (f"formats.own.{module}:{holds}",), is_answer=False, is_closed=True, has_digest=True
    )


DOCUMENTS: Mapping[str, DocumentKind] = {
    "scan": DocumentKind("ckptctl scan --json", ("selection.picking:Scan",)),
    "verify": DocumentKind("ckptctl verify --json", ("cli.documents:Verified",)),
    "pick": DocumentKind("ckptctl pick --json", ("cli.documents:Chosen", "selection.picking:Pick")),
    "show": DocumentKind("ckptctl show --json", ("selection.verifying:Contents",)),
    "sealed": DocumentKind("ckptctl seal --json", ("selection.sealing:Sealed",)),
    "watched": DocumentKind("ckptctl watch --json", ("selection.watching:Watched",)),
    "marked": DocumentKind("ckptctl reject, accept and pin --json", ("selection.marking:Marked",)),
    "pruned": DocumentKind("ckptctl prune --json", ("selection.pruning:Pruned",)),
    "preflight": DocumentKind("ckptctl preflight --json", ("preflight_checks.results:Preflight",)),
    "supervised": DocumentKind("ckptctl run --json", ("supervisor.restarting:Supervised",)),
    "attempt": DocumentKind(
        "ckptctl run --notify, for an attempt that failed", ("cli.run:Attempted",)
    ),
    "history": DocumentKind("ckptctl history --json", ("goodput.history:RunHistory",)),
    "data": DocumentKind("ckptctl data --json", ("goodput.data_use:DataUse",)),
    "cost": DocumentKind("ckptctl cost --json", ("goodput.estimating:RecoveryCost",)),
    "drilled": DocumentKind("ckptctl drill --json", ("drill.drilling:Drilled",)),
    "rerun": DocumentKind("ckptctl rerun --json", ("rerun.rerunning:Rerun",)),
    "reshard": DocumentKind("ckptctl reshard --json", ("resharding.results:Reshard",)),
    "convert": DocumentKind("ckptctl convert --json", ("resharding.results:Converted",)),
    "diff": DocumentKind("ckptctl diff --json", ("resharding.results:Diff",)),
    "runbooks": DocumentKind("ckptctl runbook list and show --json", ("cli.runbook:Runbooks",)),
    "runbook": DocumentKind("ckptctl runbook run --json", ("runbook.engine:Ran",)),
    "classify": DocumentKind("ckptctl classify --json", ("failures.results:Classification",)),
    "loss": DocumentKind("ckptctl loss --json", ("loss.checking:LossReport",)),
    "doctor": DocumentKind("ckptctl doctor --json", ("diagnostics.advice:Diagnosis",)),
    "explain": DocumentKind("ckptctl explain --json", ("cli.explain:Explained",)),
    "error": DocumentKind("An error, with --json", ("cli.documents:Failed",)),
    "seal": _own_file("A seal: .ckptctl/seal.json of a step", "Seal", "seals"),
    "mark": _own_file("A mark: .ckptctl/marks/ID.json of a step, or a line", "Mark", "marks"),
    "proof": _own_file("A proof: .ckptctl/proof.json of a step", "ProofDocument"),
    "data-ledger": _own_file(
        "The data ledger of a step: .ckptctl/data.json", "DataFields", "data_ledger"
    ),
    "watch": _own_file("What a watch saw: .ckptctl/watch.json of a root", "WatchDocument"),
    "root": _own_file("The sentinel of a root: .ckptctl/root.json", "RootDocument"),
    "fence": _own_file("A token: .ckptctl/fence/NUMBER.json of a root", "FenceDocument"),
    "branch": _own_file(
        "A resume of a run with several roots: .ckptctl/branches/ATTEMPT.from-STEP.json",
        "BranchDocument",
    ),
    "supervisor": _own_file(
        "The state of a supervised run: .ckptctl/supervisor/NUMBER.json of a root",
        "SupervisorDocument",
        "supervision",
    ),
    "lease": _own_file(
        "The sign of life of a run: .ckptctl/supervisor/lease.json of a root",
        "LeaseDocument",
        "supervision",
    ),
    "resume": DocumentKind(
        "A resume report: .ckptctl/attempts/ATTEMPT.resume.json of a root",
        ("formats.own.documents:ResumeDocument",),
        is_answer=False,
        is_closed=True,
    ),
    "ledger": DocumentKind(
        "A line of a ledger: .ckptctl/attempts/ATTEMPT.jsonl of a root",
        ("formats.own.ledger:LedgerEvent",),
        is_answer=False,
        is_line=True,
    ),
    "runbook-event": DocumentKind(
        "An event of a run of a runbook: .ckptctl/runbooks/NAME/RUN/NUMBER.json of a root",
        ("formats.own.run_events:Event",),
        is_answer=False,
        is_line=True,
    ),
    "node": DocumentKind(
        "ckptctl preflight --node-report",
        ("preflight_checks.nodes:NodeReport",),
        is_answer=False,
    ),
}
"""By the name in `"schema": "ckptctl.NAME/1"`."""

# By the name of a class: properties that its documents hold beside its fields.
_ALSO: Mapping[str, tuple[str, ...]] = {
    "Finding": ("severity", "verdict"),
    "Report": ("usable", "interrupted", "damaged"),
    "Fault": ("excluded",),
    "LoggedResume": ("first_step", "position"),
    "LossLevel": ("smallest_jump",),
    "Trial": ("passed",),
    "LossReport": ("next_command",),
    "Preflight": ("path", "step", "reason"),
    "Scan": ("roots", "chosen", "exit_code", "message", "reason"),
    "Comparison": ("is_equal",),
}
# Fields that documents leave out: rows of a log by the thousand, what chooses the next command,
# what other fields show.
_WITHOUT: Mapping[str, frozenset[str]] = {
    "LoggedResume": frozenset({"before", "overwritten", "after", "history"}),
    "TrainState": frozenset({"tensor_keys"}),
    "PruneDecision": frozenset({"remedy"}),
    "Finding": frozenset({"unmet"}),
    "PassedOver": frozenset({"cause"}),
    "Scan": frozenset({"pick"}),
}
OBJECTS = frozenset({"digests", "bytes_by_kind", "facts", "refused"})
"""Fields that hold pairs, and are an object in JSON."""


def document(
    name: str,
    result: DataclassInstance | None = None,
    *,
    exit_code: int | None = None,
    **beside: object,
) -> Document:
    """The document `ckptctl.NAME/1` of a result, and of the fields `beside` those it has.

    `exit_code` is the result's unless it is given.
    """
    fields = {} if result is None else as_json(result)
    own_code = fields.pop("exit_code", 0)
    code = exit_code if exit_code is not None else int(str(own_code))
    return {
        "schema": f"ckptctl.{name}/1",
        "tool": {"name": "ckptctl", "version": ckptctl.__version__},
        "generated_at": rfc3339(time.time(), "seconds"),
        "ok": code in (0, 3),
        "exit_code": code,
        **{key: plain(value) for key, value in beside.items()},
        **fields,
    }


def error_document(error: CkptctlError, command: str | None) -> Document:
    """The document of a command that could not do its work."""
    return document(
        "error",
        exit_code=error.exit_code,
        command=command,
        code=error.code,
        message=error.message,
        next_command=error.next_command,
    )


def as_text(document: Document) -> str:
    """The document as it is written: ASCII only, so that every encoding can carry it."""
    import json

    return json.dumps(document, allow_nan=False, indent=2) + "\n"


def plain(value: object) -> object:
    """A result as dicts, lists, strings and numbers; NaN and infinities become null."""
    if hasattr(type(value), "__dataclass_fields__") or isinstance(value, msgspec.Struct):
        return as_json(cast("DataclassInstance", value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def as_json(result: DataclassInstance) -> Document:
    """The fields that a document has of a result."""
    found: Document = {}
    for name in field_names(type(result)):
        value = getattr(result, name)
        pairs = name in OBJECTS and isinstance(value, tuple)
        found[name] = plain(dict(value) if pairs else value)
    return found


def field_names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    """The names of the fields that documents have of results of one class."""
    without = _WITHOUT.get(kind.__name__, frozenset())
    names = (
        kind.__struct_fields__
        if issubclass(kind, msgspec.Struct)
        else (field.name for field in fields(kind))
    )
    own = (name for name in names if name not in without)
    return (*own, *_ALSO.get(kind.__name__, ()))
