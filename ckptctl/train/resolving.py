"""Decide the step to resume from, the same on every rank, and open it there.

Rank 0 decides as `pick` does; the others receive its decision, and each proves that it
reads the same metadata. `decide`, `open_on_all` and `prove_content` are the stages of a resume
before the load; `resolve` consists of them alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Unpack

from ckptctl.distributed.process_group import ProcessGroup, make_group
from ckptctl.distributed.process_table import machine
from ckptctl.errors import (
    CkptctlError,
    LoadFailed,
    NothingToResume,
    StorageError,
    StorageUnavailable,
    UsageError,
)
from ckptctl.findings import Report, Severity, Verdict
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.layouts import METADATA, StepName, compile_pattern
from ckptctl.formatting import command_line, counted
from ckptctl.inspection.inspecting import inspect_step, train_step
from ckptctl.inspection.open_step import MAX_METADATA_BYTES, OpenStep
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import Level
from ckptctl.options import (
    JOB_TIMEOUT_S,
    SETTLE_S,
    ContentOptions,
    PickKeywords,
    PickPolicy,
    Requirements,
    StorageOptions,
    options_from,
)
from ckptctl.selection.choosing import Answer, PassedOver, refusal
from ckptctl.selection.empty_roots import without_steps
from ckptctl.selection.picking import Pick, past_damaged, pick_step, requested
from ckptctl.selection.roots import list_root, neighbours_of
from ckptctl.selection.targets import Roots, open_roots, roots_in
from ckptctl.selection.verifying import content_asked, open_target
from ckptctl.storage.opening import SharedStores, base_name, open_store, parent_url


@dataclass(frozen=True, slots=True)
class Selection:
    """The roots, the rules by which rank 0 selects a step, and how long ranks may lag behind."""

    roots: Roots
    policy: PickPolicy
    requirements: Requirements
    storage: SharedStores
    settle_s: float = SETTLE_S

    @property
    def shares_content(self) -> bool:
        """Whether all ranks compare every byte of the chosen step together."""
        return self.requirements.reads_every_byte(self.policy.level)

    @property
    def first_inspection(self) -> tuple[Level | None, SealBytes | None]:
        """The level of rank 0's own inspection, before the shared one; what a seal means for it."""
        return (None, SealBytes.LATER) if self.shares_content else (self.policy.level, None)

    def older_than(self, step: int) -> Selection:
        """The same for steps before `step` that also respect the policy's own bound."""
        before = step if self.policy.before is None else min(step, self.policy.before)
        return replace(self, policy=replace(self.policy, before=before))


def check_roots(selection: Selection) -> tuple[StepName, ...]:
    """Raise if roots without steps are not those of a run that has saved nothing yet.

    Returns the steps of all roots, newest first. Called before anything is written: a root
    that ckptctl has marked would count as known. Raises `StorageError`, `UsageError`. Cost:
    one listing of each root.
    """
    pattern = compile_pattern(selection.requirements.pattern)
    with ExitStack() as stack:
        opened_roots = open_roots(
            stack, selection.roots, lambda store: list_root(store, pattern), selection.storage
        )
        steps = [named for root in opened_roots for named in root.listing.steps]
        if not steps:
            begins = without_steps(opened_roots, ignore=selection.policy.ignore)
            if begins.answer is not Answer.FRESH:
                raise NothingToResume(
                    begins.message,
                    exit_code=begins.exit_code,
                    next_command=command_line("scan", *selection.roots.words),
                    reason=begins.reason,
                )
        return tuple(sorted(steps, key=lambda named: -named.number))


