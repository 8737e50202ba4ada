"""Decide about the steps of a run: which may be resumed from, and why another may not.

From top to bottom: the answers and their reasons, the search from the newest step down, why a step
is refused, and what the roots of a run show besides. Reports come from the inspector in
`candidates`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, islice

import msgspec

from ckptctl.errors import StorageError, UsageError
from ckptctl.findings import (
    EXIT_FRESH,
    EXIT_NONE_USABLE,
    EXIT_STATE_MISSING,
    Finding,
    Report,
    Severity,
    Verdict,
    explained,
    unmet_in,
)
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layouts import compile_pattern, counted_by
from ckptctl.formatting import and_more, command_line, counted, rfc3339, some_of, verb
from ckptctl.inspection.inspecting import train_step
from ckptctl.inspection.marks import check_marks_file
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import STATE_KINDS, Level, Preference
from ckptctl.options import PickPolicy, Requirements, StorageOptions
from ckptctl.selection.branches import BranchState, WriteOrder
from ckptctl.selection.candidates import (
    CachingInspector,
    Candidate,
    Inspect,
    candidates_of,
    in_order,
)
from ckptctl.selection.roots import (
    RootListing,
    check_counted_further,
    check_further,
    check_pointers,
    check_reported,
    duplicates,
    list_root,
    not_shared,
    pattern_of,
    pointer_numbers,
    too_large_numbers,
)
from ckptctl.selection.targets import OpenRoot, Roots, open_roots, unavailable
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name


class Answer(StrEnum):
    """The possible answers of `pick`."""

    FOUND = "found"
    FELL_BACK = "fell-back"
    FRESH = "fresh"
    NONE_USABLE = "none-usable"
    UNKNOWN = "unknown"
    UNDECIDED = "undecided"


class NoStepReason(StrEnum):
    """Why no step was chosen, in one word that scripts and runbooks branch on."""

    DAMAGED = "damaged"
    """Of one step: it is damaged or unfinished."""
    ALL_DAMAGED = "all-damaged"
    """Every step is damaged or unfinished, or was rejected beside such steps."""
    TOO_MANY_DAMAGED = "too-many-damaged"
    """More steps are damaged than `--max-fallback` allows; an older one may be sound."""
    STATE_MISSING = "state-missing"
    """A step is sound, and lacks train state that is required."""
    UNVERIFIABLE = "unverifiable"
    """A step is not damaged, and nothing proves it at the requested level."""
    REQUIREMENT = "requirement"
    """A step is sound, and does not meet another requirement, such as a seal or world size."""
    UNCONFIRMED = "unconfirmed"
    """Of one step: it is sound, and nothing confirms it, which `--prefer confirmed` asks for."""
    REJECTED = "rejected"
    """Every step that is not damaged was rejected or superseded."""
    EXCLUDED = "excluded"
    """`--before` and `--skip` exclude every step."""
    TWO_BRANCHES = "two-branches"
    """The run may have gone back to an earlier step, and nothing says which branch it is on (2)."""
    NOT_SHARED = "not-shared"
    """Every step lacks the files of the same ranks: the storage is not shared by the nodes."""
    NOT_INSPECTED = "not-inspected"
    """A step could not be inspected, so no older one is chosen (75)."""
    LOST_STEPS = "lost-steps"
    """A record or pointer names a step that was usable, and none is there."""
    RECORD_DOUBT = "record-doubt"
    """No record proves that no step was ever usable."""
    UNKNOWN_FILES = "unknown-files"
    """Interrupted saves, and files that may be saves."""
    SAVE_RUNNING = "save-running"
    """The first save of the run may still be running (75)."""
    NEW_RUN = "new-run"
    """The root is that of a new run (10)."""
    NO_ROOT = "no-root"
    """The root does not exist (10)."""


_ANSWERS = {
    NoStepReason.NEW_RUN: Answer.FRESH,
    NoStepReason.NO_ROOT: Answer.FRESH,
    NoStepReason.NOT_INSPECTED: Answer.UNKNOWN,
    NoStepReason.SAVE_RUNNING: Answer.UNKNOWN,
    NoStepReason.TWO_BRANCHES: Answer.UNDECIDED,
}


_EXIT_CODES = {
    Answer.FRESH: EXIT_FRESH,
    Answer.UNKNOWN: StorageError.exit_code,
    Answer.UNDECIDED: UsageError.exit_code,
}


class NoStep(msgspec.Struct, frozen=True):
    """Why no step is chosen, and what to run next."""

    reason: NoStepReason
    message: str
    next_command: str | None = None
    code: int | None = None
    """The exit code of an error that is more precise than that of the answer."""
    missing: tuple[str, ...] = ()
    """The roots that do not exist."""
    created: str = ""
    """The message where they are created."""

    @property
    def answer(self) -> Answer:
        """The answer of `pick`, which follows from the reason."""
        return _ANSWERS.get(self.reason, Answer.NONE_USABLE)

    @property
    def exit_code(self) -> int:
        """The exit code of the answer: 2, 10, 11, 75 or 77."""
        return self.code or _EXIT_CODES.get(self.answer, EXIT_NONE_USABLE)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer step that was not chosen: its report, and the reason in one line."""

    report: Report
    """The report of the step."""
    reason: str
    """Why it was not chosen, in one line."""
    word: NoStepReason = NoStepReason.DAMAGED
    """The same as a word."""
    cause: str = ""
    """What is wrong with the step, where the reason also states which option accepts it."""

    @property
    def step(self) -> int | None:
        """The number of the step."""
        return self.report.number

    @property
    def path(self) -> str:
        """The address of the step."""
        return self.report.url

    @property
    def is_damage(self) -> bool:
        """Whether the step is damaged, and nobody has rejected it."""
        return self.report.damaged and not self.report.has_finding("step.rejected")


