"""Decide which faults of a resume were found, which are excluded, and which stay open.

Every check of a fault is one `FaultCheck`: what was compared, or what it would take to compare.
`decide` alone turns checks into faults. A fault is excluded by a comparison that ran in this
log and would have shown it, never because no finding names it.

How far a lost optimizer or another learning rate moves the loss depends on the size of one
update: at 1 % of the peak learning rate it is about 0.01 % of the loss, less than the
noise of some logs. The size follows from the log: the loss has fallen by so much for so
much learning rate, batches differ by so much, and the gradient has some norm. A fault is
excluded where rows as close as these would be improbable with it. The factors are measured on
small trainings with known faults (`bench/loss_rules.py --late`): they are the smallest effects
among these, not the usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from statistics import fmean, median

from ckptctl.findings import Finding
from ckptctl.formatting import counted
from ckptctl.logs.rows import Number, Row
from ckptctl.loss.level import (
    MIN_BEFORE,
    N_NOISE,
    LossLevel,
    finite,
    measure_for,
    noise_of,
    rounding_of,
    share,
)
from ckptctl.loss.replay import EXACT, FINE, FINE_DIGITS, GOOD_ROWS, Agreement, Replay, RowOrigin
from ckptctl.loss.resumes import LoggedResume

# A loss that does not fall still shows how far the learning rate is below its peak. Among
# generative adversarial networks an update moved it by 2e-4 of the peak share, or more.
_PER_PEAK_SHARE = 2e-4
# A learning rate that is not logged may have fallen this far. Where the log does not begin
# with the run, its peak is no higher than this.
_UNKNOWN_SHARE, _HIGHEST_RATE = 0.01, 1e-2
_N_FIRST = 5  # rows
_AT_START = 0.1  # of the steps before the resume
_MEDIAN_LOSS = 1.57
_RECENT_FALL_SHARE, _SURE = 0.3, 5.0
# With these the faults of 84 trainings moved the loss by at least 1.2 sizes, typically by 5.
_WHOLE_FALL_SHARE = 0.4
_NOISE_SHARE = 0.05
_LEAST_BY_NOISE, _MOST_BY_NOISE = 2.0, 3.0
_ADAPTIVE, _NORM_FACTOR = 0.5, 2.2

# A row as close as this, or closer, has at most this probability with the fault.
_IMPROBABLE = 0.02
_LEAST_CHANCE = 1e-9
_NORMS = 2.0  # gradient norms change by so much more than losses; in GANs at 1 % by no more
_UPDATE = 3.0  # a lost optimizer after two updates, in sizes of an update
_UPDATE_IN_NOISE = 0.5
_WEIGHTS = 3.5  # a stale tensor
_OTHER_WEIGHTS_NOISE = 0.12
_RANDOM = 0.02  # of the noise between batches
_ROUNDED = 1e-5  # what weights rounded to bfloat16 change at least
_DRIFT_ROWS = 20
_DRIFT_UNITS, _LEAST_DRIFT = 4.0, 2e-5
_COARSE_UNIT, _MAX_UNEQUAL = 0.3, 0.1
_FOR_MEDIAN = 8  # rows

# Differences of neighbours of a mean over all steps so far shrink with their number.
_MEAN_ROWS, _MEAN_SHRINKS, _MEAN_TURNS = 48, 2.5, -0.3


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """How far one update moves the loss, relative to it."""

    size: float
    """A lower estimate."""
    lr_share: float | None
    """The learning rate before the resume relative to its peak; null where it is unknown."""
    is_mean: bool
    """The logged loss is a mean over the steps so far, which hardly reacts."""


def measure_update(resume: LoggedResume) -> UpdateSize:
    """Estimate the size of an update at the resume from the rows before it."""
    rows = finite(resume.history or resume.before)
    recent = finite(resume.before)[-N_NOISE:]
    if not rows or not recent:
        return UpdateSize(_PER_PEAK_SHARE * _UNKNOWN_SHARE, None, is_mean=False)
    measure = measure_for([number.value for _, number in (*rows, *recent)])
    values = [measure(number.value) for _, number in recent]
    noise = noise_of(values, rounding_of([number for _, number in recent]))
    rates = [(row, row.lr.value if row.lr else None) for row, _ in rows]
    n_steps = max(1, rows[-1][0].step - rows[0][0].step)
    share = _peak_share(resume, rates, n_steps)
    now = rates[-1][1]
    losses = [measure(number.value) for _, number in rows]
    steps = [row.step for row, _ in rows]
    logged = [rate or 0.0 for _, rate in rates]
    if now is not None and sum(logged) > 0:
        by_fall = _fall(losses, steps, logged, noise) * now
    else:
        # The mean rate of a schedule is about half of its peak. A fall of the last rows shows
        # that the rate has not ended.
        last_steps = [row.step for row, _ in recent]
        n = sum(step > last_steps[-1] - N_NOISE for step in last_steps)
        recently = _recent_fall(last_steps[-n:], values[-n:], noise)
        fall = _fall(losses, steps, [1.0] * len(rows), noise)
        by_fall = max(2 * _UNKNOWN_SHARE * fall, _RECENT_FALL_SHARE * recently)
    least_share = min(1.0, max(_UNKNOWN_SHARE, (now or 0.0) / _HIGHEST_RATE))
    of_peak = least_share if share is None else share
    size = max(by_fall, _PER_PEAK_SHARE * of_peak)
    # Updates also differ by the noise of the gradient, which the noise of the batches shows.
    with_noise = math.sqrt(size * _NOISE_SHARE * noise * of_peak)
    size = min(max(with_noise, size / _LEAST_BY_NOISE), size * _MOST_BY_NOISE)
    # An adaptive optimizer moves the loss by more than the learning rate times the gradient
    # norm; with another one the loss falls by far less than that.
    by_norm = (now or 0.0) * _relative_norm(recent)
    if by_fall > _ADAPTIVE * by_norm:
        size = max(size, _NORM_FACTOR * by_norm)
    is_mean = _is_mean([number.value for _, number in finite(resume.before)], resume)
    return UpdateSize(size / max(1, resume.first_step) if is_mean else size, share, is_mean)


def _relative_norm(rows: Sequence[tuple[Row, Number]]) -> float:
    """The gradient norm relative to the loss; 0 where it is not logged."""
    norms = [row.grad_norm.value for row, _ in rows if row.grad_norm]
    norms = [norm for norm in norms if math.isfinite(norm)]
    usual = median(abs(number.value) for _, number in rows)
    return median(norms) / usual if norms and usual else 0.0


def _fall(
    losses: Sequence[float], steps: Sequence[int], rates: Sequence[float], noise: float
) -> float:
    """How far the loss falls for each unit of the learning rate, as far as this exceeds noise.

    The first updates of a run move the loss more than later ones. The fall from the second to
    the last quarter of the learning rate that was consumed counts, and a part of the whole,
    which is known better where batches differ much.
    """
    gaps = [later - step for step, later in pairwise(steps)]
    consumed = [0.0, *accumulate(rate * gap for rate, gap in zip(rates, gaps, strict=False))]
    whole = consumed[-1]
    if whole <= 0:
        return 0.0
    last = losses[-MIN_BEFORE:]
    error = noise * math.sqrt(_MEDIAN_LOSS * (1 / _N_FIRST + 1 / len(last)))
    by_whole = max(0.0, median(losses[:_N_FIRST]) - median(last) - error) / whole
    early = [i for i, used in enumerate(consumed) if whole / 4 <= used < whole / 2]
    late = [i for i, used in enumerate(consumed) if used >= whole * 3 / 4]
    if min(len(early), len(late)) < _N_FIRST:
        return _WHOLE_FALL_SHARE * by_whole
    parts = [[losses[i] for i in part] for part in (early, late)]
    squares = (noise_of(part, 0.0) ** 2 * _MEDIAN_LOSS / len(part) for part in parts)
    fallen = median(parts[0]) - median(parts[1]) - math.sqrt(sum(squares))
    used = fmean(consumed[i] for i in late) - fmean(consumed[i] for i in early)
    return max(fallen / used, _WHOLE_FALL_SHARE * by_whole)


def _peak_share(
    resume: LoggedResume, rates: Sequence[tuple[object, float | None]], n_steps: int
) -> float | None:
    known = [rate for _, rate in rates if rate is not None]
    begins = resume.first_step - n_steps
    if not known or max(known) <= 0 or begins > max(resume.interval, _AT_START * n_steps) + 1:
        return None
    return known[-1] / max(known)


def _recent_fall(steps: Sequence[int], values: Sequence[float], noise: float) -> float:
    """How far the loss falls in a step of the last rows, as far as this exceeds their noise."""
    n = len(values) // 3
    if n < _N_FIRST:
        return 0.0
    fallen = median(values[:n]) - median(values[-n:])
    fallen -= _SURE * noise * math.sqrt(2 * _MEDIAN_LOSS / n)
    return max(0.0, fallen) / max(1, median(steps[-n:]) - median(steps[:n]))


def _is_mean(losses: Sequence[float], resume: LoggedResume) -> bool:
    """Whether a loss is a mean since the start, by the way in which its changes shrink."""
    n = len(losses)
    begins = resume.before[0].step <= 1 + resume.interval
    if n < _MEAN_ROWS or not begins:
        return False
    changes = [later - earlier for earlier, later in pairwise(losses)]
    early, late = changes[n // 8 : n // 4], changes[-n // 4 :]
    about = fmean(late)
    turns = [change - about for change in late]
    square = sum(turn * turn for turn in turns)
    if not square:
        return False
    correlation = sum(a * b for a, b in pairwise(turns)) / square
    spread = median(abs(change - median(early)) for change in early)
    now = median(abs(change - median(late)) for change in late)
    return spread > _MEAN_SHRINKS * now > 0 and correlation > _MEAN_TURNS


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What the steps that were logged twice would show.

    `update` is how far one update moves the loss. Each `smallest_…` is the smallest effect that
    these rows exclude, infinite where they exclude none: the size of an update with which a lost
    optimizer state, or a stale tensor, would be seen; the relative noise between batches with
    which other random numbers, or other batches, would be; the smallest change of every loss.
    `drifts`: the first row is equal and later ones are not, where noise would be in the first row
    too.
    """

    update: UpdateSize
    smallest_update: float
    smallest_weights: float
    smallest_random: float
    smallest_data: float
    smallest_rounding: float
    drifts: bool