def decide(
    resume_from: str | int | None, selection: Selection, failed: Sequence[PassedOver] = ()
) -> tuple[Pick, OpenStep | None]:
    """The decision of one process, a fresh run or a step, which is returned open.

    `failed` are the steps that were chosen before and did not load; they are passed over. Raises
    `NothingToResume` if steps exist but none is usable (11) or one could not be inspected
    (75), and for a named step that is not usable (its verdict's code).
    """
    wanted = wanted_step(resume_from, selection.roots)
    if wanted == "none":
        return requested(selection.roots, None), None
    if wanted == "auto":
        return _newest(selection, failed)
    if not wanted.isdecimal():
        return _named(wanted, selection, failed)
    first: CkptctlError | None = None
    for url in selection.roots.urls:
        try:
            return _named(f"{url.rstrip('/')}@{wanted}", selection, failed)
        except CkptctlError as error:
            if error.exit_code == Verdict.SUPERSEDED.exit_code:
                raise  # another root may hold a copy without the mark
            # The error of an existing step explains more than its absence in another root.
            if first is None or isinstance(first, UsageError):
                first = error
    assert first is not None  # noqa: S101 - there is at least one root
    raise first


def wanted_step(resume_from: str | int | None, roots: Roots) -> str:
    """The requested step: `auto`, `none`, digits, or the path of a step.

    Raises `UsageError` for anything else.
    """
    wanted = str(resume_from if resume_from is not None else "none").strip() or "none"
    known = wanted in ("auto", "none") or wanted.isdecimal()
    if known or "/" in wanted or "@" in wanted or os.path.lexists(wanted):
        return wanted
    raise UsageError(
        f"resume_from is {wanted!r}; expected auto, none, a step number, or the path of a step",
        next_command=command_line("scan", *roots.words),
    )


def _newest(selection: Selection, failed: Sequence[PassedOver]) -> tuple[Pick, OpenStep | None]:
    skip = {over.step for over in failed if over.step is not None}
    level, seal_bytes = selection.first_inspection
    policy = replace(selection.policy, level=level, skip={*selection.policy.skip, *skip})
    requirements, storage = selection.requirements, selection.storage
    picked, opened = pick_step(selection.roots, policy, requirements, storage, seal_bytes)
    if not failed:
        if picked.chosen is None and picked.answer is not Answer.FRESH:
            raise picked.nothing
        return picked, opened
    if picked.chosen is None and not picked.passed_over:
        raise too_many(failed, selection.roots)
    if picked.chosen is None:
        # Without the steps that did not load, the root may look like that of a new run.
        fresh = picked.answer is Answer.FRESH
        raise replace(picked, exit_code=11 if fresh else picked.exit_code).nothing
    passed_over = (*failed, *picked.passed_over)
    return replace(picked, answer=Answer.FELL_BACK, passed_over=passed_over), opened


def _named(
    target: str, selection: Selection, failed: Sequence[PassedOver]
) -> tuple[Pick, OpenStep | None]:
    requirements = selection.requirements
    level, seal_bytes = selection.first_inspection
    with open_target(target, requirements, selection.storage) as found:
        level = level or Level.STRUCTURE
        report = found.inspect(requirements, level, seal_bytes=seal_bytes).report
    if refusal(report, selection.policy) is not None:
        faults = report.with_severity(Severity.FAULT)
        why = faults[0].message if faults else "a requested condition does not hold"
        raise NothingToResume(
            f"{report.url} was requested, but it is {report.verdict.value}: {why}",
            exit_code=report.exit_code,
            next_command=command_line("verify", report.url),
        )
    if report.number is None:
        raise UsageError(f"{report.url}: the folder name contains no step number")
    if any(over.step == report.number for over in failed):
        raise NothingToResume(
            f"{report.url} was requested, but it could not be loaded",
            exit_code=11,
            next_command=command_line("verify", report.url, "--level", "content"),
        )
    return requested(selection.roots, report), found


def not_loaded(chosen: Report, error: CkptctlError) -> PassedOver:
    """The refusal of a step that passed inspection and did not load."""
    corrupt = Verdict.CORRUPT
    report = replace(chosen, verdict=corrupt, exit_code=corrupt.exit_code)
    return PassedOver(report, error.message)


def too_many(failed: Sequence[PassedOver], roots: Roots) -> NothingToResume:
    """The error for steps that passed inspection but did not load."""
    steps = ", ".join(str(over.step) for over in failed)
    return NothingToResume(
        f"{counted(len(failed), 'step')} passed inspection but did not load ({steps}): check the "
        "storage before using an older step",
        exit_code=11,
        next_command=past_damaged(roots),
    )


