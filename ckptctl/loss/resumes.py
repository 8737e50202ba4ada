"""Find the resumes in a log: the rows before, the rows trained again, the rows after.

A resume is compared with the segment that trained up to its checkpoint. A job that died
twice over the same steps is thus not compared with the attempt that was bad already.
Also counts the work that a resume makes the job do again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptctl.loss.rows import Marker, Number, Place, Row
from ckptctl.loss.segments import Border, Leg, Split, log_interval

N_BEFORE = 1_000
"""Rows before a resume that are looked at."""
N_AFTER = 1_000
"""Rows after a resume that are looked at."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The checkpoint that a job says it resumed from.

    `step` is the last step that the checkpoint holds, `tokens` and `samples` the counts at
    that step where they are known, `source` who says so: `report`, `log` or `asked`. `at_s`
    is when the job resumed, in seconds since 1970.
    """

    step: int
    source: str
    tokens: int | None = None
    samples: int | None = None
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """One resume, as rows.

    `number` counts the resumes of the log from 1. `before` are the rows of the steps
    below the first step after it, `overwritten` those of the same leg that the resumed
    job went through again, `after` what the resumed job logged. `restarted` says that
    the new leg begins no later than everything before it.
    """

    number: int
    before: tuple[Row, ...]
    overwritten: tuple[Row, ...]
    after: tuple[Row, ...]
    border: Border
    boundary: Boundary | None
    marker: Marker | None = None
    restarted: bool = False

    @property
    def first_step(self) -> int:
        """The first step that the resumed job logged."""
        return self.after[0].step

    @property
    def place(self) -> Place:
        """Where the resumed job's first row stands."""
        return self.after[0].place

    @property
    def interval(self) -> int:
        """Steps from one row to the next before the resume; after it, where that is all."""
        return log_interval(self.before[-100:] if len(self.before) > 1 else self.after)


def resumes(split: Split) -> tuple[Resume, ...]:
    """Every resume in the legs that were kept, oldest first."""
    n_lost = split.n_legs - len(split.legs)
    return tuple(_resume(split.legs, i, n_lost + i, None) for i in range(1, len(split.legs)))


def resume_numbered(split: Split, number: int, boundary: Boundary | None) -> Resume | None:
    """The resume with this number; None where there is none, or it was not kept.

    It is held against the boundary where the caller named its step, where the boundary
    fits it, or where it is the last one: a report of another resume says nothing of it.
    """
    n_lost = split.n_legs - len(split.legs)
    i = number - n_lost
    if not 1 <= i < len(split.legs):
        return None
    is_its_own = boundary is not None and (
        boundary.source == "asked" or i == len(split.legs) - 1 or _fits(split.legs[i], boundary)
    )
    return _resume(split.legs, i, number, boundary if is_its_own else None)


def _fits(leg: Leg, boundary: Boundary) -> bool:
    """Whether a leg begins just behind the checkpoint."""
    interval = log_interval(leg.rows[:100])
    return boundary.step <= leg.first_step <= boundary.step + max(1, interval)


def resume_at(split: Split, boundary: Boundary, *, part: bool = True) -> Resume | None:
    """The last resume that fits a boundary; None where nothing was logged after it.

    A leg that begins just behind the step comes first. A log that one process after the
    other went on writing without a trace is parted at the step, if `part` allows it:
    what the job that died logged behind its checkpoint looks just like that, so a report
    parts a log only where the clock of the rows says that the resume lies between them.
    Where an earlier leg has reached the step, the checkpoint may be its own: the last leg
    is meant, and its counter is wrong. So it is failing both.
    """
    legs, n_lost = split.legs, split.n_legs - len(split.legs)
    for i in reversed(range(1, len(legs))):
        if _fits(legs[i], boundary):
            return _resume(legs, i, n_lost + i, boundary)
    parted = _parted(legs, boundary, n_lost) if part else None
    last = _resume(legs, len(legs) - 1, n_lost + len(legs) - 1, boundary) if legs[1:] else None
    if boundary.source == "report" or any(one.last_step >= boundary.step for one in legs[:-1]):
        return last or parted
    return parted or last


def canary_of(known: Split, canary: Split) -> Resume | None:
    """A resume of its own, over steps that another log holds: its last leg against that log.

    None where the other log has no row before or at its first step.
    """
    if not canary.legs or not known.legs:
        return None
    leg = canary.legs[-1]
    first = leg.first_step
    there = [i for i, each in enumerate(known.legs) if each.first_step <= first]
    if not there:
        return None
    # A run that resumed later on went through these steps in an earlier leg.
    holds = [i for i in there if known.legs[i].last_step >= first] or there
    i = holds[-1]
    return Resume(
        number=1,
        before=_history(known.legs, i, first),
        overwritten=tuple(row for row in known.legs[i].rows if row.step >= first),
        after=leg.rows[:N_AFTER],
        border=leg.border,
        boundary=None,
        marker=leg.marker,
    )