MAX_INSPECTED_FURTHER = 10
"""How many steps before too many damaged ones are inspected for the newest sound one."""

MAX_UNCONFIRMED = 100
"""How many sound steps are inspected for one that is confirmed."""

MAX_PREDECESSORS = 10
"""How many older steps are checked for the optimizer that a newer one lacks."""


class Search:
    """The search for the step to resume from, from the newest candidate down.

    `stopped` is why it ended before the last candidate: `NOT_INSPECTED`, `TOO_MANY_DAMAGED`,
    `TWO_BRANCHES` (the run may have gone back, by the times in `order`) or `NOT_SHARED`.
    `no_steps` are folders with a number as name that are not steps, `unknown` the copies of
    the step at which the search stopped that could not be inspected. `further` is set after
    too many damaged steps: the search for the newest sound step before them, on which a
    person decides. `n_unconfirmed` sound steps were inspected in vain for a confirmed one, with
    `listed`, which reads no more than listing and metadata.
    """

    def __init__(self, inspect: Inspect, policy: PickPolicy) -> None:
        self.inspect = inspect
        self.listed = inspect
        self.policy = policy
        self.chosen: Report | None = None
        self.chosen_candidate: Candidate | None = None
        self.no_steps: list[Candidate] = []
        self.passed_over: list[PassedOver] = []
        self.unknown: list[Report] = []
        self.stopped: NoStepReason | None = None
        self.further: Search | None = None
        self.order: WriteOrder | None = None
        self.not_shared: Finding | None = None
        self.n_unconfirmed = 0

    @property
    def damaged(self) -> list[int | None]:
        """The numbers of damaged steps that nobody has rejected; copies of one count once."""
        return [*dict.fromkeys(over.step for over in self.passed_over if over.is_damage)]

    def choose(self, candidates: Sequence[Candidate]) -> None:
        """Choose the newest candidate that passes; stop if the answer would not be certain.

        `candidates` come from `in_order`. Inspects as few as possible: one, if the newest is
        complete and lacks nothing; its predecessor too, if it lacks state. Where a confirmed step
        is preferred, the newest one is chosen if none is confirmed.
        """
        if self.policy.prefer is Preference.CONFIRMED and self._choose_confirmed(candidates):
            return
        for copies, older in by_number(candidates):
            if self.try_copies(copies, older):
                return
            if self.unknown:
                self.stopped = NoStepReason.NOT_INSPECTED
                return
            if len(self.damaged) > self.policy.max_fallback:
                self.stopped = NoStepReason.TOO_MANY_DAMAGED
                number = copies[0].named.number
                self.further = self._search_further(
                    [candidate for candidate in candidates if candidate.named.number < number]
                )
                return

    def _choose_confirmed(self, candidates: Sequence[Candidate]) -> bool:
        """Choose the newest confirmed step; false if the newest step is to be chosen instead.

        Those that nothing confirms are read at `listing`, whatever level was requested: none of
        them is chosen, and of up to `MAX_UNCONFIRMED` sound ones every byte might be read.
        """
        for copies, older in by_number(candidates):
            inspect = self.inspect if self._may_be_confirmed(copies) else self.listed
            if self.try_copies(copies, older, inspect=inspect) and self.chosen is not None:
                if self._is_confirmed(self.chosen, copies):
                    self.n_unconfirmed = 0
                    return True
                over = PassedOver(self.chosen, "nothing confirms it", NoStepReason.UNCONFIRMED)
                self.passed_over.append(over)
                self.n_unconfirmed += 1
            self.chosen = self.chosen_candidate = None
            if self.unknown:
                self.stopped = NoStepReason.NOT_INSPECTED
                return True
            is_enough = self.n_unconfirmed == MAX_UNCONFIRMED
            if is_enough or len(self.damaged) > self.policy.max_fallback:
                break
        self.passed_over, self.no_steps = [], []
        return False

    def _may_be_confirmed(self, copies: Sequence[Candidate]) -> bool:
        """Whether a copy of a step is confirmed, and sound as far as its listing shows."""
        reports = (self.listed(copy, Level.LISTING) for copy in copies)
        return any(
            report.has_finding("step.confirmed") and refusal(report, self.policy) is None
            for report in reports
        )

    def _is_confirmed(self, chosen: Report, copies: Sequence[Candidate]) -> bool:
        """Whether a step is confirmed; any copy of its save counts."""
        others = (self.listed(copy, Level.LISTING) for copy in copies if len(copies) > 1)
        return chosen.has_finding("step.confirmed") or any(
            chosen.is_same_save(other) and other.has_finding("step.confirmed") for other in others
        )

    def try_copies(
        self,
        copies: Sequence[Candidate],
        older: Sequence[Candidate],
        beside: Sequence[Candidate] = (),
        *,
        inspect: Inspect | None = None,
    ) -> bool:
        """Choose the first copy of a step that may be resumed from; whether there is one.

        `older` are the steps that it is compared with, `beside` are copies that cannot be chosen
        but whose marks count. `inspect` replaces the inspection of the search. `pick` stops at the
        first step that is chosen; retention continues until it has counted enough.
        """
        inspect = inspect or self.inspect
        # After a damaged step the next one is inspected in full.
        is_past_damage = any(one.report.damaged for one in self.passed_over)
        level = Level.STRUCTURE if is_past_damage else Level.LISTING
        for candidate in copies:
            report = inspect(candidate, level)
            if candidate.is_no_step(report):
                self.no_steps.append(candidate)
                continue
            others = [c for c in (*copies, *beside) if c.root_index != candidate.root_index]
            newer = [over.report for over in self.passed_over]
            over = why_not(report, older, inspect, self.policy, others, newer)
            if over is None:
                self.chosen, self.chosen_candidate = report, candidate
                return True
            self.passed_over.append(over)
            if report.verdict is Verdict.UNKNOWN and not candidate.optional:
                self.unknown.append(report)
        return False

    def _search_further(self, candidates: Sequence[Candidate]) -> Search:
        """Find the newest sound step before too many damaged ones, without choosing it."""

        def inspect_in_full(candidate: Candidate, level: Level) -> Report:
            return self.inspect(candidate, max(level, Level.STRUCTURE, key=lambda each: each.place))

        further = Search(inspect_in_full, self.policy)
        for copies, older in islice(by_number(candidates), MAX_INSPECTED_FURTHER):
            if further.try_copies(copies, older):
                break
        return further

    def suspect_storage(self) -> Iterator[Finding]:
        """Yield `root.suspect` if two or more recent steps are damaged.

        Where they all lack the files of the same ranks, it is `root.not-shared` instead.
        """
        damaged = self.damaged
        if self.not_shared is not None:
            yield self.not_shared
            return
        if len(damaged) < 2:
            return
        numbers = ", ".join(str(number) for number in damaged)
        yield explained(
            "root.suspect",
            "",
            f"{len(damaged)} recent steps are damaged ({numbers}): suspect the storage, and check "
            "the file system before relying on newer saves",
            expected="at most one damaged step",
            found=f"{len(damaged)} damaged steps",
        )


