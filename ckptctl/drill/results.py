"""The results of a drill, and its report as Markdown and as an HTML page."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptctl import markup
from ckptctl.formatting import duration, safe
from ckptctl.markup import as_text, page, table
from ckptctl.model import ExitCode, NextCommand, NonNegative


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault, and what followed it."""

    fault: str
    """Its name, such as `rank-killed`."""
    description: str
    """What was done to the job, in one line."""
    detected_s: NonNegative | None
    """Seconds from the fault to the end of the attempt; null where it was not detected."""
    restarted_s: NonNegative | None
    """Seconds from then to the start of the next attempt, with RB-7's checks."""
    expected_step: int | None
    """The newest step that is good after the fault."""
    resumed_from: int | None
    """The step that RB-7 resumed from."""
    lost_steps: int | None
    """Steps that were trained before the fault and had to be trained again; null where the log
    does not count training steps."""
    loss: str | None
    """Whether the loss continues as in the run without a fault; a verdict of `loss`."""
    loss_message: str | None
    """Why: how many steps agree, and how closely."""
    cause: str | None
    """What `run` called the cause."""
    section: str | None
    """The section in which the job hung, as `run` named it."""
    ranks: tuple[int, ...]
    """The ranks that `run` named."""
    nodes: tuple[str, ...]
    """The nodes that `run` named."""
    excluded: tuple[str, ...]
    """The nodes that the job was resumed without."""
    world_size: int | None
    """With how many ranks it was resumed; null where the command decides that."""
    runbook_exit_code: int | None
    """How RB-7 ended."""
    problems: tuple[str, ...]
    """What is not as it must be; none where the job survives the fault."""
    folder: str
    """Where its logs and the transcript of RB-7 are."""
    evidence: tuple[str, ...]
    """The files that show why the job hung: stacks, dumps of the flight recorder."""

    @property
    def passed(self) -> bool:
        """Whether the job survives the fault."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Drilled:
    """A drill: the job, the faults, and whether the job survives them."""

    command: tuple[str, ...]
    """The command of the job."""
    root: str
    """The checkpoint root, which the job of the drill did not use."""
    step: int
    """The step that the drill began with."""
    seed: int
    """What determined ranks, moments and bytes."""
    copied_by: str
    """`reflink`, `copy`, or `download` from an object store."""
    root_read_only: bool
    """Whether the real root was read-only for the job."""
    root_unchanged: bool
    """Whether the real root is the same as before the drill."""
    trials: tuple[Trial, ...]
    """The faults, in order; fewer than were asked for where a signal ended the drill."""
    message: str
    """The grade in one line."""
    exit_code: ExitCode
    next_command: NextCommand


_HEADINGS = (
    *("fault", "grade", "detected in", "restarted in", "resumed from", "resumed with"),
    *("lost steps", "loss"),
)


def grade(trial: Trial) -> str:
    """The grade of a trial in one word."""
    return "survived" if trial.passed else "failed"


def rows(found: Drilled) -> Sequence[tuple[str, ...]]:
    """The headings and the cells of each trial, without columns that no trial fills."""
    columns = zip(_HEADINGS, *map(_row, found.trials), strict=True)
    return [*zip(*(each for each in columns if set(each[1:]) != {"-"}), strict=True)]


def _row(trial: Trial) -> tuple[str, ...]:
    seconds = (
        "-" if each is None else duration(each) for each in (trial.detected_s, trial.restarted_s)
    )
    step, lost = (
        "-" if each is None else str(each) for each in (trial.resumed_from, trial.lost_steps)
    )
    resumed_with = [] if trial.world_size is None else [f"{trial.world_size} ranks"]
    resumed_with += [f"without {', '.join(trial.excluded)}"] if trial.excluded else []
    words = ", ".join(resumed_with) or "-"
    return (trial.fault, grade(trial), *seconds, step, words, lost, trial.loss or "-")


def facts(found: Drilled) -> Iterator[tuple[str, str]]:
    """What else a reader must know, in pairs."""
    yield "command", shlex.join(found.command)
    yield "root", found.root
    yield "began with", f"step {found.step} ({found.copied_by})"
    yield "seed", str(found.seed)
    read_only = "read-only for the job" if found.root_read_only else "writable to the job"
    changed = "unchanged" if found.root_unchanged else "changed during the drill"
    yield "the real root", f"{read_only}; {changed}"


def details(trial: Trial) -> Iterator[str]:
    """One sentence each about a trial."""
    yield trial.description
    if trial.cause is not None:
        section = f" in section {trial.section}" if trial.section else ""
        ranks = f", ranks {', '.join(map(str, trial.ranks))}" if trial.ranks else ""
        nodes = f", nodes {', '.join(trial.nodes)}" if trial.nodes else ""
        yield f"`ckptctl run` named: {trial.cause}{section}{ranks}{nodes}"
    if trial.evidence:
        folder, names = Path(trial.evidence[0]).parent, map(os.path.basename, trial.evidence)
        yield f"evidence in {folder}: {', '.join(names)}"
    if trial.runbook_exit_code is not None:
        yield f"RB-7 ended with {trial.runbook_exit_code}"
    if trial.loss_message is not None:
        yield f"loss: {trial.loss_message}"
    yield from trial.problems
    yield f"logs and transcript: {trial.folder}"


def as_markdown(found: Drilled) -> str:
    """The report as Markdown."""
    lines = [f"# Drill: {found.message}", ""]
    lines += [f"- {name}: {markup.code(text)}" for name, text in facts(found)]
    headings, *cells = rows(found)
    lines += ["", markup.row(*headings), markup.row(*["---"] * len(headings))]
    lines += [markup.row(*each) for each in cells]
    for trial in found.trials:
        lines += [
            "",
            f"## {trial.fault}: {grade(trial)}",
            "",
            *(f"- {safe(each)}" for each in details(trial)),
        ]
    return "\n".join(lines) + "\n"


def as_html(found: Drilled) -> str:
    """The report as one HTML page without scripts and other files."""
    title = f"Drill: {found.message}"
    about = (f"<li>{name}: <code>{as_text(text)}</code></li>" for name, text in facts(found))
    headings, *cells = rows(found)
    safe_cells = [[as_text(cell) for cell in row] for row in cells]
    parts = (
        f'<h2 class="{grade(trial)}">{trial.fault}: {grade(trial)}</h2><ul>'
        + "".join(f"<li>{_with_code(each)}</li>" for each in details(trial))
        + "</ul>"
        for trial in found.trials
    )
    headline = f"<h1>{as_text(title)}</h1>"
    return page(
        title, (headline, f"<ul>{''.join(about)}</ul>", table(headings, safe_cells), *parts)
    )


def _with_code(text: str) -> str:
    """A line of Markdown as HTML, of which it has only code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", as_text(text))
