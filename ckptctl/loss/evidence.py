"""Which faults does a judgement exclude, which not, and what should the log hold?

A verdict without its limits invites to trust it too far. Each line here names a fault
as a person would, and rests on what was measured (docs/loss.md). How to log what is
missing is said in the same words everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptctl.loss.replay import FINE, GOOD_ROWS, MIN_ROWS
from ckptctl.loss.verdict import SMALLEST_JUMP, Judgement

_COUNTERS = {"loss.restarted", "loss.step", "loss.gap"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a resume goes wrong; `why` says what excludes it, or would."""

    name: str
    excluded: bool
    why: str


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that the log does not hold; `remedy` says how to log it."""

    what: str
    remedy: str


def faults(judgement: Judgement) -> tuple[Fault, ...]:
    """The faults that are excluded, then those that are not. A fault that was found is neither."""
    every = sorted(_faults(judgement), key=lambda fault: not fault.excluded)
    return tuple(every)


def _faults(judgement: Judgement) -> Iterator[Fault]:
    replay, level = judgement.replay, judgement.level
    codes = {finding.code for finding in judgement.findings}
    n = len(replay.rows)
    fine = replay.fine_enough
    first = bool(n) and replay.first_is_equal and fine
    proven = replay.agrees and fine and n >= GOOD_ROWS
    again = f"{n} steps logged twice agree"
    jump = level.smallest_jump
    seen = f"a jump above {100 * jump:.2g} % would be seen" if jump is not None else ""
    need = f"{GOOD_ROWS} steps logged twice, with four decimals, would show it"
    if n >= GOOD_ROWS and not replay.agrees:
        need = "the steps logged twice differ already, so they cannot tell"

    if first:
        yield Fault("other weights, or older ones", True, "the first step logged twice agrees")
    elif not n:
        yield Fault("other weights, or older ones", False, need)
    if (
        jump is not None
        and jump <= SMALLEST_JUMP
        and not codes & {"loss.jump", "loss.spike", "loss.raised"}
    ):
        yield Fault("nothing loaded at all", True, seen)
    if proven:
        yield Fault("optimizer state lost", True, again)
    elif "loss.drift" not in codes:
        yield Fault("optimizer state lost", False, need)
    if proven or (first and replay.agrees):
        yield Fault("random numbers lost, where they matter", True, again)
    elif "loss.differs" not in codes:
        yield Fault("random numbers lost", False, need)
    yield from _data(judgement, codes, proven=proven)
    yield from _schedule(judgement, codes, proven=proven)
    yield Fault(
        "part of the second moments lost, or a small part of one tensor damaged",
        False,
        "3 to 40 % of these show in no loss; only a seal does: ckptctl seal STEP",
    )


def _data(judgement: Judgement, codes: set[str], *, proven: bool) -> Iterator[Fault]:
    resume = judgement.resume
    if codes & {"loss.data", "loss.other-samples", "loss.other-data"}:
        return
    digests = [row for row in resume.after if row.samples_digest]
    old = {row.step for row in resume.overwritten if row.samples_digest}
    if any(row.step in old for row in digests):
        yield Fault("data repeated or skipped", True, "the digests of the samples agree")
    elif proven:
        yield Fault("data repeated or skipped", True, "steps over other batches would differ")
    else:
        why = "digests of the samples of each step (samples_digest) would show it"
        yield Fault("data repeated or skipped", False, why)


def _schedule(judgement: Judgement, codes: set[str], *, proven: bool) -> Iterator[Fault]:
    resume = judgement.resume
    before = (*resume.before[-20:], *resume.overwritten[:20])
    sides = (before, resume.after[:20])
    if not codes & {"loss.lr", "loss.lr-lower"}:
        logged = all(any(row.lr for row in side) for side in sides)
        said = ("it was logged and goes on", "log the learning rate")
        yield _counted("learning rate at the wrong place", said, logged=logged, proven=proven)
    if not codes & {"loss.tokens", "loss.batch"}:
        logged = all(any(row.tokens or row.samples for row in side) for side in sides)
        said = ("tokens or samples go on", "log tokens or samples")
        yield _counted("another global batch", said, logged=logged, proven=proven)
    if not codes & _COUNTERS:
        said = (
            "the first step follows that of the checkpoint",
            "name the step of the checkpoint: --resume-step, or --resume-report",
        )
        known = resume.boundary is not None
        yield _counted("a wrong step counter", said, logged=known, proven=False)


def _counted(name: str, said: tuple[str, str], *, logged: bool, proven: bool) -> Fault:
    if logged:
        return Fault(name, True, said[0])
    return Fault(name, proven, "the steps logged twice agree" if proven else said[1])


def missing(judgement: Judgement) -> tuple[Missing, ...]:
    """What the log does not hold and should."""
    return tuple(_missing(judgement))


def _missing(judgement: Judgement) -> Iterator[Missing]:
    resume, replay = judgement.resume, judgement.replay
    rows = (*resume.before[-20:], *resume.after[:20])
    if len(replay.rows) < MIN_ROWS:
        yield Missing(
            "steps that were logged twice",
            "keep the log of the job that died (append, or a new file for each process); after a "
            "clean stop: ckptctl loss --canary",
        )
    elif len(replay.rows) < GOOD_ROWS:
        yield Missing(
            f"{GOOD_ROWS} steps that were logged twice",
            "log every step for some 20 steps after each save and each resume",
        )
    if resume.interval > 1:
        yield Missing(
            f"every step (it holds one in {resume.interval})",
            "log every step for some 20 steps after each save and each resume",
        )
    hidden = max(replay.hidden, judgement.level.rounding)
    if hidden > FINE:
        yield Missing("four decimals of the loss", "print it with .4f or finer, or write JSONL")
    if not any(row.lr for row in rows):
        yield Missing("the learning rate", "log it in every row")
    if not any(row.tokens or row.samples for row in rows):
        yield Missing("tokens or samples", "log how many were consumed since the run began")
    if not any(row.grad_norm for row in rows):
        yield Missing("the gradient norm", "log it in every row")
    if not any(row.samples_digest for row in rows):
        yield Missing(
            "which samples were consumed", "log samples_digest, as ckptctl.train makes it"
        )