def by_number(
    candidates: Sequence[Candidate],
) -> Iterator[tuple[list[Candidate], Sequence[Candidate]]]:
    """The copies of each step in turn, with the older candidates that it is compared with."""
    n_seen = 0
    for _, group in groupby(candidates, key=lambda c: c.named.number):
        copies = list(group)
        n_seen += len(copies)
        yield copies, candidates[n_seen : n_seen + MAX_PREDECESSORS]


def further_by_another_count(
    chosen: Candidate, candidates: Sequence[Candidate], inspect: Inspect, policy: PickPolicy
) -> Candidate | None:
    """A usable save whose name counts something else than that of `chosen`, and that is further.

    `epoch_3` and `step_200` cannot be compared by their numbers. The training steps of their
    train states decide, or else the times of their writes. A save without the optimizer is an
    export. Cost: an inspection of the newest usable save of each count; none where all count
    the same.
    """
    report = inspect(chosen, Level.LISTING)
    others: dict[str, list[Candidate]] = {}
    for one in candidates:
        if not (one.named.bare or one.named.unfinished):
            others.setdefault(counted_by(one.named.layout), []).append(one)
    others.pop(counted_by(chosen.named.layout), None)
    for group in others.values():
        for other in group[:MAX_PREDECESSORS]:
            found = inspect(other, Level.LISTING)
            is_export = report.state.optimizer.found and not found.state.optimizer.found
            if found.verdict is Verdict.UNKNOWN and not other.optional:
                return other
            if refusal(found, policy) is None and not is_export:
                if _is_further(found, report):
                    return other
                break
    return None


