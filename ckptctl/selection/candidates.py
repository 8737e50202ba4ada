"""The steps of the roots of a run as candidates, and the inspector that reports on them.

Each candidate is inspected at most once at each level, however often a search asks; what records of
other roots exclude is excluded in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptctl.errors import StorageError
from ckptctl.findings import Report, Verdict
from ckptctl.formats.frameworks.layouts import StepName
from ckptctl.inspection.inspecting import Inspection, inspect_step
from ckptctl.inspection.one_save import SaveTimes, times_of
from ckptctl.inspection.open_step import OpenStep, RootSteps
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import Level
from ckptctl.options import PickPolicy, Requirements
from ckptctl.selection.branches import WriteOrder, branch_of, left_behind, ruled_out
from ckptctl.selection.roots import neighbours_of
from ckptctl.selection.targets import OpenRoot
from ckptctl.storage.in_flight import in_flight

if TYPE_CHECKING:
    from ckptctl.inspection.content import Asked


@dataclass(frozen=True, slots=True)
class Candidate:
    """One step under the root at `root_index` of the argument list.

    `optional`: its root may be absent, so a step in it that does not answer does not stop
    the search.
    """

    root_index: int
    named: StepName
    optional: bool = False

    def is_no_step(self, report: Report) -> bool:
        """Whether the inspection shows that a folder with a number as name is no step."""
        return self.named.bare and not report.parts and report.verdict is not Verdict.UNKNOWN


Inspect = Callable[[Candidate, Level], Report]
"""Inspect a candidate, at the given level or deeper."""


def candidates_of(opened_roots: Sequence[OpenRoot]) -> list[Candidate]:
    """The steps of all roots, each with the place of its root."""
    return [
        Candidate(place, named, root.optional)
        for place, root in enumerate(opened_roots)
        for named in root.listing.steps
    ]


def in_order(candidates: Sequence[Candidate], policy: PickPolicy) -> list[Candidate]:
    """The candidates that the policy allows, newest first, earlier roots first."""
    return sorted(
        (
            c
            for c in candidates
            if (policy.before is None or c.named.number < policy.before)
            and c.named.number not in policy.skip
        ),
        key=lambda c: (-c.named.number, c.root_index),
    )


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
        self.at_listing: dict[Candidate, Inspection] = {}
        self._times: dict[Candidate, SaveTimes | None] = {}
        self._steps = [RootSteps(root.listing.trees) for root in opened_roots]

    def __call__(self, candidate: Candidate, at_least: Level) -> Report:
        """The report on a candidate, at the requested level and at least at `at_least`."""
        known = self.inspected.get(candidate)
        if known is None or known.report.level.place < at_least.place:
            seal_bytes = SealBytes.COMPARED if self.level is None else None
            known = self._among_roots(
                candidate, self._level(at_least), self._seal_bytes or seal_bytes
            )
            self.inspected[candidate] = known
        return known.report

    def listed(self, candidate: Candidate, _: Level = Level.LISTING) -> Report:
        """The report on a candidate at `listing`, whatever was requested, or a deeper one.

        No byte is compared with a seal, also where one is required.
        """
        known = self.inspected.get(candidate) or self.at_listing.get(candidate)
        if known is None:
            known = self._among_roots(candidate, Level.LISTING, SealBytes.LATER)
            self.at_listing[candidate] = known
        return known.report

    def _among_roots(
        self, candidate: Candidate, level: Level | None, seal_bytes: SealBytes | None
    ) -> Inspection:
        """Inspect, once more if the step changed, and exclude what records of other roots do."""
        known = self._inspect(candidate, level, seal_bytes)
        if known.report.verdict is Verdict.CHANGED:
            # A save that replaced it may be whole by now: the change is no reason to skip it.
            known = self._inspect(candidate, level, seal_bytes, anew=True)
        # The resumes that other roots record: in its own root a mark excludes a step.
        beside = [root for i, root in enumerate(self._roots) if i != candidate.root_index]
        left = left_behind(known, [resume for root in beside for resume in root.resumes])
        if left is not None and not self._has_copy(left.root, known.report):
            known = ruled_out(known, left)
        return known

    def _inspect(
        self,
        candidate: Candidate,
        level: Level | None,
        seal_bytes: SealBytes | None,
        *,
        anew: bool = False,
    ) -> Inspection:
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
            level=level,
            content=self.content,
            neighbours=beside,
            confirm=self.confirm,
            seal_bytes=seal_bytes,
        )
        if inspected.report.verdict in (Verdict.CHANGED, Verdict.UNKNOWN):
            steps.forget(named.name)
        else:
            steps.add(opened)
        return inspected

    def claim_branch(self, candidate: Candidate, candidates: Sequence[Candidate]) -> WriteOrder:
        """Claim of an inspected step that it is on the branch of the run; see `branch_of`."""
        known, root = self.inspected[candidate], self._roots[candidate.root_index]
        order = branch_of(candidate, candidates, root, self.inspected, self)
        self.inspected[candidate] = replace(known, report=known.report.with_claim(order.claim))
        return order

    def times_of(self, candidates: Sequence[Candidate]) -> list[SaveTimes | None]:
        """When steps were written; None where that is unknown. Cost: a listing of each at most."""
        unlisted = [one for one in candidates if one not in self._times]
        self._times.update(in_flight(self._listed_times, unlisted))
        return [self._times[one] for one in candidates]

    def _listed_times(self, candidate: Candidate) -> SaveTimes | None:
        root, name = self._roots[candidate.root_index], candidate.named.name
        files = self._steps[candidate.root_index].files(name)
        try:
            return times_of(OpenStep(root.store, candidate.named, files).step)
        except StorageError:
            return None

    def _level(self, at_least: Level) -> Level | None:
        if at_least is Level.LISTING:
            return self.level
        return max(self.level or at_least, at_least, key=lambda level: level.place)

    def _has_copy(self, url: str, report: Report) -> bool:
        """Whether the root at `url` contains the same save, and no mark there excludes it."""
        for root in self._roots:
            for named in root.listing.steps if root.store.url == url else ():
                if named.number == report.number:
                    # Asks which save a step is, and not for its bytes.
                    other = inspect_step(
                        OpenStep(root.store, named),
                        self._requirements,
                        level=Level.LISTING,
                        seal_bytes=SealBytes.LATER,
                    ).report
                    if report.is_same_save(other) and not other.is_excluded:
                        return True
        return False
