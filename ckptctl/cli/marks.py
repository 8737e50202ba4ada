"""`ckptctl seal`, the marks of a step, and `prune`: which steps stay, and what may be resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import ckptctl
from ckptctl.cli.main import Stopped, ignore_signals
from ckptctl.cli.options import JobsOpt, LevelOpt, StepArg, only
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import (
    EMPTY,
    Line,
    StyledText,
    finding_lines,
    line,
    next_line,
    padded,
    section,
)
from ckptctl.formats.own.marks import Mark, MarkKind
from ckptctl.formatting import counted, exact_size, size
from ckptctl.options import MARKS, PATTERN, Parameter, Requirements, StorageOptions
from ckptctl.selection.marking import Marked
from ckptctl.selection.pruning import Pruned
from ckptctl.selection.sealing import Sealed

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "seal": (
        "ckptctl seal /shared/ckpt/run-1234@latest",
        "ckptctl seal s3://bucket/run-1234/step_1200 --key-file /etc/ckptctl/seal.key",
        "ckptctl seal /shared/ckpt/run-1234@latest --replace --sign ~/.ssh/id_ed25519",
    ),
    "reject": (
        'ckptctl reject /shared/ckpt/run-1234@1400 --reason "loss spike after the resume"',
        'ckptctl reject s3://bucket/run-1234/step_1400 --reason "NaN" --marks marks.jsonl',
    ),
    "accept": (
        'ckptctl accept /shared/ckpt/run-1234@1400 --reason "the spike came from the data"',
        "ckptctl accept s3://bucket/run-1234/step_1400 --marks marks.jsonl",
    ),
    "confirm": (
        'ckptctl confirm /shared/ckpt/run-1234@1400 --reason "a replay repeated 50 steps"',
        "ckptctl confirm s3://bucket/run-1234/step_1400 --off",
    ),
    "pin": (
        'ckptctl pin /shared/ckpt/run-1234@1200 --reason "published as v1"',
        "ckptctl pin s3://bucket/run-1234/step_1200 --off",
    ),
    "prune": (
        "ckptctl prune /shared/ckpt/run-1234 --keep 3",
        "ckptctl prune /shared/ckpt/run-1234 --keep 3 --apply",
    ),
}
EXIT_CODES: Mapping[str, tuple[int, ...]] = {
    "seal": (0, 2, 10, 11, 20, 21, 22, 25, 26, 27, 75, 77),
    "prune": (0, 2, 75, 77),
    **dict.fromkeys(("reject", "accept", "confirm", "pin"), (0, 2, 10, 11, 25, 26, 75, 77)),
}


def seal(
    step: StepArg,
    replace: Annotated[
        bool, Parameter("--replace", "Replace an existing seal, if the step has no fault.")
    ] = False,
    adopt: Annotated[
        str | None,
        Parameter(
            "--adopt REASON",
            "Accept a step that was sealed for another root or under another name: compare it "
            "with that seal, and make a new one that records who accepted it and why.",
        ),
    ] = None,
    accept_unverifiable: Annotated[
        bool, Parameter("--accept-unverifiable", "Seal a step that cannot be proven good.")
    ] = False,
    jobs: JobsOpt = None,
    *,
    requirements: Annotated[
        Requirements,
        only("key_file", "sign", "saved_world_size", "marks", "pattern", "state", "grace"),
    ],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Verify a step and record its digests.

    Inspects the step, reads every byte, and writes .ckptctl/seal.json into it; nothing else is
    changed. A step that is not complete is refused with its exit code. With --quiet the address of
    the seal is printed.
    """
    sealed = ckptctl.seal(
        step,
        replace=replace,
        adopt=adopt,
        accept_unverifiable=accept_unverifiable,
        jobs=jobs,
        on_progress=lambda done, total: out.progress("digested", done, total),
        requirements=requirements,
        storage=storage,
    )
    out.answer(
        document_of("sealed", sealed),
        lambda: sealed_lines(sealed),
        bare=() if sealed.path is None else (sealed.path,),
    )
    return sealed.exit_code