def open_on_all(
    chosen: Report, group: ProcessGroup, selection: Selection, inspected: OpenStep | None
) -> OpenStep:
    """The chosen step as this rank reads it, once every rank has proven that it sees it.

    `inspected` is the step as this rank inspected it for the decision, None on the other ranks.
    Of the ranks that see the same file of metadata on the same machine, the first reads it,
    compares it with what rank 0 read, and gives its bytes to the others.

    Raises the same error on every rank, naming the rank that reads something else: its
    mount is stale or empty. Cost: one read of the metadata for each machine, and one for each
    rank of a step that has several metadata files or none.
    """
    if inspected is not None and inspected.url == chosen.url:
        step = inspected
    else:
        store = open_store(parent_url(chosen.url), selection.storage)
        step = OpenStep(store, base_name(chosen.url))
    if group.size == 1:
        return step
    views = group.gather(_view(step, chosen, group.rank))
    readers = [views.index(view) for view in views]
    settle_s = 0.0 if group.is_first else selection.settle_s
    is_needed = not group.is_first or readers.count(0) > 1
    reads = is_needed and readers[group.rank] == group.rank
    own = group.on_all(lambda: _wait_for(step, chosen, settle_s) if reads else None)
    data = group.bytes_from(readers, own)
    return step if step is inspected else OpenStep(step.store, step.name, metadata=data)


def _view(step: OpenStep, chosen: Report, rank: int) -> tuple[object, ...]:
    """What two ranks have in common if what one reads as metadata, the other reads as well.

    On a file system that is the file itself, in an object store its address, on one machine.
    Anything else is the view of this rank alone, which proves for itself.
    """
    here, files = machine(), [file for file, _ in chosen.digests]
    if not here or files != [METADATA]:
        return (rank,)
    folders = step.store.folders
    if folders is None:
        return here, step.url
    try:
        return here, *folders.file_id(step.in_store(METADATA))
    except StorageError:
        return (rank,)


def changed(chosen: Report | None, selection: Selection) -> str | None:
    """How the chosen step has changed; None if it has not.

    Reads its metadata again, bypassing any `OpenStep`: the step may have been overwritten
    during the load. Cost: one read of its metadata.
    """
    if chosen is None:
        return None
    try:
        with open_store(parent_url(chosen.url), selection.storage) as store:
            _read_decided(OpenStep(store, base_name(chosen.url)), chosen)
    except StorageError as error:
        return error.message
    return None


def _wait_for(step: OpenStep, chosen: Report, settle_s: float) -> bytes | None:
    """`_read_decided`, repeated for as long as a network file system may lag behind."""
    until_s = time.monotonic() + settle_s
    pause_s = 0.1
    while True:
        try:
            return _read_decided(step, chosen)
        except StorageError as error:
            if time.monotonic() + pause_s > until_s:
                raise StorageUnavailable(
                    f"{chosen.url}: {error.message}; this machine does not see the files of "
                    "rank 0, so no rank loads; its mount is stale or missing",
                    next_command="findmnt --real",
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)


def _read_decided(step: OpenStep, chosen: Report) -> bytes | None:
    """The bytes of the step's metadata, None unless it has one file of it.

    Raises `StorageError` unless the step is the save on which rank 0 decided.
    """
    files, data = [file for file, _ in chosen.digests], None
    now: dict[str, str] = {}
    if all(base_name(file).endswith(METADATA) for file in files):  # without a listing
        for file in files:
            data = step.store.read(step.in_store(file), limit=MAX_METADATA_BYTES)
            now[file] = sha256_of(data)
    else:
        now.update(OpenStep(step.store, step.name).digests)
    for file, digest in chosen.digests:
        found = now.get(file)
        if found is None:
            raise StorageUnavailable(f"{file} is missing")
        if found != digest:
            raise StorageUnavailable(
                f"{file} has digest {found[:12]}…, but rank 0 read {digest[:12]}…"
            )
    return data if files == [METADATA] else None


