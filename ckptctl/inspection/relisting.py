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
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Step
from ckptctl.storage.contract import Kind, ShortRead, Span

MAX_ASKED = 4
"""Missing files that are asked for by name; a listing that lacks one is told by any."""

_MISSING = frozenset({"shard.missing", "metadata.missing", "file.missing"})


def left_out(opened: OpenStep, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a `step.unknown` where a file is there that the listing lacks.

    A local file system is taken at its word. Storage errors pass through. Cost: a read
    of one byte for each file that is missing, at most `MAX_ASKED`.
    """
    if opened.store.kind is Kind.LOCAL:
        return
    listed = {file.path for file in opened.files}
    missing = [f.where for f in findings if f.code in _MISSING and f.where not in listed]
    for where in missing[:MAX_ASKED]:
        if _is_there(opened, where):
            yield _not_listed(opened.step, where)
            return


def _is_there(opened: OpenStep, path: str) -> bool:
    try:
        for _ in opened.store.read_spans([Span(opened.in_store(path), 0, 1)]):
            pass
    except PathNotFound:
        return False
    except ShortRead:
        pass  # an empty one
    return True


def contradicted(opened: OpenStep, findings: Sequence[Finding]) -> Finding | None:
    """A `step.unknown` where a `step.changed` among the findings is not borne out; else None.

    The step is listed once more: a change that no listing shows, and one that a read
    contradicts, says that the storage cannot be trusted. Storage errors pass through.
    Cost: nothing without a `step.changed`; else one listing, and a read of one byte for
    each file that is gone from it, at most `MAX_ASKED`.
    """
    said = next((finding for finding in findings if finding.code == "step.changed"), None)
    if said is None:
        return None
    step = opened.listed
    now = opened.list_again()
    gone = {file.path for file in step.files} - {file.path for file in now}
    hidden = [path for path in sorted(gone)[:MAX_ASKED] if _is_there(opened, path)]
    if hidden:
        return _not_listed(step, hidden[0])
    # Where the first listing failed there is nothing that could have changed since.
    if step.files and any(check_unchanged(step, now)):
        return None
    what = (
        f"one answer reports {said.where} as missing or changed, and a listing shows it unchanged"
    )
    return _unknown(step, said.where, what, said.found)


def _not_listed(step: Step, where: str) -> Finding:
    what = f"{where} exists, and a listing does not show it"
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
