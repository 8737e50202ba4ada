"""`ckptctl reject`, `accept`, `confirm` and `pin`: put a mark on a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import ckptctl
from ckptctl.cli.options import StepArg
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import EMPTY, Line, StyledText, line, next_line
from ckptctl.formats.own.marks import Mark, MarkKind
from ckptctl.options import MARKS, PATTERN, Parameter, StorageOptions
from ckptctl.selection.marking import Marked

EXAMPLES: Mapping[str, tuple[str, ...]] = {
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
}
EXIT_CODES = (0, 2, 10, 11, 25, 26, 75, 77)


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
    lines += [line(f"  lifted: {_described(one)}", hang=4) for one in marked.lifted]
    lines += _others(marked)
    return [*lines, EMPTY, *next_line(marked.next_command)]


def _others(marked: Marked) -> Iterator[Line]:
    for one in marked.standing:
        if one != marked.mark and not one.word.lifts:
            yield line(f"  also applies: {_described(one)}", hang=4)


def _described(mark: Mark) -> str:
    return f"{mark.word.value} {_origin(mark)}"


def _origin(mark: Mark) -> str:
    return f"by {mark.by} at {mark.at}{mark.because}"
