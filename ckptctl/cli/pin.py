"""`ckptctl pin`: keep a step."""

from __future__ import annotations

from typing import Annotated

import ckptctl
from ckptctl.cli.mark_result import answer_marked
from ckptctl.cli.options import (
    ByOpt,
    EvidenceOpt,
    MarksOpt,
    PatternOpt,
    ReasonOpt,
    StepArg,
    Storage,
    option,
)
from ckptctl.cli.output import Output
from ckptctl.formats.own.marks import MarkKind

EXAMPLES = (
    'ckptctl pin /shared/ckpt/run-1234@1200 --reason "published as v1"',
    "ckptctl pin s3://bucket/run-1234/step_1200 --off",
)
EXIT_CODES = (0, 2, 10, 11, 25, 75, 77)


def pin(
    step: StepArg,
    reason: ReasonOpt = "",
    off: Annotated[
        bool,
        option("--off", help="Take the pin off the step."),
    ] = False,
    evidence: EvidenceOpt = None,
    by: ByOpt = None,
    marks: MarksOpt = None,
    pattern: PatternOpt = None,
    *,
    storage: Storage,
    out: Output,
) -> int:
    """Pin a step, so that retention keeps it.

    No command of ckptctl removes a pinned step. A pin says nothing about whether it is good. With
    --quiet the address of the mark is printed.
    """
    marked = ckptctl.mark(
        step,
        MarkKind.UNPINNED if off else MarkKind.PINNED,
        reason=reason,
        evidence=evidence or (),
        by=by,
        marks=marks,
        pattern=pattern,
        **storage,
    )
    return answer_marked(marked, out)
