"""Decide which faults of a resume were found, which are excluded, and which stay open.

Every check of a fault is one `Check`: what was compared, or what it would take to compare.
`decide` alone turns checks into faults. A fault is excluded by a comparison that ran in this
log and would have shown it, never because no finding names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckptctl.findings import Finding
from ckptctl.formatting import counted
from ckptctl.loss.level import LossLevel, share
from ckptctl.loss.replay import (
    EXACT,
    FINE,
    FINE_DIGITS,
    GOOD_ROWS,
    Agreement,
    Origin,
    Replay,
)
from ckptctl.loss.resumes import LoggedResume
from ckptctl.loss.sensitivity import Sensitivity, measure_sensitivity

WEIGHTS = "other or older weights"
NOTHING_LOADED = "no state loaded"
OPTIMIZER = "optimizer state lost"
RANDOM = "random numbers lost, where they affect the loss"
DATA = "data repeated or skipped"
RATE = "learning rate of another step"
BATCH = "another global batch"
COUNTER = "a wrong step counter"
ROUNDED = "weights rounded to a lower precision"
AVERAGED = "averaged weights (EMA) lost"
NOT_FINITE = "a loss that is not finite"
_IN_PART = "part of the second moments lost, or a small part of one tensor damaged"

REQUIRED = (WEIGHTS, OPTIMIZER, RATE, COUNTER)
"""The verdict `continuous` requires that these are excluded."""

SMALLEST_JUMP = 0.05
"""The largest undetectable jump with which the level alone is an answer."""


class FaultState(StrEnum):
    """What the log shows of a fault."""

    FOUND = "found"
    EXCLUDED = "excluded"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a resume goes wrong, and what the log shows of it."""

    name: str
    """Its name."""
    state: FaultState
    """Found, excluded or open."""
    why: str
    """What shows or excludes it; for an open fault, why the log cannot."""

    @property
    def excluded(self) -> bool:
        """A check that ran in this log excludes it."""
        return self.state is FaultState.EXCLUDED


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one fault.

    `compared` is what was compared, and how small a fault it would have shown; empty where
    the check did not run or would not have shown the fault. `lacks` is why, or what it takes.
    `doubt` is what this fault would explain, though it is no proof of it: another check
    cannot exclude the fault then.
    """

    fault: str
    compared: str = ""
    lacks: str = ""
    doubt: str = ""
    findings: tuple[Finding, ...] = ()


def decide(checks: Iterable[Check]) -> tuple[Fault, ...]:
    """The faults that were checked: found ones, then excluded ones, then open ones."""
    by_fault: dict[str, list[Check]] = {}
    for check in checks:
        by_fault.setdefault(check.fault, []).append(check)
    faults = (_decided(name, of_fault) for name, of_fault in by_fault.items())
    order = list(FaultState)
    return tuple(sorted(faults, key=lambda fault: order.index(fault.state)))


def _decided(name: str, checks: Sequence[Check]) -> Fault:
    for check in checks:
        if check.findings:
            return Fault(name, FaultState.FOUND, check.findings[0].message)
    for check in checks:
        if check.doubt:
            return Fault(name, FaultState.OPEN, check.doubt)
    for check in checks:
        if check.compared:
            return Fault(name, FaultState.EXCLUDED, check.compared)
    return Fault(name, FaultState.OPEN, next((check.lacks for check in checks if check.lacks), ""))


_FOUND_BY = {
    "loss.higher": WEIGHTS,
    "loss.lower": WEIGHTS,
    "loss.drift": OPTIMIZER,
    "loss.differs": RANDOM,
    "loss.other-data": DATA,
    "loss.jump": NOTHING_LOADED,
    "loss.spike": NOTHING_LOADED,
    "loss.level-shift": NOTHING_LOADED,
}
"""The fault that a finding about the losses names."""


def loss_checks(
    resume: LoggedResume, replay: Replay, level: LossLevel, findings: Sequence[Finding]
) -> Iterator[Check]:
    """Yield the checks that compare losses; `findings` are what these comparisons found."""
    for finding in findings:
        if finding.code in _FOUND_BY:
            yield Check(_FOUND_BY[finding.code], findings=(finding,))
    shown = measure_sensitivity(resume, replay)
    rows, all_agree = _usable(replay), _usable(replay) or _differing(replay)
    twice = f"{counted(len(replay.rows), 'step')} logged twice agree"
    first = twice if replay.agrees else "the first step logged twice agrees"
    stale = f"{first}; a tensor that changes the loss by {share(shown.smallest_weights)} would show"
    weights = rows or _differing(replay) * (not replay.first_is_equal)
    same_weights = shown.excludes_weights and not weights
    yield _by_rows(WEIGHTS, same_weights, stale, weights or _weights_text(shown))
    jump = level.smallest_jump
    sees_jump = jump is not None and jump <= SMALLEST_JUMP
    seen = f"a jump above {share(jump)} would be detected" if jump is not None else ""
    yield Check(NOTHING_LOADED, seen if sees_jump else "", "too few or too noisy rows for a jump")
    yield _by_rows(NOTHING_LOADED, same_weights, stale, "")
    update, why = f"{twice}; {_limit_text(shown)}", all_agree or _update_text(shown)
    if shown.drifts or replay.agreement is Agreement.DRIFT:
        yield Check(OPTIMIZER, doubt=_drift_text(replay))
        yield Check(RATE, doubt=_drift_text(replay))
    yield _by_rows(OPTIMIZER, shown.excludes_update and not all_agree, update, why)
    yield _by_rows(RATE, shown.excludes_update and not all_agree, update, why)
    if replay.agreement is Agreement.DRIFT and replay.same_first_norm and replay.first_is_exact:
        same = "the first loss and its gradient norm agree, before any update"
        yield Check(RANDOM, same)
    coarse = f"differences of {share(max(replay.median, replay.rounding))} could hide it"
    yield _by_rows(RANDOM, shown.excludes_random and not weights, first, weights or coarse)
    data = shown.excludes_data and not all_agree
    batches = f"{twice}, and other batches differ by {share(replay.noise)}"
    digests = "detecting it takes a digest of the samples of each step (samples_digest)"
    yield _by_rows(DATA, data, batches, digests)
    yield _by_rows(BATCH, data, batches, "log tokens or samples")
    named = "name the step of the checkpoint (--resume-step or --resume-report)"
    yield _by_rows(COUNTER, data, f"{twice} under the same numbers", named)
    yield _by_rows(ROUNDED, shown.excludes_rounding and not all_agree, twice, all_agree or coarse)
    yield _averaged(replay)
    yield Check(
        _IN_PART,
        lacks="3 to 40 % of these do not affect the loss; a seal detects all (ckptctl seal STEP)",
    )


def _by_rows(fault: str, is_shown: bool, compared: str, lacks: str) -> Check:
    return Check(fault, compared if is_shown else "", lacks)


_TOO_FEW = (Agreement.NONE, Agreement.FEW)


def _usable(replay: Replay) -> str:
    """Why the steps logged twice are no evidence at all; empty where they are."""
    if replay.agreement in _TOO_FEW:
        return f"detecting it takes {GOOD_ROWS} steps logged twice, with {FINE_DIGITS}"
    if not replay.fine_enough:
        return f"the log rounds the loss by {share(replay.rounding)}"
    if not replay.varies:
        return "the loss hardly varies over the steps logged twice"
    if replay.origin not in (Origin.RETRAINED, Origin.ASSUMED):
        return "nothing shows that another attempt trained the steps logged twice"
    return ""


def _differing(replay: Replay) -> str:
    return "" if replay.agrees else "the steps logged twice differ, so they cannot exclude it"


def _lr_text(shown: Sensitivity) -> str:
    lr_share = shown.update.lr_share
    if shown.update.is_mean:
        return "the loss is a mean over the steps so far; "
    if lr_share is None:
        return "the learning rate relative to its peak is unknown; "
    return f"with a learning rate of {share(lr_share)} of its peak, " if lr_share < 1 else ""


def _limit_text(shown: Sensitivity) -> str:
    return (
        f"{_lr_text(shown)}one update moves the loss by about {share(shown.update.size)}, and "
        f"{share(shown.smallest_update)} would be detected"
    )


def _drift_text(replay: Replay) -> str:
    return (
        f"the first step is equal and later ones differ by up to {share(replay.most)}: another "
        "update, or noise that the first step happens to lack"
    )


def _update_text(shown: Sensitivity) -> str:
    return (
        f"{_lr_text(shown)}one update moves the loss by about {share(shown.update.size)}, less "
        f"than {_least(shown.smallest_update)} that these rows would show"
    )


def _weights_text(shown: Sensitivity) -> str:
    return (
        f"{_lr_text(shown)}a stale tensor changes the loss by about {share(shown.update.size)}, "
        f"less than {_least(shown.smallest_weights)} that these rows would show"
    )


def _least(size: float) -> str:
    return f"the {share(size)}" if math.isfinite(size) else "anything"


def _averaged(replay: Replay) -> Check:
    """Compare the loss of the averaged weights, where it was logged twice for a step."""
    pairs = [
        (row, row.before.ema_loss, row.after.ema_loss)
        for row in replay.rows
        if row.before.ema_loss is not None and row.after.ema_loss is not None
    ]
    for row, a, b in pairs:
        allowed = max(a.quantum, b.quantum, max(replay.most, EXACT) * abs(a.value))
        if abs(a.value - b.value) > allowed:
            finding = Finding(
                "loss.ema",
                str(row.after.position),
                f"the loss of the averaged weights at step {row.step:,} is {b.value:.6g}; before "
                f"the resume it was {a.value:.6g}",
                expected=f"{a.value:.6g}",
                found=f"{b.value:.6g}",
            )
            return Check(AVERAGED, findings=(finding,))
    compared = f"their loss agrees at {counted(len(pairs), 'step')} logged twice" if pairs else ""
    return Check(
        AVERAGED,
        compared,
        "the loss of the training does not depend on them; log their loss (ema_eval_loss)",
    )


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that the log does not hold, and how to log it."""

    what: str
    """What it is."""
    remedy: str
    """How to log it."""


def missing(resume: LoggedResume, replay: Replay, level: LossLevel) -> Iterator[Missing]:
    """Yield what the log should hold and does not."""
    rows = (*resume.before[-20:], *resume.after[:20])
    if replay.agreement in _TOO_FEW:
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
    if max(replay.rounding, level.rounding) > FINE:
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
