"""Decide the step to resume from, the same on every rank.

Rank 0 decides as `pick` does; the others receive its decision, and each proves that it
reads the same metadata. Without a step to load, either the run is fresh, or no step is
usable, or the storage did not answer: the first is a decision, the others are errors, and
each is the same on every rank.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.data_classes import dataclass, replace
from ckptctl.distributed.process_group import ProcessGroup, make_group
from ckptctl.errors import (
    CkptctlError,
    LoadFailed,
    NothingToResume,
    StorageError,
    StorageUnavailable,
    UsageError,
)
from ckptctl.findings import Report, Severity, Verdict
from ckptctl.formats.frameworks.layouts import (
    METADATA,
    StepName,
    compile_pattern,
    train_step_of,
)
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
from ckptctl.selection.empty_roots import decide_beginning
from ckptctl.selection.picking import pick_step
from ckptctl.selection.results import Answer, PassedOver
from ckptctl.selection.roots import list_root, older_steps
from ckptctl.selection.targets import Roots, open_tiers, roots_in
from ckptctl.selection.verifying import content_asked, open_target
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import SharedStores, base_name, open_store, parent_url

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class Rejected:
    """A newer step that was not chosen, and why; `not_loaded` if loading it failed."""

    step: int | None
    path: str
    verdict: str
    reason: str
    not_loaded: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The step to load, None for a fresh run.

    `digests` identify its save: of its metadata files, or of its rank files. `train_step` is
    the step of its train state, None if only a count of saves or epochs is known.
    """

    step: int | None
    path: str | None
    digests: tuple[tuple[str, str], ...] = ()
    fell_back: bool = False
    rejected: tuple[Rejected, ...] = ()
    level: str | None = None
    written_s: float | None = None
    train_step: int | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The roots, the rules by which rank 0 selects a step, and how long ranks may lag behind."""

    roots: Roots
    policy: PickPolicy
    requirements: Requirements
    storage: SharedStores
    settle_s: float = SETTLE_S

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
        tiers = open_tiers(
            stack, selection.roots, lambda store: (list_root(store, pattern), {}), selection.storage
        )
        steps = [named for tier in tiers for named in tier.listing.steps]
        if not steps:
            opened = partial(open_store, storage=selection.storage)
            begins = decide_beginning(tiers, pattern, open_other=opened)
            if begins.answer is not Answer.FRESH:
                raise NothingToResume(
                    begins.message,
                    exit_code=begins.exit_code,
                    next_command=f"ckptctl scan {selection.roots.words}",
                )
        return tuple(sorted(steps, key=lambda named: -named.number))


def decide(
    resume_from: str | int | None,
    selection: Selection,
    *,
    skip: Collection[int] = (),
) -> tuple[Decision, OpenStep | None]:
    """The decision of one process: a step, or a fresh run. `skip` are steps that did not load.

    The step is returned open, for a load in this process.

    `resume_from` is `auto`, `none` (or None), a step number, or the path of a step. Raises
    `NothingToResume` if steps exist but none is usable (11) or one could not be inspected
    (75), and for a named step that is not usable (its verdict's code).
    """
    wanted = wanted_step(resume_from, selection.roots)
    if wanted == "none":
        return Decision(None, None), None
    if wanted == "auto":
        return _newest(selection, skip)
    if not wanted.isdecimal():
        return _named(wanted, selection, skip)
    failed: CkptctlError | None = None
    for url in selection.roots.urls:
        try:
            return _named(f"{url.rstrip('/')}@{wanted}", selection, skip)
        except CkptctlError as error:
            if error.exit_code == Verdict.SUPERSEDED.exit_code:
                raise  # another root may hold a copy without the mark
            # The error of an existing step explains more than its absence in another root.
            if failed is None or isinstance(failed, UsageError):
                failed = error
    assert failed is not None  # noqa: S101 - there is at least one root
    raise failed


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
        next_command=f"ckptctl scan {roots.words}",
    )


def _newest(selection: Selection, skip: Collection[int]) -> tuple[Decision, OpenStep | None]:
    policy = replace(
        selection.policy, level=_first_level(selection), skip={*selection.policy.skip, *skip}
    )
    found, opened = pick_step(selection.roots, policy, selection.requirements, selection.storage)
    rejected = tuple(_rejected(over) for over in found.passed_over)
    if found.answer is Answer.FRESH and not skip:
        return Decision(None, None, rejected=rejected), None
    if found.chosen is None:
        raise NothingToResume(
            found.message,
            exit_code=found.exit_code if found.answer is not Answer.FRESH else 11,
            next_command=found.next_command or f"ckptctl scan {selection.roots.words}",
        )
    fell_back = found.answer is Answer.FELL_BACK or bool(skip)
    return _chosen(found.chosen, rejected, fell_back=fell_back), opened


def _first_level(selection: Selection) -> Level | None:
    """The level of rank 0's own inspection; level `content` follows, shared by all ranks."""
    level = selection.policy.level
    return None if level is Level.CONTENT else level


def _rejected(over: PassedOver) -> Rejected:
    report = over.report
    return Rejected(report.number, report.url, report.verdict.value, over.reason)


def _named(
    target: str, selection: Selection, skip: Collection[int]
) -> tuple[Decision, OpenStep | None]:
    level = _first_level(selection) or Level.STRUCTURE
    with open_target(target, selection.requirements, selection.storage) as found:
        report = found.inspect(selection.requirements, level).report
    if not report.usable:
        raise _not_usable(report)
    if report.number is None:
        raise UsageError(f"{report.url}: the folder name contains no step number")
    if report.number in skip:
        raise NothingToResume(
            f"{report.url} was requested, but it could not be loaded",
            exit_code=11,
            next_command=f"ckptctl verify {shlex.quote(report.url)} --level content",
        )
    return _chosen(report, (), fell_back=False), found


def _not_usable(report: Report) -> CkptctlError:
    faults = report.with_severity(Severity.FAULT)
    why = faults[0].message if faults else "a requested condition does not hold"
    return NothingToResume(
        f"{report.url} was requested, but it is {report.verdict.value}: {why}",
        exit_code=report.exit_code,
        next_command=f"ckptctl verify {shlex.quote(report.url)}",
    )


def _chosen(report: Report, rejected: tuple[Rejected, ...], *, fell_back: bool) -> Decision:
    return Decision(
        report.number,
        report.url,
        report.digests,
        fell_back,
        rejected,
        report.level.value,
        report.written_s,
        train_step_of(report.layout, report.number, report.state.step.value),
    )


def opened_here(decision: Decision, selection: Selection, opened: OpenStep | None) -> OpenStep:
    """The chosen step as this rank reads it.

    `opened` is what this rank read when it decided; the other ranks have read nothing yet.
    """
    assert decision.path is not None  # noqa: S101 - asked for where there is a step
    if opened is not None and opened.url == decision.path:
        return opened
    store = open_store(parent_url(decision.path), selection.storage)
    return OpenStep(store, base_name(decision.path))


def prove_seen(decision: Decision, group: ProcessGroup, selection: Selection) -> None:
    """Let every rank prove that it reads the metadata on which rank 0 decided.

    Raises the same error on every rank, naming the rank that reads something else: its
    mount is stale or empty. Cost: one read of the metadata on each rank.
    """
    path = decision.path
    if path is None or group.size == 1:
        return
    waited_s = 0.0 if group.is_first else selection.settle_s
    group.from_all(lambda: _see(path, decision.digests, selection, waited_s))


def changed(decision: Decision, selection: Selection) -> str | None:
    """How the chosen step has changed; None if it has not.

    Reads its metadata again, bypassing any `OpenStep`: the step may have been overwritten
    during the load. Cost: one read of its metadata.
    """
    if decision.path is None:
        return None
    return _differs(decision.path, decision.digests, selection)


def _see(
    path: str, digests: tuple[tuple[str, str], ...], selection: Selection, settle_s: float
) -> None:
    until_s = time.monotonic() + settle_s
    pause_s = 0.1
    while (wrong := _differs(path, digests, selection)) is not None:
        if time.monotonic() + pause_s > until_s:
            raise StorageUnavailable(
                f"{path}: {wrong}; this machine does not see the files of rank 0, so no rank "
                "loads; its mount is stale or missing",
                next_command="findmnt --real",
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)


def _differs(path: str, digests: tuple[tuple[str, str], ...], selection: Selection) -> str | None:
    try:
        with open_store(parent_url(path), selection.storage) as store:
            now = _digests_now(store, base_name(path), [file for file, _ in digests])
            for file, digest in digests:
                found = now.get(file)
                if found is None:
                    return f"{file} is missing"
                if found != digest:
                    return f"{file} has digest {found[:12]}…, but rank 0 read {digest[:12]}…"
    except StorageError as error:
        return error.message
    return None


def _digests_now(store: Store, name: str, files: Sequence[str]) -> Mapping[str, str]:
    """The digests of a step as the storage has it now; of metadata without a listing."""
    if not all(base_name(file).endswith(METADATA) for file in files):
        return OpenStep(store, name).digests
    read = partial(store.read, limit=MAX_METADATA_BYTES)
    return {file: hashlib.sha256(read(f"{name}/{file}")).hexdigest() for file in files}


def prove_content(
    decision: Decision, group: ProcessGroup, selection: Selection, opened: OpenStep
) -> LoadFailed | None:
    """Verify every byte of the step if level `content` was requested; shared by all ranks.

    `opened` is the step as this rank reads it; what it holds is not read again. Returns the
    failure that all ranks agree on, None for a sound step. Raises `StorageError`. Cost:
    every byte of the step, each read by one rank.
    """
    if selection.policy.level is not Level.CONTENT:
        return None
    pattern = compile_pattern(selection.requirements.pattern)

    def older() -> tuple[StepName, ...]:
        return older_steps(list_root(opened.store, pattern).steps, decision.step or 0)

    reports = group.from_all(
        lambda: (
            inspect_step(
                opened,
                selection.requirements,
                level=Level.CONTENT,
                content=content_asked(ContentOptions(), group),
                older=older,
            ).report
        )
    )
    report = reports[0]
    if report.usable:
        return None
    first = report.with_severity(Severity.FAULT)[0]
    if report.verdict is Verdict.UNKNOWN:
        raise StorageUnavailable(first.message, next_command=first.next_command)
    return LoadFailed(f"{report.verdict.value} at level content: {first.message}")


def too_many(failed: Collection[int], roots: Roots) -> NothingToResume:
    """The error for several steps that passed inspection but did not load."""
    steps = ", ".join(str(step) for step in failed)
    return NothingToResume(
        f"{len(failed)} steps passed inspection but did not load ({steps}): check the storage "
        "before using an older step",
        exit_code=11,
        next_command=f"ckptctl scan {roots.words}",
    )


def check_one_metadata(decision: Decision) -> None:
    """Raise `UsageError` for a step with several metadata files, which is not supported here."""
    assert decision.path is not None  # noqa: S101 - asked for where there is a step
    files = [file for file, _ in decision.digests]
    if files != [METADATA]:
        raise UsageError(
            f"{decision.path} holds {len(files)} metadata files ({', '.join(files[:3])}); "
            "Checkpointer loads steps with one. use `resolve` for the path, and load the step in "
            "the script",
            next_command=f"ckptctl show {shlex.quote(decision.path)}",
        )


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

    Cost: that of `pick` on rank 0, one read of the metadata on every other rank.
    """
    group = make_group(patience_s)
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
    shared = SharedStores.of(storage)
    selection = Selection(roots_in(root, optional_roots), policy, requirements, shared, settle_s)

    failed: dict[int, str] = {}
    while True:
        inspected: OpenStep | None = None  # on rank 0, the step with what was read of it

        def decide_here() -> Decision:
            nonlocal inspected
            decision, inspected = decide(resume_from, selection, skip=tuple(failed))
            return decision

        decision = group.from_first(decide_here)
        if decision.path is None or decision.step is None:
            _report(decision, failed, group, selection)
            return None
        prove_seen(decision, group, selection)
        opened = opened_here(decision, selection, inspected)
        error = prove_content(decision, group, selection, opened)
        if error is None:
            _report(decision, failed, group, selection)
            return decision.path
        failed[decision.step] = error.message
        if len(failed) > policy.max_fallback:
            raise too_many(failed, selection.roots)


def _report(
    decision: Decision, failed: Mapping[int, str], group: ProcessGroup, selection: Selection
) -> None:
    """Print the decision in one line, on rank 0 only; `loss/formats/markers.py` reads it."""
    from ckptctl.train.ledger import to_stderr  # it imports this module

    if group.is_first:
        to_stderr("; ".join(_report_parts(decision, failed, selection)))


def _report_parts(
    decision: Decision, failed: Mapping[int, str], selection: Selection
) -> Iterator[str]:
    if decision.path is None:
        yield f"no step to resume from in {selection.roots.words}: this is a fresh start"
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
