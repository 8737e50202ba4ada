"""`ckptctl reject`: rule a step out."""

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
    'ckptctl reject /shared/ckpt/run-1234@1400 --reason "loss spike after the resume"',
    'ckptctl reject s3://bucket/run-1234/step_1400 --reason "NaN" --marks marks.jsonl',
)
EXIT_CODES = (0, 2, 10, 11, 25, 75, 77)


def reject(
    step: StepArg,
    reason: ReasonOpt,
    evidence: EvidenceOpt = None,
    by: ByOpt = None,
    marks: MarksOpt = None,
    pattern: PatternOpt = None,
    *,
    storage: Storage,
    out: Output,
) -> int:
    """Reject a step, so that nothing resumes from it.

    pick passes over it from then on. The mark lies in .ckptctl/marks/ of the step, or in the file
    of --marks, and lapses when the step is saved anew. With --quiet the address of the mark is
    printed.
    """
    marked = ckptctl.mark(
        step,
        MarkKind.REJECTED,
        reason=reason,
        evidence=evidence or (),
        by=by,
        marks=marks,
        pattern=pattern,
        **storage,
    )
    return answer_marked(marked, out)
