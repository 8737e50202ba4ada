"""Turn the marks of a step into findings.

A rejection or a superseded branch rules the step out; a pin and an acceptance are
worth knowing. Marks on an earlier save of the step are told and do not count. How
marks are stored and read is asked elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptctl.findings import Finding
from ckptctl.formats.own.marks import Mark, MarkKind, standing
from ckptctl.model import Step

_CODES = {
    MarkKind.REJECTED: "step.rejected",
    MarkKind.SUPERSEDED: "step.superseded",
    MarkKind.PINNED: "step.pinned",
}
_FINISHED_LATE = "the metadata arrived after the step was superseded as an interrupted save"


def check_marks(marks: Sequence[Mark], step: Step, metadata: str | None) -> Iterator[Finding]:
    """Yield `step.rejected`, `step.superseded`, `step.pinned`, `step.accepted`, `mark.outdated`.

    `step.finished-late` too, where the step was superseded before it had any metadata.

    `marks` are all that were found on the step, whichever save of it they speak of;
    `metadata` is the `metadata_digest` of the save that lies here.
    """
    own = [mark for mark in marks if mark.speaks_of(step.number, metadata)]
    stand = standing(own)
    for mark in stand:
        if mark.word in _CODES:
            yield _said(_CODES[mark.word], mark, f"{mark.word.value} {_who(mark)}")
    superseded = [mark for mark in stand if mark.word is MarkKind.SUPERSEDED]
    if superseded and metadata and all(mark.metadata is None for mark in superseded):
        yield _said("step.finished-late", superseded[-1], _FINISHED_LATE)
    accepted = [mark for mark in stand if mark.word is MarkKind.ACCEPTED]
    if accepted:
        newest = accepted[-1]
        yield _said("step.accepted", newest, f"{_before(own, newest)}, and accepted {_who(newest)}")
    for mark in standing(mark for mark in marks if mark not in own):
        if mark.word in _CODES:
            what = f"an earlier save of this step was {mark.word.value} {_who(mark)}"
            yield _said("mark.outdated", mark, what)


def _said(code: str, mark: Mark, message: str) -> Finding:
    evidence = f"; see {', '.join(mark.evidence)}" if mark.evidence else ""
    reason = f": {mark.reason}" if mark.reason else ""
    return Finding(code, "", message + reason + evidence, found=f"mark {mark.id}")


def _who(mark: Mark) -> str:
    return f"by {mark.by} at {mark.at}"


def _before(own: Sequence[Mark], accepted: Mark) -> str:
    words = sorted({mark.word.value for mark in own if mark.id in accepted.lifts})
    return " and ".join(words) or "ruled out"
