"""Estimate what a fault would do to the rows of this log, and what equal rows exclude.

How far a lost optimizer or another learning rate moves the loss depends on the size of one
update: at 1 % of the peak learning rate it is about 0.01 % of the loss, less than the
noise of some logs. The size follows from the log: the loss has fallen by so much for so
much learning rate, batches differ by so much, and the gradient has some norm. A fault is
excluded where rows as close as these would be improbable with it: an exactly equal row
excludes every change that is large against its last digit.

The factors are measured on small trainings with known faults (`bench/loss_rules.py
--late`): they are the smallest effects among these, not the usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median

from ckptctl.logs.rows import Number, Row
from ckptctl.loss.level import MIN_BEFORE, N_NOISE, finite, measure_for, noise_of, rounding_of
from ckptctl.loss.replay import EXACT, Replay
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
_OF_RECENT_FALL, _SURE = 0.3, 5.0
# With these the faults of 84 trainings moved the loss by at least 1.2 sizes, typically by 5.
_OF_WHOLE_FALL = 0.4
_OF_NOISE = 0.05
_LEAST_BY_NOISE, _MOST_BY_NOISE = 2.0, 3.0
_ADAPTIVE, _OF_NORM = 0.5, 2.2

# A row as close as this, or closer, has at most this probability with the fault.
_IMPROBABLE = 0.02
_LEAST_CHANCE = 1e-9
_NORMS = 2.0  # gradient norms change by so much more than losses; in GANs at 1 % by no more
_UPDATE = 3.0  # a lost optimizer, in sizes of an update
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
        by_fall = max(2 * _UNKNOWN_SHARE * fall, _OF_RECENT_FALL * recently)
    least_share = min(1.0, max(_UNKNOWN_SHARE, (now or 0.0) / _HIGHEST_RATE))
    of_peak = least_share if share is None else share
    size = max(by_fall, _PER_PEAK_SHARE * of_peak)
    # Updates also differ by the noise of the gradient, which the noise of the batches shows.
    with_noise = math.sqrt(size * _OF_NOISE * noise * of_peak)
    size = min(max(with_noise, size / _LEAST_BY_NOISE), size * _MOST_BY_NOISE)
    # An adaptive optimizer moves the loss by more than the learning rate times the gradient
    # norm; with another one the loss falls by far less than that.
    by_norm = (now or 0.0) * _relative_norm(recent)
    if by_fall > _ADAPTIVE * by_norm:
        size = max(size, _OF_NORM * by_norm)
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
        return _OF_WHOLE_FALL * by_whole
    parts = [[losses[i] for i in part] for part in (early, late)]
    squares = (noise_of(part, 0.0) ** 2 * _MEDIAN_LOSS / len(part) for part in parts)
    fallen = median(parts[0]) - median(parts[1]) - math.sqrt(sum(squares))
    used = fmean(consumed[i] for i in late) - fmean(consumed[i] for i in early)
    return max(fallen / used, _OF_WHOLE_FALL * by_whole)


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

    Each `smallest_…` is the smallest effect that these rows exclude, in the unit of the
    effect that it is compared with; infinite where they exclude none.
    """

    update: UpdateSize
    """How far one update moves the loss."""
    noise: float
    """The standard deviation from one batch to the next, relative."""
    smallest_update: float
    """The smallest size of an update with which a lost optimizer state would be seen."""
    smallest_weights: float
    """The smallest size of an update with which a stale tensor would be seen."""
    smallest_random: float
    """The smallest noise between batches with which other random numbers would be seen."""
    smallest_data: float
    """The smallest noise between batches with which other batches would be seen."""
    smallest_rounding: float
    """The smallest change of every loss that would be seen."""
    drifts: bool
    """The first row is equal and later ones are not: noise would be in the first row, too."""

    @property
    def excludes_update(self) -> bool:
        """Whether another optimizer state or learning rate would have been seen."""
        return not self.drifts and self.smallest_update <= self.update.size

    @property
    def excludes_weights(self) -> bool:
        """Whether a stale tensor would have been seen."""
        return self.smallest_weights <= self.update.size

    @property
    def excludes_random(self) -> bool:
        """Whether other random numbers would have been seen, where they affect the loss."""
        return self.smallest_random <= self.noise

    @property
    def excludes_data(self) -> bool:
        """Whether other batches would have been seen."""
        return self.smallest_data <= self.noise

    @property
    def excludes_rounding(self) -> bool:
        """Whether weights rounded to a lower precision would have been seen."""
        return self.smallest_rounding <= _ROUNDED


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
    usual = median if len(sizes) >= _FOR_MEDIAN else max
    by_noise = max(usual(sizes), replay.rounding) if sizes else math.inf
    return Sensitivity(
        update=update,
        noise=replay.noise,
        smallest_update=smallest(_of_update if exact else _of_update_in_noise),
        smallest_weights=smallest(lambda _: _WEIGHTS) if exact else by_noise / _OTHER_WEIGHTS_NOISE,
        smallest_random=(smallest(lambda _: 1.0) if exact else by_noise / _OTHER_WEIGHTS_NOISE)
        / _RANDOM,
        smallest_data=smallest(lambda _: 0.3),
        smallest_rounding=smallest(lambda _: 1.0) if exact else math.inf,
        drifts=drifts,
    )


def _of_update(n: float) -> float:
    """What a lost optimizer changes after `n` updates, in sizes of an update."""
    return _UPDATE if n >= 2 else 0.0


def _of_update_in_noise(n: float) -> float:
    return 0.5 if n >= 2 else 0.0


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
