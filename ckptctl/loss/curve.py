"""Which points does a picture of a resume show?

The terminal and the files draw the same: the rows around the resume, the steps that
were logged twice in both colours, the level before, and the line above which a rise
would count. How it is drawn is the question of `drawing` and of the command line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckptctl.loss.noise import finite
from ckptctl.loss.rows import Row
from ckptctl.loss.verdict import Judgement

N_BEFORE = 60
N_AFTER = 40

Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points as (step, loss), in the order of steps.

    `first_step` is the first after the resume. `base` is the level before, `limit` the
    loss that a rise has to pass; None where there are too few rows.
    """

    before: tuple[Point, ...]
    overwritten: tuple[Point, ...]
    after: tuple[Point, ...]
    first_step: int
    base: float | None
    limit: float | None

    @property
    def points(self) -> tuple[Point, ...]:
        """All points."""
        return (*self.before, *self.overwritten, *self.after)

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step."""
        steps = [step for step, _ in self.points]
        return min(steps), max(steps)

    @property
    def losses(self) -> tuple[float, float]:
        """The lowest and the highest loss that are drawn, a little apart even where all are equal.

        A few losses far away from all others would press these into a line: they lie beyond.
        """
        losses = sorted(loss for _, loss in self.points)
        few = len(losses) // 40
        low, high = losses[few], losses[-1 - few]
        low = max(losses[0], low - (high - low))
        high = min(losses[-1], 2 * high - low)
        for each in (self.base, self.limit):
            if each is not None:
                low, high = min(low, each), max(high, each)
        room = 0.05 * (high - low) or 0.01 * abs(high) or 0.01
        return low - room, high + room


def curve_of(judgement: Judgement) -> Curve | None:
    """The picture of a resume; None where no row holds a loss that is a number."""
    resume, level = judgement.resume, judgement.level
    curve = Curve(
        before=_points(resume.before)[-N_BEFORE:],
        overwritten=_points(resume.overwritten)[:N_AFTER],
        after=_points(resume.after)[:N_AFTER],
        first_step=resume.first_step,
        base=level.base if level.shifts else None,
        limit=_limit(judgement),
    )
    return curve if curve.points else None


def _limit(judgement: Judgement) -> float | None:
    level = judgement.level
    if not level.shifts or level.base is None or level.base <= 0:
        return None
    return level.base * math.exp(min(shift.threshold for shift in level.shifts))


def _points(rows: Sequence[Row]) -> tuple[Point, ...]:
    return tuple((row.step, number.value) for row, number in finite(rows))
