"""Choose the step to resume from, and scan the steps of a root as `pick` sees them.

Without a step there are three kinds of answers, with three exit codes: there is none (10), none is
usable (11), the storage could not be inspected (75, 77).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Unpack

import msgspec

from ckptctl.errors import NothingToResume, OptionError
from ckptctl.findings import EXIT_STATE_MISSING, Finding, Report, Severity, Verdict
from ckptctl.formats.frameworks.layouts import counts_training_steps
from ckptctl.formatting import command_line, counted, safe, some_of, verb
from ckptctl.inspection.inspecting import why_not_deeper
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import ExitCode, Level, Message, NextCommand
from ckptctl.options import PickKeywords, PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.selection.branches import WriteOrder
from ckptctl.selection.candidates import Candidate, candidates_of
from ckptctl.selection.choosing import (
    KINDS_THAT_COUNT,
    Answer,
    NoStep,
    NoStepReason,
    PassedOver,
    RunSearch,
    Search,
    demanded,
    search,
)
from ckptctl.selection.empty_roots import check_unnumbered
from ckptctl.selection.roots import list_all
from ckptctl.selection.targets import Roots, roots_in
from ckptctl.storage.opening import SharedStores, join_url, parent_url


@dataclass(frozen=True, slots=True)
class Pick:
    """Which step to resume from, or why none."""

    answer: Answer
    """The kind of answer."""
    roots: tuple[str, ...]
    """The roots, in order of preference."""
    chosen: Report | None
    """The report of the chosen step; null where none was chosen."""
    passed_over: tuple[PassedOver, ...]
    """Newer steps that were not chosen, in the order in which they were inspected."""
    findings: tuple[Finding, ...]
    """Findings about the roots, not about a step."""
    level: Level | None
    """The level at which the chosen step was inspected."""
    level_reason: str | None
    """Why a deeper level was not inspected, and what it would cost; null where the level was
    given."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand
    required: tuple[str, ...] = ()
    """The kinds of train state that the chosen step had to hold: demanded by the caller, or held
    by the steps before it."""
    absent: tuple[str, ...] = ()
    """The kinds of train state that the chosen step does not restore."""
    reason: NoStepReason | None = None
    """Why no step was chosen, in one word; null where one was."""
    newest_sound: str | None = None
    """The newest sound step behind more damaged ones than may be passed over: a person decides
    whether to resume from it."""

    @property
    def path(self) -> str:
        """The address of the chosen step; raises `NothingToResume` where there is none."""
        if self.chosen is None:
            raise self.nothing
        return self.chosen.url

    @property
    def step(self) -> int:
        """The number of the chosen step; raises `NothingToResume` where there is none."""
        if self.chosen is None or self.chosen.number is None:
            raise self.nothing
        return self.chosen.number

    @property
    def nothing(self) -> NothingToResume:
        """The error that no step was chosen."""
        return NothingToResume(
            self.message,
            exit_code=self.exit_code,
            next_command=self.next_command,
            reason=self.reason or "",
        )

    @property
    def about_state(self) -> str:
        """The required train state, what is not restored, and the options that change this."""
        words = f"requires {', '.join(self.required) or 'nothing'}"
        if self.absent:
            words += f"; does not restore {', '.join(self.absent)}"
        if self.chosen and self.chosen.state.model.of_adapter:
            words += "; no base model of the adapter is recognized in the step"
        not_recognized = self.chosen.state.unrecognized if self.chosen else ()
        if not_recognized:
            keys = some_of([safe(entry.where) for entry in not_recognized])
            words += f"; not recognized: {keys} (--state KIND=KEY maps it)"
        return f"{words} (--require KIND,... demands more, --allow-missing-state less)"