def _resume(legs: Sequence[Leg], i: int, number: int, boundary: Boundary | None) -> Resume:
    leg = legs[i]
    first = leg.first_step
    earlier = [j for j in range(i) if legs[j].first_step < first]
    if boundary is None and leg.marker is not None and leg.marker.step is not None:
        boundary = Boundary(leg.marker.step, "log")
    same = earlier[-1] if earlier else i - 1
    # The attempt before it began at the same checkpoint, and may have been as wrong.
    again = not earlier and boundary is not None and 0 < boundary.step <= first
    return Resume(
        number=number,
        before=() if again else _history(legs, same, first),
        overwritten=() if again else tuple(row for row in legs[same].rows if row.step >= first),
        after=leg.rows[:N_AFTER],
        border=leg.border,
        boundary=boundary,
        marker=leg.marker,
        restarted=not earlier and not again,
    )


def _history(legs: Sequence[Leg], i: int, below: int) -> tuple[Row, ...]:
    """The newest rows below a step of a leg, and of those that it came from where it is short."""
    rows: tuple[Row, ...] = ()
    while len(rows) < N_BEFORE:
        rows = (*(row for row in legs[i].rows if row.step < below), *rows)
        below = legs[i].first_step
        earlier = [j for j in range(i) if legs[j].first_step < below]
        if not earlier:
            break
        i = earlier[-1]
    return rows[-N_BEFORE:]


def _parted(legs: Sequence[Leg], boundary: Boundary, n_lost: int) -> Resume | None:
    for i in reversed(range(len(legs))):
        leg = legs[i]
        if leg.first_step <= boundary.step < leg.last_step:
            after = tuple(row for row in leg.rows if row.step > boundary.step)
            if boundary.source == "report" and not _between(leg, boundary):
                return None
            return Resume(
                number=n_lost + i + 1,
                before=_history(legs, i, boundary.step + 1),
                overwritten=(),
                after=after[:N_AFTER],
                border=Border.ASKED,
                boundary=boundary,
            )
    return None


def _between(leg: Leg, boundary: Boundary) -> bool:
    """Whether the rows on both sides of the boundary were logged before and after the resume."""
    before = [row.at for row in leg.rows if row.step <= boundary.step][-1:]
    after = [row.at for row in leg.rows if row.step > boundary.step][:1]
    if boundary.at_s is None or not before or before[0] is None or after[0] is None:
        return False
    return before[0] <= boundary.at_s <= after[0]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The work between the checkpoint's step and the last step that was logged before.

    `tokens`, `samples` and `seconds` are None where the log does not hold them.
    """

    from_step: int
    to_step: int
    steps: int
    tokens: int | None
    samples: int | None
    seconds: float | None

    @property
    def message(self) -> str:
        """The amounts in one line."""
        parts = [f"{self.steps:,} step{'' if self.steps == 1 else 's'}"]
        parts += [f"{self.tokens:,} tokens"] if self.tokens is not None else []
        parts += [f"{self.samples:,} samples"] if self.samples is not None else []
        parts += [f"{self.seconds:,.0f} s"] if self.seconds is not None else []
        return f"{', '.join(parts)} (from step {self.from_step:,} to step {self.to_step:,})"


def recomputed_by(resume: Resume) -> Recomputed | None:
    """The work that a resume in the log does again; None where no process is seen to end."""
    if resume.border is Border.ASKED:
        return None
    step = resume.boundary.step if resume.boundary is not None else resume.first_step - 1
    return recomputed_from(step, (*resume.before, *resume.overwritten))


def recomputed_from(step: int, rows: Sequence[Row]) -> Recomputed | None:
    """The work behind `step` in the rows of the job that died; None where there are none."""
    held = [row for row in rows if row.step <= step]
    behind = [row for row in rows if row.step > step]
    if not rows:
        return None
    if not behind:
        return Recomputed(step, rows[-1].step, 0, 0, 0, 0.0)
    last = behind[-1]
    return Recomputed(
        from_step=step,
        to_step=last.step,
        steps=last.step - step,
        tokens=_counted(held, step, last, "tokens"),
        samples=_counted(held, step, last, "samples"),
        seconds=_seconds(held, behind, step),
    )


def _counted(held: Sequence[Row], step: int, last: Row, name: str) -> int | None:
    """The difference of a counter between the row of the step itself and the last one."""
    start: Number | None = getattr(held[-1], name) if held and held[-1].step == step else None
    end: Number | None = getattr(last, name)
    return None if start is None or end is None else round(end.value - start.value)


def _seconds(held: Sequence[Row], behind: Sequence[Row], step: int) -> float | None:
    start, end = held[-1].at if held and held[-1].step == step else None, behind[-1].at
    if start is not None and end is not None:
        return end - start if end >= start else None
    times = [row.step_time_s.value for row in behind if row.step_time_s is not None]
    return sum(times) / len(times) * (behind[-1].step - step) if times else None
