"""`ckptctl accept`: take a rejection back."""

from __future__ import annotations

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
)
from ckptctl.cli.output import Output
from ckptctl.formats.own.marks import MarkKind

EXAMPLES = (
    'ckptctl accept /shared/ckpt/run-1234@1400 --reason "the spike came from the data"',
    "ckptctl accept s3://bucket/run-1234/step_1400 --marks marks.jsonl",
)
EXIT_CODES = (0, 2, 10, 11, 25, 75, 77)


def accept(
    step: StepArg,
    reason: ReasonOpt = "",
    evidence: EvidenceOpt = None,
    by: ByOpt = None,
    marks: MarksOpt = None,
    pattern: PatternOpt = None,
    *,
    storage: Storage,
    out: Output,
) -> int:
    """Lift a rejection, so that the step may be used again.

    Lifts every rejection of the step that stands now, and superseded as well; they stay on record.
    With --quiet the address of the mark is printed.
    """
    marked = ckptctl.mark(
        step,
        MarkKind.ACCEPTED,
        reason=reason,
        evidence=evidence or (),
        by=by,
        marks=marks,
        pattern=pattern,
        **storage,
    )
    return answer_marked(marked, out)