@dataclass(frozen=True, slots=True)
class Scan:
    """The steps under a root, or under several, newest first, and the answer of `pick`."""

    root: str
    """The root as given; of several, the first that is not optional."""
    exists: bool
    """The root exists."""
    reports: tuple[Report, ...]
    """A report for each inspected step, newest first."""
    pick: Pick
    """The answer of `pick` under the same options."""
    findings: tuple[Finding, ...]
    """Findings about the root, not about a step."""
    n_steps: int
    """Steps under the root, including those that were not inspected."""
    next_command: NextCommand
    refused: tuple[tuple[str, str], ...] = ()
    """The address of each step that `pick` passed over, with the reason."""
    n_older: int = 0
    """Older steps that `last` left out."""
    more_before: int | None = None
    """The `--before` that shows the next older steps."""

    @property
    def roots(self) -> tuple[str, ...]:
        """All roots, in order of preference."""
        return self.pick.roots

    @property
    def chosen(self) -> str | None:
        """The address of the step that `pick` would choose; null where it would choose none."""
        return None if self.pick.chosen is None else self.pick.chosen.url

    @property
    def message(self) -> str:
        """The answer of `pick` in one line."""
        return self.pick.message

    @property
    def reason(self) -> NoStepReason | None:
        """Why `pick` would choose no step, in one word; null where it would choose one."""
        return self.pick.reason

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of `pick`."""
        return self.pick.exit_code


def pick(
    *roots: str,
    optional_roots: Collection[str] = (),
    allow_fresh: bool = False,
    create: bool = False,
    policy: PickPolicy = PickPolicy(),
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[PickKeywords],
) -> Pick:
    """Choose the newest step that may be resumed from, under one root or several.

    With several roots the newest usable step of all is chosen, from the earlier
    root if two contain it. `optional_roots` may be absent or not answer, which is a
    `root.unavailable` in the findings; each of the others must answer. With `allow_fresh`,
    a root of a new run has exit code 0; one that does not exist only with `create`, which
    creates each mandatory root and its sentinel, and records there the first chosen step.

    `policy` states which step is chosen, `requirements` what it must have. Without required
    kinds of train state, a step is skipped only if it lacks a kind that an older one has.
    Each field of the three options objects is also a keyword of this function.

    The answer is always a `Pick`, which includes storage errors of single steps. Raises
    `StorageError` if a root cannot be listed, `UsageError` for arguments.

    Cost: one listing of each root, one listing and one read for each inspected step: on a
    healthy run one step, and its predecessor if it lacks some state.
    """
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
    check_create(allow_fresh=allow_fresh, create=create)
    named = roots_in(roots, optional_roots)
    with ExitStack() as stack:
        done = search(stack, named, policy, requirements, storage)
        return answer_of(done, requirements, allow_fresh=allow_fresh, create=create)


def check_create(*, allow_fresh: bool, create: bool) -> None:
    """Raise `UsageError` where roots are to be created for no fresh run."""
    if create and not allow_fresh:
        raise OptionError("--create", "requires --allow-fresh", instead="--allow-fresh")


def pick_step(
    roots: Roots,
    policy: PickPolicy,
    requirements: Requirements,
    storage: SharedStores,
    seal_bytes: SealBytes | None = None,
) -> tuple[Pick, OpenStep | None]:
    """The answer of `pick`, and the chosen step, open.

    Its store is one of the shared ones, and stays open.
    """
    with ExitStack() as stack:
        done = search(stack, roots, policy, requirements, storage, seal_bytes=seal_bytes)
        return answer_of(done, requirements), done.opened


def requested(roots: Roots, report: Report | None) -> Pick:
    """The answer where a person named the step, or None for a run from step 0."""
    message = "a run from step 0" if report is None else f"resume from step {step_in_words(report)}"
    answer = Answer.FRESH if report is None else Answer.FOUND
    level = None if report is None else report.level
    return Pick(answer, roots.urls, report, (), (), level, None, message, 0, None)


def answer_of(
    done: RunSearch,
    requirements: Requirements,
    command: str = "pick",
    *,
    allow_fresh: bool = False,
    create: bool = False,
) -> Pick:
    """The answer of a search, for the command that the caller would run again.

    With `create`, the mandatory roots of a fresh run and their sentinels are created, or the
    chosen step is recorded.
    """
    if done.chosen is not None and done.chosen_candidate is not None:
        found = _found(done, done.chosen, done.chosen_candidate, requirements.require)
    elif done.new_run is not None:
        found = _new_run(done, done.new_run, command, allow_fresh=allow_fresh, create=create)
    else:
        why = why_none(done)
        found = _without(done, why, why.exit_code)
    if create and (found.answer is Answer.FRESH or found.chosen is not None):
        from ckptctl.selection.history import begin_run

        stores = [root.store for root in done.opened_roots if not root.optional]
        begin_run(stores, None if found.chosen is None else found.step)
    return found


def step_in_words(report: Report) -> str:
    """The number of a step, with its training step where the number counts something else."""
    trained = report.state.step.value
    if report.number is None or trained is None or counts_training_steps(report.layout):
        return str(report.number)
    return f"{report.number} (training step {trained:,})"


def _found(done: RunSearch, chosen: Report, candidate: Candidate, require: Collection[str]) -> Pick:
    passed_over = [over.report.number for over in done.passed_over]
    newer = [number for number in passed_over if number != chosen.number]
    past = f", falling back past {_numbers(newer)}" if newer else ""
    inspected = done.inspect.inspected[candidate]
    return Pick(
        answer=Answer.FELL_BACK if newer else Answer.FOUND,
        roots=done.roots.urls,
        chosen=chosen,
        passed_over=tuple(done.passed_over),
        findings=tuple(done.findings),
        level=chosen.level,
        level_reason=why_not_deeper(inspected) if done.inspect.level is None else None,
        message=f"resume from step {step_in_words(chosen)}{past}",
        exit_code=0,
        next_command=None,
        required=demanded(chosen, require, done.policy),
        absent=tuple(kind for kind in chosen.state.absent if kind in KINDS_THAT_COUNT),
    )


def _without(done: RunSearch, why: NoStep, exit_code: int) -> Pick:
    sound = done.further.chosen if done.further else None
    return Pick(
        answer=why.answer,
        roots=done.roots.urls,
        chosen=None,
        passed_over=tuple(done.passed_over),
        findings=tuple(done.findings),
        level=None,
        level_reason=None,
        message=why.message,
        exit_code=exit_code,
        next_command=why.next_command,
        reason=why.reason,
        newest_sound=sound.url if sound else None,
    )


_NEW_RUN = "for a new run, `pick` and `preflight` take --allow-fresh --create"


def _new_run(
    done: RunSearch, why: NoStep, command: str, *, allow_fresh: bool, create: bool
) -> Pick:
    message, exit_code = why.message, why.exit_code
    next_command: str | None = _after_new_run(done, why, command)
    if why.answer is Answer.FRESH and allow_fresh and (create or not why.missing):
        message, exit_code, next_command = why.created or message, 0, None
    elif why.missing:
        fresh = "a new run also needs --create"
        message += f"; {fresh if allow_fresh else _NEW_RUN}"
    why = msgspec.structs.replace(why, message=message, next_command=next_command)
    return _without(done, why, exit_code)


def _after_new_run(done: RunSearch, why: NoStep, command: str) -> str:
    """What to run next where there is no usable step; `command` is the caller's."""
    if why.answer is Answer.UNKNOWN:
        return command_line(command, *done.roots.words)
    if why.missing:  # more often a wrong path than a new run
        above = parent_url(why.missing[0])
        if above != why.missing[0]:  # an empty bucket has none
            return command_line("scan", above)
    if why.answer is Answer.FRESH:
        chooses = "pick" if command == "scan" else command
        return command_line(chooses, *done.roots.words, "--allow-fresh")
    if why.next_command is not None:
        return why.next_command
    over = done.passed_over
    if over and command == "scan":
        return command_line("verify", over[0].report.url)
    # No step is damaged: they are unfinished, gone, or in another place.
    words = done.roots.words if over else (parent_url(done.roots.first),)
    return command_line("scan", *words)


