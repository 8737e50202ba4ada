"""Choose the step to resume from.

Opens the roots, lists each once, and has `choosing` look from the newest step
down. There are three different ways to come back without a step, with three
exit codes: there is none at all (10), none is usable (11), we could not look
(75, 77).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.errors import UsageError
from ckptctl.findings import EXIT_NONE_USABLE, Finding, Report, Verdict
from ckptctl.formats.frameworks.layouts import StepName, compile_pattern
from ckptctl.inspection.inspecting import Inspection, inspect_step, why_not_deeper
from ckptctl.inspection.marks_file import check_marks_file
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Level
from ckptctl.options import Requirements, known_level, not_negative
from ckptctl.selection.branches import Resume, left_behind, ruled_out
from ckptctl.selection.choosing import (
    Candidate,
    Choice,
    Policy,
    absent_kinds,
    choose,
    demanded,
    in_order,
    suspect_storage,
)
from ckptctl.selection.empty_roots import Beginning, OpenStore, judge_empty
from ckptctl.selection.history import begin_run
from ckptctl.selection.results import Answer, Pick
from ckptctl.selection.roots import (
    check_pointers,
    duplicates,
    list_root,
    older_steps,
    too_large_numbers,
)
from ckptctl.selection.tiers import Roots, Tier, open_tiers, roots_in, unavailable
from ckptctl.storage.opening import open_store

if TYPE_CHECKING:
    from ckptctl.inspection.content import Asked


def pick(
    *roots: str,
    optional_roots: Collection[str] = (),
    level: Level | None = None,
    require: Collection[str] = (),
    allow_missing_state: bool = False,
    accept_unverifiable: bool = False,
    before: int | None = None,
    skip: Collection[int] = (),
    max_fallback: int = 2,
    allow_fresh: bool = False,
    create: bool = False,
    world_size: int | None = None,
    saved_world_size: int | None = None,
    pattern: str | None = None,
    grace_s: float = 600.0,
    require_seal: bool = False,
    key: bytes | None = None,
    marks: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
) -> Pick:
    """Choose the newest step that may be resumed from, under one root or several.

    With several roots (tiers) the newest usable step of all is taken, from the
    earlier root where two hold it. `optional_roots` may be absent or not answer, which is
    a `root.unavailable` in the findings; each of the others must.
    `before` excludes that step and all newer ones, `skip` single ones. `require` names
    the kinds of train state that must be there; without it a step is passed over only if it
    lacks what an older one holds, unless `allow_missing_state`. `max_fallback` is how many damaged
    steps may be passed over. With `allow_fresh` a root of a new run has exit code 0; one that
    does not exist only with `create`, which makes each mandatory root and its sentinel, and
    records there the first step that is taken. `level` None means as deep as is cheap on that
    storage. `grace_s`: how long after its last write a save without metadata counts as
    running, in seconds. `require_seal` takes no step that a seal does not prove, made with
    `key` where one is given.
    `marks` is a file of marks, for roots that cannot be written to.

    The answer is always a `Pick`: what a storage did to one step is in it. Raises
    `StorageError` when a root cannot be listed, `UsageError` for arguments.

    Cost: one listing of each root, one listing and one read for each step looked
    at: on a healthy run one step, and its predecessor where it lacks some state.
    """
    named = roots_in(roots, optional_roots)
    if create and not allow_fresh:
        raise UsageError(
            "--create makes the root of a new run, and goes with --allow-fresh",
            instead="--allow-fresh",
        )
    asked = Requirements(
        require=require,
        world_size=world_size,
        saved_world_size=saved_world_size,
        grace_s=grace_s,
        require_seal=require_seal,
        key=key,
        marks=marks,
    )
    check_marks_file(asked.marks)
    fallback = int(not_negative("max-fallback", max_fallback))
    policy = Policy(allow_missing_state, accept_unverifiable, before, frozenset(skip), fallback)
    level = known_level(level)
    compiled = compile_pattern(pattern)
    with ExitStack() as stack:
        tiers = open_tiers(
            stack,
            named,
            lambda store: (list_root(store, compiled), {}),
            storage_options=storage_options,
            endpoint_url=endpoint_url,
            timeout_s=timeout_s,
        )
        opened = partial(
            open_store,
            storage_options=storage_options,
            endpoint_url=endpoint_url,
            timeout_s=timeout_s,
        )
        found = _pick(named, tiers, compiled, asked, policy, level, opened, allow_fresh=allow_fresh)
        return _created(found, tiers) if create else found


class CachingInspector:
    """Looks at candidates, each at most once for each depth, and remembers."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        asked: Requirements,
        level: Level | None,
    ) -> None:
        self._tiers = tiers
        self._asked = asked
        self.level = level
        self.confirm = True
        self.content: Asked | None = None
        self.looked: dict[Candidate, Inspection] = {}

    def __call__(self, candidate: Candidate, at_least: Level) -> Report:
        """The report on a candidate, as deep as the caller asked for and `at_least` deep."""
        known = self.looked.get(candidate)
        if known is None or known.report.level.depth < at_least.depth:
            tier = self._tiers[candidate.tier]
            known = inspect_step(
                OpenStep(tier.store, candidate.named, tier.trees.get(candidate.named.name)),
                self._asked,
                level=self._level(at_least),
                content=self.content,
                older=partial(self._older, candidate),
                confirm=self.confirm,
            )
            left = left_behind(known, self._resumes_beside(candidate))
            if left is not None and not self._stands_in(left.root, known.report):
                known = ruled_out(known, left)
            self.looked[candidate] = known
        return known.report

    def _level(self, at_least: Level) -> Level | None:
        if at_least is Level.LISTING:
            return self.level
        return max(self.level or at_least, at_least, key=lambda level: level.depth)

    def _resumes_beside(self, candidate: Candidate) -> list[Resume]:
        """The resumes that the other roots record; in its own a mark rules a step out."""
        others = (tier for place, tier in enumerate(self._tiers) if place != candidate.tier)
        return [one for tier in others for one in tier.resumes]

    def _stands_in(self, root: str, report: Report) -> bool:
        """Whether a root holds the same save, and no mark there rules it out."""
        for tier in self._tiers:
            for named in tier.listing.steps if tier.store.url == root else ():
                if named.number == report.number:
                    step = OpenStep(tier.store, named)
                    other = inspect_step(step, self._asked, level=Level.LISTING).report
                    is_out = other.verdict in (Verdict.REJECTED, Verdict.SUPERSEDED)
                    if report.digests and other.digests == report.digests and not is_out:
                        return True
        return False

    def found(self, candidate: Candidate) -> Report | None:
        """The report on a candidate that was inspected already."""
        known = self.looked.get(candidate)
        return known.report if known else None

    def _older(self, candidate: Candidate) -> tuple[StepName, ...]:
        steps = self._tiers[candidate.tier].listing.steps
        return older_steps(steps, candidate.named.number)

    def level_reason(self, report: Report) -> str | None:
        """Why an inspection was not deeper; None where a level was asked for."""
        if self.level is not None:
            return None
        return next(
            (
                why_not_deeper(self._tiers[candidate.tier].store.kind, one)
                for candidate, one in self.looked.items()
                if one.report is report
            ),
            None,
        )