def _is_further(report: Report, chosen: Report) -> bool:
    """Whether a save is of a later training step, or may be as nothing shows the contrary."""
    steps = [train_step(one) for one in (report, chosen)]
    times = [report.written_s, chosen.written_s]
    for now, then in (steps, times):
        if now is not None and then is not None:
            return now > then
    return True


def why_not(
    report: Report,
    older: Sequence[Candidate],
    inspect: Inspect,
    policy: PickPolicy,
    others: Sequence[Candidate] = (),
    newer: Sequence[Report] = (),
) -> PassedOver | None:
    """Why a step is not chosen, for its own content or because of other steps; None if it is.

    `others` are its copies in other roots, `older` the steps that it is compared with, `newer`
    those that were passed over before.
    """
    over = refusal(report, policy) or _marked_elsewhere(report, others, inspect)
    if over is not None or policy.allow_missing_state:
        return over
    return _lacking(report, older, inspect) or _dropped(report) or _behind(report, newer)


def refusal(report: Report, policy: PickPolicy) -> PassedOver | None:
    """Why a step cannot be chosen because of its own content; None if it can."""
    unsealed = any(one.code in ("seal.required", "seal.not-compared") for one in report.findings)
    # What was required is not given up by an option that accepts less.
    if report.verdict is Verdict.UNVERIFIABLE and policy.accept_unverifiable and not unsealed:
        return None
    if report.usable:
        return None
    is_lacking = report.exit_code == EXIT_STATE_MISSING
    word = _WORDS.get(report.verdict, NoStepReason.DAMAGED)
    return PassedOver(
        report, _reason_of(report), NoStepReason.STATE_MISSING if is_lacking else word
    )


def _reason_of(report: Report) -> str:
    """Why a step is not usable, in one line."""
    faults = report.with_severity(Severity.FAULT)
    if faults:
        first = faults[0]
        place = f"{first.where}: " if first.where and first.where not in first.message else ""
        return f"{report.verdict.value}: {place}{first.message}{and_more(faults)}"
    unmet = unmet_in(report.findings)
    return report.verdict.value if unmet is None else unmet.message


