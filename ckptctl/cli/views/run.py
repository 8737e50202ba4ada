"""Render what `run` prints on standard error."""

from __future__ import annotations

from ckptctl.cli.text import Line, Span, line
from ckptctl.cli.views.common import next_line
from ckptctl.goodput.durations import duration
from ckptctl.supervisor.restarting import Attempt, Decision, Supervised


def life_lines(life: Attempt) -> list[Line]:
    """One life of the job, when it has ended."""
    none = "no usable step" if life.looked else "the storage did not say which steps are there"
    step = none if life.step is None else f"newest usable step {life.step}"
    newer = " (newer)" if life.progress else ""
    restarted = life.failure is not None and life.decision is Decision.RESTART
    cause = f"{life.failure}, " if restarted else ""
    return [
        line(
            f"ckptctl: life {life.number} ended with {life.exit_code} after "
            f"{duration(life.seconds)}, {step}{newer}: {life.decision.value}, {cause}{life.reason}",
            hang=2,
        )
    ]


def supervised_lines(found: Supervised) -> list[Line]:
    """How it ended."""
    done = bool(found.lives) and found.lives[-1].decision is Decision.DONE
    style = Span(found.message, "good" if done else "bad")
    return [line("ckptctl: ", style, hang=2), *next_line(found.next_command)]