def _pick(
    named: Roots,
    tiers: Sequence[Tier],
    pattern: re.Pattern[str] | None,
    asked: Requirements,
    policy: Policy,
    level: Level | None,
    open_other: OpenStore,
    *,
    allow_fresh: bool,
) -> Pick:
    candidates = candidates_of(tiers)
    looker = CachingInspector(tiers, asked, level)
    choice = choose(in_order(candidates, policy), looker, policy)
    findings = root_findings(tiers, choice, pattern)
    if choice.chosen is not None:
        found = _found(named.urls, choice, choice.chosen, findings, looker)
        required = demanded(choice.chosen, asked.require, policy)
        return replace(found, required=required, absent=absent_kinds(choice.chosen))
    begins = beginning_of(tiers, choice, findings, pattern, open_other)
    if begins is not None:
        return _without_step(named, choice, findings, begins, allow_fresh=allow_fresh)
    return _none(named, choice, findings, policy, n_steps=len(candidates))


def beginning_of(
    tiers: Sequence[Tier],
    choice: Choice,
    findings: Sequence[Finding],
    pattern: re.Pattern[str] | None,
    open_other: OpenStore,
) -> Beginning | None:
    """What it means that no step was chosen, where the roots hold none but unfinished saves.

    None where they hold anything else: then it is no question whether the run is new.
    """
    over = [one.report for one in choice.passed_over]
    n_steps = sum(len(tier.listing.steps) for tier in tiers)
    unfinished = all(report.left_unfinished for report in over)
    if len(choice.no_steps) + len(over) < n_steps or not unfinished:
        return None
    pointers = [finding for finding in findings if finding.code == "pointer.differs"]
    return judge_empty(tiers, pattern, interrupted=over, pointers=pointers, open_other=open_other)


