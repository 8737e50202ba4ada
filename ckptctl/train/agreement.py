"""Decide the step to resume from, the same on every rank.

Rank 0 decides as `pick` does; the others receive its decision, and each proves that it
reads the same metadata. Without a step to load, either the run is fresh, or no step is
usable, or the storage did not answer: the first is a decision, the others are errors, and
each is the same on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from ckptctl.errors import CkptctlError, NothingToResume, UsageError
from ckptctl.findings import Report, Severity, Verdict
from ckptctl.formats.frameworks.layouts import StepName, compile_pattern, train_step_of
from ckptctl.formatting import command_line, counted
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import Level
from ckptctl.options import SETTLE_S, PickPolicy, Requirements
from ckptctl.selection.choosing import refusal
from ckptctl.selection.empty_roots import without_steps
from ckptctl.selection.picking import past_damaged, pick_step
from ckptctl.selection.results import Answer
from ckptctl.selection.roots import list_root
from ckptctl.selection.targets import Roots, open_roots
from ckptctl.selection.verifying import open_target
from ckptctl.storage.opening import SharedStores, open_store


@dataclass(frozen=True, slots=True)
class Rejected:
    """A newer step that was not chosen, and why; `not_loaded` if loading it failed."""

    step: int | None
    path: str
    verdict: str
    reason: str
    not_loaded: bool = False


@dataclass(frozen=True, slots=True)
class ResumeDecision:
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

    @property
    def shares_content(self) -> bool:
        """Whether all ranks compare every byte of the chosen step together."""
        return self.requirements.reads_every_byte(self.policy.level)

    @property
    def seal_bytes_at_first(self) -> SealBytes | None:
        """What a required seal means for rank 0's own inspection."""
        return SealBytes.LATER if self.shares_content else None

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
            stack, selection.roots, lambda store: (list_root(store, pattern), {}), selection.storage
        )
        steps = [named for root in opened_roots for named in root.listing.steps]
        if not steps:
            opened = partial(open_store, storage=selection.storage)
            begins = without_steps(opened_roots, open_other=opened, ignore=selection.policy.ignore)
            if begins.answer is not Answer.FRESH:
                raise NothingToResume(
                    begins.message,
                    exit_code=begins.exit_code,
                    next_command=command_line("scan", *selection.roots.words),
                    reason=begins.reason.value,
                )
        return tuple(sorted(steps, key=lambda named: -named.number))


def decide(
    resume_from: str | int | None, selection: Selection, *, skip: Collection[int] = ()
) -> tuple[ResumeDecision, OpenStep | None]:
    """The decision of one process: a step, or a fresh run. `skip` are steps that did not load.

    The step is returned open, for a load in this process.

    `resume_from` is `auto`, `none` (or None), a step number, or the path of a step. Raises
    `NothingToResume` if steps exist but none is usable (11) or one could not be inspected
    (75), and for a named step that is not usable (its verdict's code).
    """
    wanted = wanted_step(resume_from, selection.roots)
    if wanted == "none":
        return ResumeDecision(None, None), None
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
        next_command=command_line("scan", *roots.words),
    )


def _newest(selection: Selection, skip: Collection[int]) -> tuple[ResumeDecision, OpenStep | None]:
    policy = replace(
        selection.policy, level=_first_level(selection), skip={*selection.policy.skip, *skip}
    )
    found, opened = pick_step(
        selection.roots,
        policy,
        selection.requirements,
        selection.storage,
        selection.seal_bytes_at_first,
    )
    rejected = tuple(
        Rejected(over.report.number, over.report.url, over.report.verdict.value, over.reason)
        for over in found.passed_over
    )
    if found.answer is Answer.FRESH and not skip:
        return ResumeDecision(None, None, rejected=rejected), None
    if found.chosen is None:
        if skip and not rejected:
            raise too_many(skip, selection.roots)
        raise NothingToResume(
            found.message,
            exit_code=found.exit_code if found.answer is not Answer.FRESH else 11,
            next_command=found.next_command or command_line("scan", *selection.roots.words),
            reason=found.reason.value if found.reason is not None else "",
        )
    fell_back = found.answer is Answer.FELL_BACK or bool(skip)
    return _chosen(found.chosen, rejected, fell_back=fell_back), opened


def _first_level(selection: Selection) -> Level | None:
    """The level of rank 0's own inspection; level `content` follows, shared by all ranks."""
    return None if selection.shares_content else selection.policy.level


def _named(
    target: str, selection: Selection, skip: Collection[int]
) -> tuple[ResumeDecision, OpenStep | None]:
    level = _first_level(selection) or Level.STRUCTURE
    with open_target(target, selection.requirements, selection.storage) as found:
        report = found.inspect(
            selection.requirements, level, seal_bytes=selection.seal_bytes_at_first
        ).report
    if refusal(report, selection.policy) is not None:
        raise _not_usable(report)
    if report.number is None:
        raise UsageError(f"{report.url}: the folder name contains no step number")
    if report.number in skip:
        raise NothingToResume(
            f"{report.url} was requested, but it could not be loaded",
            exit_code=11,
            next_command=command_line("verify", report.url, "--level", "content"),
        )
    return _chosen(report, (), fell_back=False), found


def _not_usable(report: Report) -> CkptctlError:
    faults = report.with_severity(Severity.FAULT)
    why = faults[0].message if faults else "a requested condition does not hold"
    return NothingToResume(
        f"{report.url} was requested, but it is {report.verdict.value}: {why}",
        exit_code=report.exit_code,
        next_command=command_line("verify", report.url),
    )


def _chosen(report: Report, rejected: tuple[Rejected, ...], *, fell_back: bool) -> ResumeDecision:
    return ResumeDecision(
        report.number,
        report.url,
        report.digests,
        fell_back,
        rejected,
        report.level.value,
        report.written_s,
        train_step_of(report.layout, report.number, report.state.step.value),
    )


def too_many(failed: Collection[int], roots: Roots) -> NothingToResume:
    """The error for steps that passed inspection but did not load."""
    steps = ", ".join(str(step) for step in failed)
    return NothingToResume(
        f"{counted(len(failed), 'step')} passed inspection but did not load ({steps}): check the "
        "storage before using an older step",
        exit_code=11,
        next_command=past_damaged(roots),
    )