_BY_STEP = (
    NoStepReason.STATE_MISSING,
    NoStepReason.REQUIREMENT,
    NoStepReason.UNVERIFIABLE,
    NoStepReason.DAMAGED,
    NoStepReason.REJECTED,
)
"""Of several reasons, the first counts: the one that is nearest to a step that can be used."""

_SENTENCES = {
    NoStepReason.STATE_MISSING: "no step has the train state that is required",
    NoStepReason.REQUIREMENT: "no step meets every requirement",
    NoStepReason.UNVERIFIABLE: "no step is proven good, and not every one is damaged",
    NoStepReason.ALL_DAMAGED: "every step is damaged or unfinished",
    NoStepReason.REJECTED: "every step was rejected or superseded",
}


def _sentence(reason: NoStepReason, over: Sequence[PassedOver], policy: PickPolicy) -> str:
    """What is true of the steps that were inspected, where not all have the same reason."""
    sentence = _SENTENCES[reason]
    if reason is NoStepReason.ALL_DAMAGED and any(
        one.word is NoStepReason.REJECTED for one in over
    ):
        sentence = "every step is damaged, unfinished or rejected"
    limits = _limits(policy)
    return sentence + (
        f", of those that {' and '.join(limits)} {verb(len(limits), 'leaves', 'leave')}"
        if limits
        else ""
    )


