"""Report a resume: the document, and the lines that rank 0 prints.

The lines go to standard error unless the script passes its own function. No other module of
`train/` prints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ckptctl.resharding.advising import Advice, advise
from ckptctl.storage.opening import base_name, open_store, parent_url
from ckptctl.train.job import Job, Restored
from ckptctl.train.ledger import utc_now


def to_stderr(line: str) -> None:
    """Print one line, and flush it."""
    sys.stderr.write(f"ckptctl: {line}\n")
    sys.stderr.flush()


def resume_document(job: Job, restored: Restored) -> dict[str, Any]:
    """The report (schema `ckptctl.resume/1`) without the fields of the attempt; on rank 0 only."""
    decision, saved, rejected = restored.decision, restored.saved, restored.rejected
    advice = _advice(job, restored)
    return {
        "schema": "ckptctl.resume/1",
        "attempt": None,
        "at": utc_now(),
        "root": job.root,
        "step": decision.step,
        "path": decision.path,
        "tokens": saved.tokens,
        "fell_back": decision.step is not None and (decision.fell_back or bool(rejected)),
        "rejected": [
            {"step": one.step, "path": one.path, "verdict": one.verdict, "reason": one.reason}
            for one in rejected
        ],
        "superseded": [],
        "warnings": [],
        "world_size": job.group.size,
        "saved_world_size": saved.world_size,
        "resharding": None if advice is None else advice.document(),
        "previous_attempt": None,
        "state": restored.inventory.document(),
        "cluster": None,
    }


def _advice(job: Job, restored: Restored) -> Advice | None:
    """The reads that a load of this step takes, if the number of ranks has changed."""
    path = restored.decision.path
    if path is None or restored.saved.world_size in (None, job.group.size):
        return None
    with open_store(parent_url(path), job.selection.storage) as store:
        return advise(store, base_name(path), job.group.size)


def resume_lines(report: Mapping[str, Any], restored: Restored) -> Iterator[str]:
    """The lines of a resume: its step and age, what was refused and why, and the inventory."""
    if report["step"] is None:
        what = "no save was completed in it" if report["rejected"] else "it contains no step"
        yield f"fresh run in {report['root']}: {what}"
    else:
        written_s = restored.decision.written_s
        age = "" if written_s is None else f", saved {_duration(time.time() - written_s)} ago"
        ranks = report["saved_world_size"]
        by = "" if ranks is None else f" by {ranks} rank{'' if ranks == 1 else 's'}"
        tokens = "" if report["tokens"] is None else f", {report['tokens']:,} tokens"
        back = ", falling back" if report["fell_back"] else ""
        yield f"resumed from step {report['step']}{back}: {report['path']}{age}{by}{tokens}"
    for refused in report["rejected"]:
        yield f"not from step {refused['step']}: {refused['reason']}"
    if report["superseded"]:
        steps = ", ".join(str(step) for step in report["superseded"])
        yield f"superseded from now on: step {steps}"
    for warning in report["warnings"]:
        yield f"warning: {warning}"
    for word, names in report["state"].items():
        if names:
            yield f"{word}: {', '.join(names)}"
    if report["resharding"] is not None:
        saved, now = report["saved_world_size"], report["world_size"]
        yield f"note: saved by {saved}, loaded on {now}: {report['resharding']['message']}"
    for note in restored.inventory.notes:
        yield f"note: {note}"


def _duration(age_s: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= 2 * size:
            return f"{age_s / size:.0f} {unit}"
    return f"{max(0.0, age_s):.0f} s"