Effect = Callable[[float], float]


def measure_sensitivity(resume: LoggedResume, replay: Replay) -> Sensitivity:
    """Measure what the steps logged twice would show of each fault."""
    update = measure_update(resume)
    interval = max(1, resume.interval)
    averaged = math.sqrt(min(interval, 10))
    unit = max(EXACT, 2 * replay.rounding)
    sizes = [abs(row.difference) for row in replay.rows]
    n_unequal = sum(size > max(EXACT, replay.rounding) for size in sizes)
    # Tiny noise turns the last digit of few rows; that of a smaller loss is larger beside it.
    exact = max(sizes, default=0.0) <= 1.3 * unit and n_unequal <= _MAX_UNEQUAL * len(sizes)
    # The number of updates between the checkpoint and the middle of a row.
    updates: list[float] = [
        row.step - resume.first_step + (interval - 1) / 2 if interval > 1 else i
        for i, row in enumerate(replay.rows)
    ]
    changes = [(size, unit, n, 1.0 / averaged) for size, n in zip(sizes, updates, strict=True)]
    if exact:
        changes += _norms(replay, updates)

    def smallest(effect: Effect) -> float:
        rows = [(size, digit, factor * effect(n)) for size, digit, n, factor in changes]
        return _smallest_excluded([row for row in rows if row[2] > 0])

    drifts = False
    if interval == 1 and not exact and replay.rows:
        rest = max(sizes[1:_DRIFT_ROWS], default=0.0)
        # Where the last digit hides most noise, it hides that of a right resume in most rows.
        is_coarse = unit > _COARSE_UNIT * update.size and n_unequal > _MAX_UNEQUAL * len(sizes)
        drifts = sizes[0] <= unit and (is_coarse or rest > max(_DRIFT_UNITS * unit, _LEAST_DRIFT))
    update_effect = _UPDATE if exact else _UPDATE_IN_NOISE
    usual = median if len(sizes) >= _FOR_MEDIAN else max
    by_noise = max(usual(sizes), replay.rounding) if sizes else math.inf
    return Sensitivity(
        update=update,
        smallest_update=smallest(lambda n: update_effect if n >= 2 else 0.0),
        smallest_weights=smallest(lambda _: _WEIGHTS) if exact else by_noise / _OTHER_WEIGHTS_NOISE,
        smallest_random=(smallest(lambda _: 1.0) if exact else by_noise / _OTHER_WEIGHTS_NOISE)
        / _RANDOM,
        smallest_data=smallest(lambda _: 0.3),
        smallest_rounding=smallest(lambda _: 1.0) if exact else math.inf,
        drifts=drifts,
    )