def _limits(policy: PickPolicy) -> list[str]:
    """The options that exclude steps."""
    before = [] if policy.before is None else [f"--before {policy.before}"]
    return [*before, *(["--skip"] if policy.skip else [])]


def why_none(done: RunSearch) -> NoStep:
    """Why no step is chosen although there are some."""
    over = done.passed_over
    if done.stopped is NoStepReason.NOT_INSPECTED:
        return _not_inspected(done)
    if done.stopped is NoStepReason.TWO_BRANCHES and done.order is not None:
        return _two_branches(done, done.order)
    if done.stopped is NoStepReason.NOT_SHARED and done.not_shared is not None:
        message = f"no usable step: {done.not_shared.message}; do not start fresh over them"
        return NoStep(NoStepReason.NOT_SHARED, message, "ckptctl explain root.not-shared")
    if not over:
        return _none_left(done)
    if all(one.report.exit_code == EXIT_STATE_MISSING for one in over):
        first = over[0]
        message = (
            f"{_SENTENCES[NoStepReason.STATE_MISSING]} ({len(over)} inspected): step "
            f"{first.report.number}: {first.reason}"
        )
        show = command_line("show", first.report.url)
        return NoStep(NoStepReason.STATE_MISSING, message, show)
    if done.stopped is NoStepReason.TOO_MANY_DAMAGED:
        message = (
            f"{counted(len(done.damaged), 'damaged step')}, more than "
            f"--max-fallback {done.policy.max_fallback} allows: check the storage before using an "
            f"older step; {_newest_sound(done)}"
        )
        return NoStep(NoStepReason.TOO_MANY_DAMAGED, message, past_damaged(done.roots))
    word = next(word for word in _BY_STEP if any(one.word is word for one in over))
    reason = NoStepReason.ALL_DAMAGED if word is NoStepReason.DAMAGED else word
    newest = next(one.report for one in over if one.word is word)
    message = (
        f"no usable step ({len(over)} inspected): {_sentence(reason, over, done.policy)}; do not "
        "start fresh over them"
    )
    if not any(one.word in (NoStepReason.REJECTED, NoStepReason.UNVERIFIABLE) for one in over):
        message += f"; {_newest_sound(done)}"
    faults = [one.report.with_severity(Severity.FAULT) for one in over]
    if all(found and found[0].code == "format.unsupported" for found in faults):
        return NoStep(reason, message, "ckptctl explain format.unsupported")
    if reason is NoStepReason.ALL_DAMAGED:
        return NoStep(reason, message, storage_corruption(done.roots))
    shows = "show" if reason is NoStepReason.STATE_MISSING else "verify"
    return NoStep(reason, message, command_line(shows, newest.url))


