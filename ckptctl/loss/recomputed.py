"""Count the work that a resume makes the job do again: steps, tokens, samples and seconds.

It is what the job that died had logged behind its checkpoint. It can be counted before
the resume as well, from the log of the job that died and the step that is to be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptctl.loss.legs import Border
from ckptctl.loss.resumes import Resume
from ckptctl.loss.rows import Number, Row


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