def sealed_lines(sealed: Sealed) -> list[Line]:
    """That the step is sealed and how, or why it is not."""
    found = sealed.report.findings
    if sealed.path is not None:  # there is one now
        found = tuple(finding for finding in found if finding.code != "seal.missing")
    findings = section(finding_lines(found))
    if sealed.path is None:
        head = line(StyledText(sealed.message, "bad"), hang=2)
        url = line("  ", StyledText(sealed.url, "name"), solid=True)
        return [head, url, EMPTY, *findings, *next_line(sealed.next_command)]
    digested = f"{counted(sealed.n_files, 'file')}, {exact_size(sealed.n_bytes)}"
    digested += f", digests by {sealed.kind}"
    if sealed.n_stored:
        digested += f", the store's own checksums of {counted(sealed.n_stored, 'file')}"
    facts = [
        digested,
        f"inspected first, at level {sealed.report.level.value}",
        *([] if sealed.signer is None else [f"signed by {sealed.signer}"]),
        f"place {sealed.sequence:,} of the seals of run {sealed.run}",
    ]
    written = "replaced " if sealed.replaced else "written to "
    return [
        line(StyledText("sealed", "good"), " ", StyledText(sealed.url, "name"), solid=True),
        *(line(f"  {fact}", hang=4) for fact in facts),
        line("  ", written, StyledText(sealed.path, "name"), solid=True),
        EMPTY,
        *findings,
        *next_line(sealed.next_command),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkOptions:
    """What is recorded of a decision, and where."""

    reason: Annotated[str, Parameter("--reason TEXT", "The reason, in one sentence.")] = ""
    evidence: Annotated[
        Sequence[str],
        Parameter("--evidence TEXT", "Evidence: a URL or a log file; may be given several times."),
    ] = ()
    by: Annotated[
        str | None, Parameter("--by NAME", "Who decided it; by default the user and the host.")
    ] = None
    marks: Annotated[str | None, MARKS] = None
    pattern: Annotated[str | None, PATTERN] = None


def reject(step: StepArg, *, options: MarkOptions, storage: StorageOptions, out: Output) -> int:
    """Reject a step, so that nothing resumes from it.

    pick skips it from then on. The mark is written to .ckptctl/marks/ of the step, or to the
    file of --marks, and no longer applies when the step is saved again. With --quiet the
    address of the mark is printed.
    """
    return _mark(step, MarkKind.REJECTED, options, storage, out)


def accept(step: StepArg, *, options: MarkOptions, storage: StorageOptions, out: Output) -> int:
    """Lift a rejection, so that the step may be used again.

    Lifts every rejection and superseded mark that applies to the step; they stay on record.
    With --quiet the address of the mark is printed.
    """
    return _mark(step, MarkKind.ACCEPTED, options, storage, out)


def confirm(
    step: StepArg,
    off: Annotated[bool, Parameter("--off", "Remove the confirmation.")] = False,
    *,
    options: MarkOptions,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Confirm a step: training has shown that it is good.

    A replay, a canary, or the training after a resume shows more than bytes do. After a
    failure that may have damaged newer steps, `pick --prefer confirmed` takes the newest
    confirmed one. With --quiet the address of the mark is printed.
    """
    word = MarkKind.UNCONFIRMED if off else MarkKind.CONFIRMED
    return _mark(step, word, options, storage, out)


def pin(
    step: StepArg,
    off: Annotated[bool, Parameter("--off", "Remove the pin.")] = False,
    *,
    options: MarkOptions,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Pin a step, so that retention keeps it.

    No ckptctl command removes a pinned step. A pin does not state whether the step is good.
    With --quiet the address of the mark is printed.
    """
    word = MarkKind.UNPINNED if off else MarkKind.PINNED
    return _mark(step, word, options, storage, out)


def _mark(
    step: str, word: MarkKind, options: MarkOptions, storage: StorageOptions, out: Output
) -> int:
    """Put the mark on the step, and print it, or with `--quiet` where it lies."""
    marked = ckptctl.mark(
        step,
        word,
        reason=options.reason,
        evidence=options.evidence,
        by=options.by,
        marks=options.marks,
        pattern=options.pattern,
        storage=storage,
    )
    out.answer(
        document_of("marked", marked),
        lambda: marked_lines(marked),
        bare=() if marked.path is None else (marked.path,),
    )
    return marked.exit_code


def marked_lines(marked: Marked) -> list[Line]:
    """The mark that was put, the marks that it lifts, and those that apply now."""
    lines = [line(StyledText(marked.message, "strong"), solid=True)]
    if marked.mark is not None:
        lines.append(line(f"  {_origin(marked.mark)}", hang=4))
        lines.append(line("  written to ", StyledText(marked.path or "", "name"), solid=True))
    others = [mark for mark in marked.standing if mark != marked.mark and not mark.word.lifts]
    lines += [
        line(f"  {what}: {mark.word.value} {_origin(mark)}", hang=4)
        for what, marks in (("lifted", marked.lifted), ("also applies", others))
        for mark in marks
    ]
    return [*lines, EMPTY, *next_line(marked.next_command)]


def _origin(mark: Mark) -> str:
    return f"by {mark.by} at {mark.at}{mark.because}"


def prune(
    root: Annotated[str, Parameter("ROOT", "Folder or URL that holds the steps of one run.")],
    keep: Annotated[int, Parameter("--keep N", "How many good steps to keep.", min=1)],
    apply: Annotated[
        bool, Parameter("--apply", "Remove the steps; without it only the plan is printed.")
    ] = False,
    unsealed: Annotated[
        bool, Parameter("--unsealed", "Also count steps without a seal as good.")
    ] = False,
    level: LevelOpt = None,
    accept_unverifiable: Annotated[
        bool,
        Parameter(
            "--accept-unverifiable",
            "Also count sealed steps whose format has no checksums, as pick takes them.",
        ),
    ] = False,
    other_root: Annotated[
        list[str] | None,
        Parameter(
            "--other-root ROOT",
            "Another root of the run: its marks and records count; nothing is removed there.",
        ),
    ] = None,
    *,
    requirements: Annotated[
        Requirements,
        only(
            "require", "state", "require_seal", "key_file", "require_signature", "marks", "pattern"
        ),
    ],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Remove old steps that are no longer needed.

    Keeps the newest N steps that pick would choose and that are sealed; with --unsealed, steps
    without a seal count after all of their bytes have been compared. If fewer than N count, nothing
    is removed. Pinned steps are kept, and so is the step that the newest attempt resumed from. With
    --quiet the paths to remove are printed.
    """
    results: list[Pruned] = []

    def ended(result: Pruned) -> None:
        ignore_signals()  # nothing is left to stop, and what was removed must be reported
        results.append(result)

    try:
        found = ckptctl.prune(
            root,
            keep,
            apply=apply,
            unsealed=unsealed,
            level=level,
            accept_unverifiable=accept_unverifiable,
            other_roots=tuple(other_root or ()),
            requirements=requirements,
            on_inspected=lambda done, total: out.progress(
                f"{done:,} of {total:,} steps", done, total
            ),
            on_bytes=lambda done, total: out.progress("compared", done, total, unit="B"),
            on_ended=ended,
            storage=storage,
        )
    except Stopped as stopped:
        if not results:
            raise
        found = replace(results[-1], exit_code=stopped.exit_code)
    out.answer(
        document_of("pruned", found),
        lambda: prune_lines(found),
        bare=tuple(decision.url for decision in found.decisions if decision.removed),
    )
    return found.exit_code


def prune_lines(found: Pruned) -> list[Line]:
    """The answer, then every step with its decision and the reason, newest first."""
    lines = [line(StyledText(found.message, "strong"), hang=2)]
    width = max((len(str(decision.number)) for decision in found.decisions), default=0)
    gone = "removed" if found.applied else "goes"
    for decision in found.decisions:
        word = padded(
            gone if decision.removed else "stays", 7, "warn" if decision.removed else "good"
        )
        step = padded(str(decision.number), width, right=True)
        room = padded(size(decision.n_bytes), 9, right=True)
        lines.append(line("  ", word, "  ", step, room, f"  {decision.reason}", hang=22 + width))
    return [*lines, *next_line(found.next_command)]
