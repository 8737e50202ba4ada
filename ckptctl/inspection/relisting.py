"""Confirm findings that a stale listing could explain.

A listing that is stale leaves out files that a read finds; a read may be told that a
file is gone which every listing shows. The first looks like damage and the second like
a change, and a step that is neither must not be passed over for it: what the storage
says of it cannot be trusted, so nothing is known.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from ckptctl.checks.shape import check_unchanged
from ckptctl.errors import PathNotFound
from ckptctl.findings import Finding
from ckptctl.inspection.step_listing import list_step
from ckptctl.model import Step
from ckptctl.storage.contract import Kind, ShortRead, Span, Store

MAX_ASKED = 4
"""Missing files that are asked for by name; a listing that lacks one is told by any."""

_MISSING = frozenset({"shard.missing", "metadata.missing", "file.missing"})


def left_out(store: Store, step: Step, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a `step.unknown` where a file is there that the listing lacks.

    A local file system is taken at its word. Storage errors pass through. Cost: a read
    of one byte for each file that is missing, at most `MAX_ASKED`.
    """
    if store.kind is Kind.LOCAL:
        return
    listed = {file.path for file in step.files}
    missing = [f.where for f in findings if f.code in _MISSING and f.where not in listed]
    for where in missing[:MAX_ASKED]:
        if _is_there(store, step, where):
            yield _not_listed(step, where)
            return


def _is_there(store: Store, step: Step, path: str) -> bool:
    try:
        for _ in store.read_spans([Span(f"{step.name}/{path}", 0, 1)]):
            pass
    except PathNotFound:
        return False
    except ShortRead:
        pass  # an empty one
    return True


def really_changed(store: Store, step: Step, findings: Sequence[Finding]) -> list[Finding]:
    """The findings, where each `step.changed` that no listing bears out is a `step.unknown`.

    Storage errors pass through. Cost: one listing of the step where there is one, and a
    read of one byte for each file that is gone from it, at most `MAX_ASKED`.
    """
    said = [finding for finding in findings if finding.code == "step.changed"]
    if not said:
        return list(findings)
    now = list_step(store, step.name)
    gone = {file.path for file in step.files} - {file.path for file in now}
    hidden = [path for path in sorted(gone)[:MAX_ASKED] if _is_there(store, step, path)]
    if hidden:
        return [*findings, _not_listed(step, hidden[0])]
    # Where the first listing failed there is nothing that could have changed since.
    if step.files and any(check_unchanged(step, now)):
        return list(findings)
    others = [finding for finding in findings if finding.code != "step.changed"]
    where = said[0].where
    what = f"one answer has {where} gone or changed, and a listing shows it as it was"
    return [*others, _unknown(step, where, what, said[0].found)]


def _not_listed(step: Step, where: str) -> Finding:
    what = f"{where} is there, and a listing does not show it"
    return _unknown(step, where, what, "a listing without it")


def _unknown(step: Step, where: str, what: str, found: str | None) -> Finding:
    return Finding(
        "step.unknown",
        where,
        f"{what}: the storage contradicts itself, and nothing is known about the step",
        expected="a listing and reads that agree",
        found=found,
        next_command=f"ckptctl verify {shlex.quote(step.url)}",
    )