def prove_content(
    chosen: Report, group: ProcessGroup, selection: Selection, opened: OpenStep
) -> LoadFailed | None:
    """Verify every byte of the step at level `content`, or if a seal is required.

    `opened` is the step as this rank reads it. Returns the failure that all ranks agree on, None
    for a sound step. Raises `StorageError`. Cost: every byte of the step, each read by one rank.
    """
    if not selection.shares_content:
        return None
    pattern = compile_pattern(selection.requirements.pattern)
    neighbours = neighbours_of(lambda: list_root(opened.store, pattern).steps, chosen.number or 0)

    def inspected() -> Report:
        return inspect_step(
            opened,
            selection.requirements,
            level=Level.CONTENT,
            content=content_asked(ContentOptions(), group),
            neighbours=neighbours,
        ).report

    report = group.from_all(inspected)[0]
    if report.verdict is Verdict.UNKNOWN:
        first = report.with_severity(Severity.FAULT)[0]
        raise StorageUnavailable(first.message, next_command=first.next_command)
    over = refusal(report, selection.policy)
    return None if over is None else LoadFailed(f"at level content: {over.reason}")


def resolve(
    resume_from: str | int | None,
    root: str | Sequence[str],
    *,
    optional_roots: Collection[str] = (),
    settle_s: float = SETTLE_S,
    patience_s: float = JOB_TIMEOUT_S,
    policy: PickPolicy = PickPolicy(),
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[PickKeywords],
) -> str | None:
    """The path of the step to resume from, the same on every rank; None for a fresh run.

    With several roots the step is that of `pick ROOT...`; `optional_roots` may be absent.
    `resume_from` is `auto` (the newest usable step under `root`), `none`, a step number, or
    the path of a step, which must be usable. Every rank of the job calls this; without a
    process group the answer is that of one process. Nothing is written. Rank 0 prints one
    line on standard error: the step, and why newer ones were passed over. In a log `ckptctl
    loss` reads it as the boundary between two attempts.

    Raises `NothingToResume` if steps exist but none is usable (`exit_code` 11) or one could
    not be inspected (75), `StorageError` if the root could not be inspected or a rank sees
    another storage than rank 0 (`settle_s` seconds after the first attempt). The answer is
    a fresh run only if that is certain.

    With level `content` all ranks share the bytes, and steps that fail are skipped. Each
    field of the three options objects is also a keyword of this function.

    Cost: that of `pick` on rank 0, and one read of the metadata on each machine.
    """
    group = make_group(patience_s)
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
    shared = SharedStores.of(storage)
    selection = Selection(roots_in(root, optional_roots), policy, requirements, shared, settle_s)

    failed: list[PassedOver] = []
    while True:
        decision, inspected = group.from_first_keeping(
            lambda: decide(resume_from, selection, tuple(failed))
        )
        chosen = decision.chosen
        if chosen is None:
            _report(decision, group)
            return None
        opened = open_on_all(chosen, group, selection, inspected)
        error = prove_content(chosen, group, selection, opened)
        if error is None:
            _report(decision, group)
            return chosen.url
        failed.append(not_loaded(chosen, error))
        if len(failed) > policy.max_fallback:
            raise too_many(failed, selection.roots)


def _report(decision: Pick, group: ProcessGroup) -> None:
    """Print the decision in one line, on rank 0 only; `loss/formats/markers.py` reads it."""
    if not group.is_first:
        return
    from ckptctl.train.ledger import to_stderr  # which imports this module

    chosen = decision.chosen
    if chosen is None:
        line = f"no step to resume from in {', '.join(decision.roots)}: this is a fresh start"
    else:
        # Of a folder that is named by a count of saves, only the path is printed: `loss` would
        # take the number for a step.
        trained = train_step(chosen)
        named = "" if trained is None else f" step {trained}"
        back = ", falling back" if decision.answer is Answer.FELL_BACK else ""
        line = f"resuming from{named}{back}: {chosen.url}"
    reasons = {over.step: over.reason for over in decision.passed_over if over.step is not None}
    skipped = [
        f"not from step {step}: {why}" for step, why in sorted(reasons.items(), reverse=True)
    ]
    to_stderr("; ".join([line, *skipped]))