_WORDS = {
    Verdict.UNKNOWN: NoStepReason.NOT_INSPECTED,
    Verdict.REJECTED: NoStepReason.REJECTED,
    Verdict.SUPERSEDED: NoStepReason.REJECTED,
    Verdict.UNVERIFIABLE: NoStepReason.UNVERIFIABLE,
    Verdict.COMPLETE: NoStepReason.REQUIREMENT,
}


def _marked_elsewhere(
    report: Report, others: Sequence[Candidate], inspect: Inspect
) -> PassedOver | None:
    """The refusal of a step for a mark on the copy of the same save in another root."""
    for other in (inspect(candidate, Level.LISTING) for candidate in others):
        if report.is_same_save(other) and other.is_excluded:
            reason = f"{other.verdict.value} in {other.url}, which holds the same save"
            return PassedOver(report, reason, NoStepReason.REJECTED)
    return None


def _behind(report: Report, newer: Sequence[Report]) -> PassedOver | None:
    """The refusal of a step without an optimizer as a substitute for one that was passed over.

    Older steps show what a step lacks; of a run whose older steps are weights alone, only the
    one that cannot be used does.
    """
    if report.state.optimizer.found:
        return None
    for other in newer:
        kinds = (kind_of_file(other.layout, finding.where) for finding in other.findings)
        if other.state.optimizer.found or any(k and "optimizer" in k.names for k in kinds):
            has = f"which step {other.number} has ({other.verdict.value})"
            return _would_reset(report, f"lacks the optimizer, {has}")
    return None


def _would_reset(report: Report, cause: str, if_mapped: str = "") -> PassedOver:
    """The refusal of a step that lacks state which another has."""
    accepts = f"--allow-missing-state accepts that{if_mapped}"
    reason = f"{cause}: a resume from here would reset it ({accepts})"
    return PassedOver(report, reason, NoStepReason.STATE_MISSING, cause)


def _lacking(report: Report, older: Sequence[Candidate], inspect: Inspect) -> PassedOver | None:
    """The refusal of a step that lacks train state which an older one has."""
    missing = absent_kinds(report)
    if not (missing or _may_lack_more(report)):
        return None
    # If it is uncertain that the step lacks anything, inspect one older step, not ten.
    older = older if missing else older[:1]
    # At the same level, because content that was read cannot be compared with names alone.
    for earlier in _predecessors(older, inspect, report.level, ask_all="optimizer" in missing):
        if earlier.verdict is Verdict.UNKNOWN and not earlier.only_archived:
            if not missing:
                return None
            what = ", ".join(missing)
            reason = f"lacks {what}, and step {earlier.number}, which may hold it, did not answer"
            return PassedOver(report, reason, NoStepReason.STATE_MISSING)
        lost = [*_lost(report, earlier, missing)]
        if lost:
            cause = f"lacks {', '.join(lost)}, which step {earlier.number} holds"
            return _would_reset(report, cause, _if_mapped(report, lost))
    return None


def _dropped(report: Report) -> PassedOver | None:
    """The refusal of a step without a kind of file that the steps before it hold."""
    lost = next((one for one in report.findings if one.code == "file.dropped"), None)
    if lost is None:
        return None
    return PassedOver(report, lost.message, NoStepReason.STATE_MISSING)


def _if_mapped(report: Report, lost: Collection[str]) -> str:
    """What to state where an entry that is not recognized is what a step seems to lack."""
    for entry in report.state.unrecognized:
        kind = next((kind for kind in entry.may_be if kind in lost), None)
        if kind is not None:
            return f"; if {entry.where} is the {kind}, --state {kind}={entry.key} states it"
    return ""


KINDS_THAT_COUNT = ("model", "optimizer", "scheduler", "rng", "dataloader", "step")
"""The train state that a resume restores. A count of tokens is known by few trainers."""


def absent_kinds(report: Report) -> tuple[str, ...]:
    """The kinds that were not found in the step, which it needs if an older step has them."""
    return tuple(kind for kind in KINDS_THAT_COUNT if kind not in report.state.held)


