"""List the faults that an assessment excludes, those that it does not, and what the log lacks.

Each line rests on a measurement (docs/loss.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.data_classes import dataclass
from ckptctl.loss.replay import FINE, FINE_DIGITS, GOOD_ROWS, MIN_ROWS, Agreement, Origin
from ckptctl.loss.segments import Boundary
from ckptctl.loss.verdict import SMALLEST_JUMP, Assessment, share

_COUNTERS = {"loss.restarted", "loss.step", "loss.gap"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a resume goes wrong; `why` is what excludes it, or would."""

    name: str
    """Its name."""
    excluded: bool
    """The evidence excludes it."""
    why: str
    """What excludes it, or what would."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that the log does not hold, and how to log it."""

    what: str
    """What it is."""
    remedy: str
    """How to log it."""


def faults(assessment: Assessment) -> tuple[Fault, ...]:
    """The faults that are excluded, then those that are not; a fault that was found is neither."""
    every = sorted(_faults(assessment), key=lambda fault: not fault.excluded)
    return tuple(every)


def _faults(assessment: Assessment) -> Iterator[Fault]:
    replay, level = assessment.replay, assessment.level
    codes = {finding.code for finding in assessment.findings}
    n = len(replay.rows)
    fine = replay.fine_enough
    first = replay.first_is_equal and fine and replay.varies and replay.origin is not Origin.COPIED
    proven = replay.is_proof and n >= GOOD_ROWS
    again = f"{n} steps logged twice agree"
    jump = level.smallest_jump
    seen = f"a jump above {share(jump)} would be detected" if jump is not None else ""
    need = f"detecting it takes {GOOD_ROWS} steps logged twice, with {FINE_DIGITS}"
    if n >= GOOD_ROWS and not replay.agrees:
        need = "the steps logged twice differ, so they cannot exclude it"

    if first:
        yield Fault("other or older weights", True, "the first step logged twice agrees")
    elif not n:
        yield Fault("other or older weights", False, need)
    if (
        jump is not None
        and jump <= SMALLEST_JUMP
        and not codes & {"loss.jump", "loss.spike", "loss.level-shift"}
    ):
        yield Fault("no state loaded", True, seen)
    if proven:
        yield Fault("optimizer state lost", True, again)
    elif "loss.drift" not in codes:
        yield Fault("optimizer state lost", False, need)
    if proven or (first and replay.agrees):
        yield Fault("random numbers lost, where they affect the loss", True, again)
    elif replay.agreement is Agreement.DRIFT and replay.same_first_norm:
        why = "the first loss and its gradient norm agree, before any update"
        yield Fault("random numbers lost, where they affect the loss", True, why)
    elif "loss.differs" not in codes:
        yield Fault("random numbers lost", False, need)
    yield from _data(assessment, codes, proven=proven)
    yield from _schedule(assessment, codes, proven=proven)
    yield Fault(
        "part of the second moments lost, or a small part of one tensor damaged",
        False,
        "3 to 40 % of these do not affect the loss; a seal detects all (ckptctl seal STEP)",
    )


def _data(assessment: Assessment, codes: set[str], *, proven: bool) -> Iterator[Fault]:
    resume = assessment.resume
    if codes & {"loss.data", "loss.other-samples", "loss.other-data"}:
        return
    digests = [row for row in resume.after if row.samples_digest]
    old = {row.step for row in resume.overwritten if row.samples_digest}
    if any(row.step in old for row in digests):
        yield Fault("data repeated or skipped", True, "the digests of the samples agree")
    elif proven:
        yield Fault("data repeated or skipped", True, "steps over other batches would differ")
    else:
        why = "detecting it takes a digest of the samples of each step (samples_digest)"
        yield Fault("data repeated or skipped", False, why)


def _schedule(assessment: Assessment, codes: set[str], *, proven: bool) -> Iterator[Fault]:
    resume = assessment.resume
    before = (*resume.before[-20:], *resume.overwritten[:20])
    sides = (before, resume.after[:20])
    if not codes & {"loss.lr", "loss.lr-lower"}:
        logged = all(any(row.lr for row in side) for side in sides)
        why = ("the logged learning rate continues", "log the learning rate")
        yield _counted("learning rate of another step", why, logged=logged, proven=proven)
    if not codes & {"loss.tokens", "loss.batch"}:
        logged = all(any(row.tokens or row.samples for row in side) for side in sides)
        why = ("the logged counts continue", "log tokens or samples")
        yield _counted("another global batch", why, logged=logged, proven=proven)
    if not codes & _COUNTERS:
        why = (
            "the first step follows the step of the checkpoint",
            "name the step of the checkpoint (--resume-step or --resume-report)",
        )
        known = resume.resume_point is not None and resume.boundary is not Boundary.ASKED
        yield _counted("a wrong step counter", why, logged=known, proven=False)


def _counted(name: str, why: tuple[str, str], *, logged: bool, proven: bool) -> Fault:
    """A fault of a counter; `why` is what excludes it, and what would."""
    if logged:
        return Fault(name, True, why[0])
    return Fault(name, proven, "the steps logged twice agree" if proven else why[1])


def missing(assessment: Assessment) -> tuple[Missing, ...]:
    """What the log should hold and does not."""
    return tuple(_missing(assessment))


def _missing(assessment: Assessment) -> Iterator[Missing]:
    resume, replay = assessment.resume, assessment.replay
    rows = (*resume.before[-20:], *resume.after[:20])
    if len(replay.rows) < MIN_ROWS:
        yield Missing(
            "steps that were logged twice",
            "keep the log of the failed job (append, or a new file for each process); after a "
            "clean stop, run ckptctl loss --canary",
        )
    elif len(replay.rows) < GOOD_ROWS:
        yield Missing(
            f"{GOOD_ROWS} steps that were logged twice",
            "log every step for some 20 steps after each save and each resume",
        )
    if resume.interval > 1:
        yield Missing(
            f"every step (it has one row in {resume.interval} steps)",
            "log every step for some 20 steps after each save and each resume",
        )
    if max(replay.rounding, assessment.level.rounding) > FINE:
        yield Missing(f"{FINE_DIGITS} of the loss", "print it with .6g, or write JSON lines")
    if not any(row.lr for row in rows):
        yield Missing("the learning rate", "log it in every row")
    if not any(row.tokens or row.samples for row in rows):
        yield Missing("tokens or samples", "log the number consumed since the start of the run")
    if not any(row.grad_norm for row in rows):
        yield Missing("the gradient norm", "log it in every row")
    if not any(row.samples_digest for row in rows):
        yield Missing(
            "which samples were consumed", "log the samples_digest that ckptctl.train computes"
        )
