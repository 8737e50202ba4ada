"""`ckptctl pick`: choose the step to resume from."""

from __future__ import annotations

from typing import Annotated, Literal

import ckptctl
from ckptctl.cli.options import AllowFreshOpt, CreateOpt, OfStep, OptionalRootOpt, RootsArg
from ckptctl.cli.output import MakeDocument, Output, document_of
from ckptctl.cli.pictures import warnings_of
from ckptctl.cli.rendering import Line, StyledText, finding_lines, line, next_line, refused_lines
from ckptctl.findings import Severity
from ckptctl.options import Parameter, PickPolicy, StorageOptions
from ckptctl.selection.choosing import Answer
from ckptctl.selection.picking import Pick

EXAMPLES = (
    'CKPT=$(ckptctl pick /shared/ckpt/run-1234) && torchrun train.py --resume "$CKPT"',
    "ckptctl pick s3://bucket/run-1234 --require model,optimizer --before 1400",
)
EXIT_CODES = (0, 2, 3, 10, 11, 75, 77)

_FELL_BACK = 3
_MAY_BE_NEWER = frozenset({"root.further", "root.two-branches"})
"""Findings that another save may be the newest one."""


Printed = Literal["path", "step", "reason", "damaged"]
"""What `pick` puts on standard output: the step, why there is none, or the damaged ones."""


def pick(
    roots: RootsArg,
    optional_root: OptionalRootOpt = None,
    allow_fresh: AllowFreshOpt = False,
    create: CreateOpt = False,
    detailed_exitcode: Annotated[
        bool,
        Parameter(
            "--detailed-exitcode",
            "Exit with 3 instead of 0 if newer steps were refused, or another save may be newer.",
            common=False,
        ),
    ] = False,
    printed: Annotated[Printed, Parameter("--print", "What to print on standard output.")] = "path",
    *,
    policy: PickPolicy,
    requirements: OfStep,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Choose the step to resume from.

    Prints one path on standard output, and on standard error why newer steps were refused. With
    --quiet standard error stays empty unless there is no usable step.
    """
    found = ckptctl.pick(
        *roots,
        optional_roots=optional_root or (),
        allow_fresh=allow_fresh,
        create=create,
        policy=policy,
        requirements=requirements,
        storage=storage,
    )
    doubts = any(one.code in _MAY_BE_NEWER for one in found.findings)
    is_certain = found.answer is not Answer.FELL_BACK and not doubts
    exit_code = found.exit_code
    if detailed_exitcode and not exit_code and found.chosen is not None and not is_certain:
        exit_code = _FELL_BACK
    out.answer(
        pick_document(found, exit_code),
        lambda: pick_lines(found),
        bare=_taken(found, printed),
        bare_only=True,
        has_failed=bool(found.exit_code),
    )
    return exit_code


def pick_document(found: Pick, exit_code: int) -> MakeDocument:
    """The document of `pick`; `path` and `step` are null where nothing was chosen."""
    chosen = found.chosen
    return document_of(
        "pick",
        found,
        exit_code=exit_code,
        path=chosen.url if chosen else None,
        step=chosen.number if chosen else None,
    )


def _taken(found: Pick, printed: Printed) -> tuple[str, ...]:
    if printed == "reason":
        return () if found.reason is None else (found.reason.value,)
    if printed == "damaged":
        damaged = (over for over in found.passed_over if over.is_damage)
        return tuple(f"{over.path}\t{over.reason}" for over in damaged)
    if found.chosen is None:
        return ()
    return (found.path,) if printed == "path" else (str(found.step),)


# What another world size costs is there only where --world-size asks.
_SHOWN_NOTES = {"state.lost", "world-size.differs", "state.renamed"}


def pick_lines(pick: Pick) -> list[Line]:
    """The answer, why newer steps were refused, how deep the inspection was, the next command."""
    if pick.exit_code:
        lines = [line(StyledText("error:", "bad"), f" {pick.message}", hang=2)]
    else:
        warned = warnings_of(pick.chosen) if pick.chosen else ""
        lines = [line(StyledText(pick.message + warned, "good"), hang=2)]
    lines += refused_lines(pick)
    if pick.level is not None:
        reason = f"; {pick.level_reason}" if pick.level_reason else ""
        lines.append(line(f"  checked: {pick.level.value}{reason}", hang=4))
    if pick.chosen is not None:
        lines.append(line(f"  train state: {pick.about_state}", hang=4))
    # What is to be known of the chosen step; `verify` has the rest.
    known = [
        finding
        for finding in (pick.chosen.findings if pick.chosen else ())
        if finding.severity is Severity.WARNING or finding.code in _SHOWN_NOTES
    ]
    findings = finding_lines([*pick.findings, *known])
    return [*lines, *findings, *next_line(pick.next_command)]