def _created(found: Pick, tiers: Sequence[Tier]) -> Pick:
    """Make the roots of a new run with their sentinels, or record the step that is taken."""
    stores = [tier.store for tier in tiers if not tier.optional]
    if found.answer is Answer.FRESH:
        begin_run(stores, None)
        return replace(found, exit_code=0, next_command=None)
    if found.chosen is not None:
        begin_run(stores, found.step)
    return found


def candidates_of(tiers: Sequence[Tier]) -> list[Candidate]:
    """The steps of all roots, each with the place of its root."""
    return [
        Candidate(place, named, tier.optional)
        for place, tier in enumerate(tiers)
        for named in tier.listing.steps
    ]


def root_findings(
    tiers: Sequence[Tier], choice: Choice, pattern: re.Pattern[str] | None
) -> list[Finding]:
    """What is to say about the roots themselves, not about a step."""
    number = choice.chosen.number if choice.chosen else None
    findings = [*unavailable(tiers), *suspect_storage(choice)]
    for tier in tiers:
        findings += duplicates(tier.listing.steps)
        findings += too_large_numbers(tier.listing)
        findings += check_pointers(tier.store, tier.listing, number, pattern)
    return findings


def _found(
    roots: tuple[str, ...],
    choice: Choice,
    chosen: Report,
    findings: Sequence[Finding],
    looker: CachingInspector,
) -> Pick:
    return Pick(
        answer=Answer.FELL_BACK if _newer(choice, chosen) else Answer.FOUND,
        roots=roots,
        chosen=chosen,
        passed_over=tuple(choice.passed_over),
        findings=tuple(findings),
        level=chosen.level,
        level_reason=looker.level_reason(chosen),
        message=found_message(choice, chosen),
        exit_code=0,
        next_command=None,
    )


def _newer(choice: Choice, chosen: Report) -> list[int | None]:
    numbers = [over.report.number for over in choice.passed_over]
    return [number for number in numbers if number != chosen.number]


def found_message(choice: Choice, chosen: Report) -> str:
    """Which step is taken, and past which newer ones."""
    newer = _newer(choice, chosen)
    past = f", falling back past {_numbers(newer)}" if newer else ""
    return f"resume from step {chosen.number}{past}"


def _without_step(
    roots: Roots,
    choice: Choice,
    findings: Sequence[Finding],
    begins: Beginning,
    *,
    allow_fresh: bool,
) -> Pick:
    again = f"ckptctl pick {roots.words}"
    next_command: str | None = storage_corruption(roots)
    exit_code = begins.exit_code
    if begins.answer is Answer.UNKNOWN:
        next_command = again
    elif begins.answer is Answer.FRESH:
        next_command = f"{again} --allow-fresh{' --create' if begins.missing else ''}"
        if allow_fresh and not begins.missing:
            exit_code, next_command = 0, None
    return Pick(
        answer=begins.answer,
        roots=roots.urls,
        chosen=None,
        passed_over=tuple(choice.passed_over),
        findings=tuple(findings),
        level=None,
        level_reason=None,
        message=begins.message,
        exit_code=exit_code,
        next_command=next_command,
    )