def _norms(replay: Replay, updates: Sequence[float]) -> list[tuple[float, float, float, float]]:
    """The changes of the gradient norms, as evidence beside the losses, where they are equal."""
    found = []
    for row, n in zip(replay.rows, updates, strict=True):
        a, b = row.before.grad_norm, row.after.grad_norm
        if a is not None and b is not None and a.value > 0 and math.isfinite(a.value + b.value):
            digit = max(EXACT, a.quantum / a.value)
            found.append((abs(b.value / a.value - 1), digit, n, _NORMS))
    return found if all(size <= digit for size, digit, _, _ in found) else []


def _smallest_excluded(rows: Sequence[tuple[float, float, float]]) -> float:
    """The smallest factor of the effects with which rows as close as these are improbable.

    A row is its difference, one unit of its last digit, and the effect at the factor 1.
    """

    def chance(factor: float) -> float:
        return math.prod(
            max(_LEAST_CHANCE, math.erf((size + digit / 2) / (math.sqrt(2) * factor * effect)))
            for size, digit, effect in rows
        )

    low, high = 1e-9, 1e3
    if chance(high) > _IMPROBABLE:
        return math.inf
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if chance(middle) <= _IMPROBABLE else (middle, high)
    return high


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
class FaultCheck:
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


def decide(checks: Iterable[FaultCheck]) -> tuple[Fault, ...]:
    """The faults that were checked: found ones, then excluded ones, then open ones."""
    by_fault: dict[str, list[FaultCheck]] = {}
    for check in checks:
        by_fault.setdefault(check.fault, []).append(check)
    faults = (_decided(name, of_fault) for name, of_fault in by_fault.items())
    order = list(FaultState)
    return tuple(sorted(faults, key=lambda fault: order.index(fault.state)))