def demanded(chosen: Report, require: Collection[str], policy: PickPolicy) -> tuple[str, ...]:
    """The kinds of train state that were required of a chosen step.

    `require`, and those that older steps have: a step may lack a kind only if they lack it
    too.
    """
    absent = KINDS_THAT_COUNT if policy.allow_missing_state else absent_kinds(chosen)
    by_steps = set(KINDS_THAT_COUNT).difference(absent)
    return tuple(kind for kind in STATE_KINDS if kind in by_steps or kind in require)


def _may_lack_more(report: Report) -> bool:
    """Whether a step has parts, or state of some ranks only, so that its predecessor shows more.

    A save that is killed between two parts, or between the files of two ranks, leaves
    intact files.
    """
    n_ranks = [report.state.part(kind).n_ranks for kind in _KINDS_PER_RANK]
    n_writers = report.world_size.size if report.world_size else 0
    return any(report.parts) or any(n is not None and n < n_writers for n in n_ranks)


_KINDS_PER_RANK = ("rng", "dataloader")


def _lost(report: Report, earlier: Report, missing: Sequence[str]) -> Iterator[str]:
    # An entry that only the older step shows the kind of is not lost.
    unrecognized = {entry.key for entry in report.state.unrecognized}
    for kind in missing:
        where = {place.rpartition(": ")[2] for place in earlier.state.part(kind).where}
        if where and unrecognized.isdisjoint(where):
            yield kind
    for part in earlier.parts:
        if part not in report.parts:
            yield f"the part {part}" if part else "the tensors at the top of its folder"
    if report.world_size != earlier.world_size:
        return
    # What is not recognized may be the optimizer, of which this step then holds nothing.
    keys, keys_before = report.state.tensor_keys, earlier.state.tensor_keys
    is_smaller = report.n_bytes < earlier.n_bytes and not report.state.optimizer.found
    if is_smaller and keys < keys_before:
        lost = sorted(keys_before - keys)
        yield f"{some_of(lost)} ({verb(len(lost), 'an entry', 'entries')} with tensors)"
    # Safetensors have no metadata that would miss the shard of a rank.
    there = {part: set(ranks) for part, ranks in report.ranks}
    for part, ranks in earlier.ranks:
        gone = set(ranks) - there.get(part, set(ranks))
        if gone:
            yield f"the shards of {len(gone)} of {len(ranks)} ranks in {part or 'the step'}"
    for kind in _KINDS_PER_RANK:
        now, before = report.state.part(kind).n_ranks, earlier.state.part(kind).n_ranks
        if now is not None and before is not None and now < before:
            yield f"the {kind} of {before - now} of {before} ranks"