def _none(
    roots: Roots,
    choice: Choice,
    findings: Sequence[Finding],
    policy: Policy,
    *,
    n_steps: int,
) -> Pick:
    unknown = choice.stopped == "unknown"
    message, next_command = none_usable(roots, choice, policy, n_steps)
    sound = choice.further.chosen if choice.further else None
    return Pick(
        answer=Answer.UNKNOWN if unknown else Answer.NONE_USABLE,
        roots=roots.urls,
        chosen=None,
        passed_over=tuple(choice.passed_over),
        findings=tuple(findings),
        level=None,
        level_reason=None,
        message=message,
        exit_code=choice.exit_code,
        next_command=next_command,
        newest_sound=sound.url if sound else None,
    )


def none_usable(roots: Roots, choice: Choice, policy: Policy, n_steps: int) -> tuple[str, str]:
    """Why no step is taken although there are `n_steps`, and what to run next."""
    over = choice.passed_over
    if choice.stopped == "unknown":
        number = choice.unknown[-1].number
        reason = next(one.reason for one in over if one.report is choice.unknown[-1])
        message = f"step {number} could not be looked at, so no older one is taken: {reason}"
        return message, f"ckptctl pick {roots.words} --skip {number}"
    if not over:
        return (
            f"none of the {n_steps} steps is left by --before and --skip",
            f"ckptctl explain {EXIT_NONE_USABLE}",
        )
    if choice.stopped == "suspect":
        n_damaged = len(choice.damaged)
        message = (
            f"{n_damaged} damaged step{'s' if n_damaged != 1 else ''}, more than --max-fallback "
            f"{policy.max_fallback} allows: suspect the storage path itself before you trust an "
            f"older step; {_newest_sound(choice)}"
        )
    else:
        message = (
            f"{len(over)} step{'s' if len(over) != 1 else ''} looked at, and none is usable: "
            f"do not start fresh over them; {_newest_sound(choice)}"
        )
    return message, storage_corruption(roots)


def storage_corruption(roots: Roots) -> str:
    """The command that leads through a root on which no step can be used."""
    words = ["ckptctl", "runbook", "run", "storage-corruption", roots.first]
    others = [url for url in roots.urls if url != roots.first]
    if others:
        words += ["--set", f"OTHER_ROOT={others[0]}"]
    return shlex.join(words)


def _newest_sound(choice: Choice) -> str:
    """Which step is sound although none is taken, or that there is none."""
    level = choice.passed_over[-1].report.level.value
    further = choice.further
    if further is None or not (further.chosen or further.passed_over):
        whole = [one for one in choice.passed_over if one.report.verdict is Verdict.COMPLETE]
        if whole:
            return f"step {whole[0].report.number} is whole, but {whole[0].reason}"
        return f"no step is sound at {level}"
    unknown = [one.report.number for one in further.passed_over if _is_unknown(one.report)]
    said = f" ({_numbers(unknown)} could not be looked at)" if unknown else ""
    if further.chosen is not None:
        found = further.chosen
        return f"the newest step that is sound at {found.level.value} is {found.number}{said}"
    n_over = len(further.passed_over)
    before = (
        f"none of the {n_over} steps before them is" if n_over > 1 else "the step before is not"
    )
    return f"no step is sound at {level}: {before}{said}"


def _is_unknown(report: Report) -> bool:
    return report.verdict is Verdict.UNKNOWN


MAX_NAMED = 5


def _numbers(steps: Sequence[int | None]) -> str:
    more = f" and {len(steps) - MAX_NAMED:,} more" if len(steps) > MAX_NAMED else ""
    named = ", ".join(map(str, steps[:MAX_NAMED]))
    return f"step{'s' if len(steps) > 1 else ''} {named}{more}"