def _not_inspected(done: RunSearch) -> NoStep:
    report = done.unknown[-1]
    number = report.number
    why = next(one.reason for one in done.passed_over if one.report is report)
    message = f"step {number} could not be inspected, so no older one is chosen: {why}"
    next_command = _remedy(report)
    if next_command is None:
        message += "; check the storage, then wait and try again, or wait longer with --timeout"
        next_command = command_line("doctor", "storage", parent_url(report.url))
    code = max(report.exit_code for report in done.unknown)
    return NoStep(NoStepReason.NOT_INSPECTED, message, next_command, code)


def _two_branches(done: RunSearch, order: WriteOrder) -> NoStep:
    """That the run went back, and how to choose one of its two branches."""
    last, skipped = order.last.number, ",".join(str(one.number) for one in order.later)
    number = order.own.number if order.own is not None else last
    message = (
        f"{order.why}: the run may have gone back to an earlier step, so neither is chosen; "
        f"--before {last + 1} chooses the branch that was written last, --skip {skipped} step "
        f"{number}, and `ckptctl reject` on the steps of the other branch decides it for good"
    )
    next_command = command_line("pick", *done.roots.words, "--before", last + 1)
    return NoStep(NoStepReason.TWO_BRANCHES, message, next_command)


def _remedy(report: Report) -> str | None:
    """What makes the inspection possible again, where its error states that.

    Expired credentials, a wrong clock or too little memory are no reason to skip a step.
    """
    given = (fault.next_command for fault in report.with_severity(Severity.FAULT))
    return next((each for each in given if each and not each.startswith("ckptctl verify ")), None)


def _none_left(done: RunSearch) -> NoStep:
    """Which options exclude every step, and what to run next.

    `verify` leads from a damaged step to `--before` its number: where that is the oldest step,
    the storage is to be checked; otherwise, that step is to be proven.
    """
    policy, every = done.policy, candidates_of(done.opened_roots)
    oldest = min(every, key=lambda each: each.named.number)
    first, newest = oldest.named.number, max(each.named.number for each in every)
    given = _limits(policy)
    excluded = (
        f"the only step, {first}"
        if first == newest
        else f"all of the {done.n_steps} steps, {first} to {newest}"
    )
    message = f"{' and '.join(given)} {verb(len(given), 'excludes', 'exclude')} {excluded}"
    if policy.before == first:
        return NoStep(NoStepReason.EXCLUDED, message, storage_corruption(done.roots))
    url = join_url(done.opened_roots[oldest.root_index].store.url, oldest.named.name)
    next_command = command_line("verify", url, "--level", "content")
    return NoStep(NoStepReason.EXCLUDED, message, next_command)


def storage_corruption(roots: Roots) -> str:
    """The runbook command for a root in which no step is sound."""
    return command_line("runbook", "run", "storage-corruption", *roots.words)


def past_damaged(roots: Roots) -> str:
    """The runbook command that leads past more damaged steps than `--max-fallback` allows.

    RB-7 shows them with their findings, and a person states how far back is acceptable.
    """
    return command_line("runbook", "run", "rb-7", *roots.words)


def _newest_sound(search: Search) -> str:
    """Which step is sound although none is chosen, or that there is none."""
    level = search.passed_over[-1].report.level.value
    further = search.further
    is_further = further is not None and (further.chosen or further.passed_over)
    last = further if further is not None and is_further else search
    reports = [passed.report for passed in last.passed_over]
    whole = [passed for passed in last.passed_over if passed.report.verdict is Verdict.COMPLETE]
    if whole and (last is search or last.chosen is None):
        return f"step {whole[0].report.number} is complete, but {whole[0].reason}"
    if last is search:
        return f"no step is sound at {level}"
    unknown = [report.number for report in reports if report.verdict is Verdict.UNKNOWN]
    uninspected = f" ({_numbers(unknown)} could not be inspected)" if unknown else ""
    found = last.chosen
    if found is not None:
        return (
            f"the newest step that is sound at {found.level.value} is {found.number}{uninspected}"
        )
    n_over = len(reports)
    before = (
        f"none of the {n_over} steps before them is" if n_over > 1 else "the step before is not"
    )
    return f"no step is sound at {level}: {before}{uninspected}"


