"""Plan or apply retention of a root: the command `ckptctl prune`.

Only steps that `pick` would choose, and that are proven, count as kept. `retention` decides
what counts, stays and goes; this module opens the root, reads unproven steps if steps
without a seal may count, and reports the result.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

from ckptctl.errors import OptionError, OwnFileUnreadable, PathNotFound, StorageError
from ckptctl.findings import Verdict
from ckptctl.formats.frameworks.layouts import StepName, compile_pattern
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.marks import MarksInFile, read_marks_file
from ckptctl.model import ExitCode, Level, Message, NextCommand, Positive
from ckptctl.options import (
    PickPolicy,
    Requirements,
    StepKeywords,
    StorageOptions,
    known_level,
    options_from,
)
from ckptctl.selection.candidates import CachingInspector, Candidate
from ckptctl.selection.choosing import refusal
from ckptctl.selection.empty_roots import check_has_steps
from ckptctl.selection.history import holder, resumed_from
from ckptctl.selection.retention import (
    NotCounted,
    OnInspected,
    PruneDecision,
    Remedy,
    RetentionPlan,
    Rules,
    abandoned_uploads,
    newest_good,
    remove_step,
    write_proof,
)
from ckptctl.selection.roots import list_all
from ckptctl.selection.targets import open_roots, roots_in
from ckptctl.storage.contract import Store, Upload

OnBytes = Callable[[int, int], None]
"""Called with the bytes of a step that have been compared, and their total."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result or plan of `prune`: the decision for every step, newest first."""

    root: str
    """The root as given."""
    keep: Positive
    """How many good steps are kept."""
    applied: bool
    """The steps were removed."""
    decisions: tuple[PruneDecision, ...]
    """Every step, newest first."""
    n_bytes: int
    """Size of all steps to remove, in bytes."""
    n_bytes_to_prove: int
    """Size of the steps that count only once all of their bytes are compared; `--apply` does
    that first."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand
    n_uploads: int = 0
    """Unfinished uploads of killed saves; `--apply` aborts them."""


def prune(
    root: str,
    keep: int,
    *,
    apply: bool = False,
    unsealed: bool = False,
    level: Level | str | None = None,
    accept_unverifiable: bool = False,
    other_roots: Sequence[str] = (),
    on_inspected: OnInspected | None = None,
    on_bytes: OnBytes | None = None,
    on_ended: Callable[[Pruned], None] | None = None,
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StepKeywords],
) -> Pruned:
    """Remove what is older than the newest `keep` good steps; without `apply`, only plan it.

    A step is good if `pick` would choose it and its bytes are proven: by a seal, or with
    `unsealed` by reading all of its bytes, which `apply` does once and records in the step.
    `level` is the level at which `pick` inspects; None is as deep as is cheap. Pinned steps
    stay, and so do those with an unreadable mark and the one that the newest attempt
    resumed from; damaged ones are left to a person. A step that changed since its
    inspection is kept.

    `other_roots` are other roots of the run: steps that `pick` over all of them would
    refuse do not count. Nothing is removed in them, and each must answer. `on_inspected` gets
    the number of inspected steps, `on_bytes` the progress of reading one, `on_ended` the
    result; if an exception such as `KeyboardInterrupt` ends the removal, the result so far,
    and the exception is raised. Each field of the two options objects is also a keyword of
    this function.

    A step that cannot be removed is reported in its decision, and the others are removed.
    Raises `UsageError` for `keep` below 1 and for a path that is not a root, `StorageError`
    if the root cannot be listed, and if nothing at all could be removed. Cost: one listing,
    an inspection of each step, several at once; on an object store a request per removed
    object.
    """
    if keep < 1:
        raise OptionError("--keep", f"is {keep}; at least 1 good step is kept")
    requirements, storage = options_from(keywords, requirements, storage)
    marks = requirements.marks
    marks_before = read_marks_file(marks) if marks is not None else None
    policy = PickPolicy(level=known_level(level), accept_unverifiable=accept_unverifiable)
    compiled = compile_pattern(requirements.pattern)
    with ExitStack() as stack:
        roots = roots_in((root, *other_roots))
        opened, *others = open_roots(stack, roots, lambda store: list_all(store, compiled), storage)
        store, listing = opened.store, opened.listing
        check_has_steps(store, listing)
        protected = _resumed_from(store, listing.steps)
        uploads = abandoned_uploads(store, compiled)
        rules = Rules(keep, requirements, policy, unsealed=unsealed, protected=protected)
        plan = RetentionPlan(
            opened,
            rules,
            prove=partial(_proven, store, on_bytes) if apply else _will_be_proven,
            others=others,
            on_inspected=on_inspected,
        )
        options = [
            *(["--unsealed"] if unsealed else []),
            *(["--accept-unverifiable"] if accept_unverifiable else []),
            *(["--level", policy.level.value] if policy.level is not None else []),
            *(["--require", ",".join(requirements.require)] if requirements.require else []),
            *(word for url in other_roots for word in ("--other-root", url)),
            *(["--marks", marks] if marks is not None else []),
            *(["--pattern", requirements.pattern] if requirements.pattern is not None else []),
        ]
        again = command_line("prune", root, "--keep", str(keep), *options)
        try:
            plan.carry_out(partial(_remove, store, marks_before) if apply else None)
            not_aborted = _aborted(store, uploads) if apply else None
            if plan.failures and not any(one.removed for one in plan.decisions()):
                raise plan.failures[0]
            pruned = _pruned(root, keep, plan, again, apply)
            if uploads:
                pruned = _with_uploads(pruned, len(uploads), not_aborted, again, apply)
            if on_ended is not None:
                on_ended(pruned)
        except BaseException:
            if on_ended is not None:
                pruned = _pruned(root, keep, plan, again, apply=True)
                going = [decision for decision in pruned.decisions if decision.removed]
                message = f"interrupted; removed until then: {_steps(going)}"
                exit_code = 128 + signal.SIGINT
                on_ended(replace(pruned, message=message, exit_code=exit_code, next_command=again))
            raise
    return pruned


def _with_uploads(
    pruned: Pruned, n: int, not_aborted: StorageError | None, again: str, apply: bool
) -> Pruned:
    """The result with the unfinished uploads of killed saves."""
    done = "aborted" if apply else "to be aborted"
    if not_aborted is not None:
        done = f"not all aborted: {not_aborted.message}"
        pruned = replace(pruned, exit_code=max(pruned.exit_code, not_aborted.exit_code))
    return replace(
        pruned,
        n_uploads=n,
        message=f"{pruned.message}; {counted(n, 'unfinished upload')} of killed saves {done}",
        next_command=pruned.next_command if apply else f"{again} --apply",
    )


def _aborted(store: Store, uploads: Sequence[Upload]) -> StorageError | None:
    """Abort uploads; the error that stopped this, None without one."""
    try:
        for upload in uploads:
            store.abort_upload(upload)
    except StorageError as error:
        return error
    return None


def _will_be_proven(inspected: Inspection, _: CachingInspector, __: Candidate) -> NotCounted | None:
    """Why `--apply` could not prove a step, as far as that is known without reading its bytes."""
    from ckptctl.inspection.content import without_checksums

    parts = (held.part for part in inspected.opened.parts for held in part.safetensors)
    unproven = (finding for part in parts for finding in without_checksums(part, ()))
    why = next((f"{Verdict.UNVERIFIABLE.value}: {one.message}" for one in unproven), None)
    return None if why is None else NotCounted(why, Remedy.SEAL_UNVERIFIABLE)


def _proven(
    store: Store,
    on_bytes: OnBytes | None,
    _: Inspection,
    inspector: CachingInspector,
    candidate: Candidate,
) -> NotCounted | None:
    """Compare all bytes of a step, and record it if they are sound."""
    from ckptctl.inspection.content import Asked
    from ckptctl.records.byte_pass import Limits

    inspector.content = Asked(Limits(on_progress=on_bytes))
    report = inspector(candidate, Level.CONTENT)
    over = refusal(report, PickPolicy())
    if over is not None:
        return NotCounted.refused(over)
    try:
        write_proof(store, inspector.inspected[candidate])
    except PathNotFound:
        return NotCounted("removed meanwhile")
    return None


def _remove(store: Store, marks: MarksInFile | None, inspected: Inspection) -> bool:
    if marks is not None and read_marks_file(marks.path) != marks:
        return False
    return remove_step(store, inspected.step.name, seen=inspected.step.files)


def _resumed_from(store: Store, steps: Sequence[StepName]) -> Mapping[int, str]:
    """The steps that the newest attempts on record resumed from: of the holder, and by name.

    Where their record is damaged it may be any of `steps`. Cost: two listings and two short
    reads.
    """
    held = holder(store)
    why = "the newest attempt resumed from it"
    try:
        found = resumed_from(store, held.attempt if held is not None else None)
    except OwnFileUnreadable as error:
        why = f"the newest attempt may have resumed from it: {error.message}"
        return {named.number: why for named in steps}
    return dict.fromkeys(found, why)


def _pruned(root: str, keep: int, plan: RetentionPlan, again: str, apply: bool) -> Pruned:
    decisions, unknown = plan.decisions(), plan.unknown
    going = [one for one in decisions if one.removed]
    command: str | None = None
    if not decisions:
        message = f"nothing is removed: {root} holds no step at all"
    elif sum(one.counts for one in decisions) < keep:
        command, why = _too_few(decisions, keep, again)
        message = f"nothing is removed: {why}"
    elif apply:
        message = f"removed {_steps(going)}"
    elif going:
        message = f"{_steps(going)} would be removed; nothing was removed yet"
        command = f"{again} --apply"
        if plan.n_to_read:
            message += f"; --apply first reads {plan.n_to_read:,} bytes to prove what is kept"
    else:
        message = f"nothing is removed: no step older than the {newest_good(keep)} may be removed"
    if unknown:
        numbers = some_of([report.number for report in unknown])
        steps, stay = ("step", "stays") if len(unknown) == 1 else ("steps", "stay")
        message += f"; {steps} {numbers} could not be inspected, and {stay}"
        command = command_line("verify", unknown[0].url)
    if plan.failures:
        message += f"; {counted(len(plan.failures), 'step')} could not be removed"
        command = again
    exit_codes = [
        *(error.exit_code for error in plan.failures),
        *(report.exit_code for report in unknown),
    ]
    return Pruned(
        root=root,
        keep=keep,
        applied=apply,
        decisions=decisions,
        n_bytes=sum(one.n_bytes for one in going),
        n_bytes_to_prove=plan.n_to_read,
        message=message,
        exit_code=max(exit_codes, default=0),
        next_command=command,
    )


def _too_few(decisions: Sequence[PruneDecision], keep: int, again: str) -> tuple[str | None, str]:
    """The command after which one more step counts, None if there is none; and what is lacking."""
    n_counted = sum(one.counts for one in decisions)
    exist = f"{n_counted} of {keep} good steps exist"
    for one in decisions:
        match one.remedy:
            case Remedy.ACCEPT_UNVERIFIABLE:
                return f"{again} --accept-unverifiable", exist
            case Remedy.SEAL_UNVERIFIABLE:
                why = (
                    "a step without checksums counts once it is sealed, with --accept-unverifiable"
                )
                return command_line("seal", one.url, "--accept-unverifiable"), f"{exist}; {why}"
            case Remedy.SEAL:
                return command_line("seal", one.url), f"{exist}; a seal proves what a step is"
            case Remedy.UNSEALED:
                none = "no good step is sealed, and only sealed steps count"
                # A seal is one more file, for which a full storage has no space.
                return f"{again} --unsealed", exist if n_counted else none
    return None, exist


def _steps(going: list[PruneDecision]) -> str:
    n_bytes = sum(one.n_bytes for one in going)
    return f"{counted(len(going), 'step')}, {n_bytes:,} bytes"
