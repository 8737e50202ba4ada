"""Render what `run` prints on standard error."""

from __future__ import annotations

from ckptctl.cli.text import Line, Span, line
from ckptctl.cli.views.common import next_line
from ckptctl.goodput.durations import duration
from ckptctl.supervisor.results import Attempt, Decision, Supervised


def attempt_lines(one: Attempt) -> list[Line]:
    """One attempt of the job, when it has ended."""
    none = "no usable step" if one.inspected else "the storage did not answer which steps exist"
    step = none if one.step is None else f"newest usable step {one.step}"
    newer = " (newer)" if one.progress else ""
    restarted = one.failure is not None and one.decision is Decision.RESTART
    cause = f"{one.failure}, " if restarted else ""
    return [
        line(
            f"ckptctl: attempt {one.number} ended with {one.exit_code} after "
            f"{duration(one.seconds)}, {step}{newer}: {one.decision.value}, {cause}{one.reason}",
            hang=2,
        )
    ]


def supervised_lines(found: Supervised) -> list[Line]:
    """How it ended."""
    done = bool(found.attempts) and found.attempts[-1].decision is Decision.DONE
    style = Span(found.message, "good" if done else "bad")
    return [line("ckptctl: ", style, hang=2), *next_line(found.next_command)]
