"""Build the documents that `--json` prints.

One document for each answer: an envelope that is the same everywhere, then the
fields of the result under the names they have in the library. The schemas in
`ckptctl/schemas` describe them; fields are only ever added within a major.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING

import ckptctl
from ckptctl.diagnostics.results import Diagnosis
from ckptctl.errors import CkptctlError
from ckptctl.failures.results import Classification
from ckptctl.findings import Finding, Report
from ckptctl.selection.results import Contents, Marked, Pick, Scan, Sealed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from ckptctl.goodput.estimating import RecoveryCost
    from ckptctl.loss.checking import LossReport
    from ckptctl.loss.replay import Replayed
    from ckptctl.loss.verdict import Assessment
    from ckptctl.preflight_checks.results import Preflight
    from ckptctl.resharding.results import Converted, Diff, Reshard
    from ckptctl.runbook.document import Runbook
    from ckptctl.runbook.running import Ran
    from ckptctl.selection.pruning import Pruned
    from ckptctl.supervisor.restarting import Supervised

Document = dict[str, object]

# Said by a result, but not a field of it.
_ALSO: Mapping[type, tuple[str, ...]] = {
    Finding: ("severity", "verdict"),
    Report: ("usable", "interrupted", "damaged"),
}
# Pairs that are an object in JSON.
_PAIRS = frozenset({"digests", "bytes_by_kind", "facts", "refused"})


def scan_document(scan: Scan) -> Document:
    """The document of `scan`."""
    return {**_envelope("scan", scan.exit_code), **_rest(scan)}


def verify_document(report: Report, next_command: str | None) -> Document:
    """The document of `verify`: the report is in its field `report`."""
    rest = {"report": plain(report), "next_command": next_command}
    return {**_envelope("verify", report.exit_code), **rest}


def pick_document(pick: Pick, exit_code: int) -> Document:
    """The document of `pick`; `path` and `step` are null where nothing was chosen."""
    chosen = pick.chosen
    taken = {"path": chosen.url if chosen else None, "step": chosen.number if chosen else None}
    return {**_envelope("pick", exit_code), **taken, **_rest(pick)}


def show_document(contents: Contents) -> Document:
    """The document of `show`."""
    return {**_envelope("show", contents.exit_code), **_rest(contents)}


def sealed_document(sealed: Sealed) -> Document:
    """The document of `seal`; `ckptctl.seal/1` is the seal itself."""
    return {**_envelope("sealed", sealed.exit_code), **_rest(sealed)}


def marked_document(marked: Marked) -> Document:
    """The document of `reject`, `accept` and `pin`."""
    return {**_envelope("marked", marked.exit_code), **_rest(marked)}


def cost_document(found: RecoveryCost) -> Document:
    """The document of `cost`."""
    return {**_envelope("cost", found.exit_code), **_rest(found)}


def classify_document(answer: Classification) -> Document:
    """The document of `classify`."""
    return {**_envelope("classify", answer.exit_code), **_rest(answer)}


def reshard_document(answer: Reshard) -> Document:
    """The document of `reshard`."""
    return {**_envelope("reshard", answer.exit_code), **_rest(answer)}


def loss_document(report: LossReport) -> Document:
    """The document of `loss`: of each resume the rows that were compared, not all of the log."""
    assessments = [_assessment(each) for each in report.assessments]
    rest = {
        **_rest(report),
        "assessments": assessments,
        "next_command": next(iter(report.next_commands), None),
    }
    return {**_envelope("loss", report.exit_code), **rest}


def _assessment(assessment: Assessment) -> Document:
    resume = assessment.resume
    return {
        "number": resume.number,
        "verdict": assessment.verdict.value,
        "message": assessment.message,
        "first_step": resume.first_step,
        "where": plain(resume.position),
        "boundary": resume.boundary.value,
        "resume_point": plain(resume.resume_point),
        "marker": None if resume.marker is None else resume.marker.text,
        "restarted": resume.restarted,
        "replay": {
            **fields_of(assessment.replay),
            "rows": [_replayed(row) for row in assessment.replay.rows],
        },
        "level": {
            **fields_of(assessment.level),
            "smallest_jump": plain(assessment.level.smallest_jump),
        },
        "findings": plain(assessment.findings),
        "throughput": plain(assessment.throughput),
    }


def _replayed(row: Replayed) -> Document:
    values = {
        f"{name}_{side}": None if number is None else plain(number.value)
        for side, each in (("before", row.before), ("after", row.after))
        for name in ("loss", "lr", "grad_norm", "tokens")
        for number in (getattr(each, name),)
    }
    return {
        "step": row.step,
        "difference": plain(row.difference),
        **values,
    }


def preflight_document(found: Preflight) -> Document:
    """The document of `preflight`; what `pick` says of its steps is in its field `pick`."""
    document = {**_envelope("preflight", found.exit_code), **_rest(found)}
    return {**document, "pick": _rest(found.pick)}


def pruned_document(found: Pruned) -> Document:
    """The document of `prune`."""
    return {**_envelope("pruned", found.exit_code), **_rest(found)}


def convert_document(answer: Converted) -> Document:
    """The document of `convert`."""
    return {**_envelope("convert", answer.exit_code), **_rest(answer)}


def diff_document(answer: Diff) -> Document:
    """The document of `diff`."""
    return {**_envelope("diff", answer.exit_code), **_rest(answer)}


def supervised_document(found: Supervised) -> Document:
    """The document of `run`: every life of the job."""
    return {**_envelope("supervised", found.exit_code), **_rest(found)}


def doctor_document(found: Diagnosis) -> Document:
    """The document of `doctor`."""
    return {**_envelope("doctor", found.exit_code), **_rest(found)}


def explain_document(explained: Iterable[Mapping[str, object]]) -> Document:
    """The document of `explain`: one entry for each thing that was explained."""
    return {**_envelope("explain", 0), "explained": [dict(one) for one in explained]}


def runbooks_document(
    books: Iterable[Runbook], problems: Iterable[str], exit_code: int = 0
) -> Document:
    """The document of `runbook list`, `show` and `lint`."""
    shown = [
        {
            "name": book.name,
            "title": book.title,
            "states": [state.name for state in book.states],
            "inputs": plain(book.inputs),
            "text": book.text,
        }
        for book in books
    ]
    rest = {"runbooks": shown, "problems": list(problems)}
    return {**_envelope("runbooks", exit_code), **rest}


def runbook_document(ran: Ran) -> Document:
    """The document of `runbook run`: how it went, and every event."""
    return {**_envelope("runbook", ran.exit_code), **_rest(ran)}


def error_document(error: CkptctlError, command: str | None) -> Document:
    """The document of a command that could not do its work."""
    rest = {
        "command": command,
        "code": error.code,
        "message": error.message,
        "next_command": error.next_command,
    }
    return {**_envelope("error", error.exit_code), **rest}


def as_text(document: Document) -> str:
    """The document as it is written: ASCII only, so that every encoding can carry it."""
    import json

    return json.dumps(document, allow_nan=False, indent=2) + "\n"


def plain(value: object) -> object:
    """A result as dicts, lists, strings and numbers; NaN and infinities become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return fields_of(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def fields_of(result: DataclassInstance) -> Document:
    """The fields of a result, and what it says beyond them."""
    names = [field.name for field in dataclasses.fields(result)]
    names += _ALSO.get(type(result), ())
    return {name: _field(name, getattr(result, name)) for name in names}


def _rest(result: DataclassInstance) -> Document:
    # The envelope has the exit code, and `pick` may have made it more detailed.
    return {name: value for name, value in fields_of(result).items() if name != "exit_code"}


def _field(name: str, value: object) -> object:
    if name in _PAIRS and isinstance(value, tuple):
        return {key: plain(item) for key, item in value}
    return plain(value)


def _envelope(name: str, exit_code: int) -> Document:
    import datetime

    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "schema": f"ckptctl.{name}/1",
        "tool": {"name": "ckptctl", "version": ckptctl.__version__},
        "generated_at": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "ok": exit_code in (0, 3),
        "exit_code": exit_code,
    }
