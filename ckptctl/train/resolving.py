"""Prove on every rank that it sees the step on which rank 0 decided, and open it there.

`open_on_all` and `prove_content` are the stages of a resume between the decision and the load;
`resolve` consists of them alone. Every rank calls them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptctl.distributed.process_group import ProcessGroup, make_group
from ckptctl.distributed.process_table import machine
from ckptctl.errors import LoadFailed, StorageError, StorageUnavailable
from ckptctl.findings import Severity, Verdict
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.layouts import METADATA, compile_pattern
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.part_files import MAX_METADATA_BYTES
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
from ckptctl.selection.choosing import refusal
from ckptctl.selection.roots import list_root, neighbours_of
from ckptctl.selection.targets import roots_in
from ckptctl.selection.verifying import content_asked
from ckptctl.storage.opening import SharedStores, base_name, open_store, parent_url
from ckptctl.train.agreement import ResumeDecision, Selection, decide, too_many
from ckptctl.train.ledger import to_stderr

if TYPE_CHECKING:
    from typing_extensions import Unpack


def open_on_all(
    decision: ResumeDecision, group: ProcessGroup, selection: Selection, inspected: OpenStep | None
) -> OpenStep:
    """The chosen step as this rank reads it, once every rank has proven that it sees it.

    `inspected` is the step as this rank inspected it for the decision, None on the other ranks.
    Of the ranks that see the same file of metadata on the same machine, the first reads it,
    compares it with what rank 0 read, and gives its bytes to the others.

    Raises the same error on every rank, naming the rank that reads something else: its
    mount is stale or empty. Cost: one read of the metadata for each machine, and one for each
    rank of a step that has several metadata files or none.
    """
    assert decision.path is not None  # noqa: S101 - asked for where there is a step
    if inspected is not None and inspected.url == decision.path:
        step = inspected
    else:
        store = open_store(parent_url(decision.path), selection.storage)
        step = OpenStep(store, base_name(decision.path))
    if group.size == 1:
        return step
    views = group.gather(_view(step, decision, group.rank))
    readers = [views.index(view) for view in views]
    settle_s = 0.0 if group.is_first else selection.settle_s
    is_needed = not group.is_first or readers.count(0) > 1
    reads = is_needed and readers[group.rank] == group.rank
    own = group.on_all(lambda: _wait_for(step, decision, settle_s) if reads else None)
    data = group.bytes_from(readers, own)
    return step if step is inspected else OpenStep(step.store, step.name, metadata=data)


def _view(step: OpenStep, decision: ResumeDecision, rank: int) -> tuple[object, ...]:
    """What two ranks have in common if what one reads as metadata, the other reads as well.

    On a file system that is the file itself, in an object store its address, on one machine.
    Anything else is the view of this rank alone, which proves for itself.
    """
    here, files = machine(), [file for file, _ in decision.digests]
    if not here or files != [METADATA]:
        return (rank,)
    folders = step.store.folders
    if folders is None:
        return here, step.url
    try:
        return here, *folders.file_id(step.in_store(METADATA))
    except StorageError:
        return (rank,)


def changed(decision: ResumeDecision, selection: Selection) -> str | None:
    """How the chosen step has changed; None if it has not.

    Reads its metadata again, bypassing any `OpenStep`: the step may have been overwritten
    during the load. Cost: one read of its metadata.
    """
    if decision.path is None:
        return None
    try:
        with open_store(parent_url(decision.path), selection.storage) as store:
            _read_decided(OpenStep(store, base_name(decision.path)), decision)
    except StorageError as error:
        return error.message
    return None


def _wait_for(step: OpenStep, decision: ResumeDecision, settle_s: float) -> bytes | None:
    """`_read_decided`, repeated for as long as a network file system may lag behind."""
    until_s = time.monotonic() + settle_s
    pause_s = 0.1
    while True:
        try:
            return _read_decided(step, decision)
        except StorageError as error:
            if time.monotonic() + pause_s > until_s:
                raise StorageUnavailable(
                    f"{decision.path}: {error.message}; this machine does not see the files of "
                    "rank 0, so no rank loads; its mount is stale or missing",
                    next_command="findmnt --real",
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)


def _read_decided(step: OpenStep, decision: ResumeDecision) -> bytes | None:
    """The bytes of the step's metadata, None unless it has one file of it.

    Raises `StorageError` unless the step is the save on which rank 0 decided.
    """
    now, data = _read_now(step, [file for file, _ in decision.digests])
    for file, digest in decision.digests:
        found = now.get(file)
        if found is None:
            raise StorageUnavailable(f"{file} is missing")
        if found != digest:
            raise StorageUnavailable(
                f"{file} has digest {found[:12]}…, but rank 0 read {digest[:12]}…"
            )
    return data


def _read_now(step: OpenStep, files: Sequence[str]) -> tuple[Mapping[str, str], bytes | None]:
    """The digests of a step as the storage has it now; of metadata without a listing."""
    if not all(base_name(file).endswith(METADATA) for file in files):
        return OpenStep(step.store, step.name).digests, None
    digests, data = {}, None
    for file in files:
        data = step.store.read(step.in_store(file), limit=MAX_METADATA_BYTES)
        digests[file] = sha256_of(data)
    return digests, data if files == [METADATA] else None


def prove_content(
    decision: ResumeDecision, group: ProcessGroup, selection: Selection, opened: OpenStep
) -> LoadFailed | None:
    """Verify every byte of the step at level `content`, or if a seal is required.

    All ranks share the bytes.

    `opened` is the step as this rank reads it; what it holds is not read again. Returns the
    failure that all ranks agree on, None for a sound step. Raises `StorageError`. Cost:
    every byte of the step, each read by one rank.
    """
    if not selection.shares_content:
        return None
    pattern = compile_pattern(selection.requirements.pattern)

    neighbours = neighbours_of(lambda: list_root(opened.store, pattern).steps, decision.step or 0)
    reports = group.from_all(
        lambda: (
            inspect_step(
                opened,
                selection.requirements,
                level=Level.CONTENT,
                content=content_asked(ContentOptions(), group),
                neighbours=neighbours,
            ).report
        )
    )
    report = reports[0]
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

    failed: dict[int, str] = {}
    while True:
        decision, inspected = group.from_first_keeping(
            lambda: decide(resume_from, selection, skip=tuple(failed))
        )
        if decision.path is None or decision.step is None:
            _report(decision, failed, group, selection)
            return None
        opened = open_on_all(decision, group, selection, inspected)
        error = prove_content(decision, group, selection, opened)
        if error is None:
            _report(decision, failed, group, selection)
            return decision.path
        failed[decision.step] = error.message
        if len(failed) > policy.max_fallback:
            raise too_many(failed, selection.roots)


def _report(
    decision: ResumeDecision, failed: Mapping[int, str], group: ProcessGroup, selection: Selection
) -> None:
    """Print the decision in one line, on rank 0 only; `loss/formats/markers.py` reads it."""
    if group.is_first:
        to_stderr("; ".join(_report_parts(decision, failed, selection)))


def _report_parts(
    decision: ResumeDecision, failed: Mapping[int, str], selection: Selection
) -> Iterator[str]:
    if decision.path is None:
        yield f"no step to resume from in {', '.join(selection.roots.urls)}: this is a fresh start"
    else:
        # Of a folder that is named by a count of saves, only the path is printed: `loss` would
        # take the number for a step.
        step = "" if decision.train_step is None else f" step {decision.train_step}"
        back = ", falling back" if decision.fell_back else ""
        yield f"resuming from{step}{back}: {decision.path}"
    reasons = {**failed} | {
        one.step: one.reason for one in decision.rejected if one.step is not None
    }
    for number in sorted(reasons, reverse=True):
        yield f"not from step {number}: {reasons[number]}"
