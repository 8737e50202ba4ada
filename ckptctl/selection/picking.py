"""Choose the step to resume from.

Without a step there are three kinds of answers, with three exit codes: there is none (10),
none is usable (11), the storage could not be inspected (75, 77).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from ckptctl.errors import OptionError
from ckptctl.findings import EXIT_STATE_MISSING, Report, Severity, Verdict
from ckptctl.formatting import command_line, counted, some_of, verb
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.stages import SealBytes
from ckptctl.options import PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.selection.choosing import KINDS_THAT_COUNT, Search, demanded
from ckptctl.selection.results import Answer, NoStep, NoStepReason, PassedOver, Pick
from ckptctl.selection.searching import RunSearch, candidates_of, search
from ckptctl.selection.targets import Roots, roots_in
from ckptctl.selection.write_order import WriteOrder
from ckptctl.storage.opening import SharedStores, join_url, parent_url

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptctl.options import PickKeywords


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
    policy, requirements, storage = options_from(
        keywords,
        policy,
        requirements,
        storage,
    )
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
    if done.chosen is not None:
        found = _found(done, done.chosen, requirements.require)
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


def _found(done: RunSearch, chosen: Report, require: Collection[str]) -> Pick:
    newer = _newer(done, chosen)
    past = f", falling back past {_numbers(newer)}" if newer else ""
    return Pick(
        answer=Answer.FELL_BACK if newer else Answer.FOUND,
        roots=done.roots.urls,
        chosen=chosen,
        passed_over=tuple(done.passed_over),
        findings=tuple(done.findings),
        level=chosen.level,
        level_reason=done.inspect.level_reason(chosen),
        message=f"resume from step {chosen.number}{past}",
        exit_code=0,
        next_command=None,
        required=demanded(chosen, require, done.policy),
        absent=tuple(kind for kind in chosen.state.absent if kind in KINDS_THAT_COUNT),
    )


def _newer(search: Search, chosen: Report) -> list[int | None]:
    numbers = [over.report.number for over in search.passed_over]
    return [number for number in numbers if number != chosen.number]


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
        if len(why.similar) == len(done.roots.urls) == 1:
            return command_line(command, why.similar[0])
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
        candidate = done.inspect.candidate_of(report)
        root = done.roots.first
        if candidate is not None:
            root = done.opened_roots[candidate.root_index].store.url
        message += "; check the storage, then wait and try again, or wait longer with --timeout"
        next_command = command_line("doctor", "storage", root)
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
    if further is None or not (further.chosen or further.passed_over):
        whole = [one for one in search.passed_over if one.report.verdict is Verdict.COMPLETE]
        if whole:
            return f"step {whole[0].report.number} is complete, but {whole[0].reason}"
        return f"no step is sound at {level}"
    over = (one.report for one in further.passed_over)
    unknown = [report.number for report in over if report.verdict is Verdict.UNKNOWN]
    uninspected = f" ({_numbers(unknown)} could not be inspected)" if unknown else ""
    whole = [one for one in further.passed_over if one.report.verdict is Verdict.COMPLETE]
    if further.chosen is None and whole:
        return f"step {whole[0].report.number} is complete, but {whole[0].reason}"
    if further.chosen is not None:
        found = further.chosen
        return (
            f"the newest step that is sound at {found.level.value} is {found.number}{uninspected}"
        )
    n_over = len(further.passed_over)
    before = (
        f"none of the {n_over} steps before them is" if n_over > 1 else "the step before is not"
    )
    return f"no step is sound at {level}: {before}{uninspected}"


MAX_NAMED = 5


def _numbers(steps: Sequence[int | None]) -> str:
    return f"{verb(len(steps), 'step', 'steps')} {some_of(steps, MAX_NAMED)}"