MAX_NAMED = 5


def _numbers(steps: Sequence[int | None]) -> str:
    return f"{verb(len(steps), 'step', 'steps')} {some_of(steps, MAX_NAMED)}"


OnReport = Callable[[Report, bool, PassedOver | None], None]
"""Called with a report, whether it is the chosen one, and why `pick` skipped the step."""

NEWEST = 50
"""The default number of inspected steps."""


def scan(
    *roots: str,
    optional_roots: Collection[str] = (),
    last: int | None = NEWEST,
    on_report: OnReport | None = None,
    policy: PickPolicy = PickPolicy(),
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[PickKeywords],
) -> Scan:
    """Inspect the steps under a root or several, newest first, and find what `pick` would choose.

    `last` limits this to the newest steps, None to none; `before` continues where an
    earlier scan ended. `level` None inspects the steps that decide the choice as `pick`
    would, and the others at `listing`. `on_report` gets each report, newest first, as soon
    as it is known. The other arguments are those of `pick`.

    Raises `StorageError` if the root cannot be listed, `UsageError` for arguments and if
    the root contains no known step but unnumbered checkpoints.

    Cost: that of `pick`, which may go back further than `last`; for each other step that is
    shown, one read of each metadata, or the cost of `level`, and two listings, one where it and
    the older steps of `branch_of` are compared. One listing
    per folder that is not a step, at most `MAX_FOLDERS_TRIED`. On an object store that
    shows all steps, one request per 1,000 objects replaces their listings.
    """
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
    named = roots_in(roots, optional_roots)
    with ExitStack() as stack:
        done = search(
            stack,
            named,
            policy,
            requirements,
            storage,
            lambda store, pattern: list_all(store, pattern, last),
        )
        steps = [c for c in done.candidates if c not in done.no_steps]
        shown, older = steps[:last], steps[len(steps[:last]) :]
        # The chosen one is shown wherever it is.
        beyond = [candidate for candidate in older if candidate == done.chosen_candidate]
        reports = _reports(done, [*shown, *beyond], on_report)
        n_older = len(older) - len(beyond)
        findings = [*done.findings]
        for root in done.opened_roots if done.n_steps else ():
            findings += check_unnumbered(root.store, root.listing)
        answer = answer_of(done, requirements, "scan")
        chosen, next_command = answer.chosen, answer.next_command
        if chosen is not None:
            deeper = chosen.level.deeper
            verify = ("verify", chosen.url, "--level")
            next_command = command_line(*verify, deeper.value) if deeper else None
        return Scan(
            root=done.roots.first,
            exists=any(root.listing.exists for root in done.opened_roots),
            reports=reports,
            pick=answer,
            findings=tuple(findings),
            n_steps=done.n_steps,
            next_command=next_command,
            refused=tuple((url, over.reason) for url, over in _passed_over(done).items()),
            n_older=n_older,
            more_before=shown[-1].named.number if n_older and shown else None,
        )


def _reports(
    done: RunSearch, shown: Iterable[Candidate], on_report: OnReport | None
) -> tuple[Report, ...]:
    reports: list[Report] = []
    # Steps that no longer decide anything are inspected once, at the requested level.
    done.inspect.level = done.policy.level or Level.LISTING
    done.inspect.confirm = False
    passed_over = _passed_over(done)
    for candidate in shown:
        report = done.inspect(candidate, Level.LISTING)
        if candidate.is_no_step(report):
            continue
        is_chosen = candidate == done.chosen_candidate
        if not is_chosen and report.verdict is not Verdict.UNKNOWN:
            done.inspect.claim_branch(candidate, done.candidates)
        reports.append(done.inspect.inspected[candidate].report)
        if on_report is not None:
            on_report(reports[-1], is_chosen, passed_over.get(report.url))
    return tuple(reports)


def _passed_over(search: Search) -> dict[str, PassedOver]:
    """Why `pick` skipped steps, by their addresses."""
    searches = (search, search.further) if search.further else (search,)
    return {over.report.url: over for one in searches for over in one.passed_over}