def _predecessors(
    older: Sequence[Candidate], inspect: Inspect, level: Level, *, ask_all: bool
) -> Iterator[Report]:
    # A damaged predecessor proves nothing; the one before it is used instead.
    says_nothing = (Verdict.UNSAFE, Verdict.CORRUPT, Verdict.INCOMPLETE, Verdict.IN_PROGRESS)
    for candidate in older:
        report = inspect(candidate, level)
        absent = candidate.optional and report.verdict is Verdict.UNKNOWN
        if absent or report.verdict in says_nothing:
            continue
        yield report
        if not ask_all:
            return


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
        self.listed = inspector.listed
        self.roots = roots
        self.opened_roots = opened_roots
        self.candidates = in_order(candidates_of(opened_roots), policy)
        self.findings: list[Finding] = []
        self.new_run: NoStep | None = None

    @property
    def opened(self) -> OpenStep | None:
        """The chosen step, open."""
        chosen = self.chosen_candidate
        return None if chosen is None else self.inspect.inspected[chosen].opened

    @property
    def n_steps(self) -> int:
        """The number of all steps, including those that the policy excludes."""
        return len(candidates_of(self.opened_roots)) - len(self.no_steps)

    def run(self) -> None:
        """Choose a step, and compare it with what the roots show besides; see `search`."""
        self.choose(self.candidates)
        self._check_are_steps()
        if self.chosen_candidate is not None:
            self._check_counts(self.chosen_candidate)
            self._decide_branch(self.chosen_candidate)
        over = {id(one.report) for one in self.passed_over}
        inspector = self.inspect
        every = (*inspector.at_listing.values(), *inspector.inspected.values())
        known = [inspection for inspection in every if id(inspection.report) in over]
        self.not_shared = not_shared(known)
        if self.not_shared is not None and self.chosen is None and not self.unknown:
            self.stopped = NoStepReason.NOT_SHARED
        self.findings = self._root_findings()
        decided = (NoStepReason.TWO_BRANCHES, NoStepReason.NOT_SHARED)
        if self.chosen is None and self.stopped not in decided:
            self.new_run = self._new_run()

    def _check_are_steps(self) -> None:
        """Raise `UsageError` if all that has the name of a step is the root of a run."""
        over = [one.report for one in self.passed_over]
        nested = [report for report in over if report.has_finding("step.nested")]
        if self.chosen is None and nested and nested == over:
            roots = ", ".join(root.store.url for root in self.opened_roots)
            inside = some_of([base_name(report.url) for report in nested])
            do = verb(len(nested), "does", "do")
            raise UsageError(
                f"{roots} holds no steps itself, but {inside} in it {do}",
                next_command=command_line("scan", nested[0].url),
            )

    def _check_counts(self, chosen: Candidate) -> None:
        """Raise `UsageError` if a save whose name has another count is further than the chosen."""
        other = further_by_another_count(chosen, self.candidates, self.inspect, self.policy)
        if other is None:
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
        step = train_step(report)
        if step is not None:
            return f"is of training step {step:,}"
        if report.written_s is not None:
            return f"was written at {rfc3339(report.written_s, 'seconds')}"
        return "does not show how far it is"

    def _decide_branch(self, chosen: Candidate) -> None:
        """Claim that the chosen step is on the branch of the run, or stop where it is not.

        The step with the highest number and the one that was written last may be of two branches;
        a person, or a record, decides which of them the run is on.
        """
        self.order = order = self.inspect.claim_branch(chosen, self.candidates)
        self.chosen = report = self.inspect.inspected[chosen].report
        if order.state is BranchState.WENT_BACK:
            self.passed_over.append(PassedOver(report, order.why, NoStepReason.TWO_BRANCHES))
            self.stopped = NoStepReason.TWO_BRANCHES
            self.chosen = self.chosen_candidate = None

    def _root_findings(self) -> list[Finding]:
        """Findings about the roots themselves.

        Cost: a read of each pointer, an inspection of each older step that one names, and what
        `check_further` takes.
        """
        chosen = self.chosen_candidate
        number = chosen.named.number if chosen else None
        findings = [*unavailable(self.opened_roots), *self.suspect_storage(), *self._unconfirmed()]
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
                trained = train_step(known.report)
                findings += check_counted_further(root.store, root.listing, known.opened, trained)
        return [*findings, *self._two_branches()]

    def _unconfirmed(self) -> Iterator[Finding]:
        """Yield `root.unconfirmed` where a confirmed step was asked for, and none was found."""
        if self.n_unconfirmed and self.chosen is not None:
            n_steps = counted(self.n_unconfirmed, "sound step")
            yield explained(
                "root.unconfirmed",
                "",
                f"none of {n_steps} is confirmed, so the newest, {self.chosen.number}, was chosen: "
                "it may hold what the failure left in it",
                expected="a confirmed step",
                found=f"{n_steps} that nothing confirms",
            )

    def _two_branches(self) -> Iterator[Finding]:
        """Yield `root.two-branches` where lower steps were written after the chosen one."""
        order = self.order
        if order is None or order.own is None:
            return
        if order.state not in (BranchState.WENT_BACK, BranchState.DOUBTFUL):
            return
        own, last = order.own, order.last
        message = (
            f"step {last.number} was written after step {own.number}: they are of two branches of "
            "the run"
        )
        if order.state is BranchState.DOUBTFUL:
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

    def _new_run(self) -> NoStep | None:
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
        return without_steps(self.opened_roots, over, pointers, self.policy.ignore)


def search(
    stack: ExitStack,
    roots: Roots,
    policy: PickPolicy,
    requirements: Requirements,
    storage: StorageOptions,
    list_steps: Callable[[Store, re.Pattern[str] | None], RootListing] = list_root,
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
    found.run()
    return found
