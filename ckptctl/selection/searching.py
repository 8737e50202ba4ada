"""Search the roots of one run for the step to resume from: shared by `pick` and `scan`.

Opens the roots, lists each once, and lets `choosing` inspect from the newest step down.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.claims import Claim
from ckptctl.errors import StorageError, UsageError
from ckptctl.findings import Finding, Report, Verdict
from ckptctl.formats.frameworks.layouts import (
    compile_pattern,
    counted_by,
    train_step_of,
)
from ckptctl.formatting import command_line, rfc3339, some_of, verb
from ckptctl.inspection.inspecting import Inspection, inspect_step, why_not_deeper
from ckptctl.inspection.marks import check_marks_file
from ckptctl.inspection.one_save import SaveTimes, times_of
from ckptctl.inspection.open_step import OpenStep, RootSteps
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import Level
from ckptctl.options import PickPolicy, Requirements, StorageOptions
from ckptctl.selection.branches import RecordedResume, left_behind, ruled_out
from ckptctl.selection.choosing import (
    Candidate,
    Search,
    further_by_another_count,
    in_order,
)
from ckptctl.selection.doubtful_names import pattern_of
from ckptctl.selection.not_shared import not_shared
from ckptctl.selection.results import NoStep, NoStepReason
from ckptctl.selection.roots import (
    RootListing,
    check_counted_further,
    check_further,
    check_pointers,
    check_reported,
    duplicates,
    list_root,
    neighbours_of,
    pointer_numbers,
    too_large_numbers,
)
from ckptctl.selection.targets import OpenRoot, Roots, Trees, open_roots, unavailable
from ckptctl.selection.write_order import Order, WriteOrder, accepted, to_compare, write_order
from ckptctl.storage.contract import Store, StoreKind
from ckptctl.storage.opening import base_name, open_store

if TYPE_CHECKING:
    from ckptctl.inspection.content import Asked

ListRoot = Callable[[Store, re.Pattern[str] | None], tuple[RootListing, Trees]]


def names_only(store: Store, pattern: re.Pattern[str] | None) -> tuple[RootListing, Trees]:
    """List a root with the names of its steps, and no step."""
    return list_root(store, pattern), {}


class RunSearch(Search):
    """The search of the roots of one run, which stay open until the caller's stack ends.

    `candidates` are the steps that the policy allows, newest first. `findings` are about the
    roots, not about a step. `new_run` is what it means that no step was chosen, where the roots
    contain only unfinished saves or nothing.
    """

    inspect: CachingInspector

    def __init__(
        self,
        roots: Roots,
        opened_roots: tuple[OpenRoot, ...],
        inspector: CachingInspector,
        policy: PickPolicy,
    ) -> None:
        super().__init__(inspector, policy)
        self.roots = roots
        self.opened_roots = opened_roots
        self.candidates = in_order(candidates_of(opened_roots), policy)
        self.findings: list[Finding] = []
        self.new_run: NoStep | None = None

    @property
    def chosen_candidate(self) -> Candidate | None:
        """The candidate that is chosen."""
        return self.inspect.candidate_of(self.chosen)

    @property
    def opened(self) -> OpenStep | None:
        """The chosen step, open."""
        chosen = self.chosen_candidate
        return None if chosen is None else self.inspect.inspected[chosen].opened

    @property
    def n_steps(self) -> int:
        """The number of all steps, including those that the policy excludes."""
        return len(candidates_of(self.opened_roots)) - len(self.no_steps)

    def run(self, storage: StorageOptions) -> None:
        """Choose a step, and compare it with what the roots show besides; see `search`."""
        self.choose(self.candidates)
        self._check_are_steps()
        self._check_counts()
        self._check_branch()
        self._check_shared()
        self.findings = self._root_findings()
        if self.chosen is None and self.stopped not in (
            NoStepReason.TWO_BRANCHES,
            NoStepReason.NOT_SHARED,
        ):
            self.new_run = self._new_run(storage)

    def _check_are_steps(self) -> None:
        """Raise `UsageError` if all that has the name of a step is the root of a run."""
        over = [one.report for one in self.passed_over]
        nested = [r for r in over if any(one.code == "step.nested" for one in r.findings)]
        if self.chosen is None and nested and nested == over:
            roots = ", ".join(root.store.url for root in self.opened_roots)
            inside = some_of([base_name(report.url) for report in nested])
            do = verb(len(nested), "does", "do")
            raise UsageError(
                f"{roots} holds no steps itself, but {inside} in it {do}",
                next_command=command_line("scan", nested[0].url),
            )

    def _check_counts(self) -> None:
        """Raise `UsageError` if a save whose name has another count is further than the chosen."""
        chosen = self.chosen_candidate
        other = chosen and further_by_another_count(
            chosen, self.candidates, self.inspect, self.policy
        )
        if chosen is None or other is None:
            return
        root = self.opened_roots[other.root_index].store.url
        counts = [counted_by(one.named.layout) for one in (chosen, other)]
        raise UsageError(
            f"{chosen.named.name} counts {counts[0]} and {other.named.name} counts {counts[1]}, so "
            f"their numbers cannot be compared; {other.named.name} {self._how_far(other)}, and "
            f"{chosen.named.name} {self._how_far(chosen)}: select the saves of one count by "
            "--pattern, or give the step itself",
            next_command=command_line("scan", root, "--pattern", pattern_of(other.named)),
        )

    def _how_far(self, candidate: Candidate) -> str:
        """What is known of how far a save is, for a message."""
        report = self.inspect(candidate, Level.LISTING)
        step = train_step_of(report.layout, report.number, report.state.step.value)
        if step is not None:
            return f"is of training step {step:,}"
        if report.written_s is not None:
            return f"was written at {rfc3339(report.written_s, 'seconds')}"
        return "does not show how far it is"

    def _check_branch(self) -> None:
        """Claim that the chosen step is on the branch of the run, or stop where it is not."""
        chosen = self.chosen_candidate
        if chosen is None:
            return
        order = branch_of(chosen, self.candidates, self.opened_roots, self.inspect)
        self.chosen = self.inspect.claim(chosen, order.claim)
        self.decide_branch(order)

    def _check_shared(self) -> None:
        """Recognize steps that lack the same ranks; without a step to choose, it is the answer."""
        over = {id(one.report) for one in self.passed_over}
        known = [one for one in self.inspect.inspected.values() if id(one.report) in over]
        self.not_shared = not_shared(known)
        if self.not_shared is not None and self.chosen is None and not self.unknown:
            self.stopped = NoStepReason.NOT_SHARED

    def _root_findings(self) -> list[Finding]:
        """Findings about the roots themselves.

        Cost: a read of each pointer, an inspection of each older step that one names, and what
        `check_further` takes.
        """
        chosen = self.chosen_candidate
        number = chosen.named.number if chosen else None
        findings = [*unavailable(self.opened_roots), *self.suspect_storage()]
        for root in self.opened_roots:
            findings += duplicates(root.listing.steps)
            findings += too_large_numbers(root.listing)
            named = pointer_numbers(root.store, root.listing)
            findings += check_pointers(named, root.listing, number)
            findings += check_reported(root.store, root.listing, chosen.named if chosen else None)
            if number is not None:
                findings += check_further(root.store, root.listing, number)
            if chosen is not None and self.opened_roots[chosen.root_index] is root:
                known = self.inspect.inspected[chosen]
                report = known.report
                trained = train_step_of(report.layout, report.number, report.state.step.value)
                findings += check_counted_further(root.store, root.listing, known.opened, trained)
        return [*findings, *self._two_branches()]

    def _two_branches(self) -> Iterator[Finding]:
        """Yield `root.two-branches` where lower steps were written after the chosen one."""
        order = self.order
        if order is None or order.own is None:
            return
        if order.order not in (Order.WENT_BACK, Order.DOUBTFUL):
            return
        own, last = order.own, order.last
        message = (
            f"step {last.number} was written after step {own.number}: they are of two branches of "
            "the run"
        )
        if order.order is Order.DOUBTFUL:
            message = (
                f"{order.why}: if they were not copied, the run went back to an earlier step, and "
                f"step {own.number} is of the branch that it left"
            )
        yield Finding(
            "root.two-branches",
            last.name,
            message,
            expected="steps written in the order of their numbers",
            found=f"step {last.number} written after step {own.number}",
            next_command=command_line("pick", *self.roots.urls, "--before", last.number + 1),
        )

    def _new_run(self, storage: StorageOptions) -> NoStep | None:
        """What it means that no step was chosen, if the roots hold none but unfinished saves.

        None where they hold anything else: then it is no question whether the run is new.
        """
        over = [one.report for one in self.passed_over]
        n_steps = sum(len(root.listing.steps) for root in self.opened_roots)
        unfinished = all(report.left_unfinished for report in over)
        if len(self.no_steps) + len(over) < n_steps or not unfinished:
            return None
        from ckptctl.selection.empty_roots import without_steps

        pointers = [finding for finding in self.findings if finding.code == "pointer.differs"]
        return without_steps(
            self.opened_roots,
            interrupted=over,
            pointers=pointers,
            open_other=partial(open_store, storage=storage),
            ignore=self.policy.ignore,
        )


def search(
    stack: ExitStack,
    roots: Roots,
    policy: PickPolicy,
    requirements: Requirements,
    storage: StorageOptions,
    list_steps: ListRoot = names_only,
    seal_bytes: SealBytes | None = None,
) -> RunSearch:
    """Open the roots until `stack` ends, list each, and choose a step.

    Raises as `open_roots` and `without_steps` do. Cost: one call of `list_steps` for each root,
    and the inspection of each step that decides the choice.
    """
    check_marks_file(requirements.marks)
    pattern = compile_pattern(requirements.pattern)
    opened_roots = open_roots(stack, roots, lambda store: list_steps(store, pattern), storage)
    inspector = CachingInspector(opened_roots, requirements, policy.level, seal_bytes)
    found = RunSearch(roots, opened_roots, inspector, policy)
    found.run(storage)
    return found


class CachingInspector:
    """Inspects candidates, each at most once at each level, and keeps the reports."""

    def __init__(
        self,
        opened_roots: Sequence[OpenRoot],
        requirements: Requirements,
        level: Level | None,
        seal_bytes: SealBytes | None = None,
    ) -> None:
        self._roots = opened_roots
        self._seal_bytes = seal_bytes
        self._requirements = requirements
        self.level = level
        self.confirm = True
        self.content: Asked | None = None
        self.inspected: dict[Candidate, Inspection] = {}
        self._steps = [RootSteps(root.trees) for root in opened_roots]

    def __call__(self, candidate: Candidate, at_least: Level) -> Report:
        """The report on a candidate, at the requested level and at least at `at_least`."""
        known = self.inspected.get(candidate)
        if known is None or known.report.level.place < at_least.place:
            known = self._inspect(candidate, at_least)
            if known.report.verdict is Verdict.CHANGED:
                # A save that replaced it may be whole by now: the change is no reason to skip it.
                known = self._inspect(candidate, at_least, anew=True)
            left = left_behind(known, self._resumes_beside(candidate))
            if left is not None and not self._has_copy(left.root, known.report):
                known = ruled_out(known, left)
            self.inspected[candidate] = known
        return known.report

    def _inspect(self, candidate: Candidate, at_least: Level, *, anew: bool = False) -> Inspection:
        root, named = self._roots[candidate.root_index], candidate.named
        steps = self._steps[candidate.root_index]
        beside = neighbours_of(lambda: root.listing.steps, named.number, steps)
        opened = steps.opened.get(named.name)
        if opened is None or anew:
            files = None if anew else steps.files(named.name)
            opened = OpenStep(root.store, named, files)
        inspected = inspect_step(
            opened,
            self._requirements,
            level=self._level(at_least),
            content=self.content,
            neighbours=beside,
            confirm=self.confirm,
            seal_bytes=self._seal_bytes or (SealBytes.COMPARED if self.level is None else None),
        )
        if inspected.report.verdict in (Verdict.CHANGED, Verdict.UNKNOWN):
            steps.forget(named.name)
        else:
            steps.add(opened)
        return inspected

    def times_of(self, candidate: Candidate) -> SaveTimes | None:
        """When a candidate was written; None where that is unknown. Cost: its listing at most."""
        root, name = self._roots[candidate.root_index], candidate.named.name
        files = self._steps[candidate.root_index].files(name)
        try:
            return times_of(OpenStep(root.store, candidate.named, files).step)
        except StorageError:
            return None

    def claim(self, candidate: Candidate, claim: Claim) -> Report:
        """The report on a candidate, with a claim in the place of the one of that name."""
        known = self.inspected[candidate]
        known = replace(known, report=known.report.with_claim(claim))
        self.inspected[candidate] = known
        return known.report

    def _level(self, at_least: Level) -> Level | None:
        if at_least is Level.LISTING:
            return self.level
        return max(self.level or at_least, at_least, key=lambda level: level.place)

    def _resumes_beside(self, candidate: Candidate) -> list[RecordedResume]:
        """The resumes that the other roots record; in its own root a mark excludes a step."""
        others = (root for place, root in enumerate(self._roots) if place != candidate.root_index)
        return [one for root in others for one in root.resumes]

    def _has_copy(self, url: str, report: Report) -> bool:
        """Whether the root at `url` contains the same save, and no mark there excludes it."""
        for root in self._roots:
            for named in root.listing.steps if root.store.url == url else ():
                if named.number == report.number:
                    step = OpenStep(root.store, named)
                    other = self._at_listing(step).report
                    is_out = other.verdict in (Verdict.REJECTED, Verdict.SUPERSEDED)
                    if report.digests and other.digests == report.digests and not is_out:
                        return True
        return False

    def listed(self, candidate: Candidate) -> Inspection:
        """An inspection of names, sizes and metadata, if there is none at any level yet."""
        known = self.inspected.get(candidate)
        if known is None:
            step = OpenStep(self._roots[candidate.root_index].store, candidate.named)
            known = self._at_listing(step)
        return known

    def _at_listing(self, step: OpenStep) -> Inspection:
        """An inspection that asks which save a step is, and not for its bytes."""
        return inspect_step(
            step, self._requirements, level=Level.LISTING, seal_bytes=SealBytes.LATER
        )

    def candidate_of(self, report: Report | None) -> Candidate | None:
        """The candidate that a report is about; None if it was not inspected here."""
        found = (one for one, known in self.inspected.items() if known.report is report)
        return next(found, None)

    def found(self, candidate: Candidate) -> Report | None:
        """The report on a candidate that was already inspected."""
        known = self.inspected.get(candidate)
        return known.report if known else None

    def level_reason(self, report: Report) -> str | None:
        """Why an inspection was not deeper; None if a level was requested."""
        if self.level is not None:
            return None
        return next(
            (why_not_deeper(one) for one in self.inspected.values() if one.report is report), None
        )


def candidates_of(opened_roots: Sequence[OpenRoot]) -> list[Candidate]:
    """The steps of all roots, each with the place of its root."""
    return [
        Candidate(place, named, root.optional)
        for place, root in enumerate(opened_roots)
        for named in root.listing.steps
    ]


def branch_of(
    chosen: Candidate,
    candidates: Sequence[Candidate],
    opened_roots: Sequence[OpenRoot],
    inspector: CachingInspector,
) -> WriteOrder:
    """Whether a step is on the branch that was written last, among `candidates`.

    Steps of other roots, and steps that a mark or a record excludes, do not count. Cost: a listing
    of each step in `to_compare`, none of those that were listed with the root; an inspection at
    `listing` of each older step that was written later.
    """
    if inspector.inspected[chosen].notes.accepted:
        return accepted()
    root = opened_roots[chosen.root_index]
    count = counted_by(chosen.named.layout)
    older = {
        one.named.name: one
        for one in candidates
        if one.root_index == chosen.root_index
        and one.named.number < chosen.named.number
        and counted_by(one.named.layout) == count
    }
    step = inspector.inspected[chosen].step
    own = times_of(step)
    is_local = root.store.kind is StoreKind.LOCAL
    names, n_silent = to_compare(
        [*older],
        root.listing.folder_times,
        own.weights_s if own is not None else 0.0,
        known=root.trees,
        n_local_files=len(step.files) if is_local else None,
    )
    if own is None:
        return write_order(None, ())
    wanted = [older[name] for name in names]
    if is_local:
        listed = [inspector.times_of(one) for one in wanted]
    else:
        from ckptctl.storage.in_flight import in_flight

        listed = [times for _, times in in_flight(inspector.times_of, wanted)]
    times = [one for one in listed if one is not None]
    n_silent += len(listed) - len(times)  # what could not be listed was not compared
    order = write_order(own, times, n_silent)
    left = {one.name for one in order.later if _is_left(inspector, older[one.name])}
    if left:
        order = write_order(own, [one for one in times if one.name not in left], n_silent)
    return order


def _is_left(inspector: CachingInspector, candidate: Candidate) -> bool:
    """Whether a mark or a record excludes a step, or it is none."""
    report = inspector(candidate, Level.LISTING)
    no_step = candidate.named.bare and not report.parts
    return no_step or report.verdict in (Verdict.REJECTED, Verdict.SUPERSEDED)