def _decided(name: str, checks: Sequence[FaultCheck]) -> Fault:
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
) -> Iterator[FaultCheck]:
    """Yield the checks that compare losses; `findings` are what these comparisons found."""
    for finding in findings:
        if finding.code in _FOUND_BY:
            yield FaultCheck(_FOUND_BY[finding.code], findings=(finding,))
    shown = measure_sensitivity(resume, replay)
    rows, all_agree = _usable(replay), _usable(replay) or _differing(replay)
    twice = f"{counted(len(replay.rows), 'step')} logged twice agree"
    first = twice if replay.agrees else "the first step logged twice agrees"
    stale = f"{first}; a tensor that changes the loss by {share(shown.smallest_weights)} would show"
    weights = rows or _differing(replay) * (not replay.first_is_equal)
    size = shown.update.size
    same_weights = shown.smallest_weights <= size and not weights
    unseen = (
        f"{_lr_text(shown)}a stale tensor changes the loss by about {share(size)}, "
        f"less than {_least(shown.smallest_weights)}"
    )
    yield _row_check(WEIGHTS, same_weights, stale, weights or unseen)
    jump = level.smallest_jump
    sees_jump = jump is not None and jump <= SMALLEST_JUMP
    seen = f"a jump above {share(jump)} would be detected" if jump is not None else ""
    yield FaultCheck(
        NOTHING_LOADED, seen if sees_jump else "", "too few or too noisy rows for a jump"
    )
    yield _row_check(NOTHING_LOADED, same_weights, stale, "")
    moves = f"{_lr_text(shown)}one update moves the loss by about {share(size)}"
    update = f"{twice}; {moves}, and {share(shown.smallest_update)} would be detected"
    why = all_agree or f"{moves}, less than {_least(shown.smallest_update)}"
    if shown.drifts or replay.agreement is Agreement.DRIFT:
        yield FaultCheck(OPTIMIZER, doubt=_drift_text(replay))
        yield FaultCheck(RATE, doubt=_drift_text(replay))
    same_update = not (shown.drifts or all_agree) and shown.smallest_update <= size
    yield _row_check(OPTIMIZER, same_update, update, why)
    yield _row_check(RATE, same_update, update, why)
    if replay.agreement is Agreement.DRIFT and replay.same_first_norm and replay.first_is_exact:
        same = "the first loss and its gradient norm agree, before any update"
        yield FaultCheck(RANDOM, same)
    coarse = f"differences of {share(max(replay.median, replay.rounding))} could hide it"
    same_random = shown.smallest_random <= replay.noise and not weights
    yield _row_check(RANDOM, same_random, first, weights or coarse)
    data = shown.smallest_data <= replay.noise and not all_agree
    batches = f"{twice}, and other batches differ by {share(replay.noise)}"
    digests = "detecting it takes a digest of the samples of each step (samples_digest)"
    yield _row_check(DATA, data, batches, digests)
    yield _row_check(BATCH, data, batches, "log tokens or samples")
    named = "name the step of the checkpoint (--resume-step or --resume-report)"
    yield _row_check(COUNTER, data, f"{twice} under the same numbers", named)
    same_digits = shown.smallest_rounding <= _ROUNDED and not all_agree
    yield _row_check(ROUNDED, same_digits, twice, all_agree or coarse)
    yield _averaged(replay)
    yield FaultCheck(
        _IN_PART,
        lacks="3 to 40 % of these do not affect the loss; a seal detects all (ckptctl seal STEP)",
    )


