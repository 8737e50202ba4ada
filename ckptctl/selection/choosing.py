"""Choose the newest candidate that may be resumed from.

This module contains only the policy: candidates come newest first, and the caller provides
the function that inspects one. It does not access storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from ckptctl.findings import (
    EXIT_STATE_MISSING,
    Finding,
    Report,
    Severity,
    Verdict,
)
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layouts import StepName, counted_by, train_step_of
from ckptctl.formatting import and_more, some_of, verb
from ckptctl.model import STATE_KINDS, Level
from ckptctl.options import PickPolicy
from ckptctl.selection.not_shared import NotShared
from ckptctl.selection.results import NoStepReason, PassedOver
from ckptctl.selection.write_order import Order, WriteOrder

MAX_INSPECTED_FURTHER = 10
"""How many steps before too many damaged ones are inspected for the newest sound one."""

MAX_PREDECESSORS = 10
"""How many older steps are checked for the optimizer that a newer one lacks."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One step under the root at `root_index` of the argument list.

    `optional`: its root may be absent, so a step in it that does not answer does not stop
    the search.
    """

    root_index: int
    named: StepName
    optional: bool = False


Inspect = Callable[[Candidate, Level], Report]
"""Inspect a candidate, at the given level or deeper."""


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


class Search:
    """The search for the step to resume from, from the newest candidate down.

    `stopped` is why it ended before the last candidate: `NOT_INSPECTED`, `TOO_MANY_DAMAGED`,
    `TWO_BRANCHES` (the run may have gone back, by the times in `order`) or `NOT_SHARED`.
    `no_steps` are folders with a number as name that are not steps, `unknown` the copies of
    the step at which the search stopped that could not be inspected. `further` is set after
    too many damaged steps: the search for the newest sound step before them, on which a
    person decides.
    """

    def __init__(self, inspect: Inspect, policy: PickPolicy) -> None:
        self.inspect = inspect
        self.policy = policy
        self.chosen: Report | None = None
        self.no_steps: list[Candidate] = []
        self.passed_over: list[PassedOver] = []
        self.unknown: list[Report] = []
        self.stopped: NoStepReason | None = None
        self.further: Search | None = None
        self.order: WriteOrder | None = None
        self.not_shared: NotShared | None = None

    @property
    def damaged(self) -> list[int | None]:
        """The numbers of damaged steps that nobody has rejected; copies of one count once."""
        reports = (one.report for one in self.passed_over)
        return [
            *dict.fromkeys(
                report.number
                for report in reports
                if report.damaged and not report.has_finding("step.rejected")
            )
        ]

    def choose(self, candidates: Sequence[Candidate]) -> None:
        """Choose the newest candidate that passes; stop if the answer would not be certain.

        `candidates` come from `in_order`. Inspects as few as possible: one, if the newest is
        complete and lacks nothing; its predecessor too, if it lacks state.
        """
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

    def try_copies(
        self,
        copies: Sequence[Candidate],
        older: Sequence[Candidate],
        beside: Sequence[Candidate] = (),
    ) -> bool:
        """Choose the first copy of a step that may be resumed from; whether there is one.

        `older` are the steps that it is compared with, `beside` are copies that cannot be chosen
        but whose marks count. `pick` stops at the first step that is chosen; retention continues
        until it has counted enough.
        """
        # After a damaged step the next one is inspected in full.
        is_past_damage = any(one.report.damaged for one in self.passed_over)
        level = Level.STRUCTURE if is_past_damage else Level.LISTING
        for candidate in copies:
            report = self.inspect(candidate, level)
            if candidate.named.bare and not report.parts and report.verdict is not Verdict.UNKNOWN:
                self.no_steps.append(candidate)
                continue
            others = [c for c in (*copies, *beside) if c.root_index != candidate.root_index]
            newer = [over.report for over in self.passed_over]
            over = why_not(report, older, self.inspect, self.policy, others, newer)
            if over is None:
                self.chosen = report
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

    def decide_branch(self, order: WriteOrder) -> None:
        """Stop the search where the run went back from the chosen step.

        The step with the highest number and the one that was written last are of two branches,
        and a person, or a record, decides which of them the run is on.
        """
        self.order = order
        if self.chosen is None or order.order is not Order.WENT_BACK:
            return
        self.passed_over.append(PassedOver(self.chosen, order.why, NoStepReason.TWO_BRANCHES))
        self.chosen, self.stopped = None, NoStepReason.TWO_BRANCHES

    def suspect_storage(self) -> Iterator[Finding]:
        """Yield `root.suspect` if two or more recent steps are damaged.

        Where they all lack the files of the same ranks, it is `root.not-shared` instead.
        """
        damaged = self.damaged
        if self.not_shared is not None:
            yield self.not_shared.finding
            return
        if len(damaged) < 2:
            return
        numbers = ", ".join(str(number) for number in damaged)
        yield Finding(
            "root.suspect",
            "",
            f"{len(damaged)} recent steps are damaged ({numbers}): suspect the storage, and check "
            "the file system before relying on newer saves",
            expected="at most one damaged step",
            found=f"{len(damaged)} damaged steps",
            next_command="ckptctl explain root.suspect",
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
    steps = [train_step_of(r.layout, r.number, r.state.step.value) for r in (report, chosen)]
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
    return (
        refusal(report, policy)
        or _marked_elsewhere(report, others, inspect)
        or _lacking(report, older, inspect, policy)
        or _dropped(report, policy)
        or _behind(report, newer, policy)
    )


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
    conditions = {23: "state.missing state.unrecognized", 24: "world-size.fixed state.lost"}
    wanted = conditions.get(report.exit_code, "").split()
    messages = [
        finding.message
        for finding in report.findings
        if finding.code in wanted and (report.exit_code != 23 or "required" in finding.message)
    ]
    return messages[0] if messages else report.verdict.value


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
        same_save = bool(report.digests) and other.digests == report.digests
        if same_save and other.verdict in (Verdict.REJECTED, Verdict.SUPERSEDED):
            reason = f"{other.verdict.value} in {other.url}, which holds the same save"
            return PassedOver(report, reason, NoStepReason.REJECTED)
    return None


def _behind(report: Report, newer: Sequence[Report], policy: PickPolicy) -> PassedOver | None:
    """The refusal of a step without an optimizer as a substitute for one that was passed over.

    Older steps show what a step lacks; of a run whose older steps are weights alone, only the
    one that cannot be used does.
    """
    if policy.allow_missing_state or report.state.optimizer.found:
        return None
    for other in newer:
        kinds = (kind_of_file(other.layout, finding.where) for finding in other.findings)
        if other.state.optimizer.found or any(k and "optimizer" in k.names for k in kinds):
            return PassedOver(
                report,
                f"lacks the optimizer, which step {other.number} has ({other.verdict.value}): a "
                "resume from here would reset it (--allow-missing-state accepts that)",
                NoStepReason.STATE_MISSING,
            )
    return None


def _lacking(
    report: Report, older: Sequence[Candidate], inspect: Inspect, policy: PickPolicy
) -> PassedOver | None:
    """The refusal of a step that lacks train state which an older one has."""
    missing = absent_kinds(report)
    if policy.allow_missing_state or not (missing or _may_lack_more(report)):
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
            return PassedOver(
                report,
                f"lacks {', '.join(lost)}, which step {earlier.number} holds: a resume from here "
                f"would reset it (--allow-missing-state accepts that{_if_mapped(report, lost)})",
                NoStepReason.STATE_MISSING,
            )
    return None


def _dropped(report: Report, policy: PickPolicy) -> PassedOver | None:
    """The refusal of a step without a kind of file that the steps before it hold."""
    lost = next((one for one in report.findings if one.code == "file.dropped"), None)
    if lost is None or policy.allow_missing_state:
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
    yield from (_part(part) for part in earlier.parts if part not in report.parts)
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


def _part(path: str) -> str:
    # The part without a path is the top of the step's folder.
    return f"the part {path}" if path else "the tensors at the top of its folder"


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