def _row_check(fault: str, is_shown: bool, compared: str, lacks: str) -> FaultCheck:
    return FaultCheck(fault, compared if is_shown else "", lacks)


_TOO_FEW = (Agreement.NONE, Agreement.FEW)


def _usable(replay: Replay) -> str:
    """Why the steps logged twice are no evidence at all; empty where they are."""
    if replay.agreement in _TOO_FEW:
        return f"detecting it takes {GOOD_ROWS} steps logged twice, with {FINE_DIGITS}"
    if not replay.fine_enough:
        return f"the log rounds the loss by {share(replay.rounding)}"
    if not replay.varies:
        return "the loss hardly varies over the steps logged twice"
    if replay.origin not in (RowOrigin.RETRAINED, RowOrigin.ASSUMED):
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


def _drift_text(replay: Replay) -> str:
    return (
        f"the first step is equal and later ones differ by up to {share(replay.most)}: another "
        "update, or noise that the first step happens to lack"
    )


def _least(size: float) -> str:
    least = f"the {share(size)}" if math.isfinite(size) else "anything"
    return f"{least} that these rows would show"


def _averaged(replay: Replay) -> FaultCheck:
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
            return FaultCheck(AVERAGED, findings=(finding,))
    compared = f"their loss agrees at {counted(len(pairs), 'step')} logged twice" if pairs else ""
    return FaultCheck(
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
